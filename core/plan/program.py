"""The program of a rank: what it really runs of a plan at a pipeline stage, decided here and nowhere else.

    F, kept      receive  forward                            send
    F, replayed  receive  keep_input  forward_kv             send
    B, kept                                receive  backward send
    B, replayed           recompute_forward receive backward send
    W            weight_grads

The first stage receives no input and sends no gradient, the last one the other way round. A forward_kv at the last
stage runs only the slices whose keys and values a recompute_forward reads and does not write itself, or not at all; a
micro-batch that ranks share runs whole there, as fewer slices might leave a rank without a token. At other stages it
runs whole, because the next stage wants its output. A recompute_forward is the recomputation of its layers: what the
recipe recomputes elsewhere need not run a third time.

The executor (`runtime.stage.executor`) carries a program out action by action; simulator and memory walk charge what
`forwards_that_run` says.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Row
from typing import Literal

from ..errors import PlanError
from .action import Action, Program, dummy, in_step
from .order import orders_of_stage
from .step_plan import MicroBatch, Op, StepPlan, fact_of_plan

Dummies = Literal["none", "idle", "in step"]
"""What a trainer wants beyond the plan: idle: a forward and a backward of a rank without work. in step: all ranks run
one sequence of forwards and backwards (`in_step`)."""

_ALL = ("lengths", "micro_batches", "backward", "replayed", "order", "recompute", "offload", "limits")


@fact_of_plan(*_ALL)
def lower(plan: StepPlan, stage: int, rank: int, dummies: Dummies = "none") -> Program:
    """The actions of a rank of the dp_cp plane at a pipeline stage, in order.

    Raises PlanError where the plan has no such stage or rank, or wants ranks of several stages in step.
    """
    _refuse_nowhere(plan, stage, rank)
    if dummies == "in step":
        return _in_step(plan)[rank]
    program = _program(plan, stage, orders_of_stage(plan, stage)[rank])
    if dummies == "idle" and not program:
        return dummy("forward", 0), dummy("backward", 0)
    return program


@fact_of_plan("lengths", "micro_batches", "backward", "replayed", "order", "limits")
def forwards_that_run(plan: StepPlan, is_last: bool) -> tuple[MicroBatch | None, ...]:
    """What runs of each micro-batch of the forward at a stage, the last one or another; None: nothing. Of the forwards
    that a group of ranks in step runs together all run, as a dummy where nothing of one is wanted, or none."""
    if not is_last or len(plan.kept) == len(plan.micro_batches):
        return plan.micro_batches
    end = _written_by_forwards(plan)
    runs = [m if i in plan.kept else _wanted(m, end) for i, m in enumerate(plan.micro_batches)]
    if plan.limits.in_step > 1:
        for together in _forwards_together(plan):
            if any(runs[i] is not None for i in together):
                for i in together:
                    runs[i] = runs[i] or _without_work(plan.micro_batches[i])
    return tuple(runs)


def exchanges(program: Program) -> tuple[str, ...]:
    """What a program exchanges with its group in layers that have experts, pass by pass, in words that two ranks have
    in common where they can meet: the kind of pass; of a backward the number of the pass whose tokens came to the
    rank's experts, and how many layers run forward again."""
    graphs: dict[int, tuple[int, int | None]] = {}
    words: list[str] = []
    for action in program:
        if action.kind == "backward":
            number, again = graphs[action.graph]
            layers = (
                "" if again == 0 else ", recomputing as the recipe says" if again is None else f", recomputing {again}"
            )
            words.append(f"the backward of pass {number}{layers}")
        elif action.computes and action.kind != "weight_grads":
            graphs[action.graph] = len(words), action.recomputed
            words.append("a forward")
    return tuple(words)


def _forwards_together(plan: StepPlan) -> Iterator[tuple[int, ...]]:
    """The numbers of the forwards that each group of ranks in step runs at once."""
    rows = [
        [op.micro_batch for op in ops if op.kind == "F"] for ops in orders_of_stage(plan, plan.limits.num_stages - 1)
    ]
    for first in range(0, len(rows), plan.limits.in_step):
        yield from zip(*rows[first : first + plan.limits.in_step], strict=False)


def _without_work(micro_batch: MicroBatch) -> MicroBatch:
    """What a rank runs alongside its peers where it wants nothing of a forward: its slices may continue others that
    have not run either."""
    return micro_batch if len(micro_batch.ranks) > 1 else micro_batch._replace(slices=())


def _wanted(micro_batch: MicroBatch, end: dict[int, int]) -> MicroBatch | None:
    slices = tuple(s for s in micro_batch.slices if s.start < end[s.sequence])
    return (micro_batch if len(micro_batch.ranks) > 1 else micro_batch._replace(slices=slices)) if slices else None


