"""Passes that leave blocks out: who is scored twice, what the sums come to, and that all ranks repeat them or none."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch.distributed as dist
from evenload.api import load_plugins
from evenload.core.planning.chain import PlanChain
from evenload.core.recipe.recipe import parse
from evenload.integrations.host.scoring import Scores
from evenload.training.drawing import draw_of
from evenload.training.sparse_passes import SparsePasses

LENGTHS = np.random.default_rng(0).integers(600, 3000, 120)
DENSE = LENGTHS * np.random.default_rng(1).uniform(2, 4, len(LENGTHS))
LONG = LENGTHS >= 1024
MASKED = LENGTHS // 2
"""Targets of each sample."""


def passes(least=2, lengths=LENGTHS, plugins=None, memory_gib=None, **sparse):
    settings = {"choose": "sample", "min_length": 1024, "dense_share": 0.2} | sparse
    plugins = plugins or {"packing": {"enabled": True, "max_tokens": 4096}}
    data = {"max_length": max(4096, int(lengths.max()))}
    more = {"memory_gib": memory_gib, "sparse": settings, "plugins": plugins}
    recipe = parse({"parallel": {"dp": 2}, "data": data, **more})
    source = SimpleNamespace(lengths=lengths, targets=None, groups=None, trunks=None, weight_sums=None, divisor=None)
    chain = PlanChain.of_recipe(recipe, recipe.layout())
    return SparsePasses(SimpleNamespace(recipe=recipe, source=source, chain=chain), least=least), source


def drawn_of(own, source, size=40):
    parts = np.split(np.arange(len(source.lengths)), range(size, len(source.lengths), size))
    return own.draws([draw_of(source, part) for part in parts])


def scorer(off, seen, shift=0.0):
    """Losses that are off by a share of their own where blocks are left out, half of them; ``seen`` gets each pass."""

    def score(planned, run):
        draw = planned.draw
        sparse = np.array([run is not None and name is not None for name in (run.samples if run else draw.samples)])
        seen.append(run is not None)
        for place in np.flatnonzero(sparse):
            run.note(place, (1.0, 1.0, 2.0))
        dense = DENSE[draw.samples]
        return Scores(np.where(sparse, dense * (1 + off[draw.samples] + shift), dense), MASKED[draw.samples])

    return score


def scored(own, draws, off, shift=0.0):
    seen = []
    whole = own.whole(lambda: (SimpleNamespace(draw=draw) for draw in draws), scorer(off, seen, shift))
    return whole, seen


OFF = np.random.default_rng(2).normal(5e-4, 2e-4, len(LENGTHS))


def test_drawn_samples_are_long_ones_and_in_the_batch_once_more():
    own, source = passes()
    draws = drawn_of(own, source)
    twins = np.concatenate([draw.samples[draw.twins] for draw in draws])
    assert LONG[twins].all()
    assert 0.1 < len(twins) / LONG.sum() < 0.3
    for draw in draws:
        assert np.array_equal(draw.samples[draw.twins], draw.samples[len(draw.own.samples) :])
        assert draw.own.twins is draw.own.computes is None
        assert (draw.computes[len(draw.own.samples) :] == 1).all()
    again = drawn_of(own, source)
    assert all(np.array_equal(one.samples, other.samples) for one, other in zip(draws, again, strict=True))


def test_who_is_drawn_depends_on_no_loss():
    """The same samples after passes of very different losses."""
    own, source = passes(limit=10.0)
    first = drawn_of(own, source)
    for scale in (0.0, 1.0):
        scored(own, first, scale * np.linspace(0, 1, len(LENGTHS)))
        now = drawn_of(own, source)
        assert all(np.array_equal(one.twins, other.twins) for one, other in zip(first, now, strict=True))


def test_the_sum_is_the_corrected_one_and_the_interval_is_about_it():
    own, source = passes()
    whole, seen = scored(own, drawn_of(own, source), OFF)
    total, targets = sum(one.losses.sum() for one in whole.scores), MASKED.sum()
    assert (whole.error.low + whole.error.high) / 2 == pytest.approx(total / targets, rel=1e-12)
    assert abs(total - DENSE.sum()) < 0.2 * abs((DENSE * (1 + OFF * LONG)).sum() - DENSE.sum())
    assert (whole.error.samples, whole.error.kept, whole.error.dense) == (LONG.sum(), 0.5, False)
    assert seen == [True] * 3
    assert sum(len(one.losses) for one in whole.scores) == len(LENGTHS)


def test_above_the_limit_all_is_dense_and_what_was_sparse_is_there_to_compare():
    own, source = passes()
    off = np.where(np.arange(len(LENGTHS)) % 2, 0.01, 0.0)
    whole, seen = scored(own, drawn_of(own, source), off)
    assert seen == [True] * 3 + [False] * 3
    assert np.array_equal(np.concatenate([one.losses for one in whole.scores]), DENSE)
    assert whole.error.dense
    assert not np.array_equal(np.concatenate([one.losses for one in whole.first]), DENSE)


def test_losses_that_are_meant_one_by_one_are_not_corrected():
    own, source = passes(least=0)
    draw = drawn_of(own, source)[0]
    scores, error = own.one(SimpleNamespace(draw=draw), scorer(OFF, []))
    numbers = np.arange(40)
    twice = np.isin(numbers, draw.twins)
    expected = DENSE[numbers] * (1 + OFF[numbers] * (LONG[numbers] & ~twice))
    assert np.allclose(scores.losses, expected, rtol=1e-14)
    assert error.drawn == twice.sum()


@pytest.mark.parametrize("sparse", [{"choose": "dense"}, {"mass": 1}, {"min_length": 4000}])
def test_without_it_batches_and_plans_are_as_they_were(sparse):
    own, source = passes(**sparse)
    draws = drawn_of(own, source)
    whole, seen = scored(own, draws, OFF)
    assert all(draw.twins is None and draw.computes is None for draw in draws)
    assert (seen, whole.error) == ([False] * 3, None)
    assert np.array_equal(np.concatenate([one.losses for one in whole.scores]), DENSE)


def test_too_few_samples_to_draw_from_are_dense(caplog):
    caplog.set_level("INFO", "evenload")
    own, source = passes(lengths=np.array([2000, 500, 2100]))
    assert [draw.twins for draw in drawn_of(own, source)] == [None]
    assert "2 samples of sparse.min_length or more are too few to draw from" in caplog.text


def test_samples_are_on_single_ranks_where_one_can_hold_them(caplog):
    caplog.set_level("INFO", "evenload")
    both = {name: {"enabled": True, "max_tokens": 2048} for name in ("mesh", "packing")}
    assert not passes(plugins=both)[0].chain.shares
    lengths, mesh = np.array([200_000, 200_000, 100]), {"mesh": {"enabled": True}}
    for gib, degree in ((0.06, 1), (0.04, 0)):
        own, _ = passes(lengths=lengths, plugins=mesh, memory_gib=gib)
        assert own.chain.links[0][1].max_degree == degree
    assert caplog.text.count("one rank cannot hold the longest sample") == 1


def falls_back():
    """On this rank: which passes ran, and whether the result is dense. The losses of rank 1 are below the limit."""
    load_plugins()
    own, source = passes()
    whole, seen = scored(own, drawn_of(own, source), np.full(len(LENGTHS), 0.0019), 0.001 * (dist.get_rank() == 0))
    return seen, whole.error.dense


def test_all_ranks_repeat_a_pass_or_none(world):
    """Where ranks have other losses in their last bits, the border may lie between them: rank 0 decides."""
    assert world(2).run(falls_back) == [([True] * 3 + [False] * 3, True)] * 2
