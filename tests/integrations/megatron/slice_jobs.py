"""What the ranks of test_slices.py do: random plans against plain training, planted faults, work that is counted."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from evenload.core.errors import EvenloadError
from evenload.core.laws import check
from evenload.core.plan.action import LETTERS
from evenload.core.plan.limits import Limits
from evenload.core.plan.order import one_forward_one_backward
from evenload.core.plan.program import lower
from evenload.core.plan.step_plan import MicroBatch, Slice, StepPlan, as_lengths
from evenload.integrations.host.step import Step, no_mark
from evenload.integrations.megatron.model.attention import PackedCoreAttention
from evenload.integrations.megatron.model.weights import global_gradients, global_parameters
from evenload.integrations.megatron.plain import grad_rel_err, reference
from evenload.integrations.megatron.stage import MegatronStage
from evenload.runtime.attention import prefix
from evenload.runtime.attention.labels import count_targets
from evenload.runtime.measure.busy import BusyClock
from evenload.runtime.stage.executor import Executor
from evenload.runtime.stage.stage_links import StageLinks
from evenload.runtime.stage.tape import Tape
from megatron_tests.jobs import LENGTHS, hosted, labels_in_turn, plan, tokens
from megatron_tests.random_plans import random_plan

FEW_LENGTHS = (37, 5, 64, 2)


def planned(host: Any, seed: int, lengths: Any = LENGTHS, **drawn: Any) -> StepPlan:
    """A random plan for a host's layout."""
    layout = host.layout
    layers = host.recipe.model.num_layers // layout.pp
    sizes = {"num_ranks": layout.dp_cp_size, "num_stages": layout.pp, "layers_per_stage": layers}
    return random_plan(seed, lengths, **sizes, **drawn)


def sliced(
    world: Any,
    *,
    seeds: list[int],
    lengths: Any = FEW_LENGTHS,
    drawn: dict[str, Any] | None = None,
    mutant: str = "",
    **changes: Any,
) -> list[dict[str, Any]]:
    """Errors of random plans against plain training, one reference for all of them."""
    with hosted(world, **changes) as host:
        plans = ((seed, planned(host, seed, lengths, **(drawn or {}))) for seed in seeds)
        return errors_of_plans(host, plans, lengths, FAULTS.get(mutant))


def errors_of_plans(
    host: Any, plans: Iterable[tuple[Any, StepPlan]], lengths: Any, fault: Callable[[], Any] | None = None
) -> list[dict[str, Any]]:
    """Loss and gradients of named plans, each with other labels and weights, against plain training, or what the host
    said where `fault` plants one."""
    data, batch, found = tokens(lengths), as_lengths(lengths), []
    references: dict[int, Any] = {}
    for number, (name, the_plan) in enumerate(plans):
        labels = labels_in_turn(number, lengths)
        if number % 4 not in references:
            references[number % 4] = reference(host.recipe, host, data, batch, labels)
        expected_loss, expected = references[number % 4]
        try:
            with fault() if fault else nullcontext():
                result, gradients = host.gradients(the_plan, data, labels)
        except (EvenloadError, RuntimeError):
            if not fault:
                raise
            found.append({"plan": name, "error": traceback.format_exc()})
            continue
        found.append(
            {
                "plan": name,
                "loss": abs(result.loss / expected_loss - 1),
                "grad": grad_rel_err(gradients, expected),
                "miscounted": result.num_targets - count_targets(batch, labels),
                "executed": result.executed,
                "trained": list(gradients),
            }
        )
    return found


def reduced(world: Any, *, seeds: list[int], drawn: dict[str, Any] | None = None, **changes: Any) -> list[float]:
    """Errors of the gradients that training steps leave, by turns of a random plan and of Megatron's own schedule."""
    errors = []
    with hosted(world, megatron__distributed_optimizer=False, **changes) as host:
        data = tokens()
        _, expected = reference(host.recipe, host, data, as_lengths(LENGTHS))
        for seed in seeds:
            for the_plan in (planned(host, seed, **(drawn or {})), plan(host.layout.dp_cp_size)):
                host.trained.run(Step(the_plan, data, None, no_mark, BusyClock(torch.device("cpu"))))
                errors.append(grad_rel_err(dict(global_gradients(host.model)), expected))
    return errors


def trained(world: Any, *, cut: bool, record: bool = False, **changes: Any) -> dict[str, Any]:
    """Losses, norms and weights of three steps, with random plans or with Megatron's schedule; what was recorded."""
    with hosted(world, **changes) as host:
        plans = [planned(host, seed) if cut else plan(host.layout.dp_cp_size) for seed in (4, 5, 6)]
        results = [host.train_step(p, tokens(seed=i), lr=1e-2, record=record) for i, p in enumerate(plans)]
        return {
            "spans": [r.spans for r in results],
            "passes": [passes_here(host, p) for p in plans],
            "losses": [r.loss for r in results],
            "norms": [r.grad_norm for r in results],
            "weights": {name: p.detach().double().norm().item() for name, p in global_parameters(host.model)},
        }


