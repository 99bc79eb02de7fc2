"""The entries of a rank's program, and how programs are brought into step where all ranks meet in every pass.

Where parameters are gathered in every forward and every backward by all ranks (ZeRO 3), all must run one sequence of
forwards and backwards (whether a forward keeps gradients makes no difference to its gathers), and ranks that share a
micro-batch must come to it in the same round. One that waited in the ring for a peer in another round would wait for
ever, as that peer waits for it in the gather of that round.
"""

from __future__ import annotations

from collections.abc import Sequence as Row
from typing import Literal, NamedTuple

from ..errors import EvenloadError
from .step_plan import MicroBatch, Op

ActionKind = Literal[
    "receive", "keep_input", "forward", "forward_kv", "recompute_forward", "backward", "weight_grads", "send", "score"
]
"""receive, send: a stage's input (F) or the gradient of its output (B), from or to the neighbour. keep_input: the input
waits on the tape for a recompute_forward. forward: its activations wait for the backward. forward_kv: without gradients
and without the head; only keys, values and the next stage's input are wanted of it. recompute_forward: the forward of a
backward that kept nothing. backward. weight_grads: those that a backward has left."""

LETTERS: dict[ActionKind, str] = {
    "forward": "F",
    "forward_kv": "f",
    "recompute_forward": "R",
    "backward": "B",
    "weight_grads": "W",
    "score": "F",
}
"""How a grid shows what computes."""

DUMMY = MicroBatch((), ())
"""Stands for: run one token of no weight, so that the trainer does on this rank what it does on its peers."""


class Action(NamedTuple):
    """What a rank does next."""

    kind: ActionKind
    op: Op
    """The pass of the plan that it belongs to; the number of a dummy that the plan does not have is -1."""
    micro_batch: MicroBatch
    """What runs or travels: of a forward_kv only the slices that are wanted."""
    graph: int = -1
    """Ties a backward to the forward that made its graph; the number of the backward. -1: there is no graph."""
    recomputed: int | None = 0
    """So many layers of the stage, the first ones, run again in the backward; None: what the recipe says."""
    offload: float = 0.0
    """The share of the inner layers' activations that waits in host memory for the backward."""
    defers_wgrad: bool = False
    """The backward of this graph leaves its weight gradients to a weight_grads."""

    @property
    def computes(self) -> bool:
        return self.kind in LETTERS

    @property
    def is_shared(self) -> bool:
        return len(self.micro_batch.ranks) > 1

    @property
    def cell(self) -> str:
        """Two or three characters for a grid: ``F3``; a dummy is ``F-``."""
        number = "-" if self.op.micro_batch < 0 else str(self.op.micro_batch)
        return LETTERS.get(self.kind, "") + number


Program = tuple[Action, ...]


def in_step(rows: Row[Row[Action]]) -> tuple[Program, ...]:
    """Programs in which all ranks meet in the same kind of pass: the actions of ``rows`` with dummies between them.

    Forwards go first: a backward starts when no rank has a forward that it could run before its next backward. A shared
    pass waits, after dummies, for the round in which it is the next one of all its ranks. A rank never holds more
    activations than in the plan but those of dummies, and rows that are in step already stay as they are. Cost:
    O(ranks * passes) without shared ones; 1,024 ranks of 40 passes take 0.1 s.

    ``rows``: of each rank, forwards and backwards alone. Raises EvenloadError where ranks wait for each other in a
    circle, which no lawful plan makes them do.
    """
    if _are_in_step(rows):
        return tuple(map(tuple, rows))
    at = [0] * len(rows)
    result: list[list[Action]] = [[] for _ in rows]
    spare: list[list[int]] = [[] for _ in rows]
    graph = max((action.graph for row in rows for action in row), default=-1)
    while any(place < len(row) for place, row in zip(at, rows, strict=True)):
        heads = _startable([row[place] if place < len(row) else None for place, row in zip(at, rows, strict=True)])
        forward = any(head is not None and head.kind != "backward" for head in heads)
        if not forward and any(head is None and not spare[rank] for rank, head in enumerate(heads)):
            # A rank has no graph left for a dummy backward: all run one dummy forward more.
            forward, heads = True, [None] * len(rows)
        graph += 1
        for rank, head in enumerate(heads):
            if head is not None and (head.kind == "backward") != forward:
                result[rank].append(head)
                at[rank] += 1
            elif forward:
                result[rank].append(dummy("forward", graph))
                spare[rank].append(graph)
            else:
                result[rank].append(dummy("backward", spare[rank].pop()))
    return tuple(
        tuple(action._replace(kind="forward_kv", graph=-1) if action.graph in unused else action for action in row)
        for row, unused in zip(result, map(set, spare), strict=True)
    )


def dummy(kind: Literal["forward", "backward"], graph: int) -> Action:
    """A forward or a backward of one token without weight."""
    return Action(kind, Op("F" if kind == "forward" else "B", -1), DUMMY, graph)


def _are_in_step(rows: Row[Row[Action]]) -> bool:
    if len({tuple(action.kind == "backward" for action in row) for row in rows}) > 1:
        return False
    return all(_meet(action, heads) for heads in zip(*rows, strict=True) for action in heads if action.is_shared)


def _meet(action: Action, heads: Row[Action | None]) -> bool:
    """Whether a shared pass is the next one of all its ranks."""
    others = (heads[rank] for rank in action.micro_batch.ranks)
    return all(other is not None and other[:2] == action[:2] for other in others)


def _startable(heads: list[Action | None]) -> list[Action | None]:
    """The next passes of all ranks; None where a rank has none left or would wait for peers."""
    free = [head if head is None or not head.is_shared or _meet(head, heads) else None for head in heads]
    if not any(free):
        stuck = [f"rank {rank} at {head.kind} of {head.op.micro_batch}" for rank, head in enumerate(heads) if head]
        what, do = "ranks that share micro-batches wait for each other", "give a plan that check() passes"
        raise EvenloadError(what, "; ".join(stuck[:8]), do)
    return free
