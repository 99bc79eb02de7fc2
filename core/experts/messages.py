"""How copies of experts travel: messages in one or two hops, the same on every rank.

An expert that one rank copies is sent to it whole. One that several copy would keep its home sending: it goes as
scatter and all-gather instead, in pieces, one to each of these ranks, which then send each other what they have. So
nobody sends much more than it receives. Gradients of copies go home by the same messages, backwards.

Experts that are cut over all ranks of a group come in one hop, a piece from each rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ..plan.expert_policy import LayerCopies

MANY = 2
"""Copies of an expert from which on it travels in pieces: its home sends one whole expert instead of so many. With two
in pieces a layer of `benchmarks/published/ultraep.py` is predicted 0.6 to 1.5 % shorter than with three."""


class Message(NamedTuple):
    """Elements [piece N / pieces, (piece + 1) N / pieces) of an expert's N weights, from one rank to another."""

    sender: int
    receiver: int
    expert: int
    piece: int = 0
    pieces: int = 1

    def bounds(self, size: int) -> tuple[int, int]:
        """First element and the one after the last, of an expert of ``size`` weights."""
        return self.piece * size // self.pieces, (self.piece + 1) * size // self.pieces

    def length(self, size: int) -> int:
        """Elements of the piece, for an expert of ``size`` weights."""
        start, stop = self.bounds(size)
        return stop - start


Hops = tuple[tuple[Message, ...], tuple[Message, ...]]
"""The messages from experts' homes, then those among the ranks that have got pieces; by sender and receiver."""


def hops_of(copies: LayerCopies, own: int) -> Hops:
    """The messages that give every rank its copies; ``own``: experts at home on each rank."""
    takers: dict[int, list[int]] = {}
    for rank, experts in enumerate(copies):
        for expert in experts:
            takers.setdefault(expert, []).append(rank)
    first: list[Message] = []
    second: list[Message] = []
    for expert, ranks in takers.items():
        home, count = expert // own, len(ranks)
        if count < MANY:
            first += [Message(home, rank, expert) for rank in ranks]
            continue
        first += [Message(home, rank, expert, piece, count) for piece, rank in enumerate(ranks)]
        others = [(piece, rank, other) for piece, rank in enumerate(ranks) for other in ranks if other != rank]
        second += [Message(rank, other, expert, piece, count) for piece, rank, other in others]
    return tuple(sorted(first)), tuple(sorted(second))


def hops_of_pieces(experts: Sequence[Sequence[int]]) -> Hops:
    """The messages that give every rank ``experts`` of its own choice, of which rank r has piece r of R."""
    count = len(experts)
    pieces = (
        Message(r, rank, expert, r, count) for rank in range(count) for expert in experts[rank] for r in range(count)
    )
    return tuple(sorted(pieces)), ()
