"""Loops on packed samples, as Megatron-LM's --sft and Megatron-Bridge have them, and on verl's TensorDicts: exact."""

from __future__ import annotations

import pytest
from harness.cases import only_full

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

CUT = {"packing": {"enabled": True, "max_tokens": 48}}
WHOLE = {"packing": {"enabled": True, "max_tokens": 64, "slices": "off"}}
FEW = [("sft", True, CUT), ("bridge", False, CUT)]
MORE = [
    ("sft", False, WHOLE),
    ("sft, two rows", True, CUT),
    ("sft, two rows", False, WHOLE),
    ("bridge of old", True, CUT),
]
LAYOUTS = pytest.mark.parametrize(
    ("tp", "pp"), [pytest.param(1, 1, id="dp2"), pytest.param(1, 2, id="pp2"), only_full(2, 1, id="tp2")]
)


@pytest.mark.parametrize(
    ("tp", "pp", "cases"),
    [
        pytest.param(1, 1, [*FEW, MORE[1]], id="dp2"),
        pytest.param(1, 2, FEW, id="pp2"),
        only_full(1, 1, MORE, id="dp2, more"),
        only_full(2, 1, FEW, id="tp2"),
    ],
)
def test_packed_samples_are_regrouped_exactly(on_ranks, tp, pp, cases):
    ranks = on_ranks(2, "packed_samples", tp=tp, pp=pp, cases=cases)
    for rank in ranks:
        assert len(rank) == len(cases)
        for one in rank:
            assert one["error"] < 1e-9, one
            before, after = one["reports"]
            assert len(before) == len(after) == 2
            for stock, planned in zip(before, after, strict=True):
                assert [pytest.approx(report, rel=1e-6) for report in stock] == planned
    for of_ranks in zip(*ranks, strict=True):
        before, after = (sum(one["computed"][i] for one in of_ranks) for i in (0, 1))
        assert after < before * (0.5 if tp * pp == 1 else 0.9), of_ranks[0]["case"]


def test_samples_of_a_row_that_stock_mixes_stay_apart_and_that_is_said_once(on_ranks):
    first, second = on_ranks(2, "borders_left_out", pp=2, plugins=CUT)
    assert max(rank["apart"] for rank in (first, second)) < 1e-9
    assert max(rank["mixed"] for rank in (first, second)) > 1e-3
    (line,) = first["said"]["forgetful"]
    assert "samples of one row see each other in Megatron's pipeline stages" in line
    assert "padding" not in line, "no expert, nothing that counts it"
    assert first["said"]["telling"] == second["said"]["telling"] == second["said"]["forgetful"] == []


@LAYOUTS
def test_rows_of_tensordicts_are_regrouped_exactly(on_ranks, tp, pp):
    pytest.importorskip("tensordict")
    cases = [("sft", False), ("ppo by row", False)] if tp * pp == 1 else [("sft", True), ("ppo", False)]
    ranks = on_ranks(2, "tensor_dicts", tp=tp, pp=pp, cases=[*cases, ("mean", False)], plugins=CUT)
    for rank in ranks:
        *planned, refused = rank
        assert "not the sum of its rows' losses" in refused
        assert len(planned) == len(cases)
        for one in planned:
            assert one["error"] < 1e-9, one
            assert one["said"] < 1e-12, one
            assert one["shapes"][0] != one["shapes"][1]
    for of_ranks in zip(*(rank[:-1] for rank in ranks), strict=True):
        stock, planned = (sum(sum(one["losses"][i]) for one in of_ranks) for i in (0, 1))
        assert planned == pytest.approx(stock, rel=1e-9)


def test_tensordicts_that_one_rank_cannot_take_are_refused_on_all(on_ranks):
    pytest.importorskip("tensordict")
    first, second = on_ranks(2, "odd_tensor_dicts", plugins=CUT)
    assert first == second
    for told, says in zip(first, ("holds another one", "cannot lie in one TensorDict", "unequal numbers"), strict=True):
        assert says in told


def test_tensordicts_on_some_ranks_of_a_model_copy_are_refused_on_all(on_ranks):
    pytest.importorskip("tensordict")
    for told in on_ranks(2, "tensor_dicts_of_some", plugins=CUT):
        assert "TensorDicts are given to some ranks of a copy of the model" in told
