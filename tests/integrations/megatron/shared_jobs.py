"""What the ranks of test_shared.py do: micro-batches that ranks share, against plain training."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from evenload.core.plan.step_plan import StepPlan, as_lengths
from evenload.integrations.host.step import Step, no_mark
from evenload.integrations.megatron import PlannedBatches, open_plane
from evenload.integrations.megatron.model.weights import global_gradients, global_parameters
from evenload.integrations.megatron.plain import grad_rel_err, reference
from evenload.integrations.megatron.stage import MegatronStage
from evenload.runtime.attention import pack as pack_module
from evenload.runtime.measure.busy import BusyClock
from evenload.runtime.stage.executor import Executor
from evenload.runtime.world.plane import Pending
from megatron_tests.jobs import hosted, in_stock_schedule, tokens, unchanged
from megatron_tests.shared_plans import HAND_LENGTHS, by_hand, in_turns, random_shared_plan
from megatron_tests.slice_jobs import dropped_accumulator, errors_of_plans, planned
from megatron_tests.telling import told

WHOLE = {"asymmetric": False, "replay": "none", "recompute": False, "pieces": (1,)}
"""Drawn plans of whole sequences, each on one rank."""


def sharing(host: Any, which: str | int, lengths: Any = HAND_LENGTHS, **drawn: Any) -> StepPlan:
    """A plan for a host's layout: by its name, or drawn from a seed."""
    layout, model = host.layout, host.recipe.model
    sizes = {"num_ranks": layout.dp_cp_size, "num_stages": layout.pp, "layers_per_stage": model.num_layers // layout.pp}
    sizes["heads"] = model.num_attention_heads // layout.tp
    if isinstance(which, str) and which.startswith("turns "):
        return in_turns(int(which.split()[1]), **sizes, **drawn)
    if isinstance(which, str):
        return by_hand(which, **sizes)
    return random_shared_plan(which, lengths, **sizes, **drawn)


def shared(
    world: Any,
    *,
    plans: list[str | int],
    lengths: Any = HAND_LENGTHS,
    drawn: dict[str, Any] | None = None,
    mutant: str = "",
    **changes: Any,
) -> list[dict[str, Any]]:
    """Errors of plans against plain training, one reference for all of them."""
    with hosted(world, **changes) as host:
        named = ((which, sharing(host, which, lengths, **(drawn or {}))) for which in plans)
        return errors_of_plans(host, named, lengths, FAULTS.get(mutant))


def shared_reduced(world: Any, *, plans: list[str | int], **changes: Any) -> list[float]:
    """Errors of the gradients that overlapped reductions leave, by turns of shared plans and of unshared ones."""
    errors = []
    with hosted(world, megatron__distributed_optimizer=False, megatron__overlap_grad_reduce=True, **changes) as host:
        data = tokens(HAND_LENGTHS)
        _, expected = reference(host.recipe, host, data, as_lengths(HAND_LENGTHS))
        unshared = replace(planned(host, 3, HAND_LENGTHS, **WHOLE), order=())
        for which in plans:
            for the_plan in (sharing(host, which), unshared):
                host.trained.run(Step(the_plan, data, None, no_mark, BusyClock(torch.device("cpu"))))
                errors.append(grad_rel_err(dict(global_gradients(host.model)), expected))
    return errors


def shared_trained(world: Any, *, plans: list[str | int | None], **changes: Any) -> dict[str, Any]:
    """Losses, norms and weights of a step for each plan; None: whole sequences, each on one rank."""
    with hosted(world, **changes) as host:
        alone = planned(host, 2, HAND_LENGTHS, **WHOLE)
        results = [
            host.train_step(alone if which is None else sharing(host, which), tokens(HAND_LENGTHS, seed=i), lr=1e-2)
            for i, which in enumerate(plans)
        ]
        return {
            "losses": [r.loss for r in results],
            "norms": [r.grad_norm for r in results],
            "weights": {name: p.detach().double().norm().item() for name, p in global_parameters(host.model)},
        }


def shared_own_loop(world: Any) -> float:
    """A loop of one's own over shared micro-batches, from the public pieces and stock Megatron only; its error."""
    with hosted(world, train__dtype="fp32", megatron__distributed_optimizer=False) as host:
        data, the_plan = tokens(HAND_LENGTHS), sharing(host, "zones")
        _, expected = reference(host.recipe, host, data, the_plan.lengths)
        ddp, plane = host.ddp, open_plane()
        batches = PlannedBatches.of_rank(the_plan, host.dp_cp_rank, data, plane=plane)
        in_stock_schedule(ddp, batches)
        plane.close()
        return grad_rel_err(dict(global_gradients(host.model)), expected)


def refused(world: Any) -> list[str]:
    """What is said of plans which no host here can run: without an engine, and for several stages."""
    with hosted(world) as host, unchanged(host):
        good = sharing(host, "ring")
        without_engine = replace(good, micro_batches=tuple(m._replace(cp_comm="") for m in good.micro_batches))
        of_stages = replace(good, limits=replace(good.limits, num_stages=2))
        return [
            told(lambda bad=bad: host.train_step(bad, tokens(HAND_LENGTHS), lr=1.0))
            for bad in (without_engine, of_stages)
        ]


def _changed_packs(change: Any) -> Any:
    """Every pack that is loaded goes through ``change`` first."""
    load = MegatronStage.load

    def loaded(self: Any, *args: Any) -> Any:
        batch = load(self, *args)
        pack = change(batch.pack)
        return batch._replace(pack=pack, params=replace(batch.params, pack=pack))

    return patch.object(MegatronStage, "load", loaded)


def _positions_of_pieces() -> Any:
    """Every piece counts from the start of its neighbour, as if the pieces of a rank were one."""

    def wrong(pack: Any) -> Any:
        positions = pack.positions_T.clone()
        for piece, first in zip(pack.slices, pack.segments, strict=False):
            positions[first : first + piece.length] -= piece.start // 2
        return replace(pack, positions_T=positions)

    return _changed_packs(wrong)


def _border_labels() -> Any:
    """The last token of every piece has no target, as if its sequence ended there."""

    def wrong(pack: Any) -> Any:
        labels = pack.labels_T.clone()
        for piece, first in zip(pack.slices, pack.segments, strict=False):
            labels[first + piece.length - 1] = pack_module.IGNORE
        return replace(pack, labels_T=labels, num_targets=int((labels != pack_module.IGNORE).sum()))

    return _changed_packs(wrong)


def _lost_message(where: str) -> Any:
    """The first tensor that comes from another rank in a kind of pass is nothing but zeros, once a step."""
    run, wait, stack = getattr(Executor, where), Pending.wait, ExitStack()
    looks = [False]

    def running(self: Any, action: Any) -> None:
        looks[0] = action.op.micro_batch == 0
        run(self, action)
        looks[0] = False

    def losing(self: Any) -> Any:
        came = wait(self)
        floats = [t for t in came.values() if t.is_floating_point()]
        if looks[0] and floats:
            floats[0].zero_()
            looks[0] = False
        return came

    stack.enter_context(patch.object(Executor, where, running))
    stack.enter_context(patch.object(Pending, "wait", losing))
    return stack


FAULTS = {
    "positions of pieces": _positions_of_pieces,
    "labels at borders": _border_labels,
    "dropped accumulator": dropped_accumulator,
    "lost in forward": lambda: _lost_message("_forward"),
    "lost in backward": lambda: _lost_message("_backward"),
}
