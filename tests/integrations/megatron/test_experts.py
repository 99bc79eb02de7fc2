"""Models with experts on real ranks, planned, against plain training with all experts on each rank.

The reference has its own routing and losses (`evenload.integrations.megatron.plain_experts`), written from the papers.
"""

from __future__ import annotations

import pytest
from harness.cases import full, only_full

pytestmark = pytest.mark.slow

LOSSES = {"z_loss": 0.02, "sequence_aux_loss": 0.05}
BIASED = {"score": "sigmoid", "bias_rate": 0.01, **LOSSES}
PACKS = {"packing": {"enabled": True, "max_tokens": 96}}
SLICES = {"packing": {"enabled": True, "max_tokens": 40}}
SHARED = {"mesh": {"enabled": True, "max_tokens": 24}}
CUT = {"moe": {"enabled": True, "owners": "sharded"}}
ODD = {"model__hidden_size": 10, "model__num_attention_heads": 1, "model__num_query_groups": 1}
STAGES = {"pipeline": {"enabled": True}}
LAYOUTS = {
    "ep1": (2, {"parallel__ep": 1}),
    "ep2": (2, {"parallel__ep": 2}),
    "ep2dp2": (4, {"parallel__ep": 2}),
    "ep4": (4, {"parallel__ep": 4}),
    "pp2ep2": (4, {"parallel__ep": 2, "parallel__pp": 2}),
}
PLUGINS = {"stock": {}, "packs": PACKS, "slices": SLICES}
AT_EVERY_CHANGE = ("ep1-packs", "ep2-slices", "ep2dp2-stock", "ep4-packs", "pp2ep2-slices")
"""Each layout once, and each kind of plan."""
FEW = [37, 5, 64, 2]
UNEQUAL = {"parallel__ep": 2, "parallel__pp": 2, "parallel__layers": [1, 3], "model__num_layers": 4}


def exact(rows, *, branch="", copied=True):
    """All steps of all ranks; together the ranks must have compared every parameter.

    ``copied``: experts are divided, and in every second step some have copies.
    """
    for number, of_step in enumerate(zip(*rows, strict=True)):
        assert any(one["copies"] for one in of_step) == (copied and number % 2 == 1)
        assert set().union(*(one["names"] for one in of_step)) == set(of_step[0]["expected"])
        for one in of_step:
            assert one["grad"] < 1e-9
            assert one["loss"] < 1e-12
            assert one["norm"] < 1e-9
            assert one["biases"] == []
            assert one["miscounted"] == []
            assert branch in ("", *one["branches"])


@pytest.mark.parametrize(
    ("layout", "plugins"),
    [
        pytest.param(layout, plugins, marks=[] if f"{layout}-{plugins}" in AT_EVERY_CHANGE else full)
        for layout in LAYOUTS
        for plugins in PLUGINS
    ],
)
def test_float64_is_that_of_plain_training(on_ranks, layout, plugins):
    size, changes = LAYOUTS[layout]
    rows = on_ranks(size, "routed", moe=BIASED, plugins=PLUGINS[plugins], **changes)
    exact(rows, branch="cut sequences" * (plugins == "slices"), copied=changes["parallel__ep"] > 1)
    assert all(row[0]["moved"] == rows[0][0]["moved"] > 0.03 for row in rows), "biases move"


def test_experts_of_unequal_stages_are_exact(on_ranks):
    rows = on_ranks(4, "routed", moe=BIASED, plugins=SLICES, train__recompute=True, **UNEQUAL)
    exact(rows, branch="cut sequences")


def test_copies_where_tokens_come_from(on_ranks):
    rows = on_ranks(4, "routed", moe=BIASED, plugins=SLICES, parallel__ep=4, local=True, seeds=(None,) * 4)
    exact(rows, branch="cut sequences")


@pytest.mark.parametrize(
    "changes",
    [
        only_full({"plugins": SLICES, "moe": BIASED, "seeds": (None,) * 4}, id="drawn copies"),
        pytest.param(
            {"plugins": SLICES, "moe": LOSSES, "local": True, "train__recompute": True},
            id="local copies, recompute",
        ),
        pytest.param({"plugins": PACKS | CUT, "moe": {"shared_ffn_hidden_size": 16}}, id="cut experts, shared"),
        only_full({"seeds": list(range(4)), "lengths": FEW, "moe": {"num_experts": 8, "topk": 3}}, id="random plans"),
        pytest.param(
            {"plugins": PACKS, "lengths": [40], "train__global_batch_size": 4, "seeds": (None,) * 2},
            id="ranks without a token",
        ),
    ],
)
def test_tokens_that_go_once_to_a_node(on_ranks, changes):
    exact(on_ranks(4, "routed", parallel__ep=4, once=True, **changes))


