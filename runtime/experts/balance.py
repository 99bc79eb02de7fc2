"""What the counts of a layer come to under the policy of a plan: quotas, and where each token of this rank goes.

Every rank of a group computes the same quotas from the counts that all have gathered. A planner of layers that fails or
breaks a law of quotas is warned of, and the experts of that layer stay at home, on all ranks alike.

In a pass with copies, ranks have slots next to their own experts, as many as the rank that has the most copies:

    slots of rank r     r (E/R + C) ... r (E/R + C) + E/R - 1   its own experts
                        after them                              its copies, ascending; empty slots get no token

Shape legend: R = ranks of a group, E = experts, C = slots for copies, S = R (E/R + C) slots of all ranks,
T = tokens of this rank.
"""

from __future__ import annotations

import logging
import zlib
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...core.aliases import Ints
from ...core.errors import PlanError
from ...core.experts.quotas import LayerPlanner, at_home, check_quotas, copies_of, imbalance_of
from ...core.experts.sources import received_by, sent_by
from ...core.plan.expert_policy import AT_HOME, EXPERTS_AT_HOME, ExpertPolicy, LayerCopies
from ..attention.copy_rows import copy_rows
from .copies import Fetch, Journey
from .owners import Owner

logger = logging.getLogger("evenload")


@dataclass
class CopyReport:
    """What copies did in one layer's pass, for its `Load`."""

    imbalance_after: float
    copies: int = 0
    copied_bytes: int = 0
    exposed_s: float = 0.0


class Shares:
    """The quotas of one layer's pass, as the rank at a place of its group sees them."""

    def __init__(self, counts_RE: Ints, quotas_ER: Ints, copies: LayerCopies, place: int, policy: ExpertPolicy) -> None:
        self.counts_RE = counts_RE
        self.quotas_ER = quotas_ER
        self.copies = copies
        self.place = place
        self.num_ranks, num_experts = counts_RE.shape
        self.own = num_experts // self.num_ranks
        self.slots = self.own + max(map(len, copies))
        """Of one rank: its own experts and those for copies."""
        self._node_ranks = policy.node_ranks
        self.keep = policy.keep and policy.planner != AT_HOME
        """Whether what was fetched stays until the backward; where the plan has no copies it does not."""
        self.report = CopyReport(imbalance_of(quotas_ER), sum(map(len, copies)))

    @cached_property
    def counts_of_slots(self) -> Ints:
        """Tokens of each rank for each slot of this one [R, S]; those for slots of other ranks are left out."""
        counts_RS = np.zeros((self.num_ranks, self.num_ranks * self.slots), dtype=np.int64)
        received_RE = received_by(self.place, self.counts_RE, self.quotas_ER, self._node_ranks)
        for expert in self._experts_of(self.place):
            counts_RS[:, self._slot_ER[expert, self.place]] = received_RE[:, expert]
        return counts_RS

    def spread(self, chosen_TE: Tensor, probs_TE: Tensor) -> tuple[Tensor, Tensor]:
        """Choices (bool) and probabilities of experts as those of slots [T, S]; a token's place among those of its
        rank for an expert says which rank's slot it goes to."""
        experts, tokens = chosen_TE.T.nonzero(as_tuple=True)
        slots = self._slots_in_order(len(tokens), chosen_TE.device)
        shape = len(chosen_TE), self.num_ranks * self.slots
        chosen_TS = torch.zeros(shape, dtype=torch.bool, device=chosen_TE.device)
        chosen_TS[tokens, slots] = True
        probs_TS = probs_TE.new_zeros(shape).index_put((tokens, slots), probs_TE[tokens, experts])
        return chosen_TS, probs_TS

    def slots_of(self, chosen_TK: Tensor) -> Tensor:
        """The numbers of the slots of choices, which are numbers of experts [T, K]."""
        order = chosen_TK.flatten().argsort(stable=True)
        slots = torch.empty_like(chosen_TK.flatten())
        slots[order] = self._slots_in_order(len(order), chosen_TK.device)
        return slots.view(chosen_TK.shape)

    def fetch(self, group: Any, owner: Owner, *, keep: bool | None = None) -> Fetch:
        """Send the weights that the layer's pass needs on other ranks, and note what they take. ``keep``: hold them
        until their backward, None: as the policy says."""
        report = self.report

        def waited(seconds: float) -> None:
            report.exposed_s += seconds

        fetched = owner.fetched(self.copies, self.place)
        journey = Journey(owner.hops(self.copies), fetched, self.place, group)
        fetch = Fetch(journey, owner, keep=self.keep if keep is None else keep, waited=waited)
        report.copied_bytes = fetch.received_bytes
        return fetch

    def _slots_in_order(self, length: int, device: torch.device) -> Tensor:
        """Slots of this rank's tokens, by expert and, for an expert, by the tokens' order [length]."""
        sent_ER = sent_by(self.place, self.counts_RE, self.quotas_ER, self._node_ranks)
        there = copy_rows({"slots": self._slot_ER.ravel(), "counts": sent_ER.ravel()}, device)
        return there["slots"].repeat_interleave(there["counts"], output_size=length)

    @cached_property
    def _slot_ER(self) -> Ints:
        """The slot of each expert on each rank, 0 where it has none [E, R]."""
        slot_ER = np.zeros(self.quotas_ER.shape, dtype=np.int64)
        for rank in range(self.num_ranks):
            experts = self._experts_of(rank)
            slot_ER[experts, rank] = rank * self.slots + np.arange(len(experts))
        return slot_ER

    def _experts_of(self, rank: int) -> list[int]:
        return [*range(rank * self.own, (rank + 1) * self.own), *self.copies[rank]]


