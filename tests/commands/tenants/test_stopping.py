"""Patience: a tenant stops after so many evaluations without a new lowest loss, also across a resume."""

from __future__ import annotations

import json
import math

from evenload.commands.tenants.stopping import Stopping, perplexity
from evenload.core.recipe.tenant import Evaluate
from hypothesis import given
from hypothesis import strategies as st


def evaluate(patience: int | None = 2) -> Evaluate:
    return Evaluate(source="held_out.jsonl", every=10, patience=patience)


def test_evaluations_are_due_before_the_first_step_and_behind_the_last() -> None:
    stopping = Stopping(evaluate(), steps=25)
    assert [done for done in range(26) if stopping.due(done)] == [0, 10, 20, 25]


@given(st.lists(st.sampled_from([1.0, 2.0, 3.0, math.inf]), min_size=1, max_size=12), st.integers(1, 4))
def test_it_stops_where_the_last_ones_brought_nothing(losses: list[float], patience: int) -> None:
    stopping = Stopping(evaluate(patience), steps=1000)
    for number, loss in enumerate(losses):
        best = stopping.add(10 * number, loss)
        assert best == (loss < min(losses[:number], default=math.inf))
        lowest = min(losses[: number + 1])
        assert stopping.lowest == lowest
        since = number - losses.index(lowest) if lowest < math.inf else number + 1
        assert stopping.over == (since >= patience)
        stopping = Stopping(evaluate(patience), steps=1000, state=json.loads(json.dumps(stopping.state())))
    if stopping.lowest < math.inf:
        assert stopping.at_step == 10 * losses.index(min(losses))


def test_without_patience_it_never_stops() -> None:
    stopping = Stopping(evaluate(None), steps=1000)
    for done in range(100):
        stopping.add(done, 5.0 + done)
    assert not stopping.over
    assert stopping.at_step == 0


def test_perplexity_stays_a_number() -> None:
    assert perplexity(0.0) == 1.0
    assert math.isfinite(perplexity(1e9))
