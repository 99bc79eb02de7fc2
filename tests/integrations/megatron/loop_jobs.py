"""What the ranks of unmodified/test_together.py, test_hybrid.py and test_unlike_recipes.py do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import evenload
import torch
from evenload.core.errors import RankError
from evenload.core.plan.step_plan import StepPlan
from evenload.core.planning.chain import PlanChain
from evenload.integrations.megatron.base.families import pattern_of, unwrapped_chunk
from evenload.integrations.megatron.stage import recomputing
from evenload.integrations.megatron.unmodified.planning.user_loop import shape_of
from evenload.integrations.megatron.unmodified.refusals.supported import why_stock
from evenload.integrations.unmodified import planned_runs
from evenload.runtime.experts.balance import Shares
from evenload.runtime.world import agreement
from megatron.core.models.gpt import GPTModel
from megatron_tests.form_jobs import packed_attention
from megatron_tests.telling import told
from megatron_tests.user_jobs import compared, listening, loaded_script, recipe, user_loop, worst
from torch.nn.modules.module import register_module_forward_pre_hook


def kept_together(world: Any, *, cases: list[tuple[dict[str, Any], dict[str, Any]]]) -> list[dict[str, Any]]:
    """A step with plugins against the same step without, for (plugins, loop) of each case."""
    return [_case(plugins, loop) for plugins, loop in cases]


def _case(plugins: dict[str, Any], loop: dict[str, Any]) -> dict[str, Any]:
    plans: list[StepPlan] = []
    make = PlanChain.plan

    def plan(chain: PlanChain, *batch: Any) -> StepPlan:
        plans.append(make(chain, *batch))
        return plans[-1]

    planned_runs._idle.clear()
    with user_loop(**loop) as user:
        stock = user.step()
        with (
            evenload.enabled(recipe(**plugins)),
            listening() as lines,
            patch.object(PlanChain, "plan", plan),
            patch.object(Shares, "fetch", autospec=True, side_effect=Shares.fetch) as fetches,
        ):
            found = user.step()
        again = user.step()
    return {
        **compared(found, stock),
        "again": worst(again, stock),
        "routers": {n: float((v - found["routers"][n]).abs().max()) for n, v in stock["routers"].items()},
        "shapes": sorted(found["shapes"]) == sorted(stock["shapes"]),
        "ordered": any(plan.order for plan in plans),
        "split": sum(map(len, plans[0].split)) if plans else 0,
        "plans": len(plans),
        "copies": fetches.call_count,
        "idle": [line for line in lines if "nothing is planned" in line],
        "finite": all(bool(torch.isfinite(g).all()) for g in found["gradients"].values()),
    }


def forwards_of_layers(world: Any, *, layers: int, **loop: Any) -> list[int]:
    """How often each layer runs in a forward and backward of which the first ``layers`` are recomputed."""
    with user_loop(**loop) as user:
        gpt = unwrapped_chunk(user.model)
        counts = [0] * len(gpt.decoder.layers)

        def count(number: int) -> Any:
            return lambda *_: counts.__setitem__(number, counts[number] + 1)

        for number, layer in enumerate(gpt.decoder.layers):
            # What a layer begins with, for its own hooks are around a recomputation.
            next(m for m in layer.modules() if list(m.parameters(False))).register_forward_pre_hook(count(number))
        tokens = torch.arange(8)[None]
        with recomputing(gpt, layers):
            losses = gpt(tokens, tokens, torch.ones(1, 1, 8, 8).triu(1).bool(), labels=tokens)
        losses.sum().backward()
        return counts


def sizes_and_order(world: Any, **loop: Any) -> tuple[Any, str]:
    """What planners are told of a model, and why no order can run, if so."""
    with user_loop(**loop) as user:
        gpt = unwrapped_chunk(user.model)
        shape = shape_of(gpt.config, gpt.vocab_size, loop.get("pp", 1), pattern_of(gpt))
        trouble = why_stock([user.model], "")
        experts = shape.experts and shape.experts.layers
        return (*shape[:5], experts), trouble[0] if trouble else ""


def refused_hybrids(world: Any, **loop: Any) -> dict[str, str]:
    """What a loop is told of settings and layers that a hybrid model cannot have."""
    with user_loop(**loop) as user:
        gpt = unwrapped_chunk(user.model)
        stranger = patch.dict(gpt.decoder.layers[0]._modules, self_attention=torch.nn.Identity())
        virtual = patch.object(user.model.config, "virtual_pipeline_model_parallel_size", 2)
        said = {}
        for name, change in (("virtual", virtual), ("stranger", stranger)):
            with change:
                said[name] = told(user.step, evenload.enabled(recipe()))
        return said


def unlike_in_schedule(world: Any, *, plugins: list[dict[str, Any]], loop: dict[str, Any]) -> list[Any]:
    """In a loop that calls Megatron's schedule; a rank has the plugins of its place."""
    with user_loop(**loop) as user:
        return _message_of(user.step, plugins[world.rank])


def unlike_in_rows(world: Any, *, plugins: list[dict[str, Any]]) -> list[Any]:
    """In a loop that hands over TensorDicts."""
    with loaded_script("verl_script") as script, packed_attention():
        return _message_of(lambda: script.train("sft", True), plugins[world.rank])


def _message_of(step: Callable[[], Any], plugins: dict[str, Any]) -> list[Any]:
    """Of a step, as if the roll call, which compares recipes before it, had not been held."""
    trained: list[bool] = []
    count = register_module_forward_pre_hook(
        lambda module, _: trained.append(torch.is_grad_enabled()) if isinstance(module, GPTModel) else None
    )
    try:
        with evenload.enabled(recipe(**plugins)), patch.object(agreement, "before_first", None):
            step()
    except RankError as error:
        return [str(error), sum(trained)]
    finally:
        count.remove()
    return ["no error", sum(trained)]
