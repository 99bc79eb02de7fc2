"""What the ranks of unmodified/test_order.py do: a user's own training loop, stock and under plans, and planted faults.

The loop is `tests/scripts/megatron_script.py`, which imports nothing of evenload.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import evenload
import numpy as np
import torch
from evenload.api import load_plugins
from evenload.core.errors import EvenloadError
from evenload.core.laws import check
from evenload.core.plan.rounds import in_rounds
from evenload.core.plan.step_plan import MicroBatch, Op, Slice, StepPlan, as_lengths
from evenload.core.planning.chain import PlanChain
from evenload.core.recipe.recipe import parse
from evenload.integrations.megatron.base.plane import leave_groups
from evenload.integrations.megatron.unmodified.planning import call_plan
from evenload.integrations.megatron.unmodified.refusals.layers import refuse_attention, refuse_experts, why_whole
from evenload.integrations.megatron.unmodified.running import attention as users_attention
from evenload.integrations.megatron.unmodified.running import order
from evenload.integrations.megatron.unmodified.running.forward_step import UserStep
from evenload.runtime.experts.balance import Shares
from evenload.runtime.stage.stage_links import StageLinks
from harness.proof import faults, random_plan
from harness.proof.experts import layer_planner_of, with_drawn_copies
from megatron.core import parallel_state
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.pipeline_parallel import schedules
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_config import MLATransformerConfig
from megatron_tests.float64 import all_in_float64
from megatron_tests.hybrid_model import hybrid_model
from megatron_tests.telling import planted, told
from torch.distributed import distributed_c10d

SCRIPTS = Path(__file__).parents[2] / "scripts"


def recipe(**plugins: Any) -> Any:
    load_plugins()
    return parse({"plugins": plugins or {"packing": {"enabled": True, "max_tokens": 64}}})


def _norm_in_shares(cls: type, config: Any, *rest: Any, **named: Any) -> Any:
    """torch's norms work on shares as on anything else; Megatron's wrapper refuses them, and others need a GPU."""
    shares, config.sequence_parallel = config.sequence_parallel, False
    norm = _plain_norm(cls, config, *rest, **named)
    config.sequence_parallel = shares
    for parameter in norm.parameters():
        parameter.sequence_parallel = shares
    return norm


_plain_norm = WrappedTorchNorm.__new__


def _words(length: int, index: int) -> Any:
    """Tokens of a whole sample."""
    return torch.randint(1, 128, (length,), generator=torch.Generator().manual_seed(index))


@contextmanager
def loaded_script(name: str, tp: int = 1, pp: int = 1, **sizes: Any) -> Iterator[Any]:
    """A script of `tests/scripts` as a module, and Megatron ready for it on this layout."""
    load_plugins()
    spec = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
    script = importlib.util.module_from_spec(spec)
    parallel_state.initialize_model_parallel(tp, pp, **sizes)
    try:
        sys.modules[name] = script  # a session rebinds names of loaded modules only
        spec.loader.exec_module(script)
        torch.manual_seed(1234)
        model_parallel_cuda_manual_seed(1234)
        yield script
    finally:
        for loaded in {name, "megatron_script"} & sys.modules.keys():  # the others import that one
            del sys.modules[loaded]
        leave_groups()


@contextmanager
def user_loop(
    tp: int = 1,
    pp: int = 1,
    ep: int = 1,
    etp: int | None = None,
    cp: int = 1,
    overlap: bool = False,
    frozen: str = "",
    full: bool = False,
    te: bool = False,
    mla: bool = False,
    hybrid: str = "",
    positions: str = "rope",
    exact: bool = False,
    micro_batches: int = 0,
    scale: float = 0.0,
    spec: Callable[[], Any] | None = None,
    **config: Any,
) -> Iterator[Loop]:
    """The script's model on a layout of its own.

    Args:
        full: no sample is padded.
        exact: routers compute in float64, too.
        micro_batches: of a rank; 0: as the script has them.
        scale: by which the optimizer scales losses, as Megatron-LM's loop sets it; 0: it does not.
        te: Transformer Engine's layer spec; with ``mla`` for latent attention.
        hybrid: a pattern: Megatron-Core's hybrid model, with layers of the local spec; "": its GPTModel.
        frozen: weights whose name holds this need no gradient; "": all do.
        spec: makes the spec of a layer; None: Megatron-Core's local one.
        config: changes fields of its TransformerConfig.
    """
    experts_by = {"expert_model_parallel_size": ep, "expert_tensor_parallel_size": etp}
    with loaded_script("megatron_script", tp, pp, context_parallel_size=cp, **experts_by) as script:
        script.NUM_MICRO_BATCHES = micro_batches or script.NUM_MICRO_BATCHES
        if full:
            padded = script.sample
            whole = {"loss_mask": torch.ones(script.SEQ_LENGTH)}
            words = partial(_words, script.SEQ_LENGTH)
            script.sample = lambda index: {**padded(index), **whole, "tokens": words(index), "labels": words(index + 1)}
        if experts := config.get("num_moe_experts"):
            config |= {**experts_by, "add_bias_linear": False, "bias_activation_fusion": False}
            script.get_gpt_layer_local_spec = lambda: get_gpt_layer_local_spec(experts, moe_grouped_gemm=False)
        if te:
            norm = bool(config.get("qk_layernorm"))
            spec_of = partial(get_gpt_layer_with_transformer_engine_spec, qk_layernorm=norm, multi_latent_attention=mla)
            script.get_gpt_layer_local_spec = spec_of
        script.get_gpt_layer_local_spec = spec or script.get_gpt_layer_local_spec
        make, make_model = MLATransformerConfig if mla else script.TransformerConfig, script.GPTModel
        make_model = partial(hybrid_model, hybrid) if hybrid else make_model

        def partly_frozen(**fields: Any) -> Any:
            model = make_model(**fields)
            for name, weight in model.named_parameters():
                weight.requires_grad_(not (frozen and frozen in name))
            return model

        script.GPTModel = partly_frozen
        layers = len(hybrid.replace("|", "").split("/")[0]) or 4
        layout = {"num_layers": layers, "context_parallel_size": cp}
        latent = {"num_query_groups": 4, "add_bias_linear": False} if mla else {}
        own = _yarn if positions == "yarn" else lambda config: config
        script.TransformerConfig = lambda **fields: own(make(**{**fields, **layout, **latent, **config}))
        with patch.object(WrappedTorchNorm, "__new__", _norm_in_shares):
            model, _ = script.build(torch.float64, positions, overlap)
        model.config.grad_scale_func = partial(torch.mul, torch.tensor([scale])) if scale else None
        with all_in_float64() if exact else nullcontext():
            yield Loop(script, model)


def _yarn(config: Any) -> Any:
    """A config with what Megatron-LM's arguments set for ``position_embedding_type yarn``."""
    names = "original_max_position_embeddings", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"
    values = (16, 32.0, 1.0, 1.0, 0.5)
    for name, value in zip(names, values, strict=True):
        setattr(config, f"yarn_{name}", value)
    config.yarn_rotary_scaling_factor, config.yarn_correction_range_round_to_int = 4.0, True
    return config