def passes_here(host: Any, the_plan: Any) -> list[tuple[str, int]]:
    """(kind, number) of the passes that this rank runs of a plan, as spans have them, in order."""
    if the_plan.order:
        program = lower(the_plan, host.pipeline_stage, host.dp_cp_rank)
        return [(LETTERS[action.kind].upper(), action.op.micro_batch) for action in program if action.computes]
    behind = host.layout.pp - 1 - host.pipeline_stage
    return [tuple(op) for op in one_forward_one_backward(the_plan.of_rank(host.dp_cp_rank), behind)]


def counted(world: Any, *, plans: list[dict[str, Any]], **changes: Any) -> list[dict[str, Any]]:
    """How often layers and the head ran in each of some plans, beside the numbers of its passes."""
    calls = {"attention": 0, "head": 0, "graphs": 0}
    attend = PackedCoreAttention.forward

    def counting(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls["attention"] += 1
        calls["graphs"] += torch.is_grad_enabled()
        return attend(self, *args, **kwargs)

    def head(*_: Any) -> None:
        calls["head"] += 1

    rows = []
    with hosted(world, **changes) as host, patch.object(PackedCoreAttention, "forward", counting):
        if hasattr(host.model, "output_layer"):
            host.model.output_layer.register_forward_hook(head)
        for drawn in plans:
            calls.update(dict.fromkeys(calls, 0))
            the_plan = planned(host, 1, **drawn)
            result, _ = host.gradients(the_plan, tokens())
            program = lower(the_plan, host.pipeline_stage, host.dp_cp_rank)
            rows.append(
                {
                    **calls,
                    "forwards": len(the_plan.micro_batches),
                    "backwards": len(the_plan.passes("B")),
                    "prefixes": sum(action.kind == "forward_kv" for action in program),
                    "recomputed": [sum(row) for row in the_plan.recompute],
                    "forward_s": result.forward_s,
                }
            )
    return rows


def in_flight(world: Any, *, packs: int) -> dict[str, int]:
    """Tensors that a pipeline of two sends in 1F1B, and how many of them it holds at most."""
    lengths = [4] * packs
    micro_batches = tuple(MicroBatch((Slice(i, 0, 4),), (0,)) for i in range(packs))
    limits = Limits(1, 4, num_stages=2, layers_per_stage=2)
    order = tuple(tuple(one_forward_one_backward(range(packs), ahead)) for ahead in (1, 0))
    the_plan = check(StepPlan(as_lengths(lengths), micro_batches, limits, order=order))
    told = {"sent": 0, "most": 0}
    send = StageLinks.send

    def counting(self: Any, *args: Any) -> None:
        send(self, *args)
        told["sent"] += 1
        told["most"] = max(told["most"], *map(len, self._sent.values()))

    with hosted(world, parallel__pp=2) as host, patch.object(StageLinks, "send", counting):
        host.gradients(the_plan, tokens(lengths))
        assert not any(links._sent[kind] for links in host._links for kind in links._sent)
    return told


def dropped_accumulator() -> Any:
    settle = prefix.PrefixStore.settle

    def alone(self: Any, layer: int, piece: Any, dk: Any, dv: Any) -> Any:
        own = dk[piece.start :].clone(), dv[piece.start :].clone()
        settle(self, layer, piece, dk, dv)
        return own

    return patch.object(prefix.PrefixStore, "settle", alone)


def _restarted_positions() -> Any:
    load = MegatronStage.load

    def restarted(self: Any, *args: Any) -> Any:
        batch = load(self, *args)
        positions = batch.pack.positions_T.clone()
        for piece, first in zip(batch.pack.slices, batch.pack.segments, strict=False):
            positions[first : first + piece.length] -= piece.start
        pack = replace(batch.pack, positions_T=positions)
        return batch._replace(pack=pack, params=replace(batch.params, pack=pack))

    return patch.object(MegatronStage, "load", restarted)


def _loss_booked_twice() -> Any:
    forward = MegatronStage.forward

    def twice(self: Any, loaded: Any, received: Any, action: Any) -> Any:
        if action.kind == "recompute_forward":
            forward(self, loaded, received, action)
        return forward(self, loaded, received, action)

    return patch.object(MegatronStage, "forward", twice)


def _shifted_tape() -> Any:
    gather = Tape.gather

    def shifted(self: Any, slices: Any, segments: Any, like: Any, **named: Any) -> Any:
        return like.copy_(gather(self, slices, segments, like, **named).roll(1, 0))

    return patch.object(Tape, "gather", shifted)


def _replay_without_grad() -> Any:
    replay = Executor._recompute_forward

    def without(self: Any, action: Any) -> Any:
        with torch.no_grad():
            return replay(self, action)

    return patch.object(Executor, "_recompute_forward", without)


FAULTS = {
    "dropped accumulator": dropped_accumulator,
    "restarted positions": _restarted_positions,
    "loss booked twice": _loss_booked_twice,
    "shifted tape": _shifted_tape,
    "replay without grad": _replay_without_grad,
}
