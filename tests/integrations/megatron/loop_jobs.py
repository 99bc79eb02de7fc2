"""What the ranks of unmodified/test_together.py, test_hybrid.py and test_unlike_recipes.py do."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
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
from megatron.core import parallel_state
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


def left_as_they_are(world: Any, *, odd: list[str], **loop: Any) -> dict[str, Any]:
    """Of loops that cannot be planned, by what is odd in them: whether each of two steps is the stock one, bit by bit,
    and what is said."""
    with user_loop(**loop) as user:
        batches, found = user.script.batches, {}
        for name in odd:
            user.script.batches = partial(ODD_BATCHES[name], batches) if name in ODD_BATCHES else batches
            step = partial(ODD.get(name, _of_any_batch), user)
            stock = user.step(step)
            planned_runs._idle.clear()
            with evenload.enabled(recipe()), listening() as lines:
                steps = [user.step(step), user.step(step)]
            same = [_is_same(one, stock) for one in steps]
            found[name] = same, [line for line in lines if "nothing is planned" in line]
        return found


def _odd_on_first(batches: Any) -> Any:
    """Batches with a mask that is not causal, on the first data-parallel rank alone."""
    for batch in batches():
        mask = ~torch.ones(1, 1, *2 * batch["tokens"].shape[1:], dtype=torch.bool).tril()
        mask[..., 2:, :2] |= parallel_state.get_data_parallel_rank() == 0
        yield {**batch, "attention_mask": mask}


def _is_same(found: dict[str, Any], stock: dict[str, Any]) -> bool:
    reports = zip(found["reports"], stock["reports"], strict=True)
    return all(torch.equal(found["gradients"][name], value) for name, value in stock["gradients"].items()) and all(
        torch.equal(one, other) for one, other in reports
    )


def _fixed_shape(user: Any, data_iterator: Any, model: Any) -> Any:
    batch = next(data_iterator)
    assert batch["tokens"].shape == (user.script.MICRO_BATCH, user.script.SEQ_LENGTH), "a batch of another shape"
    return user.forward_step(iter([batch]), model)


def _shortened(user: Any, data_iterator: Any, model: Any) -> Any:
    keys = ("tokens", "labels", "position_ids", "loss_mask")
    batch = {key: value[:, :-1].contiguous() if key in keys else value for key, value in next(data_iterator).items()}
    return user.forward_step(iter([batch]), model)


def _of_rows(user: Any, data_iterator: Any, model: Any) -> Any:
    output, loss_func = user.forward_step(data_iterator, model)
    return output, lambda losses: loss_func(losses.view(user.script.MICRO_BATCH, user.script.SEQ_LENGTH))


def _mean(user: Any, data_iterator: Any, model: Any) -> Any:
    output, loss_func = user.forward_step(data_iterator, model)

    def mean(losses: Any) -> Any:
        total, count, report = loss_func(losses)
        return total / count, count, report

    return output, mean


def _of_any_batch(user: Any, data_iterator: Any, model: Any) -> Any:
    """A function that takes any of `ODD_BATCHES`."""
    batch = next(data_iterator)
    if isinstance(batch, tuple):
        batch = dict(zip(("tokens", "labels", "loss_mask", "position_ids"), batch, strict=True))
    keys = ("tokens", "labels", "loss_mask", "position_ids")
    batch = batch.get("inner", batch)
    batch = {**batch, "tokens": batch.get("input_ids", batch.get("tokens"))}
    batch = {key: torch.as_tensor(batch[key]) for key in keys if key in batch}
    batch.setdefault("position_ids", torch.arange(user.script.SEQ_LENGTH).expand_as(batch["tokens"]))
    mask = batch.get("loss_mask", torch.ones(user.script.SEQ_LENGTH, dtype=torch.float64))
    return user.forward_step(iter([{**batch, "loss_mask": mask.expand_as(batch["tokens"]).contiguous()}]), model)


def _changed(change: Any, batches: Any) -> Any:
    return map(change, batches())


ODD_BATCHES = {
    "mask": _odd_on_first,
    "tuple": partial(
        _changed, lambda batch: tuple(batch[key] for key in ("tokens", "labels", "loss_mask", "position_ids"))
    ),
    "no mask": partial(_changed, lambda batch: {key: value for key, value in batch.items() if key != "loss_mask"}),
    "no positions": partial(
        _changed, lambda batch: {key: value for key, value in batch.items() if key != "position_ids"}
    ),
    "input_ids": partial(_changed, lambda batch: {"input_ids": batch["tokens"], **batch, "tokens": None}),
    "lists": partial(_changed, lambda batch: {key: value.tolist() for key, value in batch.items()}),
    "inner": partial(_changed, lambda batch: {"inner": batch}),
    "numpy": partial(_changed, lambda batch: {key: value.numpy() for key, value in batch.items()}),
    "text": partial(_changed, lambda batch: {**batch, "text": ["a", "b"]}),
    "mask of words": partial(_changed, lambda batch: {**batch, "attention_mask": "causal"}),
    "one row": partial(_changed, lambda batch: {**batch, "loss_mask": batch["loss_mask"][0]}),
}
ODD = {"shape": _fixed_shape, "shortened": _shortened, "rows": _of_rows, "mean": _mean}


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
