"""Seconds of one layer with experts in one pass under quotas, forward and backward.

    forward    counts + plan        counts of all ranks gathered, quotas planned
             + tokens               out to their experts and back: 2 * L(tokens)
             + experts              tokens of the busiest rank * forward_s
             + copies               L(tokens and first hop together) - L(tokens), + L(second hop)
    backward   tokens               gradients the same two journeys back: 2 * L(tokens)
             + experts              tokens of the busiest rank * backward_s
             + copies               where they are not kept, weights again: L(first hop) + L(second hop)
             + gradients            of copies, home: L(second hop) + L(first hop), in bytes of gradients

    L(x) = the slower link of latency + max over ranks of max(sent, received) / bandwidth, inside nodes | across

So a rank's sends and receives run at once, and so do both links; phases follow each other, but for the first hop of
copies, which leaves together with the tokens. Hops are those of `core.experts.messages`: an expert that many copy goes
as scatter and all-gather. Nothing else hides anything, and launches of products are free.

Sources: the terms are UltraEP's objective (arXiv 2606.04101, section 4: planning, weights with tokens, all-to-all by
the rank that sends or receives most, experts by the busiest rank), with the weights' bytes by message instead of by
copy; LAER-MoE (arXiv 2602.11686, section 3) weighs a layer as 4 all-to-alls and 3 times the busiest rank. Counts are
gathered by recursive doubling (Thakur et al., IJHPCA 2005, section 4.1).

Shape legend: R = ranks of a group, E = experts of a layer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ..aliases import Floats, Ints
from ..machine.cluster import Link
from .messages import Message, hops_of
from .quotas import copies_of
from .sources import tokens_between

COUNT_BYTES = 8
"""Of the tokens that a rank has for an expert."""
CHOICE_BYTES = 5
"""Along with a row for a node, of each of its slots: the token's probability in float32, and whether it goes there."""


class LayerCost(NamedTuple):
    """What a layer's tokens and experts cost on one rank and on its links."""

    forward_s: float
    """Of a routed token at its expert."""
    backward_s: float
    token_bytes: float
    """Of a routed token's hidden state."""
    weight_bytes: float
    """Of one expert."""
    gradient_bytes: float
    """Of one copy's gradient on its way home."""
    intra: Link
    inter: Link
    node_ranks: int = 0
    """Neighbouring ranks of a group on one node; 0: all of them."""
    plan_s: float = 0.0
    """Of one planner's answer."""
    keep: bool = True
    """Copies stay until their backward."""
    once_topk: int = 0
    """Experts of a token, which goes once to each node where it has any, and on from there; 0: once to each expert."""


class LayerSeconds(NamedTuple):
    """Seconds of one pass of one layer, by what they go into."""

    counts: float
    """Gathering the counts and planning."""
    tokens: float
    experts: float
    copies: float
    gradients: float = 0.0

    @property
    def total(self) -> float:
        return sum(self)


class LayerPasses(NamedTuple):
    """A layer's forward and its backward."""

    forward: LayerSeconds
    backward: LayerSeconds

    @property
    def total(self) -> float:
        return self.forward.total + self.backward.total

    @property
    def moving(self) -> float:
        """For copies: weights and gradients that nothing hides."""
        return sum(one.copies + one.gradients for one in self)


def layer_seconds(counts_RE: Ints, quotas_ER: Ints, cost: LayerCost) -> LayerPasses:
    """Seconds of both passes of a layer, whose quotas keep their laws (`quotas.check_quotas`); copies without a token
    cost nothing."""
    legs, hops = _tokens(counts_RE, quotas_ER, cost), _copies(quotas_ER, cost.node_ranks)
    first, second = (hop * cost.weight_bytes for hop in hops)
    tokens_s, busiest = sum(_seconds(leg, cost) for leg in legs), float(quotas_ER.sum(axis=0).max())
    copies_s = _seconds(legs[0] + first, cost) - _seconds(legs[0], cost) + _seconds(second, cost)
    again_s = 0.0 if cost.keep else _seconds(first, cost) + _seconds(second, cost)
    home_s = sum(_seconds(hop * cost.gradient_bytes, cost) for hop in hops)
    counted_s = _counting_seconds(counts_RE, cost) + cost.plan_s
    return LayerPasses(
        LayerSeconds(counted_s, 2 * tokens_s, cost.forward_s * busiest, copies_s),
        LayerSeconds(0.0, 2 * tokens_s, cost.backward_s * busiest, again_s, home_s),
    )


def once_a_node(share: Floats, topk: int, num_experts: int) -> Floats:
    """Rows a routed token, of which ``share`` goes to a node, where a token draws ``topk`` different ones of as many
    experts, each as likely as others. Steeper loads have some per cent more."""
    likelier = 1 + (topk - 1) / (2 * num_experts)
    rows: Floats = (1 - np.maximum(0, 1 - share * likelier) ** topk) / topk
    return rows


def exchanged_s(routed: float, share: float, num_nodes: int, num_experts: int, cost: LayerCost) -> float:
    """Seconds of a layer's four journeys between nodes, where a rank has so many routed tokens, of which it sends
    ``share`` to each other node."""
    others = routed * (num_nodes - 1)
    if not cost.once_topk:
        return 4 * cost.inter.send_s(others * share * cost.token_bytes)
    rows = others * float(once_a_node(np.array(share), cost.once_topk, num_experts))
    passed = routed * (1 - 1 / cost.node_ranks)
    return 4 * (cost.inter.send_s(rows * cost.token_bytes) + cost.intra.send_s(passed * cost.token_bytes))


