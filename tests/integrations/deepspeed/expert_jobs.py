"""What ranks do with models whose experts DeepSpeed divides."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import deepspeed
import torch
from deepspeed.module_inject import auto_ep_layer
from deepspeed.module_inject.auto_ep_comm import DEEPEP_BACKEND
from deepspeed.module_inject.auto_ep_layer import AutoEPMoELayer
from deepspeed_tests.jobs import hosted, recipe, told
from deepspeed_tests.script_jobs import SMALL, collate, rows_of, switched_on
from evenload.core.errors import RankError
from evenload.integrations.deepspeed.engine.engine import full_weights
from evenload.integrations.deepspeed.engine.expert_gate import gated_experts
from evenload.integrations.deepspeed.engine.experts import DividedExperts
from evenload.runtime.attributes import with_attributes
from evenload.runtime.experts import copies
from evenload.runtime.world.world import init_world
from harness.groups import giving_groups_back
from harness.proof import planned, tokens
from harness.proof.experts import quotas_now_and_then, with_drawn_copies
from transformers import MixtralConfig, MixtralForCausalLM

GATE = "evenload.integrations.deepspeed.engine.expert_gate"


def bound(model: Any) -> int:
    """How many of the functions of AutoEP's layers are replaced."""
    layers = [module for module in model.modules() if isinstance(module, AutoEPMoELayer)]
    return sum(("_forward" in vars(layer)) + ("forward" in vars(layer.experts)) for layer in layers)


def bookkeeping() -> list[dict[str, Any]]:
    """Of one plan with experts at home, then with copies: what is booked, what AutoEP's layers count and how many
    experts they know behind a step, and the messages of copies."""
    with hosted(1, ep=2, family="mixtral", recompute=True) as host:
        plan = planned(host, "slices, half replayed")
        layers = [module for module in host.engine.module.modules() if isinstance(module, AutoEPMoELayer)]
        rows = []
        for number in (0, 1, 3):
            for layer in layers:
                layer.tokens_per_expert.zero_()
            with mock.patch.object(copies, "_exchange", wraps=copies._exchange) as sent:
                result, _ = host.gradients(with_drawn_copies(plan, number, once=False), tokens())
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


def at_exchanges(name: str, **asked: Any) -> dict[str, Any]:
    """What a step marks right before each exchange of tokens, what it books of each layer, and its tokens."""
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

    with hosted(family="mixtral", **asked) as host, with_attributes(auto_ep_layer, _AllToAllV=Watched):
        plan = planned(host, name)
        loads = host.train_step(plan, tokens(), lr=1e-3, mark=marks.append).expert_loads
    counts = [torch.tensor([load.counts for load in loads if load.layer == layer]).sum(dim=0) for layer in range(2)]
    return {
        "at": at,
        "counts": [count.tolist() for count in counts],
        "imbalance": [load.imbalance for load in loads],
        "tokens": int(plan.lengths.sum()),
    }


def unfit_plans() -> tuple[str, int, str]:
    """The error where one rank runs another plan, and how many exchanges of tokens came before it; and the error of a
    plan whose ranks run as they like."""
    exchanges: list[Any] = []
    with hosted(1, ep=2, family="mixtral") as host:
        plan = planned(host, "slices, half replayed" if host.world.rank else "slices")
        free = plan.revised(limits=replace(plan.limits, in_step=1))
        said = told(lambda: host.gradients(free, tokens()))
        with with_attributes(auto_ep_layer._AllToAllV, apply=lambda *args: exchanges.append(args)):
            try:
                host.gradients(plan, tokens())
                error = ""
            except RankError as caught:
                error = str(caught)
    return error, len(exchanges), said


def other_exchange() -> str:
    layer = AutoEPMoELayer.__new__(AutoEPMoELayer)
    torch.nn.Module.__init__(layer)
    layer.ep_size, layer.comm_backend = 2, DEEPEP_BACKEND
    copied = recipe(1, ep=2, family="mixtral").changed({"plugins.moe.enabled": True})
    return told(lambda: gated_experts(layer, copied))


@giving_groups_back()
def unmodified(stage: int, ep: int, reentrant: bool | None = None) -> dict[str, Any]:
    """A step of a user's loop on a model whose experts DeepSpeed divides: how far its weights are from those of plain
    training, against how far these have moved, and what its copies leave behind. ``reentrant``: how layers are
    recomputed; None: they are not."""
    world = init_world()
    rows = rows_of(31, 7, 12, 25, 3, 18, 9, 14)
    torch.manual_seed(0)
    small = {**SMALL, "vocab_size": 128, "tie_word_embeddings": False}
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
    with switched_on():
        engine, _, loader, _ = deepspeed.initialize(
            model=model, config=ds_config, training_data=rows, collate_fn=collate
        )
        with (
            mock.patch(f"{GATE}.layer_planner", return_value=quotas_now_and_then),
            mock.patch.object(copies, "_exchange", wraps=copies._exchange) as sent,
        ):
            for batch in loader:
                engine.backward(engine(**batch).loss)
                engine.step()
        divided = DividedExperts(engine.module, world.device)
        weights = divided.whole(full_weights(engine, dict(engine.module.named_parameters())))
        evaluated = [_evaluated(engine, rows[0])]
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