class Loop:
    """One step of the script at a time, from the same weights and the same samples."""

    def __init__(self, script: Any, model: Any) -> None:
        self.script, self.model = script, model
        self.stage = parallel_state.get_pipeline_model_parallel_rank()
        self.last = parallel_state.is_pipeline_last_stage()

    def step(
        self, forward_step: Callable[..., Any] | None = None, schedule: Callable[..., Any] | None = None
    ) -> dict[str, Any]:
        """Gradients, reports and what the forward step saw, in one step."""
        self.model.zero_grad_buffer()
        self.shapes: list[Any] = []
        reports = (schedule or self.script.get_forward_backward_func())(
            forward_step_func=forward_step or self.forward_step,
            data_iterator=self.script.batches(),
            model=[self.model],
            num_microbatches=self.script.NUM_MICRO_BATCHES,
            seq_length=self.script.SEQ_LENGTH,
            micro_batch_size=self.script.MICRO_BATCH,
            forward_only=False,
        )
        trained = {name: p for name, p in self.model.module.named_parameters() if p.requires_grad}
        gradients = {name: p.main_grad.clone() for name, p in trained.items()}
        # What finalize has made of the bias of experts.
        buffers = self.model.module.named_buffers()
        biases = {name: b.sign() for name, b in buffers if "expert_bias" in name}  # each moved by the rate, or by none
        for name, bias in biases.items():
            self.model.module.get_buffer(name).zero_()
            gradients[name] = bias
        reports = [r["lm loss"] for r in reports]
        return {"gradients": gradients, "reports": reports, "shapes": self.shapes, "routers": of_routers()}

    def forward_step(self, data_iterator: Any, model: Any) -> tuple[Any, Callable[..., Any]]:
        """The script's, with a loss that is averaged over data-parallel ranks for its report, as older scripts do."""
        output, loss_func = self.script.forward_step(self.shapes, data_iterator, model)

        def averaged(losses: Any) -> Any:
            loss, count, report = loss_func(losses)
            mean = loss.detach().clone()
            torch.distributed.all_reduce(mean, group=parallel_state.get_data_parallel_group())
            return loss, count, {**report, "mean": mean}

        return output, averaged