@pytest.mark.parametrize(
    "changes",
    [
        only_full({"moe": {}}, id="softmax"),
        pytest.param({"moe": BIASED, "train__recompute": True}, id="recompute"),
        pytest.param({"moe": {"score": "sigmoid", "topk": 1, "shared_ffn_hidden_size": 16}}, id="one of them, shared"),
        pytest.param(
            {"moe": {"num_experts": 6, "topk": 3, "every": 2, **BIASED}, "model__family": "qwen3_moe"},
            id="qwen3_moe, every second",
        ),
        pytest.param({"moe": LOSSES, "megatron__overlap_grad_reduce": True}, id="overlap"),
    ],
)
def test_every_kind_of_routing(on_ranks, changes):
    exact(on_ranks(2, "routed", parallel__ep=2, plugins=SLICES, **changes))


def test_losses_and_drops_of_a_micro_batch_are_the_hosts_own(on_ranks):
    moe = {"batch_aux_loss": 0.05, "capacity_factor": 1.0}
    exact(on_ranks(2, "routed", parallel__ep=2, moe=moe, train__micro_batch_size=1))


@pytest.mark.parametrize(("size", "ep"), [pytest.param(2, 2, id="ep2"), only_full(4, 2, id="ep2dp2")])
def test_sequences_that_ranks_share(on_ranks, size, ep):
    exact(on_ranks(size, "routed", parallel__ep=ep, moe=LOSSES, plugins=SHARED, lengths=[90, 7, 30, 12]))


def test_orders_of_the_pipeline_plugin(on_ranks):
    layout = {"parallel__pp": 2, "parallel__ep": 2}
    exact(on_ranks(4, "routed", moe=BIASED, plugins=STAGES, **layout), branch="an order of the plan's own")


@pytest.mark.parametrize(
    ("layout", "seeds"),
    [
        pytest.param("ep2", [4, 6, 7, 5], id="ep2"),
        pytest.param("pp2ep2", [4, 6], id="pp2ep2"),
        *(only_full(layout, list(range(12)), id=f"{layout}, all") for layout in ("ep2", "pp2ep2")),
    ],
)
def test_random_plans(on_ranks, layout, seeds):
    """Of four sequences: few enough that in some of the plans a rank is idle."""
    size, layout = LAYOUTS[layout]
    rows = on_ranks(size, "routed", moe=BIASED, seeds=seeds, lengths=FEW, **layout)
    exact(rows)
    assert any("idle ranks" in one["branches"] for one in rows[0])


@pytest.mark.parametrize("plugins", [{}, PACKS], ids=["stock", "packs"])
def test_dummies_and_padding_count_in_nothing(on_ranks, plugins):
    """One rank has no sample at all; in the stock plan a micro-batch of the other is padded."""
    rows = on_ranks(2, "routed", parallel__ep=2, moe=BIASED, plugins=plugins, lengths=[40], train__global_batch_size=2)
    exact(rows, branch="dummies")


def test_what_does_not_compose_is_refused(on_ranks):
    cases = [
        {"parallel__tp": 2},
        {"parallel__ep": 2, "moe": {"dispatcher": "allgather"}, "plugins": PACKS},
        {"moe": {"topk": 1}},
        {"parallel__ep": 2, "moe": {"dispatcher": "allgather"}},
        {"parallel__ep": 2, "moe": {"dispatcher": "allgather"}, "plugins": {"moe": {"enabled": True}}},
        {"plugins": CUT},
        {"parallel__ep": 2, "parallel__pp": 2, "moe": {"every": 2}, "train__dtype": "fp32"},
    ]
    said = on_ranks(2, "refused_recipes", cases=cases)[0]
    assert "sequence parallelism" in said[0]
    assert "allgather" in said[1]
    assert "softmax over one" in said[2]
    assert said[3] == ""
    assert "copies of experts" in said[4]
    assert "group of its own" in said[5]
    assert "a pipeline stage whose" in said[6]


