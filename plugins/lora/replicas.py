"""Which replica of a job trains which sequences of a step, and what they make of it together (LobRA, arXiv 2509.01193).

The first rank deals every batch, by the draw and the replicas' costs: on unlike machines last bits might differ.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from ...core.aliases import Ints
from ...core.plan.step_plan import Lengths
from ...core.planning.chain import PlanChain
from ...core.planning.planner import BatchPart, Draw
from ...core.planning.replicas import ReplicaCost, dealt
from ...data.samples.cut import IGNORE
from ...runtime.adapters.company import Company
from ...runtime.attention.labels import Labels, part_of
from ...runtime.attention.pack import TokensOf
from ...runtime.world.agreement import from_first


class Replicas:
    """All replicas of a job, by their planners, and which of them this process is of."""

    def __init__(self, chains: Sequence[PlanChain], own: int = 0) -> None:
        self.chains, self.own = chains, own
        self._costs: list[ReplicaCost] = []
        self._longest = 0

    @property
    def unlike_tp(self) -> bool:
        """Whether tensor-parallel degrees differ, and with them what such layers round."""
        return len({chain.context.layout.tp for chain in self.chains}) > 1

    def part_of(self, draw: Draw) -> Draw:
        """What this replica trains of a batch. One to whom nothing is dealt runs a copy of the shortest sequence, for
        no target: ranks that have no pass at all are in no plan."""
        if len(self.chains) == 1:
            return draw
        places = np.flatnonzero(self._dealt(draw.lengths) == self.own)
        counts = bool(len(places))
        if not counts:
            places = np.array([int(draw.lengths.argmin())])
        return draw.at(places)._replace(part=BatchPart(draw, places, counts))

    def _dealt(self, lengths: Lengths) -> Ints:
        """The replica of each sequence. Collective over the job. Raises EvenloadError for one that fits on none."""
        return from_first(lambda: self._dealt_here(lengths), "job")

    def _dealt_here(self, lengths: Lengths) -> Ints:
        if (longest := int(lengths.max())) > self._longest:
            self._costs = [ReplicaCost.of_chain(chain, longest) for chain in self.chains]
            self._longest = longest
        return dealt(self._costs, lengths).replica_of


def company_of(draw: Draw, labels: Labels | None) -> Company | None:
    """What all replicas train where a draw is the part of one; ``labels``: of the whole batch."""
    if (part := draw.part) is None:
        return None
    whole = part.whole
    assert whole.tenants is not None
    return Company.of(whole.tenants, whole.lengths, labels)._replace(places=part.places, counts=part.counts)


def whole_of(draw: Draw) -> Draw:
    """The batch of which a draw is one replica's part; itself where it is all."""
    return draw.part.whole if draw.part else draw


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
    """What all replicas have to agree on of a step: the whole batch, sequence by sequence."""
    whole = whole_of(draw)
    assert whole.tenants is not None
    parts = whole.samples, whole.lengths, whole.tenants, whole.num_targets
    flat = b"".join(np.asarray(one, np.int64).tobytes() for one in parts)
    return hashlib.blake2b(flat, digest_size=16).digest()