def of_routers() -> dict[str, torch.Tensor]:
    """What Megatron would print of the losses of routers, layer by layer, of this stage alone."""
    values = {}
    for name, entry in sorted(moe_utils.get_moe_layer_wise_logging_tracker().items()):
        values[name] = entry["values"].clone()
        torch.distributed.all_reduce(values[name])
        entry["values"].zero_()
    return values


def worst(found: dict[str, Any], wanted: dict[str, Any]) -> float:
    """Largest ||a - b|| / ||b|| over the gradients of this rank's part of the model."""
    pairs = [(found["gradients"][name], g) for name, g in wanted["gradients"].items()]
    return max(float((a - b).norm() / b.norm()) for a, b in pairs)


def compared(planned: dict[str, Any], stock: dict[str, Any]) -> dict[str, Any]:
    """Errors of a step's gradients and reports, and what it computes."""
    pairs = list(zip(planned["reports"], stock["reports"], strict=True))
    return {
        "grad": worst(planned, stock),
        "reports": max((float((a - b).abs().max() / b.abs().max().clamp(min=1)) for a, b in pairs), default=0.0),
        "dtypes": all(a.dtype == b.dtype and a.shape == b.shape for a, b in pairs),
        "rows": {rows for rows, _ in planned["shapes"]},
        "tokens": sum(rows * tokens for rows, tokens in planned["shapes"]),
    }


def loss_and_tokens(found: dict[str, Any]) -> torch.Tensor:
    """(loss sum, tokens) over the reports of this data-parallel rank's last stage and those of its peers."""
    total = sum(found["reports"], torch.zeros(2, dtype=torch.float64))
    torch.distributed.all_reduce(total)
    return total


@contextmanager
def planning(make: Callable[[Any], StepPlan]) -> Iterator[list[StepPlan]]:
    """Plans come from ``make(chain, lengths)`` instead of the plugins; gives those that were made."""
    plans: list[StepPlan] = []

    def plan(chain: PlanChain, batch: Any) -> StepPlan:
        plans.append(make(chain, [int(length) for length in batch]))
        return plans[-1]

    with patch.object(PlanChain, "plan", plan):
        yield plans


