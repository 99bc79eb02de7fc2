"""Which replica of a job trains which sequences of a step, and what each of them took for it (LobRA, arXiv 2509.01193).

Every batch is dealt by what its sequences take on each replica (`core.planning.replicas`). All ranks deal alike, by the
numbers that the first of them has: on unlike machines last bits might differ.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ..core.aliases import Floats
from ..core.planning.chain import PlanChain
from ..core.planning.judge import outcome_of
from ..core.planning.planner import BatchPart, Draw, Planned
from ..core.planning.replicas import ReplicaCost, dealt
from ..data.samples.cut import IGNORE
from ..integrations.host.host import Host
from ..runtime.adapters.company import Company
from ..runtime.attention.labels import NOBODY, Labels, part_of
from ..runtime.attention.pack import TokensOf
from ..runtime.world.agreement import agree, everyone, from_first
from ..runtime.world.replicas import everyone_left, job_group

COMPARED_EVERY = 10
"""Steps after which replicas compare the bits of what they train."""
_WINDOW = 8
"""Steps by which a replica's slowness is told."""


class Replicas:
    """All replicas of a job, by their planners, and which of them this process is of."""

    def __init__(self, chains: Sequence[PlanChain], own: int = 0) -> None:
        self.chains, self.own = chains, own
        self._costs: list[ReplicaCost] = []
        self._longest = 0
        self._slowness: list[list[float]] = []
        """Of each step, and of each replica."""

    @property
    def unlike_tp(self) -> bool:
        """Whether tensor-parallel degrees differ, and with them what such layers round."""
        return len({chain.context.layout.tp for chain in self.chains}) > 1

    def prepare(self, longest: int) -> None:
        """Let sequences of so many tokens be dealt. Collective over the job where any as long were not before."""
        if longest > self._longest:
            self._costs = from_first(lambda: [ReplicaCost.of_chain(chain, longest) for chain in self.chains], "job")
            self._longest = longest

    @property
    def slowness(self) -> list[float]:
        """By how many times each replica takes longer than predicted, next to the one that does so least; in steps of
        1 / 16, so that replicas of a kind stay one."""
        if not self._slowness:
            return [1.0] * len(self.chains)
        times = np.median(self._slowness[-_WINDOW:], axis=0)
        return [round(16 * one) / 16 for one in (times / times.min()).tolist()]

    def learn(self, rows: Sequence[ReplicaRow]) -> None:
        """Deal the next batches by what the passes of a step took, too. All ranks have the same rows."""
        if len(rows) == len(self.chains):
            self._slowness.append([row.busy_s / row.predicted_busy_s for row in rows])

    def part_of(self, draw: Draw) -> Draw:
        """What this replica trains of a batch. One to whom nothing is dealt runs a copy of the shortest sequence, for
        no target: ranks that have no pass at all are in no plan. Collective over the job where a sequence is longer
        than any before. Raises EvenloadError for one that fits on no replica."""
        if len(self.chains) <= 1 or not len(draw.samples):
            return draw
        self.prepare(int(draw.lengths.max()))
        costs = [cost.slowed(factor) for cost, factor in zip(self._costs, self.slowness, strict=True)]
        replica_of = dealt(costs, draw.lengths).replica_of
        places = np.flatnonzero(replica_of == self.own)
        counts = bool(len(places))
        if not counts:
            places = np.array([int(draw.lengths.argmin())])
        return draw.at(places)._replace(part=BatchPart(draw, places, replica_of, counts))


@dataclass(frozen=True)
class ReplicaRow:
    """What one of several replicas did in a step."""

    replica: int
    sequences: int
    tokens: int
    busy_s: float
    """Of its busiest rank, in passes."""
    predicted_s: float
    """What its plan was to take."""
    predicted_busy_s: float
    """What its busiest rank was to take, in passes."""


