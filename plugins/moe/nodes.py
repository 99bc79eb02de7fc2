"""Between nodes: copies of experts where their tokens come from, and which quotas take least on the links between.

A token that leaves its node makes four journeys (out and back, forward and backward) on a link that is some ten times
slower than those inside; with experts at home 7 of 8 tokens do so in 8 nodes. A *local copy* of an expert computes
tokens of its own node alone, which so stay there. Each node has those of the experts that its ranks want most, in
rounds of one a rank: the busiest of a round goes to the rank with the least to do. All other tokens go home, and
`core.experts.exact.levelled` evens the ranks. The number of rounds is the one with the least

    most over nodes of tokens that leave + K c (rounds + E/R - 1)          c = the policy's copy_tokens

since a rank receives an expert a round, and a home sends each of its E/R experts once, however many copy it. Where that
is less than what leaves without local copies, less what copies for even ranks keep inside anyway, layers with them were
shorter in all of 176 drawn settings (EP 16 to 64, nodes of 4 and 8, 64 to 256 experts). For mild skew and large experts
no round pays. All is chosen from the counts of the layer itself; nothing is solved, and the only loop is over rounds:
0.15 to 0.23 ms at 64 ranks x 128 experts, where exact quotas take 0.08 (benchmarks/results/experts.md).

`price` is what `core.experts.seconds` says of quotas, in tokens and on the links between nodes alone: those inside are
taken for free, and of what leaves a node all its ranks send equally much. All is of integers, so that ranks choose
alike.

Shape legend: R = ranks of a group, E = experts of a layer, N = nodes, K = R/N, S = rounds, C = columns of
copies, A = alternative quotas, X = A N E, Z = quotas that are not zero.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...core.aliases import Ints
from ...core.experts.exact import descending, levelled
from ...core.experts.quotas import copies_of
from ...core.plan.expert_policy import ExpertPolicy

_BITS = 20
_WHOLE = 1 << _BITS
"""Parts of an expert that travels in pieces, so that all arithmetic is of integers."""
_SURE = 50
"""By one part in so many local copies must leave less, as node by node says little of single ranks."""


def wanted_by_nodes(counts_RE: Ints, policy: ExpertPolicy) -> Ints:
    """Tokens of each node for each expert [N, E]."""
    wanted_NE: Ints = counts_RE.reshape(-1, policy.node_ranks, counts_RE.shape[1]).sum(axis=1)
    return wanted_NE


def with_local_copies(wanted_NE: Ints, policy: ExpertPolicy) -> Ints | None:
    """Even quotas [E, R] with local copies, in the slots that a rank has beyond those of its own experts; None where no
    round of them pays, or exact loads need more slots than there are."""
    num_nodes, num_experts = wanted_NE.shape
    size, nodes = policy.node_ranks, np.arange(num_nodes)
    own = num_experts // (num_nodes * size)
    rounds = min(policy.slots - own, (num_nodes - 1) * own)
    if rounds <= 0:
        return None
    foreign_NE, loads_E = wanted_NE.copy(), wanted_NE.sum(axis=0)
    foreign_NE.reshape(num_nodes, num_nodes, -1)[nodes, nodes] = -1
    tokens_NE, experts_NE = descending(foreign_NE)
    leave_N = foreign_NE.sum(axis=1) + own * size
    kept_NS = tokens_NE[:, : rounds * size].reshape(num_nodes, rounds, size).sum(axis=2).cumsum(axis=1)
    rows_NS = _rows(leave_N[:, None] - kept_NS, wanted_NE, policy)
    takes_S = rows_NS.max(axis=0) + size * policy.copy_tokens * (np.arange(rounds) + own)
    best = int(takes_S.argmin())
    without = int(_rows(leave_N[:, None], wanted_NE, policy).max())
    if not policy.once_topk:
        without -= _over_the_mean(loads_E, num_nodes, size)
    if int(takes_S[best]) * _SURE >= without * (_SURE - 1):
        return None
    chosen = slice((best + 1) * size)
    quotas_ER = _on_ranks(loads_E, tokens_NE[:, chosen], experts_NE[:, chosen], policy)
    return quotas_ER if max(map(len, copies_of(quotas_ER))) <= policy.slots else None


def _rows(leave_NS: Ints, wanted_NE: Ints, policy: ExpertPolicy) -> Ints:
    """Rows that leave each node for so many tokens, evenly to all others: as many, or fewer where a token goes once to
    a node, as `core.experts.seconds.once_a_node` has it."""
    topk, others, num_experts = policy.once_topk, len(wanted_NE) - 1, wanted_NE.shape[1]
    if not topk:
        return leave_NS
    routed_N1 = np.maximum(1, wanted_NE.sum(axis=1))[:, None]
    likelier = _WHOLE + _WHOLE * (topk - 1) // (2 * num_experts)
    apart_NS = np.maximum(0, _WHOLE - np.maximum(leave_NS, 0) * likelier // (routed_N1 * others))
    none_NS = apart_NS
    for _ in range(topk - 1):
        none_NS = none_NS * apart_NS >> _BITS
    rows_NS: Ints = routed_N1 * others // topk * (_WHOLE - none_NS) >> _BITS
    return rows_NS


def _over_the_mean(loads_E: Ints, num_nodes: int, size: int) -> int:
    """Tokens of a node that copies for even ranks keep inside anyway, at most: what ranks have over the mean."""
    tokens_R = loads_E.reshape(num_nodes * size, -1).sum(axis=1)
    return int(np.maximum(tokens_R - tokens_R.sum() // len(tokens_R), 0).sum()) // num_nodes


def _on_ranks(loads_E: Ints, tokens_NC: Ints, experts_NC: Ints, policy: ExpertPolicy) -> Ints:
    """Even quotas [E, R] where nodes keep so many tokens of these experts inside, the most first; others go home."""
    size, num_nodes, num_experts = policy.node_ranks, len(tokens_NC), len(loads_E)
    num_ranks, nodes_N1 = num_nodes * size, np.arange(num_nodes)[:, None]
    home_E = loads_E - np.bincount(experts_NC.ravel(), tokens_NC.ravel(), num_experts).astype(np.int64)
    tokens = [home_E.reshape(num_ranks, -1)]
    experts = [np.arange(num_experts).reshape(num_ranks, -1)]
    does_NK = tokens[0].sum(axis=1).reshape(num_nodes, size)
    for first in range(0, tokens_NC.shape[1], size):
        ranks_NK = does_NK.argsort(axis=1, kind="stable")
        for rows, columns_NC in ((tokens, tokens_NC), (experts, experts_NC)):
            row_NK = np.empty_like(does_NK)
            row_NK[nodes_N1, ranks_NK] = columns_NC[:, first : first + size]
            rows.append(row_NK.reshape(num_ranks, 1))
        does_NK = does_NK + tokens[-1].reshape(num_nodes, size)
    everywhere = policy._replace(node_ranks=0)
    even_ER = levelled(np.hstack(tokens), np.hstack(experts), num_experts, everywhere)
    return even_ER


def price(wanted_NE: Ints, quotas: Sequence[Ints], policy: ExpertPolicy) -> list[int]:
    """What each of several quotas [E, R] takes, in parts of a token between nodes: tokens, copies in two hops, experts
    of the busiest rank. Ranks of one stand after those of another."""
    (num_nodes, num_experts), size = wanted_NE.shape, policy.node_ranks
    num_ranks = num_nodes * size
    columns = num_ranks * len(quotas)
    places = [np.flatnonzero(quotas_ER != 0) for quotas_ER in quotas]
    tokens_Z = np.concatenate([each.ravel()[of] for each, of in zip(quotas, places, strict=True)])
    experts_Z, ranks_Z = np.divmod(np.concatenate(places), num_ranks)
    ranks_Z += np.repeat(np.arange(0, columns, num_ranks), list(map(len, places)))
    cells_Z = ranks_Z // size * num_experts + experts_Z
    computed_X = np.bincount(cells_Z, tokens_Z, columns // size * num_experts)
    inside_X = np.minimum(np.tile(wanted_NE.ravel(), len(quotas)), computed_X)
    came_Z = (tokens_Z * (computed_X - inside_X)[cells_Z] / computed_X[cells_Z]).astype(np.int64)
    leave_AN = wanted_NE.sum(axis=1) - inside_X.reshape(-1, num_nodes, num_experts).sum(axis=2).astype(np.int64)
    if policy.once_topk:
        came_AN = np.bincount(ranks_Z // size, came_Z, columns // size).astype(np.int64).reshape(-1, num_nodes)
        most_NA = np.maximum(leave_AN, came_AN).T
        exchanged_A, between = _rows(most_NA, wanted_NE, policy).max(axis=0) // size, 0
    else:
        came_A, between = _most(ranks_Z, came_Z, num_ranks, columns), _WHOLE
        exchanged_A = np.maximum(leave_AN.max(axis=1) // size, came_A)
    at_experts = policy.copy_tokens * _WHOLE // max(1, policy.least_tokens) - between
    copied_A = policy.copy_tokens * _copied(experts_Z, ranks_Z, cells_Z, num_experts, num_ranks, columns, size)
    busiest_A = _most(ranks_Z, tokens_Z, num_ranks, columns)
    prices: list[int] = (exchanged_A * _WHOLE + copied_A + busiest_A * at_experts).tolist()
    return prices


def _copied(
    experts_Z: Ints, ranks_Z: Ints, cells_Z: Ints, num_experts: int, num_ranks: int, columns: int, size: int
) -> Ints:
    """Parts of experts that one rank sends or receives between nodes, over both hops (`core.experts.messages`)."""
    aside_Z = ranks_Z // num_ranks
    homes_Z = experts_Z // (num_experts // num_ranks) + aside_Z * num_ranks
    (away,) = (homes_Z != ranks_Z).nonzero()
    ranks_Z, homes_Z, cells_Z = ranks_Z[away], homes_Z[away], cells_Z[away]
    copied_Z = experts_Z[away] + aside_Z[away] * num_experts
    copies_Z = np.bincount(copied_Z)[copied_Z] if len(away) else copied_Z
    pieces_Z = _WHOLE // copies_Z
    across_Z = pieces_Z * (homes_Z // size != ranks_Z // size)
    others_Z = copies_Z - np.bincount(cells_Z)[cells_Z] if len(away) else copies_Z
    first_A = np.maximum(*(_most(of_Z, across_Z, num_ranks, columns) for of_Z in (homes_Z, ranks_Z)))
    second_A: Ints = _most(ranks_Z, pieces_Z * others_Z, num_ranks, columns)
    return first_A + second_A


def _most(ranks_Z: Ints, amounts_Z: Ints, num_ranks: int, columns: int) -> Ints:
    """The largest of the ranks' sums, for each of the quotas."""
    most_A: Ints = np.bincount(ranks_Z, amounts_Z, columns).reshape(-1, num_ranks).max(axis=1).astype(np.int64)
    return most_A
