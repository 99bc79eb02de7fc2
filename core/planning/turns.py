"""The local ranks of a node take turns: one plans a step for all, and each has as many steps' time as there are ranks.

The rank whose turn it is leaves word on the node's board of every stage that it has reached (`Sender`); its peers read
there how far it has come (`Received`, which they ask as they would ask `PlanStages`). A plan travels without its batch:
who receives it puts in the batch that it has drawn itself, so digests differ where data or steps do, or anything was
lost.
"""

from __future__ import annotations

import hashlib
import io
import json
import pickle
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple, Protocol

import numpy as np

from ..plan.expert_policy import ExpertPolicy
from ..plan.limits import Limits
from ..plan.step_plan import Lengths, MicroBatch, Op, Slice, StepPlan
from .chain import PlanChain
from .judge import Candidate

WORTH_S = 0.05
"""Seconds of planning, counted, from which a rank plans for its peers: to send a plan takes each of them 1 to 5 ms."""

_SENT = tuple(one.name for one in fields(StepPlan) if one.name not in ("lengths", "tenants", "trunks", "limits"))
_SENT_OF_LIMITS = tuple(one.name for one in fields(Limits) if one.name != "memory")
_NUMBER: Any = np.float64().__reduce__()[0]
_DATA = {(one.__module__, one.__qualname__): one for one in (MicroBatch, Slice, Op, ExpertPolicy, np.dtype, _NUMBER)}


class Board(Protocol):
    """What the ranks of a node can all write to and read."""

    def put(self, key: str, value: bytes) -> None: ...

    def take(self, key: str, timeout_s: float | None) -> bytes | None:
        """What is there, awaited so long (None: for ever); None where nothing is."""
        ...

    def drop(self, key: str) -> None: ...


class PlannerRotation(NamedTuple):
    """A rank among those of its node."""

    board: Board
    place: int
    size: int

    def is_own(self, number: int) -> bool:
        """Whether this rank makes the plan of that number."""
        return number % self.size == self.place


class _End(NamedTuple):
    """What the rank that plans says when it is done."""

    kept: int
    """Number of the plan; -1: it failed."""
    plan_s: float
    why: str


@dataclass(eq=False)
class Sender:
    """Leaves word of the planning of one step."""

    board: Board
    number: int
    _stages: list[tuple[int, float]] = field(default_factory=list)
    """Number of the best plan after each stage, and its predicted seconds."""
    _last: Candidate | None = None
    _kept: int = -1

    def stage(self, best: Candidate | None) -> None:
        """A stage is done, and this is the best so far."""
        if best is not None and best is not self._last:
            self._kept, self._last = self._kept + 1, best
            self.board.put(f"{self.number}.{self._kept}", dumped(best))
        self._stages.append((self._kept, best.step_s if best else 0.0))
        self.board.put(f"{self.number}", json.dumps(self._stages).encode())

    def end(self, plan_s: float, why: str = "") -> None:
        """Planning is done, with the plan of the last stage, or has failed."""
        end = _End(-1 if why else self._kept, plan_s, why)
        self.board.put(f"{self.number}.end", json.dumps(end).encode())

    def drop(self) -> None:
        """No rank reads of this step any more."""
        for key in ("", ".end", *(f".{kept}" for kept in range(self._kept + 1))):
            self.board.drop(f"{self.number}{key}")


@dataclass(eq=False)
class Received:
    """How far the planning of a step has come on the rank whose turn it is."""

    chain: PlanChain
    batch: Lengths
    board: Board
    number: int
    failed: tuple[tuple[str, Exception], ...] = ()
    """The rank that plans says it."""
    _plans: dict[int, Candidate] = field(default_factory=dict)

    def result(self, timeout: float | None) -> tuple[StepPlan, float]:
        """(plan, seconds of planning). Raises TimeoutError, and RuntimeError where it failed."""
        if (word := self.board.take(f"{self.number}.end", timeout)) is None:
            raise TimeoutError
        end = _End(*json.loads(word))
        if end.why:
            raise RuntimeError(f"on the rank of the node that planned: {end.why}")
        return self._plan(end.kept).plan, end.plan_s

    @property
    def reached(self) -> int:
        """Number of the last stage that is done."""
        return len(self._stages)

    @property
    def best_s(self) -> float:
        """Predicted seconds of the best plan so far; 0 where there is none."""
        return self._stages[-1][1] if self._stages else 0.0

    def at(self, stage: int) -> Candidate | None:
        """The best plan after a stage."""
        kept = self._stages[stage - 1][0] if stage else -1
        return None if kept < 0 else self._plan(kept)

    @property
    def _stages(self) -> list[tuple[int, float]]:
        word = self.board.take(f"{self.number}", 0.0)
        return json.loads(word) if word else []

    def _plan(self, kept: int) -> Candidate:
        if kept not in self._plans:
            word = self.board.take(f"{self.number}.{kept}", None)
            assert word is not None
            self._plans[kept] = loaded(word, self.batch, self.chain.limits)
        return self._plans[kept]


def fingerprint(chain: PlanChain) -> bytes:
    """16 bytes that are equal on two ranks whose chains plan alike."""
    asked = [(plugin.name, config) for plugin, config in (*chain.links, *chain.of_layers, *chain.of_slices)]
    settings = repr((asked, chain.context, chain.limits, chain.micro_batch_size, chain.instead))
    return hashlib.blake2b(settings.encode(), digest_size=16).digest()


def dumped(best: Candidate) -> bytes:
    """A plan of samples without trunks and what it comes to, without its batch and what all plans of a chain take of
    memory."""
    values = {name: getattr(best.plan, name) for name in _SENT}
    values["groups"] = best.plan.groups.tolist()
    limits = {name: getattr(best.plan.limits, name) for name in _SENT_OF_LIMITS}
    return pickle.dumps((values, limits, tuple(best[1:])), protocol=5)


def loaded(word: bytes, batch: Lengths, limits: Limits) -> Candidate:
    """What `dumped` wrote, of this batch and under limits like these. Raises UnpicklingError for anything else."""
    values, own, numbers = _DataOnly(io.BytesIO(word)).load()
    return Candidate(StepPlan(batch, limits=replace(limits, **own), **values), *numbers)


class _DataOnly(pickle.Unpickler):
    """Reads plans, and runs no code of others."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _DATA:
            raise pickle.UnpicklingError(f"a plan names {module}.{name}")
        return _DATA[module, name]
