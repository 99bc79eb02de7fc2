"""The cost model: its arithmetic, its fit, its presets."""

import numpy as np
import pytest
from evenload.core.costs import costs
from evenload.core.costs.costs import Costs, PassCost, Work, fit, from_totals, solve, work_of
from evenload.core.errors import EvenloadError
from evenload.core.machine import cluster
from evenload.core.machine.layout import Layout
from evenload.core.plan.step_plan import MicroBatch, Slice
from evenload.core.planning.setting import RECIPES
from hypothesis import given
from hypothesis import strategies as st

SOME = Costs(
    source="test",
    forward=PassCost(launch_s=1e-3, token_s=2e-6, pair_s=3e-9),
    backward=PassCost(launch_s=2e-3, token_s=4e-6, pair_s=7.5e-9),
)


@given(st.integers(2, 5000), st.integers(1, 4999))
def test_slices_cost_what_the_whole_costs(length, cut):
    """Attention of [0, n) is that of [0, c) plus that of [c, n) with its prefix."""
    cut = min(cut, length - 1)
    whole = SOME.forward.seconds(length)
    parts = SOME.forward.seconds(cut) + SOME.forward.seconds(length - cut, cut)
    assert parts == pytest.approx(whole, rel=1e-12)


def test_published_totals_are_met():
    """FlexSP's coefficients are totals of forward and backward: a1 s^2 + a2 s + b1."""
    model = from_totals("test", token_s=0.18396e-3, square_s=5.128e-9, launch_s=0.6294)
    length = np.array([1000, 100_000])
    expected = 5.128e-9 * length.astype(float) ** 2 + 0.18396e-3 * length
    assert model.sequence_s(length) == pytest.approx(expected, rel=1e-12)
    assert model.launch_s == pytest.approx(0.6294)


def test_a_micro_batch_pays_its_padding_and_shares_its_ranks():
    slices = (Slice(0, 0, 10), Slice(1, 0, 30))
    packed, _ = SOME.micro_batch_s(MicroBatch(slices, (0,)))
    padded, _ = SOME.micro_batch_s(MicroBatch(slices, (0,), pad_to=30))
    shared, _ = SOME.micro_batch_s(MicroBatch(slices, (0, 1)))
    assert packed == pytest.approx(1e-3 + 2e-6 * 40 + 3e-9 * (50 + 450))
    assert padded == pytest.approx(1e-3 + 2e-6 * 60 + 3e-9 * 900)
    assert shared - 1e-3 == pytest.approx((packed - 1e-3) / 2)


def test_a_stage_has_its_share():
    stage = SOME.of_stage(Layout(tp=2, pp=4))
    assert stage.forward.token_s == pytest.approx(SOME.forward.token_s / 8)
    assert stage.forward.launch_s == pytest.approx(SOME.forward.launch_s / 4)


def test_a_stage_with_a_share_of_the_layers_has_as_much_of_what_is_beside_the_tokens():
    beside = SOME.model_copy(update={"beside": ((-3.0, 1.0), (0.0, 2.0))})
    assert beside.of_share(0.5).beside == ((-1.5, 0.5), (0.0, 1.0))


def test_the_work_of_a_rank_is_linear_in_its_micro_batches():
    chain = [MicroBatch((Slice(0, 0, 10),), (0,)), MicroBatch((Slice(0, 10, 30), Slice(1, 0, 4)), (0,))]
    shared, dummy = MicroBatch((Slice(2, 0, 8),), (0, 1)), MicroBatch((), (0,))
    work = work_of([*chain, shared, dummy])
    # 30^2 / 2 for the whole sequence, however it is cut; half of 8 tokens on each of two ranks.
    assert work == Work(4, 10 + 24 + 4 + 1, 450 + 8 + 16 + 0.5)
    each = [SOME.micro_batch_s(m) for m in (*chain, shared, dummy)]
    assert SOME.forward.of(work) == pytest.approx(sum(f for f, _ in each))
    assert SOME.backward.of(work) == pytest.approx(sum(b for _, b in each))


@given(st.floats(1e-5, 1e-2), st.floats(1e-8, 1e-5), st.floats(1e-12, 1e-9))
def test_fit_recovers_exact_coefficients(launch_s, token_s, pair_s):
    true = PassCost(launch_s=launch_s, token_s=token_s, pair_s=pair_s)
    work = [Work(m, m * n * k, m * k * n * n / 2) for n in (64, 256, 1024, 4096) for k in (1, 4) for m in (1, 3)]
    found, error = fit(work, [true.of(w) for w in work])
    assert error < 1e-6
    for name, most in zip(("launch_s", "token_s", "pair_s"), (3, 3 * 4 * 4096, 3 * 4 * 4096**2 / 2), strict=True):
        value = getattr(true, name)
        assert getattr(found, name) == pytest.approx(value, rel=1e-4) or value * most / true.of(work[-1]) < 1e-6


@given(st.integers(0, 2**32 - 1))
def test_no_other_non_negative_solution_is_better(seed):
    rng = np.random.default_rng(seed)
    columns, target = rng.uniform(0, 1, (8, 3)) * [1, 1e3, 1e-6], rng.uniform(0.5, 2, 8)
    found, error = solve(columns, target, target)

    def loss(x):
        return float(np.square((columns @ x - target) / target).sum())

    assert (found >= 0).all()
    assert error == pytest.approx(np.abs(columns @ found / target - 1).mean())
    size = np.abs(1 / columns.max(axis=0))
    for step in (*np.eye(3), *-np.eye(3), *rng.normal(size=(20, 3))):
        assert loss(found) <= loss(np.maximum(0, found + 1e-3 * step * size)) + 1e-12


