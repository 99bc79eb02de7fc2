"""What the ranks of a test world run: every function here is a case of test_experts.py."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from runpy import run_path
from types import ModuleType
from typing import Any
from unittest import mock
from zlib import crc32

import deepspeed
import torch
from deepspeed.module_inject import auto_ep_layer
from deepspeed.module_inject.auto_ep_comm import DEEPEP_BACKEND
from deepspeed.module_inject.auto_ep_layer import AutoEPMoELayer
from evenload.core.errors import EvenloadError, RankError
from evenload.core.experts.quotas import at_home
from evenload.core.plan.branches import COPIED
from evenload.core.plan.expert_policy import ExpertPolicy
from evenload.core.recipe import recipe as recipes
from evenload.core.registry import layer_planner
from evenload.integrations.deepspeed import open_host
from evenload.integrations.deepspeed.engine.engine import full_weights, prepare_deepspeed
from evenload.integrations.deepspeed.engine.expert_gate import gated_experts
from evenload.integrations.deepspeed.engine.experts import DividedExperts
from evenload.integrations.deepspeed.plain import reference, relative_error
from evenload.integrations.deepspeed.unmodified import loop
from evenload.patches import deepspeed as patch
from evenload.patches import transformers
from evenload.patches.ledger import Ledger
from evenload.runtime.attributes import with_attributes
from evenload.runtime.experts import copies
from evenload.runtime.world.world import init_world
from transformers import MixtralConfig, MixtralForCausalLM


def _load(file: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(file, Path(__file__).with_name(f"{file}.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


_drawn_quotas = run_path(str(Path(__file__).parents[1] / "drawn_quotas.py"))["drawn_quotas"]
slices, plans, scripts = _load("rank_slices"), _load("expert_plans"), _load("rank_scripts")


def recipe(stage: int, ep: int = 1, recompute: bool = False, clip_grad: float = 0.0, **model: Any) -> Any:
    zero = {"config": {"zero_optimization": slices.GATHERED}} if stage == 3 else {}
    moe = {"num_experts": 4, "topk": 2, "ffn_hidden_size": 24}
    return recipes.parse(
        {
            "trainer": "deepspeed",
            "model": {**slices.MODEL, "family": "mixtral", "moe": moe, **model},
            "data": {"max_length": 200},
            "parallel": {"ep": ep},
            "train": {"clip_grad": clip_grad, "recompute": recompute},
            "deepspeed": {"zero_stage": stage, **zero},
        }
    )


def drawn_quotas(counts_RE: Any, *more: Any) -> Any:
    """In every layer of every pass and in every group of ranks anew: drawn, or every expert at home."""
    drawn = crc32(counts_RE.astype("int64").tobytes()) % 4
    return (_drawn_quotas if drawn else at_home)(counts_RE, *more)


def with_drawn_copies(plan: Any, number: int) -> Any:
    """The plan, all but the first with quotas that are drawn in every layer of every pass; of every second one copies
    are fetched again for the backward."""
    if plan.limits.in_step == 1 or number == 0:
        return plan
    return plan.revised(experts=ExpertPolicy("drawn", slots=4, keep=number % 2 == 1))


def layer_planner_of(name: str) -> Any:
    """The registry's, which knows no planner that draws."""
    return drawn_quotas if name == "drawn" else layer_planner(name)


@contextmanager
def opened(made: Any) -> Iterator[Any]:
    """The host of a recipe, which knows the planner that draws."""
    host = open_host(made, init_world())
    with mock.patch("evenload.integrations.deepspeed.engine.expert_gate.layer_planner", layer_planner_of):
        yield host
    host.close()