def copy_tokens(cost: LayerCost) -> float:
    """Tokens that a rank exchanges with other nodes, on four journeys, while one copy's weights and gradient travel."""
    return (cost.weight_bytes * (1 if cost.keep else 2) + cost.gradient_bytes) / (4 * cost.token_bytes)


def paying_tokens(cost: LayerCost) -> float:
    """Routed tokens that a copy must take off the busiest rank so that forward and backward are no longer than without
    it, on the slowest link of the group.

    Weights of n parameters are 2 n bytes and 2 n operations a token in half precision: a forward's break-even would be
    rate / bandwidth tokens, whatever the expert's size. A token that goes elsewhere saves its four journeys too, as the
    busiest rank is where most arrive: on links inside nodes where it goes once to each node.
    """
    link = cost.inter if cost.node_ranks else cost.intra
    token_link = cost.intra if cost.once_topk else link
    weights_s = link.send_s(cost.weight_bytes) * (1 if cost.keep else 2)
    token_s = cost.forward_s + cost.backward_s + 4 * cost.token_bytes / token_link.bytes_per_s
    return (weights_s + link.send_s(cost.gradient_bytes)) / token_s


def _counting_seconds(counts_RE: Ints, cost: LayerCost) -> float:
    """Until every rank has the counts of all."""
    num_ranks, num_experts = counts_RE.shape
    link = cost.inter if 0 < cost.node_ranks < num_ranks else cost.intra
    others_bytes = (num_ranks - 1) * COUNT_BYTES * num_experts
    return float(math.ceil(math.log2(num_ranks)) * link.latency_s + others_bytes / link.bytes_per_s)


def _seconds(num_bytes: Floats, cost: LayerCost) -> float:
    """L: of the bytes [inside, across] x [sent, received] x R that leave and come at once."""
    most = num_bytes.max(axis=(1, 2)).tolist()
    links = zip((cost.intra, cost.inter), most, strict=True)
    return max((link.send_s(amount) for link, amount in links if amount), default=0.0)


def _tokens(counts_RE: Ints, quotas_ER: Ints, cost: LayerCost) -> list[Floats]:
    """Bytes of tokens that go to other ranks in each leg of a journey, [inside, across] x [sent, received] x R."""
    num_ranks = len(counts_RE)
    size = cost.node_ranks or num_ranks
    sent_RR = tokens_between(counts_RE, quotas_ER, cost.node_ranks)
    if cost.once_topk and size < num_ranks:
        rows, passed = _once_a_node(sent_RR, counts_RE, size, cost.once_topk)
        beside_bytes = CHOICE_BYTES * counts_RE.shape[1] * size // num_ranks
        return [rows * (cost.token_bytes + beside_bytes), passed * cost.token_bytes]
    nodes = np.arange(num_ranks) // size
    inside_RR = nodes[:, None] == nodes
    links = [sent_RR * inside_RR * ~np.eye(num_ranks, dtype=bool), sent_RR * ~inside_RR]
    return [np.array([[link.sum(axis=1), link.sum(axis=0)] for link in links]) * cost.token_bytes]


def _once_a_node(sent_RR: Ints, counts_RE: Ints, size: int, topk: int) -> list[Floats]:
    """Rows between ranks of one place in all nodes, then tokens inside nodes, of which each rank passes on all that
    came to its place."""
    (num_ranks, num_experts), num_nodes = counts_RE.shape, len(counts_RE) // size
    routed_R1 = counts_RE.sum(axis=1)[:, None]
    sent_RN = sent_RR.reshape(num_ranks, num_nodes, size).sum(axis=2)
    rows_RN = routed_R1 * once_a_node(sent_RN / np.maximum(1, routed_R1), topk, num_experts)
    rows_NKN = rows_RN.reshape(num_nodes, size, num_nodes) * (1 - np.eye(num_nodes))[:, None]
    passed_KNK = sent_RR.reshape(num_nodes, size, num_nodes, size).sum(axis=0) * (1 - np.eye(size))[:, None]
    legs = np.zeros((2, 2, 2, num_ranks))
    legs[0, 1] = rows_NKN.sum(axis=2).ravel(), rows_NKN.sum(axis=0).T.ravel()
    legs[1, 0] = passed_KNK.sum(axis=2).T.ravel(), passed_KNK.sum(axis=0).ravel()
    return list(legs)


def _copies(quotas_ER: Ints, node_ranks: int) -> list[Floats]:
    """For each hop the experts that each rank sends and receives, [inside, across] x [sent, received] x R."""
    num_experts, num_ranks = quotas_ER.shape
    hops = hops_of(copies_of(quotas_ER), num_experts // num_ranks)
    return [_experts_sent(hop, num_ranks, node_ranks or num_ranks) for hop in hops]


def _experts_sent(messages: Sequence[Message], num_ranks: int, node_ranks: int) -> Floats:
    experts = np.zeros((2, 2, num_ranks))
    if messages:
        senders, receivers, _, _, pieces = np.array(messages).T
        across = (senders // node_ranks != receivers // node_ranks).astype(int)
        np.add.at(experts, (across, 0, senders), 1 / pieces)
        np.add.at(experts, (across, 1, receivers), 1 / pieces)
    return experts