def drawn(seed: int, **how: Any) -> Callable[..., StepPlan]:
    """A random lawful plan for the layout of a chain."""

    def make(chain: PlanChain, lengths: list[int]) -> StepPlan:
        limits = chain.limits
        sizes = {
            "num_ranks": limits.num_ranks,
            "num_stages": limits.num_stages,
            "layers_per_stage": limits.layers_per_stage,
            "layers": limits.layers,
        }
        plan = random_plan(seed, list(map(int, lengths)), **sizes, **how)
        own = replace(plan.limits, whole_sequences=limits.whole_sequences, in_step=limits.in_step)
        plan = with_drawn_copies(check(in_rounds(plan.revised(limits=own))), seed)
        return with_weights(plan, seed) if limits.splits_backward and seed % 2 else plan

    return make


def with_weights(plan: StepPlan, seed: int) -> StepPlan:
    """Weight gradients of some backwards as passes of their own, anywhere behind them."""
    draw = np.random.default_rng(seed)
    rows = [list(row) for row in plan.order]
    for row in rows:
        for op in [op for op in row if op.kind == "B" and draw.random() < 0.5]:
            row.insert(int(draw.integers(row.index(op) + 1, len(row) + 1)), Op("W", op.micro_batch))
    limits = replace(plan.limits, splits_backward=True)
    return check(replace(plan, limits=limits, order=tuple(map(tuple, rows))))


@contextmanager
def one_queue() -> Iterator[None]:
    """Links as between devices with one queue: a send waits until the one before it has been taken."""
    issue = StageLinks._issue

    def waiting(links: StageLinks, op: Op, tensor: Any) -> None:
        if sent := links._sent[op.kind]:
            work, earlier = sent.pop()
            work.wait()
            sent.append((SimpleNamespace(wait=lambda: None), earlier))
        issue(links, op, tensor)

    with (
        patch("evenload.runtime.stage.stage_links.has_one_queue", return_value=True),
        patch.object(StageLinks, "_issue", waiting),
    ):
        yield


def user_plans(
    world: Any,
    *,
    seeds: list[int],
    mutant: str = "",
    how: dict[str, Any] | None = None,
    queued: bool = False,
    **loop: Any,
) -> list[dict[str, Any]]:
    """Errors of random plans in the user's loop against the same loop with nothing switched on."""
    results = []
    links = one_queue if queued else nullcontext
    with user_loop(**loop) as user:
        stock = user.step()
        wanted = loss_and_tokens(stock)
        for seed in seeds:
            try:
                quotas = patch(
                    "evenload.integrations.megatron.unmodified.running.experts.layer_planner", layer_planner_of
                )
                with (
                    evenload.enabled(recipe()),
                    planning(drawn(seed, **(how or {}))) as made,
                    planted(FAULTS, mutant),
                    quotas,
                    links(),
                ):
                    found = user.step()
            except EvenloadError as error:
                results.append({"seed": seed, "error": error.what})
                continue
            (plan,) = made
            results.append(
                {
                    "seed": seed,
                    "grad": worst(found, stock),
                    "loss": float(((loss_and_tokens(found) - wanted).abs() / wanted).max()),
                    "routers": [float((v - found["routers"][n]).abs().max()) for n, v in stock["routers"].items()],
                    "reports": len(found["reports"]),
                    "steps": len(found["shapes"]),
                    "cut": len(plan.cut),
                    "replayed": len(plan.replayed),
                    "weights": sum(map(len, plan.split)),
                    "recomputed": sum(map(sum, plan.recompute)),
                    "losses": max(len(plan.of_rank(r, "B")) for r in range(plan.limits.num_ranks)) if user.last else 0,
                }
            )
        again = user.step()
        results.append({"seed": -1, "grad": worst(again, stock), "loss": 0.0})
    return results


