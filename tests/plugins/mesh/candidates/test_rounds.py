"""How a batch is divided into rounds: every sequence once, no round over what all ranks hold."""

import numpy as np
import pytest
from evenload.plugins.mesh.assign import Frame
from evenload.plugins.mesh.candidates.rounds import divisions, fewest_rounds, step_seconds
from evenload.plugins.mesh.cost_table import SequenceCosts, most_tokens

DEGREES = np.array([1, 2], dtype=np.int64)


def shares(lengths):
    each = lengths[:, None] / DEGREES / 2.0
    tokens = np.stack([most_tokens(lengths, int(d)) for d in DEGREES], axis=1)
    return SequenceCosts(DEGREES, tokens, each, each.copy(), np.zeros_like(tokens))


def test_seconds_of_a_step_count_rounds_bubbles_and_launches():
    assert step_seconds([3.0, 2.0], 0.5, 1) == pytest.approx(3 + 2 + 2 * 0.5)
    assert step_seconds([3.0, 2.0], 0.5, 4) == pytest.approx(3 + 2 + 3 * 3.0 + 5 * 0.5)


@pytest.mark.parametrize("stages", [1, 4])
def test_every_sequence_is_in_one_round_and_no_round_is_over_the_cap(stages):
    lengths = np.random.default_rng(3).integers(5, 400, 60)
    frame = Frame(2, 2, 1500.0)
    options = divisions(lengths, shares(lengths), frame, 0.1, stages)
    assert options
    assert [one.seconds for one in options] == sorted(one.seconds for one in options)
    for division in options:
        assert sorted(np.concatenate(division.rounds).tolist()) == list(range(60))
        assert len(division.rounds) >= fewest_rounds(lengths, frame)
        assert max(int(lengths[r].sum()) for r in division.rounds) <= 2 * 1500


def test_one_round_where_all_tokens_fit():
    lengths = np.array([100, 50, 25])
    options = divisions(lengths, shares(lengths), Frame(2, 2, 200.0), 0.0, 1)
    assert [len(r) for r in options[0].rounds] == [3]
    assert options[0].seconds >= 175 / 2