@pytest.mark.parametrize(
    ("layout", "changes"),
    [
        pytest.param(
            "ep2", {"plugins": SLICES | CUT, "train__recompute": True, "seeds": (None,) * 4}, id="ep2, recompute"
        ),
        only_full("ep2dp2", {"plugins": PACKS | CUT, "megatron__overlap_grad_reduce": True}, id="ep2dp2, overlap"),
        pytest.param("ep4", {"plugins": CUT, "moe": BIASED | {"ffn_hidden_size": 25}, **ODD}, id="ep4, padded pieces"),
        pytest.param("pp2ep2", {"plugins": SLICES | CUT}, id="pp2ep2, slices"),
    ],
)
def test_experts_that_are_cut_over_their_group(on_ranks, layout, changes):
    size, layout = LAYOUTS[layout]
    exact(on_ranks(size, "routed", **{"moe": BIASED, **layout, **changes}))


@pytest.mark.parametrize(
    ("size", "near", "changes"),
    [
        only_full(4, 1e-12, {"parallel__ep": 4, "train__dtype": "fp64", **ODD}, id="fp64, padded pieces"),
        only_full(2, 1e-5, {"parallel__ep": 2, "train__dtype": "fp32"}, id="fp32, distributed optimizer"),
        only_full(4, 1e-5, {"parallel__ep": 2, "train__dtype": "fp32"}, id="fp32, ep2dp2"),
        only_full(
            4,
            1e-12,
            {"parallel__ep": 2, "parallel__pp": 2, "train__dtype": "fp64", "model__family": "qwen3_moe"},
            id="fp64, a stage without experts",
        ),
    ],
)
def test_cut_experts_take_the_same_steps_and_share_checkpoints(on_ranks, tmp_path, size, near, changes):
    moe = BIASED | {"ffn_hidden_size": 25, "every": 2 if "model__family" in changes else 1}
    common = {"moe": moe, "train__clip_grad": 0.2, **changes}
    for row in on_ranks(size, "sharded_beside_home", folder=str(tmp_path / "c"), **common):
        assert row["started"] == row["behind True"] == row["behind False"] == []
        assert row["before True"]
        assert row["before False"]
        assert max(row["far"], row["then"]) <= near
        for one, other in row["losses"] + row["norms"]:
            assert one == pytest.approx(other, rel=near)


ELSEWHERE = ((1, 2), (2, 4), (4, 4))
NEXT = {1: ELSEWHERE[1:2], 2: ELSEWHERE[2:], 4: ELSEWHERE[:1]}
"""In float64 every layout reads of every other; in float32 each reads of one."""


@pytest.mark.parametrize(
    "kind", [only_full({"train__dtype": "fp64"}, id="fp64"), pytest.param({"train__dtype": "fp32"}, id="fp32 sharded")]
)
def test_start_losses_and_resume_are_equal_on_other_numbers_of_expert_ranks(on_ranks, tmp_path, kind):
    near = 1e-12 if kind["train__dtype"] == "fp64" else 1e-5
    common = {"moe": BIASED, "plugins": PACKS, **kind}
    whole = on_ranks(2, "expert_steps", steps=4, parallel__ep=1, **common)[0]
    for ep, size in ((1, 2), (2, 2), (4, 4)):
        there = str(tmp_path / f"from{ep}")
        first = on_ranks(size, "expert_steps", steps=2, write=there, parallel__ep=ep, **common)[0]
        assert first["start"] == whole["start"]
        assert first["losses"] == pytest.approx(whole["losses"][:2], rel=near)
        for to, ranks in ELSEWHERE if kind["train__dtype"] == "fp64" else NEXT[ep]:
            then = on_ranks(ranks, "expert_steps", first=2, steps=2, read=there, parallel__ep=to, **common)[0]
            assert then["losses"] == pytest.approx(whole["losses"][2:], rel=near)
            assert then["norms"] == pytest.approx(whole["norms"][2:], rel=near)
            assert then["biases"] == {layer: pytest.approx(b, abs=1e-6) for layer, b in whole["biases"].items()}


def test_a_closed_host_leaves_no_layer_alive(on_ranks):
    """Graphs that dispatchers keep would hold the model, and the threads of its process groups, for ever."""
    assert on_ranks(2, "left_alive") == [0, 0]


def test_stock_megatron_reads_the_checkpoint(on_ranks, tmp_path):
    there = str(tmp_path / "c")
    on_ranks(2, "expert_steps", steps=1, write=there, parallel__ep=2, moe=BIASED, plugins=PACKS)
    for same in on_ranks(2, "stock_reads", folder=there, parallel__ep=2, moe=BIASED):
        assert all(same.values())
        assert len(same) > 16
