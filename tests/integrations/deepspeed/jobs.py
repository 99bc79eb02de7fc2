"""What ranks do with DeepSpeed: hosts of small models, and what several files of tests ask of them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from evenload.core.errors import EvenloadError
from evenload.core.plan.action import LETTERS
from evenload.core.plan.program import lower
from evenload.core.plan.step_plan import StepPlan
from evenload.core.recipe import recipe as recipes
from evenload.integrations.deepspeed import open_host
from evenload.integrations.deepspeed.engine import engine as engine_module
from evenload.integrations.deepspeed.engine import stage as stage_module
from evenload.runtime.world.world import init_world
from harness.groups import giving_groups_back
from harness.proof import LENGTHS, errors_of_plans, labels_in_turn, planned, tokens
from harness.proof.experts import layer_planner_of, with_drawn_copies
from harness.proof.faults import Planted, around
from harness.proof.faults import fault as shared_fault

MODEL = {"hidden_size": 32, "num_attention_heads": 4, "num_query_groups": 2, "vocab_size": 97}
OF_FAMILY = {
    "gpt": {"num_query_groups": 4},
    **{name: {"moe": {"num_experts": 4, "topk": 2, "ffn_hidden_size": 24}} for name in ("mixtral", "qwen3_moe")},
}
GATHERED = {
    "stage3_param_persistence_threshold": 0,
    "stage3_max_reuse_distance": 0,
    "stage3_prefetch_bucket_size": 0,
}
"""ZeRO 3 keeps small parameters gathered for good; without these nothing of a test's model would ever be released."""


def recipe(
    stage: int = 1,
    *,
    pp: int = 1,
    ep: int = 1,
    layers: Any = None,
    v_shape: bool = False,
    lora: bool = False,
    dtype: str = "fp32",
    clip_grad: float = 0.0,
    recompute: bool = False,
    **model: Any,
) -> Any:
    """Two layers, four in a pipeline; ``layers``: of each of its stages. ``model``: what else is other."""
    zero = {"config": {"zero_optimization": GATHERED}} if stage == 3 else {}
    plugins: dict[str, Any] = {"lora": {"enabled": True}} if lora else {}
    return recipes.parse(
        {
            "trainer": "deepspeed",
            "model": {"num_layers": 4 if pp > 1 else 2, **MODEL, **OF_FAMILY.get(model.get("family", ""), {}), **model},
            "data": {"max_length": max(LENGTHS)},
            "parallel": {"pp": pp, "ep": ep, "layers": layers},
            "train": {"dtype": dtype, "clip_grad": clip_grad, "weight_decay": 0.1, "recompute": recompute},
            "deepspeed": {"zero_stage": stage, **zero},
            "plugins": plugins | ({"pipeline": {"enabled": True, "v_shape": True}} if v_shape else {}),
        }
    )


@contextmanager
def hosted(stage: int = 1, **asked: Any) -> Iterator[Any]:
    """The host of a recipe, which knows the planner of layers that draws."""
    with giving_groups_back():
        host = open_host(recipe(stage, **asked), init_world())
        try:
            with patch("evenload.integrations.deepspeed.engine.expert_gate.layer_planner", layer_planner_of):
                yield host
        finally:
            host.close()


def gathered(host: Any) -> int:
    states = [getattr(p, "ds_status", None) for p in host.engine.module.parameters()]
    return sum(state == ZeroParamStatus.AVAILABLE for state in states)


def exactness(
    names: list[str], lengths: Any = LENGTHS, faults: Any = ("",), drawings: int = 0, **asked: Any
) -> dict[str, Any]:
    """What `errors_of_plans` finds under each fault, each plan after the first with other copies of divided experts;
    how often the first layer ran in each plan; and what has moved or stays gathered."""
    with hosted(**asked) as host:
        before, calls = host.weights(), list[int]()
        copies = (0, *itertools.islice(itertools.cycle((1, 3)), len(names)))
        plans = [
            (name, with_drawn_copies(planned(host, name, lengths), number, once=False))
            for name, number in zip(names, copies, strict=False)
        ]
        found = [
            errors_of_plans(host, plans, lengths, counting(host, fault(name), calls), drawings=drawings)
            for name in faults
        ]
        return {
            "found": found,
            "layers": calls,
            "gathered": gathered(host),
            "moved": max(float((weight - before[name]).abs().max()) for name, weight in host.weights().items()),
            "describe": host.describe(),
        }


def counting(host: Any, planted: Planted, calls: list[int]) -> Callable[[], AbstractContextManager[None]]:
    """Adds to ``calls`` how often the first layer runs."""
    # Not the MLP: a recomputed layer stops where it has all that it needs, inside it.
    blocks = getattr(host, "module", None)
    layer = blocks.blocks[0] if blocks is not None else host.engine.module.base_model.layers[0]
    inner = getattr(layer, "self_attn", None) or layer.attention

    @contextmanager
    def counted() -> Iterator[None]:
        seen: list[int] = []
        hook = inner.register_forward_hook(lambda *_: seen.append(1))
        with planted():
            yield
        hook.remove()
        calls.append(len(seen))

    return counted


