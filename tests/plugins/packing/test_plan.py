"""The packing planner and its baselines: laws by hypothesis, quality against bounds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from evenload.api import load_plugins
from evenload.core.errors import EvenloadError
from evenload.core.plan.step_plan import MicroBatch, Slice, StepPlan, as_lengths
from evenload.core.planning.chain import PlanChain
from evenload.core.planning.judge import outcome_of
from evenload.core.recipe.recipe import parse
from evenload.core.simulate.predict import predict
from evenload.plugins.packing.config import PackingConfig
from evenload.plugins.packing.settings import breaks
from hypothesis import given
from hypothesis import strategies as st

load_plugins()
CAP = 256


def chain(
    num_ranks: int,
    *,
    pp: int = 1,
    zero_stage: int | None = None,
    cap: int = CAP,
    recompute: bool = False,
    **packing: object,
) -> PlanChain:
    data = {
        "trainer": "megatron" if zero_stage is None else "deepspeed",
        "parallel": {"dp": num_ranks, "pp": pp},
        "deepspeed": {"zero_stage": zero_stage or 0},
        "train": {"global_batch_size": 4096, "micro_batch_size": 2, "recompute": recompute},
        "plugins": {"packing": {"enabled": True, "max_tokens": cap, **packing}},
    }
    recipe = parse(data)
    return PlanChain.of_recipe(recipe, recipe.layout())


LENGTHS = st.lists(st.integers(1, CAP), min_size=1, max_size=60)
LAYOUTS = st.tuples(st.integers(1, 6), st.sampled_from([(1, None), (2, None), (4, None), (1, 1), (1, 3)]))


@given(LENGTHS, LAYOUTS)
def test_every_planner_makes_lawful_plans(lengths: list[int], layout: tuple[int, tuple[int, int | None]]) -> None:
    ranks, (pp, zero) = layout
    made = chain(ranks, pp=pp, zero_stage=zero)
    batch = as_lengths(lengths)
    whole = chain(ranks, pp=pp, zero_stage=zero, slices="off")
    plans = [whole.plan(batch), *(made.baseline(name, batch) for name in made.baseline_names)]
    for plan in (*plans, made.plan(batch)):  # each has passed check()
        assert all(plan.of_rank(rank) for rank in range(ranks)), "every rank has at least a dummy"
        if zero == 3:
            assert len({len(plan.of_rank(rank)) for rank in range(ranks)}) == 1
    for plan in plans:
        assert sorted(s for m in plan.micro_batches for s in m.slices) == [(i, 0, n) for i, n in enumerate(lengths)]


@given(LENGTHS, st.integers(1, 6))
def test_the_bound_holds_for_every_planner_and_none_is_faster(lengths: list[int], ranks: int) -> None:
    made = chain(ranks)
    batch = as_lengths(lengths)
    plan = made.plan(batch)
    ours = predict(plan, made.context.costs)
    # The stock plan is left out: its micro-batches are capped in samples, so it may launch fewer.
    capped = [made.baseline(name, batch) for name in made.baseline_names if name != "padded"]
    others = [predict(one, made.context.costs) for one in capped]
    assert all(p.step_s >= plan.bound_s * (1 - 1e-9) for p in (ours, *others))
    least_s = min(outcome_of(one, made.context).step_s for one in capped)
    assert outcome_of(plan, made.context).step_s <= least_s * (1 + 1e-9)


@given(LENGTHS, st.integers(1, 6), st.randoms())
def test_plans_depend_on_lengths_alone(lengths: list[int], ranks: int, random: object) -> None:
    made = chain(ranks)
    assert made.plan(as_lengths(lengths)).digest == made.plan(as_lengths(lengths)).digest
    mixed = sorted(lengths, key=lambda _: random.random())  # type: ignore[attr-defined]
    one = predict(made.plan(as_lengths(lengths)), made.context.costs)
    other = predict(made.plan(as_lengths(mixed)), made.context.costs)
    assert one.step_s == pytest.approx(other.step_s, rel=0.05)


def heavy_tail(seed: int, count: int, longest: int) -> np.ndarray:
    """Lengths like those of documents: lognormal, p50 about 350, p99 about 11,000 (Wikipedia's shape)."""
    draw = np.random.default_rng(seed).lognormal(np.log(350), 1.45, size=count)
    return np.clip(draw, 2, longest).astype(np.int64)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("count", "ranks"), [(512, 16), (512, 32), (4096, 64)])