def exactness(stage: int, names: list[str], **asked: Any) -> dict[str, Any]:
    """Errors of every plan against the plain reference, and what the rank ran."""
    made = recipe(stage, **asked)
    found: dict[str, Any] = {}
    references: dict[Any, Any] = {}
    with opened(made) as host:
        in_step = host.world.size if stage == 3 and made.parallel.ep > 1 else made.parallel.ep
        for number, name in enumerate(names):
            plan = with_drawn_copies(plans.named(name, host.world.size, in_step), number)
            labels = plans.labels_of(plan, number // 2)
            key = plan.sequences, number // 2 % 4
            if key not in references:
                references[key] = reference(made, host, plans.tokens_of(plan), plan.lengths, labels)
            loss, wanted = references[key]
            result, gradients = host.gradients(plan, plans.tokens_of(plan), labels)
            norm = float(torch.stack([g.double().norm() for g in wanted.values()]).norm())
            found[name] = {
                "loss": abs(result.loss / loss - 1),
                "grad": relative_error(gradients, wanted),
                "norm": abs(result.grad_norm - norm) / norm,
                "executed": [tuple(piece) for piece in result.executed],
                "copied": COPIED in result.branches,
            }
    return found


def bound(model: Any) -> int:
    """How many of the functions of AutoEP's layers are replaced."""
    layers = [module for module in model.modules() if isinstance(module, AutoEPMoELayer)]
    return sum(("_forward" in vars(layer)) + ("forward" in vars(layer.experts)) for layer in layers)


def bookkeeping(stage: int) -> list[dict[str, Any]]:
    """Of one plan with experts at home, then with copies: what is booked, what AutoEP's layers count and how many
    experts they know behind a step, and the messages of copies."""
    with opened(recipe(stage, ep=2, recompute=True)) as host:
        plan = plans.named("chains some", 2, 2)
        layers = [module for module in host.engine.module.modules() if isinstance(module, AutoEPMoELayer)]
        rows = []
        for number in range(3):
            for layer in layers:
                layer.tokens_per_expert.zero_()
            with mock.patch.object(copies, "_exchange", wraps=copies._exchange) as sent:
                result, _ = host.gradients(with_drawn_copies(plan, number), plans.tokens_of(plan))
            rows.append(
                {
                    "counts": [load.counts for load in result.expert_loads],
                    "buffers": [layer.tokens_per_expert.tolist() for layer in layers],
                    "experts": [(layer.num_experts, layer.num_local_experts) for layer in layers],
                    "after": [load.imbalance_after for load in result.expert_loads],
                    "messages": sent.call_count,
                }
            )
        while_bound = bound(host.engine.module)
        host.gated.unbind()
        return [{**row, "bound": while_bound, "left": bound(host.engine.module)} for row in rows]


def save_and_go_on(stage: int, ep: int, folder: str) -> list[str]:
    """Losses of two steps behind a checkpoint after one: the first shows the weights, the second Adam's states."""
    host = open_host(recipe(stage, ep, clip_grad=1.0), init_world())
    _steps(host, 1)
    host.save(Path(folder))
    losses = _steps(host, 2)
    host.close()
    return losses


def resume(stage: int, ep: int, folder: str) -> list[str]:
    """The same losses from the checkpoint, or why it is refused."""
    host = open_host(recipe(stage, ep, clip_grad=1.0), init_world())
    try:
        host.load(Path(folder))
        return _steps(host, 2)
    except EvenloadError as error:
        return [str(error)]
    finally:
        host.close()


def trained(stage: int, ep: int) -> tuple[dict[str, str], list[float]]:
    """Digests of the weights at the start, and losses of four clipped steps."""
    host = open_host(recipe(stage, ep, clip_grad=0.5), init_world())
    start = {name: sha256(weight.numpy().tobytes()).hexdigest() for name, weight in host.weights().items()}
    losses = [float.fromhex(loss) for loss in _steps(host, 4)]
    host.close()
    return start, losses


def at_exchanges(stage: int, name: str, ep: int = 2, recompute: bool = False) -> dict[str, Any]:
    """What a step marks right before each exchange of tokens, what it books of each layer, and its tokens."""
    host = open_host(recipe(stage, ep, recompute), init_world())
    plan = plans.named(name, host.world.size, ep)
    marks: list[str] = []
    at: list[str] = []
    exchange = auto_ep_layer._AllToAllV

    class Watched(exchange):
        @staticmethod
        def forward(*args: Any) -> Any:
            at.append(marks[-1])
            return exchange.forward(*args)

        @staticmethod
        def backward(*args: Any) -> Any:
            at.append(marks[-1])
            return exchange.backward(*args)

    with with_attributes(auto_ep_layer, _AllToAllV=Watched):
        loads = host.train_step(plan, plans.tokens_of(plan), lr=1e-3, mark=marks.append).expert_loads
    host.close()
    counts = [torch.tensor([load.counts for load in loads if load.layer == layer]).sum(dim=0) for layer in range(2)]
    return {
        "at": at,
        "counts": [count.tolist() for count in counts],
        "imbalance": [load.imbalance for load in loads],
        "tokens": int(plan.lengths.sum()),
    }


def another_plan() -> tuple[str, int]:
    """The error where one rank runs another plan, and how many exchanges of tokens came before it."""
    world = init_world()
    host = open_host(recipe(1, 2), world)
    plan = plans.named("chains some" if world.rank else "chains none", 2, 2)
    exchanges: list[Any] = []
    with with_attributes(auto_ep_layer._AllToAllV, apply=lambda *args: exchanges.append(args)):
        try:
            host.gradients(plan, plans.tokens_of(plan))
            error = ""
        except RankError as caught:
            error = str(caught)
    host.close()
    return error, len(exchanges)


def out_of_step() -> str:
    """Why a plan whose ranks run as they like is refused."""
    host = open_host(recipe(1, 2), init_world())
    plan = slices.plans.chains("some")
    try:
        host.gradients(plan, plans.tokens_of(plan))
        return ""
    except EvenloadError as error:
        return str(error)
    finally:
        host.close()


def _steps(host: Any, count: int) -> list[str]:
    ranks = host.world.size
    plan = plans.named("whole_sequences", ranks, ranks if host.stage == 3 and host.layout.ep > 1 else host.layout.ep)
    return [host.train_step(plan, plans.tokens_of(plan), lr=1e-2).loss.hex() for _ in range(count)]


def other_exchange() -> str:
    """Why copies are refused in a loop whose experts exchange tokens by DeepEP."""
    layer = AutoEPMoELayer.__new__(AutoEPMoELayer)
    torch.nn.Module.__init__(layer)
    layer.ep_size, layer.comm_backend = 2, DEEPEP_BACKEND
    try:
        gated_experts(layer, recipe(1, ep=2).changed({"plugins.moe.enabled": True}))
        return ""
    except EvenloadError as error:
        return str(error)


def unmodified(stage: int, ep: int, reentrant: bool | None = None) -> dict[str, Any]:
    """A step of a user's loop on a model whose experts DeepSpeed divides: how far its weights are from those of plain
    training, against how far these have moved, and what its copies leave behind. ``reentrant``: how layers are
    recomputed; None: they are not."""
    prepare_deepspeed()
    world = init_world()
    rows = scripts.rows_of(31, 7, 12, 25, 3, 18, 9, 14)
    torch.manual_seed(0)
    small = {**scripts.SMALL, "vocab_size": 128, "tie_word_embeddings": False}
    config = MixtralConfig(**small, num_local_experts=4, num_experts_per_tok=2)
    model, plain = (MixtralForCausalLM(config) for _ in range(2))
    plain.load_state_dict(model.state_dict())
    if reentrant is not None:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    start = {name: weight.clone() for name, weight in plain.state_dict().items()}
    ds_config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": len(rows) // 2 // world.size,
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
        "expert_parallel": {"enabled": True, "autoep_size": ep, "preset_model": "mixtral", "use_grouped_mm": False},
        "evenload": {"packing": {"enabled": True, "max_tokens": 64}, "moe": {"enabled": True, "mode": "clone"}},
    }
    with Ledger() as ledger:
        ledger.apply([*transformers.rows()[:1], *patch.rows()])
        engine, _, loader, _ = deepspeed.initialize(
            model=model, config=ds_config, training_data=rows, collate_fn=scripts.collate
        )
        with (
            mock.patch("evenload.integrations.deepspeed.engine.expert_gate.layer_planner", return_value=drawn_quotas),
            mock.patch.object(copies, "_exchange", wraps=copies._exchange) as sent,
        ):
            for batch in loader:
                engine.backward(engine(**batch).loss)
                engine.step()
        divided = DividedExperts(engine.module, world.device)
        weights = divided.whole(full_weights(engine, dict(engine.module.named_parameters())))
        evaluated = [_evaluated(engine, rows[0])]
    loop.release()
    evaluated.append(_evaluated(engine, rows[0]))
    left = bound(engine.module)
    divided.close()
    engine.destroy()
    targets = sum(len(row) - 1 for row in rows)
    for row in rows:
        logits = plain(input_ids=row[None, :-1], use_cache=False).logits[0]
        (torch.nn.functional.cross_entropy(logits, row[1:], reduction="sum") / targets).backward()
    torch.optim.SGD(plain.parameters(), lr=0.5).step()
    wanted = dict(plain.named_parameters())
    moved = {name: (wanted[name] - start[name]).norm() for name in wanted}
    errors = {name: float((weights[name] - wanted[name]).norm() / moved[name]) for name in wanted}
    return {
        "error": max(errors.values()),
        "named": weights.keys() == wanted.keys(),
        "messages": sent.call_count,
        "evaluation differs": float((evaluated[0] - evaluated[1]).abs().max()),
        "bound": left,
    }


@torch.no_grad()
def _evaluated(engine: Any, row: torch.Tensor) -> torch.Tensor:
    engine.eval()
    return engine(input_ids=row[None], use_cache=False).logits
