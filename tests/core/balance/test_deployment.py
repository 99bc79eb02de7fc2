"""Which replicas ranks are divided into: against all multisets, each dealt to by HiGHS."""

from itertools import product

import numpy as np
import pytest
from evenload.core.balance.deployment import ReplicaKind, deploy
from evenload.core.errors import EvenloadError

from .by_solver import least_end_s

SIZES = {"TP1": 1, "TP2": 2, "PP2": 2, "TP4": 4}


def kinds_of(seed, sequences=6):
    """Four shapes of which larger ones hold more and waste some time; at most three at once fill 8 ranks."""
    random = np.random.default_rng(seed)
    work = np.sort(random.lognormal(0, 1, sequences))[::-1]
    holds = dict(zip(SIZES, (sequences // 2, sequences - 1, sequences, sequences), strict=True))
    kinds = []
    for shape, ranks in SIZES.items():
        seconds = work / ranks ** random.uniform(0.7, 1.0) * random.uniform(0.9, 1.1, sequences)
        seconds[: sequences - holds[shape]] = np.inf
        kinds.append(ReplicaKind(shape, ranks, seconds, 0.1 * random.random()))
    return kinds


@pytest.mark.parametrize("seed", range(3))
def test_eight_ranks_are_divided_as_well_as_by_trying_everything(seed):
    kinds = kinds_of(seed)
    ends = {}
    for counts in product(*(range(8 // kind.ranks + 1) for kind in kinds)):
        own = [at for at, count in enumerate(counts) if count]
        seconds = np.stack([kinds[at].seconds for at in own or [0]], axis=1)
        ranks = sum(count * kind.ranks for count, kind in zip(counts, kinds, strict=True))
        if ranks == 8 and np.isfinite(seconds).any(axis=1).all():
            fixed_s = np.array([kinds[at].fixed_s for at in own])
            kind_of = np.repeat(np.arange(len(own)), [counts[at] for at in own])
            ends[counts] = least_end_s(seconds, fixed_s, kind_of, whole=True)
    found = deploy(kinds, [8], gap=0.0)
    least_s = min(ends.values())
    assert found.dealt.step_s == pytest.approx(ends[tuple(found.counts.tolist())], rel=1e-6)
    assert found.floor_s <= least_s * (1 + 1e-6)
    one_s = min((end for counts, end in ends.items() if np.count_nonzero(counts) == 1), default=np.inf)
    assert found.dealt.step_s <= one_s * (1 + 1e-6)
    if np.count_nonzero(found.counts) > 1:
        assert found.dealt.step_s == pytest.approx(least_s, rel=1e-6)
        assert found.dealt.step_s * 1.005 < one_s
    else:
        assert found.dealt.step_s <= least_s * 1.005 * (1 + 1e-6)


def test_one_shape_wins_where_unlike_ones_are_hardly_faster():
    work = np.full(640, 0.1)
    short = np.where(np.arange(640) > 0, work, np.inf)
    deployed = deploy([ReplicaKind("TP1", 1, short), ReplicaKind("TP2", 2, 0.501 * work)], [4], gap=0.0)
    assert deployed.counts.tolist() == deployed.one_shape[0].tolist() == [0, 2]
    assert deployed.floor_s < deployed.dealt.step_s < 1.005 * deployed.floor_s


def test_cards_at_half_the_rate_have_half_the_work():
    work = np.ones(96)
    kinds = [ReplicaKind("TP1", 1, work), ReplicaKind("TP1", 1, 2 * work, cards=1)]
    found = deploy(kinds, [4, 4])
    assert found.counts.tolist() == [4, 4]
    assert np.bincount(found.dealt.replica_of).tolist() == [16] * 4 + [8] * 4
    assert found.one_shape[1].step_s == found.dealt.step_s == 16


def test_ranks_that_hold_no_longest_sequence_are_refused():
    small = ReplicaKind("TP1", 1, np.array([1.0, np.inf]))
    with pytest.raises(EvenloadError, match=r"(?s)no replicas use all ranks.*holds 50\.0%"):
        deploy([small], [8])
    with pytest.raises(EvenloadError, match="no replicas use all ranks"):
        deploy([small, ReplicaKind("TP8", 8, np.array([1.0, 2.0]))], [4])
    with pytest.raises(EvenloadError, match="no replicas use all ranks"):
        deploy([ReplicaKind("TP4", 4, np.array([1.0]))], [6])