def plugin_plans(
    world: Any, *, settings: list[dict[str, Any]], plugin: str = "pipeline", **loop: Any
) -> list[dict[str, Any]]:
    """A plugin in the user's loop, once with each of its settings."""
    results, make = [], PlanChain.plan
    with user_loop(**loop) as user:
        stock, groups = user.step(), len(distributed_c10d._world.pg_map)
        for one in settings:

            def plan(chain: PlanChain, lengths: list[int]) -> StepPlan:
                return make(chain, as_lengths(lengths))

            with evenload.enabled(recipe(**{plugin: {"enabled": True, **one}})), planning(plan) as made:
                found = user.step()
            results.append(
                {
                    "grad": worst(found, stock),
                    "made_by": made[0].made_by,
                    "order": bool(made[0].order),
                    "cut": len(made[0].cut),
                    "weights": sum(map(len, made[0].split)),
                    "recomputed": sum(map(sum, made[0].recompute)),
                    "tokens": max(tokens for _, tokens in found["shapes"]),
                    "ran": [tokens for _, tokens in found["shapes"][1:]],  # the first is tried before the step
                    "groups": len(distributed_c10d._world.pg_map) - groups,
                }
            )
    return results


def said_of_padding(world: Any, *, cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Two steps of plans in loops with experts: what is said of stock's losses, and how far gradients are from them."""
    results = []
    for one in cases:
        with user_loop(**one) as user:
            stock = user.step()
            with evenload.enabled(recipe()), listening() as lines:
                found = user.step()
                user.step()
        said = [line for line in lines if "on purpose" in line]
        results.append({"said": said, "apart": worst(found, stock)})
    return results


class OtherRope(RotaryEmbedding):
    """Rotary embeddings that evenload does not know."""


class OtherModel(GPTModel):
    """A user's own model, whose forward takes more than Megatron's."""

    def forward(
        self, input_ids: Any, position_ids: Any, attention_mask: Any, packed_seq_params: Any = None, **more: Any
    ):
        notes.append(more.pop("note", None))
        return super().forward(input_ids, position_ids, attention_mask, packed_seq_params=packed_seq_params, **more)


notes: list[Any] = []


def stays_whole(world: Any, *, seeds: list[int]) -> dict[str, Any]:
    """Unknown embeddings at the last stage, in orders of whole samples: what is said, what a cut plan is told."""
    with user_loop(pp=2) as user, listening() as lines:
        if user.last:
            user.model.module.rotary_pos_emb.__class__ = OtherRope
        user.model.module.__class__ = OtherModel
        notes.clear()

        def step() -> dict[str, Any]:
            return user.step(lambda data, model: user.forward_step(data, functools.partial(model, note="own")))

        stock, whole = step(), {"pieces": (1,), "asymmetric": False, "replay": "none", "recompute": True}
        errors = []
        with evenload.enabled(recipe(packing={"enabled": True, "max_tokens": 64, "slices": "even"})):
            for seed in seeds:
                with planning(drawn(seed, **whole)):
                    errors.append(worst(step(), stock))
            with planning(drawn(1, pieces=(2,))):
                left = worst(step(), stock)
        why = "no sample is cut in this loop: OtherRope knows borders between samples alone"
        parts = (
            "samples stay whole",
            why,
            "a batch of Megatron-Core runs as it is: this host runs whole sequences only",
        )
        said = [sum(part in line for line in lines) for part in parts]
        return {"errors": errors, "left": left, "said": said, "notes": set(notes)}


@contextmanager
def listening() -> Iterator[list[str]]:
    """What evenload logs."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("evenload").addHandler(handler)
    try:
        yield lines
    finally:
        logging.getLogger("evenload").removeHandler(handler)


def refusals(world: Any) -> dict[str, Any]:
    """What loops are told that cannot run an order, and whether a plan without one still runs there."""
    messages: dict[str, Any] = {}
    plans = {"ordered": drawn(1, pieces=(1,), asymmetric=False, replay="none"), "stock": _as_read}

    def attempt(name: str, user: Loop, make: Callable[..., StepPlan], **call: Any) -> None:
        with planning(make):
            messages[name] = told(partial(user.step, **call), evenload.enabled(recipe()))

    with user_loop() as user:
        stock = schedules.forward_backward_no_pipelining

        @functools.wraps(stock)
        def louder(**call: Any) -> Any:
            return stock(**call)

        with patch.object(schedules, "forward_backward_no_pipelining", louder):
            for name, make in plans.items():
                attempt(f"stranger inside, {name}", user, make)
        ask = schedules.get_forward_backward_func
        with patch.object(schedules, "get_forward_backward_func", functools.partial(ask)):
            enabled = evenload.enabled(recipe(pipeline={"enabled": True}))
            messages["stranger outside"] = told(lambda: None, enabled)
        replayed = drawn(1, pieces=(1,), asymmetric=False, replay="all")
        for name, value, make in (
            ("overlap_p2p_comm", True, plans["ordered"]),
            ("num_microbatches_with_partial_activation_checkpoints", 1, plans["ordered"]),
            ("hidden_dropout", 0.1, replayed),
        ):
            user.model.config.__dict__[name], had = value, getattr(user.model.config, name)
            attempt(name, user, make)
            user.model.config.__dict__[name] = had
        with patch.object(
            user.model.module.decoder.layers[-1].self_attention.core_attention.attention_dropout, "p", 0.1
        ):
            attempt("attention dropout, cut", user, drawn(1, pieces=(2,)))
            assert not user.shapes, "told after a forward"
            attempt("attention dropout, whole", user, plans["ordered"])

        def unconnected(data_iterator: Any, model: Any) -> Any:
            output, loss_func = user.forward_step(data_iterator, model)
            return output, lambda losses: loss_func(losses.detach())

        attempt("loss", user, plans["ordered"], forward_step=unconnected)
        attempt("no loss", user, plans["ordered"], forward_step=lambda *a: (user.forward_step(*a)[0], None))
        attempt("fine", user, plans["ordered"])
    return messages


def attention_rules(world: Any) -> dict[str, str]:
    """Why samples stay whole, and what is refused, for settings of a live model's attention."""
    said = {}
    with user_loop() as user:
        gpt, layer = user.model.module, user.model.module.decoder.layers[-1].self_attention
        core = layer.core_attention

        def why(name: str, target: Any, shares: bool = False, **values: Any) -> None:
            with ExitStack() as stack:
                for field, value in values.items():
                    stack.enter_context(patch.object(target, field, value))
                said[name] = told(lambda: refuse_attention(gpt)) or why_whole(gpt, shares=shares)

        why("as it is", gpt)
        why("dropout", core.attention_dropout, p=0.1)
        why("clip", gpt.config, qk_clip=True)
        why("window", gpt.config, window_size=(5, 0), window_attn_skip_freq=4)
        why("window, shared", gpt.config, shares=True, window_size=(5, 0), window_attn_skip_freq=4)
        why("no window, shared", gpt.config, shares=True)
        why("rope", gpt, rotary_pos_emb=OtherRope(8, 1.0))
        why("all before", core.scale_mask_softmax, window_size=(-1, 0))
        why("ahead", core.scale_mask_softmax, window_size=(5, 5))
        why("sink", gpt.config, softmax_type="learnable")
        why("no mask", layer, attn_mask_type=AttnMaskType.no_mask)
        why("cross", layer, attention_type="cross")
        with patch.dict(layer._modules, core_attention=torch.nn.Identity()):
            why("stranger", gpt)
    return said


def copied(world: Any, **loop: Any) -> dict[str, Any]:
    """A loop with the moe plugin: its error against the same loop without, and what it is told of other experts."""
    settings = {"enabled": True, "tolerance": 1.0}
    later = []
    with user_loop(ep=2, **loop) as user:
        stock = user.step()
        with evenload.enabled(recipe(moe={**settings, "mode": "reroute"})):
            for _ in range(2):
                with patch.object(Shares, "fetch", autospec=True, side_effect=Shares.fetch) as fetches:
                    later.append((worst(user.step(), stock), fetches.call_count))
        with (
            evenload.enabled(recipe(moe=settings)),
            patch.object(Shares, "fetch", autospec=True, side_effect=Shares.fetch) as fetches,
        ):
            error = worst(user.step(), stock)
        user.model.module.config.fp8 = "e4m3"
        refusal = told(lambda: refuse_experts(user.model.module), evenload.enabled(recipe(moe=settings)))
        return {"error": error, "copies": fetches.call_count, "told": refusal, "later": later}


def _as_read(chain: PlanChain, lengths: list[int]) -> StepPlan:
    """Every sample a micro-batch of its own, without an order."""
    micro_batches = tuple(MicroBatch((Slice(i, 0, n),), (0,)) for i, n in enumerate(map(int, lengths)))
    return check(StepPlan(as_lengths(lengths), micro_batches, chain.limits))


def _symbols(script: Any) -> list[Any]:
    """What a session replaces: a function of Megatron, the name that a script has imported it by, and a method."""
    attention = vars(DotProductAttention)["forward"]
    return [schedules.get_forward_backward_func, script.get_forward_backward_func, attention]


def left_behind(world: Any) -> dict[str, Any]:
    """A loop that holds its function over the end of a session: what it finds then."""
    with user_loop(pp=2, recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1) as user:
        gpt, config, stock = user.model.module, user.model.config, user.step()
        before = {**vars(config)}, dict(gpt._modules), len(gpt._forward_pre_hooks)
        symbols = _symbols(user.script)
        session = evenload.enable(recipe())
        changed = [one is not other for one, other in zip(_symbols(user.script), symbols, strict=True)]
        held = user.script.get_forward_backward_func()
        with planning(drawn(3)) as made:
            user.step(schedule=held)
        after = {**vars(config)}, dict(gpt._modules), len(gpt._forward_pre_hooks)
        session.disable()
        restored = [one is other for one, other in zip(_symbols(user.script), symbols, strict=True)]
        again = user.step(schedule=held)
    return {
        "changed": changed,
        "restored": restored,
        "same": before == after,
        "plans": len(made),
        "shapes": sorted(set(again["shapes"])),
        "error": worst(again, stock),
    }


def changed_parts(change: Callable[[Any, Any, int], None]) -> Callable[[], Any]:
    """Plants ``change(packed, part, its first token)`` for the parts of samples, those that begin them left out."""

    def changed(lay: Any, *args: Any, **named: Any) -> Any:
        packed = lay(*args, **named)
        for piece, first in zip(packed.pack.slices, packed.pack.segments, strict=False):
            if piece.start:
                change(packed, piece, first)
        return packed

    return lambda: faults.around(call_plan, "lay_out", changed)


def _restarted_positions(packed: Any, piece: Any, first: int) -> None:
    packed.pack.positions_T[first : first + piece.length] -= piece.start


def _shifted_labels(packed: Any, piece: Any, first: int) -> None:
    """As if the labels of a part were not shifted already: its last one is lost."""
    packed.fields["labels"][0, first] = packed.fields["tokens"][0, first]


@contextmanager
def _plan_of_the_latest() -> Iterator[None]:
    """Recomputed layers see the pack that ran last instead of their own."""
    latest = []

    def noting(run: Any, step: Any, packed: Any, *rest: Any) -> Any:
        latest[:] = [packed.pack]
        return run(step, packed, *rest)

    def misled(attend: Any, q: Any, k: Any, v: Any, pack: Any, *rest: Any, **more: Any) -> Any:
        wrong = latest[0] if latest[0].num_padded_tokens == pack.num_padded_tokens else pack
        return attend(q, k, v, wrong, *rest, **more)

    with faults.around(UserStep, "run", noting), faults.around(users_attention, "packed_attention", misled):
        yield


def _uncounted_tokens(init: Any, forward: Any, *rest: Any) -> None:
    init(forward, *rest)
    forward.num_tokens += 1


FAULTS = {
    "restarted positions": changed_parts(_restarted_positions),
    "shifted labels": changed_parts(_shifted_labels),
    "dropped accumulator": faults.FAULTS["dropped accumulator"],
    "plan of the latest": _plan_of_the_latest,
    "uncounted tokens": lambda: faults.around(order._Forward, "__init__", _uncounted_tokens),
}
