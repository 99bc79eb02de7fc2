"""What sequences cost beside their tokens is weighed: a rank with pictures has fewer tokens."""

import numpy as np
import pytest
from evenload.core.plan.step_plan import as_lengths
from evenload.core.planning.judge import judge
from evenload.plugins.packing import padded

from ..chains import chain_of


def chain(*, rows):
    made = chain_of(
        {
            "trainer": "transformers",
            "parallel": {"dp": 2},
            "plugins": {"packing": {"enabled": True, "max_tokens": 4096, "padded": rows}},
        }
    )
    return made


def seconds_of_ranks(plan, each_s):
    return [
        sum(each_s[s.sequence] for number in plan.of_rank(rank) for s in plan.micro_batches[number].slices)
        for rank in range(2)
    ]


@pytest.mark.parametrize("rows", [False, True])
def test_pictures_are_dealt_over_ranks_as_work_is(rows):
    """A sample whose pictures take as long as all texts together has a rank nearly to itself."""
    made, lengths = chain(rows=rows), as_lengths([200] * 12)
    text_s = made.context.costs.sequence_s(lengths)
    beside = [(0.0, 0.0)] * 12
    beside[3] = (text_s.sum() / 3, text_s.sum() * 2 / 3)
    weighed = made.with_beside(beside)
    each_s = text_s + np.array(beside).sum(axis=1)
    alone_s, others_s = sorted(seconds_of_ranks(weighed.plan(lengths), each_s), reverse=True)
    assert alone_s <= 1.05 * each_s.max()
    assert others_s >= 0.85 * (each_s.sum() - each_s.max())
    blind = seconds_of_ranks(made.plan(lengths), each_s)
    assert max(blind) > 1.3 * alone_s


@pytest.mark.parametrize("rows", [False, True])
def test_seconds_beside_tokens_are_those_of_both_passes_of_its_micro_batch(rows):
    made, lengths = chain(rows=rows), as_lengths([300, 200, 100, 250])
    beside = [(0.25, 0.5), (0.0, 0.0), (0.125, 0.0), (0.0, 0.0)]
    plan, weighed = made.plan(lengths), made.with_beside(beside)
    for m, forward, backward in zip(
        plan.micro_batches, *weighed.context.costs.micro_batches_s(plan.micro_batches), strict=True
    ):
        bare = made.context.costs.micro_batch_s(m)
        own = np.array([beside[s.sequence] for s in m.slices]).reshape(-1, 2).sum(axis=0)
        assert (forward - bare[0], backward - bare[1]) == pytest.approx(tuple(own), abs=1e-9)
        assert weighed.context.costs.micro_batch_s(m) == (forward, backward)
    assert judge(plan, weighed.context).step_s > judge(plan, made.context).step_s


def test_runs_of_rows_are_weighed_with_what_stands_beside_their_tokens():
    made, lengths = chain(rows=True), as_lengths([100, 90, 80])
    beside = [(4.0, 0.0), (0.0, 0.0), (1.0, 2.0)]
    weighed = made.with_beside(beside)
    bare, rows = (padded.SortedRows.of(lengths, one.caps, one.context) for one in (made, weighed))
    assert rows.cost(0, 3) - bare.cost(0, 3) == pytest.approx(7.0)
    assert rows.cost(1, 2) == pytest.approx(bare.cost(1, 2))
    assert padded.equal_runs(rows, 2) == [0, 1, 3], "the costliest alone"
