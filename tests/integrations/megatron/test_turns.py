"""Halves of micro-batches that take turns in the layers, against plain training of whole sequences."""

from __future__ import annotations

import pytest
from harness.cases import only_full
from harness.proof import in_turns
from megatron_tests.exact import exact

pytestmark = pytest.mark.slow

TWO = {"model__num_layers": 2}


def _is_tied(m):
    """Whether a half attends to keys of the other."""
    first, second = ({s.sequence for s in half.slices} for half in m.halves)
    return not first.isdisjoint(second)


TURNS = [f"turns {seed}" for seed in range(6)]


def test_the_drawn_plans_hold_what_they_are_to_prove():
    plans = [in_turns(seed, num_ranks=4, num_stages=1, layers_per_stage=2, heads=4) for seed in range(6)]
    micro_batches = [m for plan in plans for m in plan.micro_batches if m.first_half]
    wanted = {
        "a half that attends to the other's keys": _is_tied,
        "halves of whole sequences": lambda m: not _is_tied(m),
        "one sequence alone": lambda m: len({s.sequence for s in m.slices}) == 1,
        "halves that ranks share": lambda m: len(m.ranks) > 1 and not m.cp_groups,
        "halves whose slices have CP groups of their own": lambda m: len(set(m.cp_groups)) > 1,
        "halves of a later slice": lambda m: any(s.start for s in m.halves[0].slices),
    }
    assert [name for name, holds in wanted.items() if not any(map(holds, micro_batches))] == []


@pytest.mark.parametrize(
    ("size", "layout", "plans"),
    [
        pytest.param(4, {"parallel__tp": 2}, TURNS[:1], id="tp2 cp2"),
        pytest.param(4, {}, TURNS[:4], id="dp4"),
        pytest.param(2, {"parallel__tp": 2}, TURNS, id="tp2"),
        only_full(4, {"parallel__tp": 2}, TURNS, id="tp2 cp2, all"),
    ],
)
def test_halves_in_turn_give_the_gradients_of_plain_training(on_ranks, size, layout, plans):
    exact(on_ranks(size, "proven", plans=plans, **TWO, **layout), layout)
