"""Timing of collectives among real ranks, and the link fitted to it."""

from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from evenload.core.machine.cluster import Link
from evenload.runtime.measure import links
from evenload.runtime.measure.links import COLLECTIVES, SIZES, Timing, fit_link, measure_links

PLANTED = Link(latency_s=3e-5, bytes_per_s=4e9)
FORMULAS = {
    "all_reduce": lambda link, size, n: link.all_reduce_s(size, n),
    "all_gather": lambda link, size, n: link.all_gather_s(size / n, n),
    "reduce_scatter": lambda link, size, n: link.all_gather_s(size / n, n),
    "all_to_all": lambda link, size, n: link.all_to_all_s(size, n),
    "send": lambda link, size, n: link.send_s(size),
}


def timings(num_ranks, slower=None):
    """What a machine with the planted link would show over buffers of `SIZES`."""
    return [
        Timing(name, COLLECTIVES[name].counted(size, num_ranks), num_ranks, by * formula(PLANTED, size, num_ranks))
        for name, formula in FORMULAS.items()
        for size in SIZES
        for by in [(slower or {}).get(name, 1.0)]
    ]


@pytest.mark.parametrize("num_ranks", [2, 3, 8])
def test_the_planted_link_is_found(num_ranks):
    assert set(FORMULAS) == set(COLLECTIVES)
    found = fit_link(timings(num_ranks))
    assert found.link.latency_s == pytest.approx(PLANTED.latency_s, rel=1e-6)
    assert found.link.bytes_per_s == pytest.approx(PLANTED.bytes_per_s, rel=1e-6)
    assert found.errors == pytest.approx(dict.fromkeys(COLLECTIVES, 0.0), abs=1e-6)


def test_a_collective_that_does_not_follow_its_formula_is_named():
    found = fit_link(timings(4, {"all_reduce": 4.0}))
    assert max(found.errors, key=lambda name: found.errors[name]) == "all_reduce"
    assert found.errors["all_reduce"] > 0.5
    # One of five gives way by most of the factor: the link moves by a fifth of its logarithm.
    assert PLANTED.bytes_per_s / 4**0.25 < found.link.bytes_per_s < PLANTED.bytes_per_s


def measures(ranks_per_node):
    with patch.multiple(links, SIZES=(4, 1024, 16384), ROW_S=1e-4):
        found = measure_links(torch.device("cpu"), ranks_per_node, budget_s=20.0)
    return {name: (fit.link.model_dump(), fit.errors, fit.timings) for name, fit in found.items()}


def moves():
    """What is in a buffer of each collective that works in place, having held the rank's number."""
    rank, found = dist.get_rank(), {}
    for name in ("all_reduce", "all_gather", "send"):
        buffer = torch.full((4,), float(rank))
        COLLECTIVES[name].call(buffer, rank, None)
        found[name] = buffer.tolist()
    return found


@pytest.mark.slow
def test_real_ranks_time_what_their_backend_has(world):
    ranks = world(4).run(measures, 2)
    assert all(rank["inter"] == ranks[0]["inter"] for rank in ranks)
    assert ranks[0]["intra"] == ranks[1]["intra"]
    for name, num_ranks in (("intra", 2), ("inter", 4)):
        link, errors, found = ranks[0][name]
        assert link["bytes_per_s"] > 0
        assert set(errors) == {t[0] for t in found} >= {"all_reduce", "all_gather", "send"}
        assert {t[2] for t in found} == {num_ranks}
        assert all(t[3] > 0 for t in found)
        # Four bytes are less than one value for each of two ranks.
        assert len([t for t in found if t[0] == "all_reduce"]) == 2
    assert set(world(4).run(measures, 4)[0]) == {"intra"}


@pytest.mark.slow
def test_the_calls_move_what_they_are_named_for(world):
    for rank, found in enumerate(world(4).run(moves)):
        assert found["all_reduce"] == [6.0] * 4
        assert found["all_gather"] == [0.0, 1.0, 2.0, 3.0]
        assert found["send"] == [float(rank - rank % 2)] * 4
