"""Both objectives of Megatron's loops, fed as Megatron-LM feeds its ranks: gradients and reports of the stock loop."""

from __future__ import annotations

import pytest
from harness.cases import only_full
from megatron_tests.settings import MEANS

pytestmark = pytest.mark.slow

LONE = {"lone": True}


@pytest.mark.parametrize(
    ("size", "layout"),
    [
        pytest.param(1, {**MEANS, "seeds": (1, 2)}, id="means"),
        pytest.param(2, {**MEANS, "overlap": True, "seeds": (1,)}, id="means, dp2"),
        pytest.param(2, {**MEANS, "values": 2, "seeds": (1,)}, id="means, two values, dp2"),
        pytest.param(1, {**MEANS, "values": 1, "seeds": (1,)}, id="means, the loss itself reported"),
        pytest.param(2, {"tp": 2, **LONE, "seeds": (1,)}, id="tokens, tp2, one iterator"),
        pytest.param(4, {**MEANS, "tp": 2, "pp": 2, **LONE, "seeds": (2,)}, id="means, tp2pp2, two iterators"),
        only_full(4, {**MEANS, "pp": 4, **LONE}, id="means, pp4, stages without iterators"),
    ],
)
def test_gradients_and_reports_are_those_of_the_stock_loop(on_ranks, size, layout):
    reported = 0
    for rank in on_ranks(size, "objectives", **layout):
        for result in rank:
            assert result["grad"] < 1e-9, result
            assert result["reports"] < 1e-12
            assert result["dtypes"]
            assert result["rows"] == {1}
        reported += len(rank)
    assert reported == size * (1 + len(layout.get("seeds", ())))


@pytest.mark.parametrize("mutant", ["as if packs were micro-batches", "one count for all"])
def test_the_proof_catches_wrong_weights(on_ranks, mutant):
    assert all(rank[0]["grad"] > 1e-4 for rank in on_ranks(2, "objectives", mutant=mutant, **MEANS))


def test_groups_that_a_loop_passes_are_passed_on_or_refused(on_ranks):
    for error, rows, refusal in on_ranks(2, "passed_groups", pp=2):
        assert error < 1e-9
        assert rows == {1}
        assert "not those of megatron.core.parallel_state" in refusal


def test_a_loop_without_iterators_where_they_are_needed_is_told_so(on_ranks):
    for nobody, nobody_last, nobody_first in on_ranks(2, "missing_iterators"):
        assert "no rank of a copy of the model has a data iterator" in nobody
        assert "no rank of the last pipeline stage has a data iterator" in nobody_last
        assert "no rank of the first pipeline stage has a data iterator" in nobody_first


ODD = {
    "mask": "the attention mask is not the causal one",
    "shape": "AssertionError: a batch of another shape",
    "shortened": "does not give the model the batch that it took",
    "rows": "is invalid for input of size",
    "mean": "returns the mean of the token losses",
}
OF_BATCHES = {
    "tuple": "gives tuple",
    "no mask": "keys labels, position_ids, tokens",
    "no positions": "keys labels, loss_mask, tokens",
    "input_ids": "not all one shape",
    "lists": "tokens list",
    "inner": "keys inner",
    "numpy": "tokens ndarray",
    "text": "keys text",
    "mask of words": "cannot be read as samples",
    "one row": "not all one shape",
}
"""Forms of batches that a script's own function may take."""


@pytest.mark.parametrize("layout", [{}, only_full({"tp": 2}), {"pp": 2}], ids=["dp2", "tp2", "pp2"])
def test_a_loop_that_cannot_be_planned_runs_as_it_does_without(on_ranks, layout):
    """Whatever is odd in it, and whether one rank knows or all; rank 0 says why."""
    odd = [*ODD, *OF_BATCHES]
    if "pp" in layout:
        # Stages exchange tensors of one shape, so no such loop shortens its batches; these are read alike everywhere.
        odd = [name for name in ODD if name != "shortened"] + ["tuple", "mask of words"]
    for rank, found in enumerate(on_ranks(2, "left_as_they_are", odd=odd, **layout)):
        for name, (same, said) in found.items():
            assert same == [True, True], name
            assert len(said) == (rank == 0), name
            assert all({**ODD, **OF_BATCHES}[name] in line for line in said), said


def test_what_a_rank_refuses_of_its_batches_is_said_on_peers_without_an_iterator(on_ranks):
    for said in on_ranks(2, "odd_mask", tp=2):
        assert "the attention mask is not the causal one" in said


def test_reports_are_those_of_the_loop_on_all_ranks_or_on_none(on_ranks):
    for told in on_ranks(2, "reports_of_ranks"):
        assert told == [[["hits", "lm loss"]]] * 2


def test_a_second_model_on_the_packs_of_a_step_is_refused(on_ranks):
    ((told, stock, wrapped),) = on_ranks(1, "second_model")
    assert "gives its batch to a second model" in told
    assert not stock
    assert not wrapped