class ExpertBalance:
    """The planner of layers of one rank.

    Args:
        place: this rank's in its group.
        sharded: passes fetch all experts, those at home, too.
    """

    def __init__(self, place: int, sharded: bool = False) -> None:
        self._place, self._sharded = place, sharded
        self._policy = EXPERTS_AT_HOME
        self._planner: LayerPlanner = at_home
        self._warned = False
        self.failed = ""
        """Why the experts of the layer that was asked for last stay at home; empty where no planner failed."""
        self.checksum = 0
        """Of all quotas of the step so far: equal on two ranks that have planned alike."""

    def begin(self, policy: ExpertPolicy, planner: LayerPlanner) -> None:
        """Before the first pass of a step; ``planner``: the one that the policy names."""
        self._policy = policy
        self._planner = planner
        self.checksum = 0

    @property
    def at_home(self) -> bool:
        """Whether no expert of this step is fetched."""
        return self._policy.planner == AT_HOME and not self._sharded

    def shares(self, layer: int, counts_RE: Ints) -> Shares | None:
        """How a layer of the whole model is shared, by the counts that all ranks of the group have for its experts;
        None where every token goes to its expert's home and finds it there."""
        policy = self._policy
        known, self.failed = policy.copies_of(layer), ""
        try:
            quotas_ER = check_quotas(self._planner(counts_RE, policy, known), counts_RE, policy, known)
        except Exception as error:
            self._warn(layer, error)
            quotas_ER = at_home(counts_RE, policy, known)
        else:
            self.checksum = zlib.crc32(quotas_ER.tobytes(), self.checksum)
        copies = copies_of(quotas_ER)
        return Shares(counts_RE, quotas_ER, copies, self._place, policy) if any(copies) or self._sharded else None

    def _warn(self, layer: int, error: Exception) -> None:
        why = str(error) if isinstance(error, PlanError) else f"{type(error).__name__}: {error}"
        self.failed = f"experts of layer {layer} stay at home, as '{self._policy.planner}' failed: {why}"
        if not self._warned:
            logger.warning("%s", self.failed)
        self._warned = True