def _written_by_forwards(plan: StepPlan) -> dict[int, int]:
    """How many tokens of each sequence the forwards must have run for its replays.

    The backward of a sequence starts with its last slice. A replay of that one writes its own keys and values, so
    forward slices from its start on may be left out, if one of them starts right there, and if none of them runs anyway
    in a shared micro-batch.
    """
    end: dict[int, int] = {}
    for micro_batch in plan.passes("B"):
        for s in micro_batch.slices:
            end[s.sequence] = max(s.start, end.get(s.sequence, 0))
    starts = {s[:2] for m in plan.micro_batches for s in m.slices}
    whole = {sequence for sequence, start in end.items() if (sequence, start) not in starts}
    while whole:
        end |= {sequence: int(plan.lengths[sequence]) for sequence in whole}
        shared = [m for m in plan.micro_batches if len(m.ranks) > 1 and _wanted(m, end)]
        whole = {s.sequence for m in shared for s in m.slices if s.start >= end[s.sequence] and s.sequence in plan.cut}
    return end


def _program(plan: StepPlan, stage: int, ops: Row[Op]) -> Program:
    kept = {number: j for j, number in enumerate(plan.forward_of) if number is not None}
    runs = forwards_that_run(plan, stage == plan.limits.num_stages - 1)
    actions: list[Action] = []
    for op in ops:
        if op.kind == "F":
            actions += _forward(plan, stage, op, kept.get(op.micro_batch), runs[op.micro_batch])
        elif op.kind == "B":
            actions += _backward(plan, stage, op)
        else:
            actions.append(Action("weight_grads", op, plan.passes("W")[op.micro_batch], op.micro_batch))
    return tuple(actions)


def _forward(plan: StepPlan, stage: int, op: Op, backward: int | None, runs: MicroBatch | None) -> Iterator[Action]:
    micro_batch = plan.micro_batches[op.micro_batch]
    if stage:
        yield Action("receive", op, micro_batch)
    if backward is not None:
        # A dummy has nothing to recompute, but for the exchanges of its peers.
        layers = _recomputed(plan, stage, op, None if micro_batch.slices or plan.limits.in_step > 1 else 0)
        offload = plan.offload[op.micro_batch] if plan.offload else 0.0
        yield Action("forward", op, micro_batch, backward, layers, offload, _defers(plan, stage, backward))
    elif stage:
        yield Action("keep_input", op, micro_batch)
    if backward is None and runs is not None:
        yield Action("forward_kv", op, runs)
    if stage < plan.limits.num_stages - 1:
        yield Action("send", op, micro_batch)


def _backward(plan: StepPlan, stage: int, op: Op) -> Iterator[Action]:
    micro_batch, defers = plan.passes("B")[op.micro_batch], _defers(plan, stage, op.micro_batch)
    if plan.forward_of[op.micro_batch] is None:
        layers = _recomputed(plan, stage, op, 0)
        yield Action("recompute_forward", op, micro_batch, op.micro_batch, layers, defers_wgrad=defers)
    if stage < plan.limits.num_stages - 1:
        yield Action("receive", op, micro_batch, op.micro_batch)
    yield Action("backward", op, micro_batch, op.micro_batch, defers_wgrad=defers)
    if stage:
        yield Action("send", op, micro_batch)


def _recomputed(plan: StepPlan, stage: int, op: Op, otherwise: int | None) -> int | None:
    return plan.recompute[stage][op.micro_batch] if plan.recompute else otherwise


def _defers(plan: StepPlan, stage: int, backward: int) -> bool:
    return bool(plan.split) and backward in plan.split[stage]


@fact_of_plan(*_ALL)
def _in_step(plan: StepPlan) -> tuple[Program, ...]:
    """All ranks in step. What gathers parameters in recomputed layers needs backwards that are all of one sort: with a
    plan's numbers, of the one that recomputes most."""
    if plan.limits.num_stages > 1 or any(plan.split):
        detail = f"{plan.limits.num_stages} stages, {sum(map(len, plan.split))} W"
        raise PlanError(
            "ranks in step have no pipeline stages and no weight gradients of their own", detail, "plan for one stage"
        )
    rows = in_step([_program(plan, 0, ops) for ops in orders_of_stage(plan, 0)])
    if plan.recompute:
        layers: int | None = max(plan.recompute[0])
    elif any(plan.micro_batches[i].slices for i in plan.kept):
        layers = None
    else:
        return rows
    graphs = ("forward", "recompute_forward")
    return tuple(tuple(a._replace(recomputed=layers) if a.kind in graphs else a for a in row) for row in rows)


def _refuse_nowhere(plan: StepPlan, stage: int, rank: int) -> None:
    ranks, stages, _ = plan.limits.shape
    for word, number, count in (("pipeline stage", stage, stages), ("rank", rank, ranks)):
        if not 0 <= number < count:
            raise PlanError(f"the plan has no such {word}", f"{word} {number} of {count}", f"give 0 to {count - 1}")