@pytest.mark.parametrize("path", sorted((RECIPES / "costs").glob("*.yaml")), ids=lambda p: p.stem)
def test_presets_load_and_name_their_source(path):
    model = costs.load(str(path), RECIPES / "costs")
    assert len(model.source) > 20
    assert model.backward.token_s >= model.forward.token_s


@pytest.mark.parametrize("path", sorted((RECIPES / "clusters").glob("*.yaml")), ids=lambda p: p.stem)
def test_clusters_load(path):
    machines = cluster.load(str(path), RECIPES / "clusters")
    assert machines.intra.bytes_per_s >= machines.inter.bytes_per_s
    assert machines.link_among(range(machines.ranks_per_node)) == machines.intra
    assert machines.link_among(range(machines.ranks_per_node + 1)) == machines.inter
    assert machines.intra.all_reduce_s(1e6, 2) > 0
    assert machines.intra.all_gather_s(1e6, 1) == 0


def test_unknown_names_are_refused():
    with pytest.raises(EvenloadError, match="did you mean 'local'"):
        cluster.load("locl", RECIPES / "clusters")
    with pytest.raises(EvenloadError, match="no such cost model"):
        costs.load("nonsense", RECIPES / "costs")


CLUSTER = "name: some\nsource: made up\nranks_per_node: 8\nflops_per_s: 1.0e+12\nmemory_bytes: 1.0e+10\n"
CLUSTER += "intra: {latency_s: 1.0e-6, bytes_per_s: 1.0e+10}\ninter: {latency_s: 1.0e-6, bytes_per_s: 1.0e+10}\n"
COSTS = "source: made up\nforward: {token_s: 1.0e-6}\nbackward: {token_s: 1.0e-6}\n"
TOTALS = "source: made up\ntotals: {token_s: 1.0e-6, square_s: 0.0}\n"


@pytest.mark.parametrize(
    "value", [".inf", "-.inf", ".nan", "1.0e-320", "1.0e+300", "-1.0", "1" + "0" * 90, "'x'", "[]", "null"]
)
@pytest.mark.parametrize(
    ("load", "text", "key"),
    [
        (cluster.load, CLUSTER, "flops_per_s: 1.0e+12"),
        (cluster.load, CLUSTER, "bytes_per_s: 1.0e+10"),
        (cluster.load, CLUSTER, "memory_bytes: 1.0e+10"),
        (costs.load, COSTS, "token_s: 1.0e-6"),
        (costs.load, TOTALS, "token_s: 1.0e-6"),
    ],
)
def test_quantities_without_sense_are_refused(tmp_path, load, text, key, value):
    path = tmp_path / "machine.yaml"
    path.write_text(text)
    load(str(path), tmp_path)
    path.write_text(text.replace(key, f"{key.partition(':')[0]}: {value}", 1))
    with pytest.raises(EvenloadError) as caught:
        load(str(path), tmp_path)
    assert len(caught.value.found) <= 200


@pytest.mark.parametrize("load", [cluster.load, costs.load])
@pytest.mark.parametrize(
    "content", [b"\x80", b"- 1", b"x", b"", b"[" * 10_000, b"a: 2001-99-99", b"totals: 1", b"totals: {1: 2}"]
)
def test_other_files_are_refused(tmp_path, load, content):
    path = tmp_path / "machine.yaml"
    path.write_bytes(content)
    with pytest.raises(EvenloadError) as caught:
        load(str(path), tmp_path)
    assert caught.value.found
    assert len(caught.value.found) <= 200


@pytest.mark.parametrize("name", ["x" * 300, "x" * 5000 + ".yaml", "a\0b", "a\0b.yaml", "", "/"])
def test_names_that_no_file_can_have_are_not_there(tmp_path, name):
    for load in (cluster.load, costs.load):
        with pytest.raises(EvenloadError, match="there is no such"):
            load(name, tmp_path)


def test_passes_that_take_no_time_are_refused(tmp_path):
    for direction in ("forward", "backward"):
        other = {"forward": "backward", "backward": "forward"}[direction]
        text = f"source: made up\n{other}: {{token_s: 1.0}}\n{direction}: {{launch_s: 1.0, token_s: 0}}\n"
        (tmp_path / "free.yaml").write_text(text)
        with pytest.raises(EvenloadError, match=f"found: {direction} takes no time"):
            costs.load("free", tmp_path)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (TOTALS + "forward: {token_s: 1.0e-6}\n", "what a pass costs twice"),
        (COSTS + "memory: {input_bytes_per_token: 8.0}\n", r"memory\.input_bytes_per_token, which is counted"),
        (COSTS + "ep: 2\n", "ep, which is the layout's"),
    ],
)
def test_what_is_no_part_of_a_cost_model_is_refused(tmp_path, text, found):
    (tmp_path / "some.yaml").write_text(text)
    with pytest.raises(EvenloadError, match=rf"is not a cost model\n  found: .*{found}"):
        costs.load("some", tmp_path)
