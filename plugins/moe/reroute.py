"""Reroute and layout: tokens over copies that are there before the counts are, by exact counts or evenly.

Reroute gives the least maximum that these copies allow. Tokens flow from ranks over a share along experts that several
ranks have to ranks below it, on a shortest path each time. Where none is left, the ranks that the flow still reaches
cannot pass a token on to others: their mean, rounded up, is a lower bound for every division (Hall's condition), and
the next share. So the last share is at once reached and the least.

Shape legend: R = ranks of a group, E = experts of a layer.
"""

from __future__ import annotations

from ...core.aliases import Ints
from ...core.experts.quotas import at_home, ranks_of_experts
from ...core.plan.expert_policy import ExpertPolicy, LayerCopies

Path = list[tuple[int, int]]
"""(rank, expert by which tokens leave it), from the last rank before the end back to the first."""


def ranks_with(copies: LayerCopies, num_experts: int, num_ranks: int) -> dict[int, list[int]]:
    """For each expert that has copies, the ranks with its weights, its home first."""
    home = ranks_of_experts(num_experts, num_ranks).tolist()
    ranks: dict[int, list[int]] = {}
    for rank, experts in enumerate(copies):
        for expert in experts:
            if home[expert] != rank:
                ranks.setdefault(expert, [home[expert]]).append(rank)
    return ranks


def evenly(counts_RE: Ints, policy: ExpertPolicy, copies: LayerCopies) -> Ints:
    """Quotas [E, R] of which all ranks that have an expert have equal parts: a `LayerPlanner`."""
    quotas_ER = at_home(counts_RE, policy, copies)
    for expert, ranks in ranks_with(copies, *quotas_ER.shape).items():
        each, more = divmod(int(quotas_ER[expert, ranks[0]]), len(ranks))
        quotas_ER[expert, ranks] = [each + (place < more) for place in range(len(ranks))]
    return quotas_ER


def reroute(counts_RE: Ints, policy: ExpertPolicy, copies: LayerCopies) -> Ints:
    """Quotas [E, R] with the least tokens on the busiest rank that these copies allow: a `LayerPlanner`."""
    quotas_ER = at_home(counts_RE, policy, copies)
    ranks = ranks_with(copies, *quotas_ER.shape)
    if ranks:
        flow = _Flow(quotas_ER, ranks)
        flow.level()
        flow.settle()
        for expert, parts in flow.parts.items():
            quotas_ER[expert, ranks[expert]] = list(parts.values())
    return quotas_ER


class _Flow:
    """Tokens of each rank, and of each expert with copies its tokens by rank."""

    def __init__(self, quotas_ER: Ints, ranks: dict[int, list[int]]) -> None:
        self.tokens: list[int] = quotas_ER.sum(axis=0).tolist()
        self.parts = {e: dict.fromkeys(of, 0) | {of[0]: int(quotas_ER[e, of[0]])} for e, of in ranks.items()}
        self._experts: list[list[int]] = [[] for _ in self.tokens]
        """Those with copies that each rank has."""
        for expert, of in ranks.items():
            for rank in of:
                self._experts[rank].append(expert)

    def level(self) -> None:
        """A start: tokens of each expert, the largest first, go to where its ranks come out level."""
        tokens = self.tokens
        for parts in sorted(self.parts.values(), key=lambda parts: -sum(parts.values())):
            amount, of = sum(parts.values()), list(parts)
            tokens[of[0]] -= amount
            of.sort(key=tokens.__getitem__)
            total = amount
            for count, rank in enumerate(of, 1):
                total += tokens[rank]
                if count == len(of) or total <= tokens[of[count]] * count:
                    break
            each, more = divmod(total, count)
            for place, rank in enumerate(of[:count]):
                parts[rank] = each + (place < more) - tokens[rank]
                tokens[rank] = each + (place < more)
            for rank in of[count:]:
                parts[rank] = 0

    def settle(self) -> None:
        """Move tokens until no rank is over the least share that these copies allow."""
        tokens = self.tokens
        share = -(-sum(tokens) // len(tokens))
        over = [rank for rank, amount in enumerate(tokens) if amount > share]
        while over:
            if tokens[over[-1]] <= share:
                over.pop()
                continue
            end, path, reached = self._search(over[-1], share)
            if end is None:
                share = -(-sum(tokens[rank] for rank in reached) // len(reached))
            else:
                self._push(end, path, share)

    def _search(self, start: int, share: int) -> tuple[int | None, Path, list[int]]:
        """The nearest rank below the share, how tokens come to it from one, and the ranks that they can come to."""
        came: dict[int, tuple[int, int] | None] = {start: None}
        row, seen = [start], set[int]()
        for rank in row:
            for expert in self._experts[rank]:
                parts = self.parts[expert]
                if expert in seen or not parts[rank]:
                    continue
                seen.add(expert)
                for other in parts:
                    if other in came:
                        continue
                    came[other] = (rank, expert)
                    if self.tokens[other] < share:
                        return other, self._path(other, came), row
                    row.append(other)
        return None, [], row

    @staticmethod
    def _path(end: int, came: dict[int, tuple[int, int] | None]) -> Path:
        path: Path = []
        step = came[end]
        while step is not None:
            path.append(step)
            step = came[step[0]]
        return path

    def _push(self, end: int, path: Path, share: int) -> None:
        start = path[-1][0]
        amount = min(self.tokens[start] - share, share - self.tokens[end], *(self.parts[e][rank] for rank, e in path))
        self.tokens[start] -= amount
        self.tokens[end] += amount
        to = end
        for rank, expert in path:
            self.parts[expert][rank] -= amount
            self.parts[expert][to] += amount
            to = rank
