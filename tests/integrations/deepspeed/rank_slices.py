"""What the ranks of a test world run: every function here is a case of test_slices.py."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from evenload.core.errors import EvenloadError
from evenload.core.plan.step_plan import StepPlan
from evenload.core.recipe import recipe as recipes
from evenload.integrations.deepspeed import open_host
from evenload.integrations.deepspeed.engine import engine as engine_module
from evenload.integrations.deepspeed.engine import stage as stage_module
from evenload.integrations.deepspeed.engine.stage import EngineStage
from evenload.integrations.deepspeed.plain import reference, relative_error
from evenload.runtime.attention.prefix import PrefixStore
from evenload.runtime.world.world import init_world

_spec = importlib.util.spec_from_file_location("slice_plans", Path(__file__).with_name("slice_plans.py"))
plans = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(plans)

MODEL = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "num_query_groups": 2, "vocab_size": 97}
GATHERED = {
    "stage3_param_persistence_threshold": 0,
    "stage3_max_reuse_distance": 0,
    "stage3_prefetch_bucket_size": 0,
}
"""ZeRO 3 keeps small parameters gathered for good; without these nothing of a test's model would ever be released."""


def recipe(stage: int, recompute: bool = False, dtype: str = "fp32", **model: Any) -> Any:
    zero = {"config": {"zero_optimization": GATHERED}} if stage == 3 else {}
    return recipes.parse(
        {
            "trainer": "deepspeed",
            "model": {**MODEL, **model},
            "data": {"max_length": 200},
            "train": {"dtype": dtype, "clip_grad": 0.0, "recompute": recompute},
            "deepspeed": {"zero_stage": stage, **zero},
        }
    )


def plan_named(name: str) -> StepPlan:
    """``random 7``, or a function of slice_plans with its argument: ``chains some``."""
    kind, *words = name.split()
    if kind == "random":
        return plans.random_plan(int(words[0]))
    return getattr(plans, kind)(*words[:1], **dict.fromkeys(words[1:], True))


def exactness(stage: int, names: list[str], recompute: bool = False, dtype: str = "fp32") -> dict[str, Any]:
    """Errors of every plan against the plain reference, and what the rank ran."""
    made = recipe(stage, recompute, dtype)
    host = open_host(made, init_world())
    found: dict[str, Any] = {}
    references: dict[Any, Any] = {}
    for number, name in enumerate(names):
        plan = plan_named(name)
        labels = plans.labels_of(plan, number)
        key = plan.sequences, number % 4
        if key not in references:
            references[key] = reference(made, host, plans.tokens_of(plan), plan.lengths, labels)
        loss, wanted = references[key]
        calls: list[int] = []
        # Not the MLP: a recomputed layer stops where it has all that it needs, inside it.
        layer = host.engine.module.model.layers[0].self_attn
        counter = layer.register_forward_hook(lambda *_, calls=calls: calls.append(1))
        result, gradients = host.gradients(plan, plans.tokens_of(plan), labels)
        counter.remove()
        found[name] = {
            "forwards": len(calls),
            "loss": abs(result.loss / loss - 1),
            "grad": relative_error(gradients, wanted),
            "executed": [tuple(piece) for piece in result.executed],
            "gathered": _gathered(host),
        }
    host.close()
    return found


def trained(stage: int, name: str, recompute: bool = False) -> tuple[list[float], Any, Any, Any]:
    """Losses of two optimizer steps, the weights before and after, what the second recorded."""
    host = open_host(recipe(stage, recompute), init_world())
    before = host.weights()
    plan = plan_named(name)
    results = [host.train_step(plan, plans.tokens_of(plan), lr=1e-2, record=record) for record in (False, True)]
    after = host.weights()
    host.close()
    assert not results[0].spans
    return [result.loss for result in results], before, after, results[1].spans


