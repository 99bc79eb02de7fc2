"""Bubbles of spans drawn by hand, and of simulated steps beside the simulator's own number."""

from dataclasses import replace

import numpy as np
import pytest
from evenload.core.plan.step_plan import as_lengths
from evenload.core.planning.chain import PlanChain
from evenload.core.recipe.recipe import parse
from evenload.core.simulate.step import Span, simulate
from evenload.training.measuring import _shown
from evenload.training.pipelines import Waits, bubbles_of

HAND = (
    # Stage 0 fills until nothing, waits between its passes, and for the sum of the gradients with nobody.
    Span(0, 0, "F", 0, 0.0, 2.0),
    Span(0, 0, "B", 0, 6.0, 9.0),
    Span(0, 0, "G", -1, 9.0, 9.5),
    Span(0, 0, "U", -1, 9.5, 10.0),
    # Stage 1 waits for its first pass; a forward again lies inside its backward; then it waits for the update.
    Span(1, 0, "F", 0, 2.0, 3.0),
    Span(1, 0, "B", 0, 3.0, 6.0),
    Span(1, 0, "R", 0, 3.0, 4.0),
    Span(1, 0, "W", 0, 7.0, 8.0),
    Span(1, 0, "U", -1, 9.5, 10.0),
)


def test_waiting_is_told_before_between_and_after_passes():
    found = bubbles_of([HAND])
    assert found.waits == {(0, 0): Waits(0.0, 4.0, 0.0), (1, 0): Waits(2.0, 1.0, 1.5)}
    assert found.frac == pytest.approx((4.0 + 4.5) / (2 * 10.0))
    assert found.of(1, 0) == pytest.approx(0.45)


def test_steps_are_summed_second_by_second():
    short = tuple(s._replace(start_s=s.start_s / 2, end_s=s.end_s / 2) for s in HAND)
    both = bubbles_of([HAND, short])
    assert both.step_s == 15.0
    assert both.frac == pytest.approx(bubbles_of([HAND]).frac)
    assert both.waits[1, 0] == Waits(3.0, 1.5, 2.25)


def test_rows_are_shares_that_sum_to_the_bubble():
    (first, second) = bubbles_of([HAND]).rows(bubbles_of([HAND[:4]]))
    assert (first["stage"], first["rank"], second["stage"]) == (0, 0, 1)
    assert second["before_frac"] + second["between_frac"] + second["after_frac"] == pytest.approx(second["bubble_frac"])
    assert first["predicted_bubble_frac"] == pytest.approx(0.4)
    assert second["predicted_bubble_frac"] == 0.0


@pytest.mark.parametrize("instead", ["", "in_order"])
def test_simulated_steps_have_the_simulators_bubble(instead):
    recipe = parse(
        {
            "model": {"num_layers": 8},
            "parallel": {"pp": 4, "dp": 2},
            "plugins": {"packing": {"enabled": True, "max_tokens": 1500 if instead else 1024}},
        }
    )
    chain = replace(PlanChain.of_recipe(recipe, recipe.layout()), instead=instead)
    plan = chain.plan(as_lengths(np.random.default_rng(0).integers(10, 1500, 64)))
    outcome = simulate(plan, chain.context)
    found = bubbles_of([outcome.spans])
    if plan.order:
        assert found.frac == pytest.approx(outcome.bubble_frac, abs=1e-9)
    else:  # the host's own schedule waits until its sends have arrived
        assert outcome.bubble_frac < found.frac < outcome.bubble_frac + outcome.exposed_frac
    assert bool(plan.order) != bool(instead)
    assert found.step_s == pytest.approx(outcome.step_s)
    assert len(found.waits) == outcome.busy_s.size


def test_tensor_parallel_peers_are_one_and_collectives_begin_with_their_last_rank():
    first = (Span(0, 0, "F", 0, 0.0, 1.0), Span(0, 0, "G", -1, 1.0, 4.0))
    peer = (Span(0, 0, "F", 0, 0.0, 1.5), Span(0, 0, "G", -1, 1.5, 4.0))
    other = (Span(0, 1, "F", 1, 0.0, 3.0), Span(0, 1, "G", -1, 3.0, 4.0))
    shown = list(_shown([first, peer, other]))
    assert [s for s in shown if s.kind == "F"] == [first[0], other[0]]
    assert {(s.start_s, s.end_s) for s in shown if s.kind == "G"} == {(3.0, 4.0)}
    assert bubbles_of([shown]).waits[0, 0] == Waits(0.0, 0.0, 2.0)