class JobStep(NamedTuple):
    """What the ranks of all replicas know together of a step."""

    replicas: tuple[ReplicaRow, ...]
    """Where there are several, by their numbers."""
    step_s: float
    """Of the slowest."""
    stop_code: float
    """The largest (`early_end`)."""


def of_all_replicas(planned: Planned, step: int, busy_s: float, step_s: float, stop_code: float) -> JobStep:
    """What this replica knows of a step, as all of them do: the seconds of its busiest and of its slowest rank, and its
    stop code. Collective over the job. Raises RankError where replicas have drawn or dealt different batches."""
    job, part = job_group(), planned.draw.part
    if job is None or (part is None and job.changing is None):
        return JobStep((), step_s, stop_code)
    lengths = planned.plan.lengths[: len(planned.plan.lengths) if part is None or part.counts else 0]
    outcome = outcome_of(planned.plan, planned.chain.context)
    predicted_s = outcome.step_s, float(outcome.busy_s.max())
    own = ReplicaRow(job.numbers[job.place.replica], len(lengths), int(lengths.sum()), busy_s, *predicted_s)
    digest = digest_of(planned.draw)
    of_ranks = everyone_left((own, step_s, stop_code, digest), everyone)
    rows, seconds, stop_codes, digests = zip(*of_ranks, strict=True)
    if len(set(digests)) > 1:
        agree(digest, "batches", step, "job")
    by_replica = {row.replica: row for row in reversed(rows)}
    return JobStep(tuple(by_replica[number] for number in sorted(by_replica)), max(seconds), max(stop_codes))


def compare_replicas(host: Host, what: str, step: int) -> None:
    """Raise RankError where replicas have come to hold different bits of ``what`` they train. Collective over the
    job."""
    agree(host.trained.digest().to_bytes(8, "big"), what, step, "job")


def company_of(draw: Draw, labels: Labels | None) -> Company | None:
    """What all replicas train where a draw is the part of one; ``labels``: of the whole batch."""
    if (part := draw.part) is None:
        return None
    whole = part.whole
    tenants = np.full(len(whole.samples), NOBODY) if whole.tenants is None else whole.tenants
    return Company.of(tenants, whole.lengths, labels)._replace(places=part.places, counts=part.counts)


def whole_of(draw: Draw) -> Draw:
    """The batch of which a draw is one replica's part; itself where it is all."""
    return draw.part.whole if draw.part else draw


def reweighed(draw: Draw, weights: Floats) -> Draw:
    """The draw with its targets' weights times those of each sequence of the whole batch."""
    whole = whole_of(draw)
    whole = whole._replace(weight=whole.weight * weights)
    return whole.at(draw.part.places)._replace(part=draw.part._replace(whole=whole)) if draw.part else whole


def labels_of_part(draw: Draw, labels: Labels | None) -> Labels | None:
    """The labels of a replica's part, of those of the whole batch."""
    if draw.part is None:
        return labels
    return part_of(labels, draw.part.places.tolist()) if draw.part.counts else without_targets(draw)


def without_targets(draw: Draw) -> Labels:
    """The labels of sequences that run for nothing."""
    lengths = draw.lengths
    return Labels(lambda index: np.full(lengths[index], IGNORE), np.zeros(len(lengths), np.int64))


def tokens_of_part(draw: Draw, tokens_of: TokensOf) -> TokensOf:
    """Reads the sequences of a replica's part; ``tokens_of`` reads those of the whole batch."""
    part = draw.part
    return (lambda index: tokens_of(int(part.places[index]))) if part else tokens_of


def digest_of(draw: Draw) -> bytes:
    """What all replicas have to agree on of a step: the whole batch, sequence by sequence, and who trains which."""
    whole = whole_of(draw)
    parts = [whole.samples, whole.lengths, whole.tenants, whole.num_targets, draw.part and draw.part.replica_of]
    flat = b"".join(np.asarray(one, np.int64).tobytes() for one in parts if one is not None)
    return hashlib.blake2b(flat, digest_size=16).digest()
