"""Patience: a tenant stops after so many evaluations without a new lowest loss."""

from evenload.plugins.lora.sweeps.evaluation import is_due, is_over, without_gain
from evenload.plugins.lora.tenant_file import Evaluate
from hypothesis import given
from hypothesis import strategies as st


def evaluate(patience=2, every=10):
    return Evaluate(source="held_out.jsonl", every=every, patience=patience)


def test_evaluations_are_due_before_the_first_step_and_behind_the_last():
    assert [done for done in range(26) if is_due(evaluate(), done, 25)] == [0, 10, 20, 25]


@given(
    st.lists(st.sampled_from([1.0, 2.0, 3.0]), min_size=1, max_size=12),
    st.integers(1, 4),
    st.integers(1, 7),
    st.integers(0, 6),
)
def test_it_stops_where_the_last_evaluations_brought_nothing(losses, patience, every, tail):
    steps = every * (len(losses) - 1) + tail % every
    places = [done for done in range(steps + 1) if is_due(evaluate(patience, every), done, steps)]
    losses = (losses + [3.0])[: len(places)]
    for number, done in enumerate(places):
        best = losses.index(min(losses[: number + 1]))
        assert without_gain(evaluate(patience, every), done, places[best], steps) == number - best
        assert is_over(evaluate(patience, every), done, places[best], steps) == (number - best >= patience)