def fault(name: str = "") -> Planted:
    """A fault of DeepSpeed's passes, or one that trainers share."""
    own: dict[str, Planted] = {
        "wrong scale": lambda: around(stage_module.PackStage, "_weighed", lambda stock, *given: stock(*given) * 1.01),
        "flag not cleared": lambda: around(engine_module.OneReduction, "before_backward", _keep_flag),
        "loss per micro-batch": lambda: around(stage_module, "token_losses", _mean),
    }
    return own[name] if name in own else shared_fault(name)


def _keep_flag(before_backward: Any, reduction: Any) -> None:
    optimizer = reduction._engine.optimizer
    optimizer.clear_backward_seen_flag = lambda: None
    before_backward(reduction)
    del optimizer.clear_backward_seen_flag


def _mean(losses: Any, logits: Any, pack: Any, **named: Any) -> Any:
    return losses(logits, pack, **named) / max(1, pack.num_targets)


def trained(name: str, steps: int = 3, **asked: Any) -> dict[str, Any]:
    """Losses and norms of steps of one plan at learning rates that change, the last recorded; the weights before and
    after, and what the last marked and recorded."""
    with hosted(**asked) as host:
        start, plan, marks = host.weights(), planned(host, name), list[str]()
        rates = [(1e-2, 2e-2, 5e-3)[step % 3] for step in range(steps)]
        *first, last = rates
        results = [host.train_step(plan, tokens(), lr=lr) for lr in first]
        assert not any(result.spans for result in results)
        results.append(host.train_step(plan, tokens(), lr=last, mark=marks.append, record=True))
        return {
            "losses": [result.loss for result in results],
            "norms": [result.grad_norm for result in results],
            "start": start,
            "weights": host.weights(),
            "spans": [(span.kind, span.micro_batch) for span in results[-1].spans],
            "passes": passes_here(host, plan),
            "marks": marks,
        }


def passes_here(host: Any, plan: StepPlan) -> list[tuple[str, int]]:
    """(kind, number) of the passes that this rank runs of a plan, as spans have them, in order."""
    if host.layout.pp > 1:
        program = lower(plan, host.pipeline_stage, host.dp_cp_rank)
    else:
        program, _ = host.program_of(plan, "idle")
    return [(LETTERS[action.kind].upper(), action.op.micro_batch) for action in program if action.computes]


def save_and_go_on(folder: str, **asked: Any) -> list[str]:
    """Losses of two steps after a checkpoint: the first shows the weights, the second Adam's states."""
    with hosted(clip_grad=1.0, **asked) as host:
        _steps(host, 1)
        host.save(Path(folder))
        return _steps(host, 2)


def resume(folder: str, **asked: Any) -> list[str]:
    """The same losses from the checkpoint, or why it is refused."""
    with hosted(clip_grad=1.0, **asked) as host:
        try:
            host.load(Path(folder))
        except EvenloadError as error:
            return [str(error)]
        return _steps(host, 2)


def _steps(host: Any, count: int) -> list[str]:
    """Losses of some steps, in full. The plan is the same on any number of ranks but for where it runs."""
    plan = planned(host, "packs")
    return [host.train_step(plan, tokens(), lr=1e-2).loss.hex() for _ in range(count)]


def told(call: Callable[[], Any]) -> str:
    try:
        call()
    except EvenloadError as error:
        return str(error)
    return "no error"


def refused_labels() -> None:
    """Labels that miscount, and weights that add up to nothing, are refused before an update."""
    with hosted(0) as host:
        plan, labels = planned(host, "packs"), labels_in_turn(3)
        assert labels is not None
        with pytest.raises(EvenloadError, match="another number of targets"):
            host.train_step(plan, tokens(), lr=1e-2, labels=labels._replace(targets=labels.targets + 1))
        weights = labels.weights
        cancelled = weights._replace(sums=weights.sums * float("nan"))
        with pytest.raises(EvenloadError, match="add up to nothing that its loss can be divided by"):
            host.train_step(plan, tokens(), lr=1e-2, labels=labels._replace(weights=cancelled))


def refused() -> dict[str, str]:
    """Messages of plans of other layouts, of a replay with dropout, and of what is shared without a cp_comm."""
    with hosted(1) as host:
        plan, shared = planned(host, "packs"), planned(host, "slices")
        both = tuple(m._replace(ranks=(0, 1)) for m in shared.micro_batches)
        said = {}
        for name, other in {"ranks": {"num_ranks": 4}, "stages": {"num_stages": 2}}.items():
            foreign = plan.revised(limits=replace(plan.limits, **other))
            said[name] = told(lambda foreign=foreign: host.train_step(foreign, tokens(), lr=1e-3))
        said["shared"] = told(lambda: host.gradients(shared.revised(micro_batches=both), tokens()))
        host.engine.module.model.layers[0].mlp.act_fn = torch.nn.Dropout(0.1)
        said["dropout"] = told(lambda: host.gradients(planned(host, "slices, all replayed"), tokens()))
        return said
