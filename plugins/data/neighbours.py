"""Selections by embeddings: no model runs for them, except for the gradients of a cluster's representatives.

    near           the nearest candidate of every query, then all second nearest ..., each sample once
    tsds           a transport of queries to candidates that near-duplicates cannot crowd (TSDS, arXiv 2410.11303):
                   rho(x)  = sum over the nearest of x, itself too, of max(0, 1 - d^2 / sigma^2)      density
                   m_jk    = sum_{l <= k} 1 / rho(x_jl)        x_jl: the l-th nearest of query j, at distance d_jl
                   c_j(k)  = d_j,k+1 m_jk - sum_{l <= k} d_jl / rho(x_jl)
                   s       = the least m_jk, in rising order, at which alpha / C sum_j c_j >= (1 - alpha) M
                   p(x)    = sum over j of (min(s, m_jk) - min(s, m_j,k-1)) / (M s), what is left of s for the last one
                   n are drawn without replacement
    cluster_less   LESS by clusters of embeddings (k-means): the gradients of a few members stand for all of it

The first two need no warm-up: their first answer is one of theirs. All are pure functions of embeddings and numbers;
ties go to the lesser number. Embeddings have rows in the order of the pool. O(M N d), and O(densities N d) for tsds;
distances are sums of squares of differences, a query at a time.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Annotated

import numpy as np
from pydantic import Field

from ...core.aliases import Floats, Ints
from ...core.input.bounds import Amount, Count
from ...core.input.validation import Frozen
from ...core.policies import DataPolicy, Pool, State
from .draws import drawn, uniform
from .selects import Selected, any_of, cosine_scores

_ITERATIONS = 20
"""Of k-means, if it does not come to rest before."""


class Tsds(Frozen):
    """Settings of Task-Specific Data Selection."""

    alpha: Annotated[float, Field(gt=0, lt=1)] = 0.6
    """More follows the queries closer; less is more diverse."""
    scale: Amount = 5.0
    """C"""
    neighbours: Count = 5000
    """Candidates of a query."""
    density_neighbours: Count = 1000
    sigma: Amount = 0.75


class ClusterLess(Frozen):
    """Settings of LESS by clusters."""

    cluster_size: Count = 64
    """Members of a cluster, on average."""
    representatives: Count = 4
    """Those nearest to its centre, whose gradients are taken."""


def _distances(point: Floats, rows: Floats) -> Floats:
    """[N] Euclidean, of rows [N, d]."""
    distances: Floats = np.sqrt(((rows - point) ** 2).sum(axis=1))
    return distances


def _nearest(pool: Pool, count: int) -> tuple[Floats, Ints]:
    """Distances and places in the pool [M, count] of the nearest candidates of every query, nearest first."""
    assert pool.embeddings is not None
    assert pool.queries is not None
    distances = np.empty((len(pool.queries), count))
    places = np.empty((len(pool.queries), count), dtype=np.int64)
    for number, query in enumerate(pool.queries):
        own = _distances(query, pool.embeddings)
        places[number] = np.lexsort((pool.numbers, own))[:count]
        distances[number] = own[places[number]]
    return distances, places


def _near(state: State, pool: Pool, settings: Frozen) -> Selected:
    _, places = _nearest(pool, min(len(pool.numbers), pool.take))
    in_turn = pool.numbers[places.T.ravel()]
    _, first = np.unique(in_turn, return_index=True)
    return state, in_turn[np.sort(first)][: pool.take]


def _tsds(state: State, pool: Pool, settings: Tsds) -> Selected:
    probabilities = transport_probabilities(pool, settings)
    return state, drawn(pool.numbers, probabilities, pool.take, seed=pool.seed, update=pool.update)


def transport_probabilities(pool: Pool, settings: Tsds) -> Floats:
    """p [N], in the order of the pool; they add up to 1."""
    distances, places = _nearest(pool, min(settings.neighbours, len(pool.numbers)))
    candidates, inverse = np.unique(places, return_inverse=True)
    parts = 1 / _densities(pool, candidates, settings)[inverse.reshape(places.shape)]
    masses, spent = parts.cumsum(axis=1), (distances * parts).cumsum(axis=1)
    stop = _mass_at_stop(masses, distances[:, 1:] * masses[:, :-1] - spent[:, :-1], settings)
    filled = np.minimum(masses, stop)
    filled[:, -1] = stop
    shares = np.diff(filled, axis=1, prepend=0.0) / (len(masses) * stop)
    return np.bincount(places.ravel(), shares.ravel(), len(pool.numbers)).astype(np.float64)


def _mass_at_stop(masses: Floats, costs: Floats, settings: Tsds) -> float:
    """s, of masses [M, K] and costs [M, K - 1] at each."""
    queries, places = np.indices(costs.shape)
    rising = np.lexsort((queries.ravel(), places.ravel(), masses[:, :-1].ravel()))
    total = np.diff(costs, axis=1, prepend=0.0).ravel()[rising].cumsum()
    enough = np.flatnonzero(settings.alpha / settings.scale * total >= (1 - settings.alpha) * len(masses))
    if not rising.size:
        return float(masses[:, -1].max())
    return float(masses[:, :-1].ravel()[rising[enough[0] if enough.size else -1]])


def _densities(pool: Pool, candidates: Ints, settings: Tsds) -> Floats:
    assert pool.embeddings is not None
    count = min(settings.density_neighbours, len(pool.numbers))
    densities = np.empty(len(candidates))
    for place, candidate in enumerate(candidates):
        own = ((pool.embeddings - pool.embeddings[candidate]) ** 2).sum(axis=1)
        nearest = np.sort(np.partition(own, count - 1)[:count])
        densities[place] = math.fsum(np.maximum(1 - nearest / settings.sigma**2, 0.0))
    return densities


def _start_clusters(pool: Pool, settings: ClusterLess) -> Selected:
    assert pool.embeddings is not None
    order = np.argsort(pool.numbers)
    numbers, rows = pool.numbers[order], pool.embeddings[order]
    count = max(1, len(numbers) // settings.cluster_size)
    chosen = np.argsort(uniform(numbers, pool.seed, 0), kind="stable")[:count]
    centres = rows[np.sort(chosen)]
    owner = np.full(len(rows), -1)
    for _ in range(_ITERATIONS):
        before, owner = owner, np.argmin([_distances(centre, rows) for centre in centres], axis=0)
        if (owner == before).all():
            break
        centres = np.array([rows[owner == c].mean(axis=0) if (owner == c).any() else centres[c] for c in range(count)])
    representatives = []
    for cluster in range(count):
        members = np.flatnonzero(owner == cluster)
        nearest = np.lexsort((numbers[members], _distances(centres[cluster], rows[members])))
        representatives += [[cluster, int(numbers[members[i]])] for i in nearest[: settings.representatives]]
    state = {"numbers": numbers.tolist(), "clusters": owner.tolist(), "representatives": representatives}
    return state, any_of(pool)


def _representatives(state: State | None, numbers: Ints) -> Ints:
    """Numbers of the state's representatives, in their order."""
    rows = state["representatives"] if state else []
    return np.array([number for _, number in rows], dtype=np.int64)


def _by_cluster(state: State, pool: Pool, _: ClusterLess) -> Selected:
    """Scores are of the state's representatives, [cluster, number] each, in their order."""
    clusters, scores = np.array([cluster for cluster, _ in state["representatives"]]), cosine_scores(pool)
    means = {int(cluster): float(scores[clusters == cluster].mean()) for cluster in np.unique(clusters)}
    owner = dict(zip(state["numbers"], state["clusters"], strict=True))
    own = np.array([means[owner[number]] for number in pool.numbers.tolist()])
    owners = np.array([owner[number] for number in pool.numbers.tolist()])
    return state, pool.numbers[np.lexsort((pool.numbers, owners, -own))[: pool.take]]


BY_EMBEDDING = {
    "near": DataPolicy(partial(_near, {}), _near, needs=("embeddings", "queries")),
    "tsds": DataPolicy(partial(_tsds, {}), _tsds, Tsds, needs=("embeddings", "queries")),
    "cluster_less": DataPolicy(
        _start_clusters,
        _by_cluster,
        ClusterLess,
        needs=("embeddings", "gradients", "query_gradients"),
        same_pool=True,
        gradients_of=_representatives,
    ),
}
"""By the names that recipes have."""