def gathered_while_backward_ends(counted: bool) -> list[int]:
    """Parameters that ZeRO 3 has gathered when the backward of the first layer ends, for each backward of a step.

    Without `counted` the counters by which DeepSpeed releases parameters are left as the last forward set them.
    """
    host = open_host(recipe(3), init_world())
    seen: list[int] = []
    first = dict(host.engine.module.named_parameters())["model.layers.0.input_layernorm.weight"]
    handle = first.register_hook(lambda grad: seen.append(_gathered(host)))
    note = engine_module.OneReduction.after_forward
    if not counted:
        engine_module.OneReduction.after_forward = lambda self: None  # type: ignore[method-assign]
    plan = plans.chains("none", equal=True)
    host.gradients(plan, plans.tokens_of(plan))
    engine_module.OneReduction.after_forward = note  # type: ignore[method-assign]
    handle.remove()
    host.close()
    return seen


def _gathered(host: Any) -> int:
    states = [getattr(p, "ds_status", None) for p in host.engine.module.parameters()]
    return sum(state == ZeroParamStatus.AVAILABLE for state in states)


def mutants(stage: int) -> dict[str, tuple[float, float]]:
    """(loss error, gradient error) of deliberately broken runs, and of sound ones."""
    made = recipe(stage)
    host = open_host(made, init_world())
    plan = plans.chains("some", equal=True)
    loss, wanted = reference(made, host, plans.tokens_of(plan), plan.lengths)

    def errors(one: StepPlan = plan) -> tuple[float, float]:
        result, gradients = host.gradients(one, plans.tokens_of(one))
        return abs(result.loss - loss) / loss, relative_error(gradients, wanted)

    if stage == 3:
        # It shows where two backwards begin the step; a replay between them would clear the flag by its forward.
        kept = plans.chains("none", equal=True)
        found = {"sound": errors(kept)}
        with _patched(engine_module.OneReduction, "before_backward", _keep_flag):
            found["flag not cleared"] = errors(kept)
        host.close()
        return found
    found = {"sound": errors()}
    for name, place, attribute, broken in (
        ("dKV dropped", PrefixStore, "settle", _settle_own_only),
        ("loss twice", EngineStage, "forward", _losses_of_prefixes),
        ("position restart", stage_module, "build_pack", _positions_from_zero),
    ):
        with _patched(place, attribute, broken):
            found[name] = errors()
    found["sound again"] = errors()
    host.close()
    return found


@contextmanager
def _patched(place: Any, attribute: str, broken: Any) -> Iterator[None]:
    stock = getattr(place, attribute)
    setattr(place, attribute, lambda *args, **kwargs: broken(stock, *args, **kwargs))
    try:
        yield
    finally:
        setattr(place, attribute, stock)


def _settle_own_only(settle: Any, store: Any, layer: int, piece: Any, dk: Any, dv: Any) -> Any:
    """The gradients of a slice without what later slices left for it."""
    settle(store, layer, piece, dk, dv)
    return dk[piece.start :], dv[piece.start :]


def _losses_of_prefixes(forward: Any, trainer: Any, loaded: Any, received: Any, action: Any) -> Any:
    if action.kind == "forward_kv":
        action = action._replace(kind="forward", recomputed=None)
    return forward(trainer, loaded, received, action)


def _positions_from_zero(build_pack: Any, micro_batch: Any, *args: Any, **more: Any) -> Any:
    pack = build_pack(micro_batch, *args, **more)
    starts = torch.tensor([s.start for s in micro_batch.slices for _ in range(s.length)] or [0])
    object.__setattr__(pack, "positions_T", pack.positions_T - starts)
    return pack


def _keep_flag(before_backward: Any, reduction: Any) -> None:
    optimizer = reduction._engine.optimizer
    optimizer.clear_backward_seen_flag = lambda: None
    before_backward(reduction)
    del optimizer.clear_backward_seen_flag


def refused() -> list[str]:
    """Messages of a replay with dropout, and of a micro-batch on several ranks without an engine."""
    told = []

    def errs(call: Any) -> None:
        try:
            call()
            told.append("no error")
        except EvenloadError as error:
            told.append(str(error))

    host = open_host(recipe(1), init_world())
    plan = plans.chains("all")
    host.engine.module.model.layers[0].mlp.act_fn = torch.nn.Dropout(0.1)
    errs(lambda: host.gradients(plan, plans.tokens_of(plan)))
    shared = tuple(m._replace(ranks=(0, 1)) for m in plan.micro_batches)
    errs(lambda: host.gradients(StepPlan(plan.lengths, shared, plan.limits, plan.order), plans.tokens_of(plan)))
    host.close()
    return told