def test_within_one_percent_of_the_bound_when_no_sequence_exceeds_the_mean(seed: int, count: int, ranks: int) -> None:
    made = chain(ranks, cap=16384)
    lengths = heavy_tail(seed, count, 8192)
    seconds = made.context.costs.sequence_s(lengths)
    plan = made.plan(as_lengths(lengths))
    step_s = predict(plan, made.context.costs).step_s
    if seconds.max() <= seconds.mean() * count / ranks:
        assert step_s <= 1.01 * plan.bound_s
    else:
        assert step_s == pytest.approx(seconds.max() + made.context.costs.launch_s, rel=0.01)


def test_the_baselines_are_what_they_say() -> None:
    made = chain(2, cap=10)
    batch = as_lengths([6, 5, 4, 3, 2, 8])

    def packs(plan: StepPlan) -> list[list[int]]:
        return [[s.sequence for s in m.slices] for m in plan.micro_batches]

    assert packs(made.baseline("in_order", batch)) == [[0], [1, 2], [3, 4], [5]]
    # 8+2, 6+4 and 5+3; the first is halved so that both ranks have as many.
    assert packs(made.baseline("best_fit", batch)) == [[5], [4], [0, 2], [1, 3]]
    stock = made.baseline("stock", batch)
    assert packs(stock) == [[0, 1], [2, 3], [4, 5]]
    assert [m.pad_to for m in stock.micro_batches] == [6, 4, 8]
    assert made.baseline("padded", batch).digest == stock.digest


def test_a_sequence_over_the_cap_is_refused_with_its_length() -> None:
    with pytest.raises(EvenloadError, match="sequence 1 has 300 tokens, the cap is 256"):
        chain(2, slices="off").plan(as_lengths([5, 300]))


def test_a_cap_that_another_plugin_set_is_named() -> None:
    made = chain(2, slices="off")
    ((plugin, config),) = made.links
    bare = StepPlan(as_lengths([5, 200]), (), replace(made.limits, max_tokens=100))
    with pytest.raises(EvenloadError, match="longer than the least max_tokens of all plugins") as caught:
        plugin.plan(bare, made.context, config)
    assert caught.value.found == "sequence 1 has 200 tokens, the cap is 100"
    with pytest.raises(EvenloadError, match="the least max_tokens of all plugins is smaller than two blocks"):
        plugin.plan(bare, made.context, config.model_copy(update={"slices": "auto", "block_tokens": 128}))


@pytest.mark.parametrize("block", [1, 3, 64, 128])
def test_chunks_start_at_blocks(block: int) -> None:
    made = chain(2, cap=255, block_tokens=block)
    plan = made.baseline("chunks", as_lengths([900, 256, 40]))
    assert plan.cut == {0, 1}
    assert {s.start % block for m in plan.micro_batches for s in m.slices} == {0}
    assert made.breaks("chunks", plan) == ""


@pytest.mark.parametrize(
    ("section", "broken"),
    [
        ({"block_tokens": 8}, ""),
        ({"slices": "off"}, "slices is off, 1 sequences are cut"),
        ({"block_tokens": 16}, "block_tokens is 16, a slice starts at 8"),
        ({"asymmetric": False}, "asymmetric is false, the backward has groups of its own"),
    ],
)
def test_a_plan_that_does_not_keep_a_setting_is_told_by_what_it_does(section: dict[str, object], broken: str) -> None:
    row = tuple(MicroBatch((Slice(0, a, a + 8),), (0,)) for a in (0, 8))
    plan = StepPlan(as_lengths([16]), row, chain(1).limits, backward=row[::-1])
    assert breaks(plan, PackingConfig.model_validate(section)) == (f"plugins.packing.{broken}" if broken else "")


def test_a_rank_without_work_that_holds_too_much_is_refused() -> None:
    """Its dummy has one token, and what any pass takes."""
    with pytest.raises(EvenloadError, match=r"plugins\.packing\.activation_gib cannot hold what a rank must keep"):
        chain(3, activation_gib=1e-12).plan(as_lengths([1]))


def test_unknown_baselines_are_refused() -> None:
    with pytest.raises(EvenloadError, match="did you mean 'in_order'"):
        chain(2).baseline("inorder", as_lengths([5]))


def test_plan_and_config_import_nothing_but_core() -> None:
    import subprocess
    import sys

    import evenload

    code = "import sys, evenload.plugins; print([m for m in ('torch', 'megatron', 'deepspeed') if m in sys.modules])"
    root = Path(evenload.__file__).parent.parent
    out = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
