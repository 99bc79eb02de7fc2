"""The search against all plans of small spaces: the same best, and what it excluded is slower or too large."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from evenload import api
from evenload.core.errors import EvenloadError
from evenload.core.plan.step_plan import as_lengths
from evenload.core.planning.chain import PlanChain
from evenload.core.planning.floors import in_schedule_s, step_floor_s
from evenload.core.planning.judge import judge
from evenload.core.recipe.recipe import parse, schema_type
from evenload.plugins.search.answer import answer, by_hand, distinct, ranked
from evenload.plugins.search.best_first import LACKS, beside, best_first
from evenload.plugins.search.search import Enough, search
from evenload.plugins.search.space import SearchBatch, space_of
from evenload.plugins.search.table import _certificate
from evenload.training.drawing import Drawing, batch_size
from harness.without import needs

MODEL = {"num_layers": 4, "hidden_size": 256, "num_attention_heads": 4, "vocab_size": 512}
EXPERTS = {**MODEL, "family": "mixtral", "moe": {"num_experts": 4, "topk": 2}}


class Case(NamedTuple):
    """A space small enough to plan whole."""

    recipe: dict[str, Any]
    ranks: int
    pins: dict[str, Any]
    memory_gib: float | None = None


CASES = {
    "dense": Case({"model": MODEL}, 4, {"max_tokens": 1024}),
    "a pipeline": Case({"model": MODEL}, 4, {"parallel.pp": 2, "parallel.tp": 1, "max_tokens": 512 * 2}),
    "caps": Case({"model": MODEL}, 4, {"parallel.tp": 1, "parallel.pp": 1, "train.recompute": False}),
    "little memory": Case({"model": MODEL}, 4, {"parallel.pp": 1, "max_tokens": 1024}, 0.04),
    "experts": Case({"model": EXPERTS}, 4, {"max_tokens": 2048, "parallel.pp": 1, "parallel.tp": 1}),
    "ZeRO": Case({"trainer": "deepspeed", "model": MODEL}, 4, {"max_tokens": 1024, "train.recompute": False}),
    "unequal stages": Case(
        {"model": {**MODEL, "num_layers": 5, "vocab_size": 8192}},
        4,
        {"parallel.tp": 1, "parallel.layers": "auto", "max_tokens": 1024},
    ),
    "the Trainer": Case({"trainer": "transformers", "model": MODEL}, 4, {}),
}


def recipe_of(case):
    sections = {"cluster": "a100", "train": {"global_batch_size": 12}, "data": {"max_length": 4096}, **case.recipe}
    return parse({**sections, "memory_gib": case.memory_gib})


DENSE = recipe_of(CASES["dense"])


def drawn(count=2):
    rng = np.random.default_rng(7)
    return [as_lengths(np.minimum(4096, rng.lognormal(6.0, 1.2, 12).astype(int) + 2)) for _ in range(count)]


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_the_best_is_that_of_all_plans_and_what_is_excluded_is_slower_or_too_large(name):
    case, batches = CASES[name], drawn()
    space = space_of(recipe_of(case), case.ranks, case.pins).settled(SearchBatch(batches[0]))
    assert 2 <= len(space.choices) <= 200
    *_, state = best_first(space.choices, [SearchBatch(batch) for batch in batches])
    means = [_mean_of_all_plans(one.choice.chain, batches) for one in state.played]
    best = min(means)
    assert state.gap == 0.0
    assert state.best.mean_s == pytest.approx(best, rel=1e-12)
    for one, mean_s in zip(state.played, means, strict=True):
        assert one.out == "" or math.isinf(mean_s), f"{one.choice.values} is left out for nothing"
        assert one.out or one.mean_s <= mean_s * (1 + 1e-9), "a floor lies above the plan"
        assert one.whole or one.out or mean_s >= best
    assert name != "little memory" or any(one.out == LACKS and not one.steps for one in state.played)
    said = answer(state, space, 10**6)
    assert said["rows"][0]["step_s"] == pytest.approx(best)
    if more := said["more_memory"]:
        free = space_of(recipe_of(case._replace(memory_gib=None)), case.ranks, case.pins).choices
        (named,) = [one.chain for one in free if one.values == more["settings"]]
        assert _mean_of_all_plans(named, batches) >= best / more["gain_at_most"] * (1 - 1e-9)
    assert said["planned"] + said["by_bound"] + said["by_memory"] + said["refused"] >= said["settings"]


def _mean_of_all_plans(chain, batches):
    """The mean step of a setting that is planned whatever its bounds say; infinite where it cannot run."""
    try:
        steps = [judge(chain.plan(batch), chain.context) for batch in batches]
    except EvenloadError:
        return math.inf
    return sum(step.step_s for step in steps) / len(steps) if all(step.fits for step in steps) else math.inf


def test_settings_of_equal_contexts_share_one_and_recipes_one_schema():
    contexts = [choice.chain.context for choice in space_of(recipe_of(CASES["caps"]), 4, {}).choices]
    assert len({id(one) for one in contexts}) == len({repr(one) for one in contexts}) < len(contexts) / 4
    assert schema_type() is schema_type()


def test_a_search_says_what_was_not_measured_of_its_settings(tmp_path):
    from evenload.training.verbs.profile import write_costs  # imports torch

    case = CASES["ZeRO"]
    chain = space_of(recipe_of(case), case.ranks, case.pins).choices[0].chain
    costs = chain.context.costs.model_copy(update={"sharding": "parameters", "source": "this machine; here"})
    write_costs(costs, tmp_path / "costs.yaml")
    space = space_of(recipe_of(case).changed({"costs": str(tmp_path / "costs.yaml")}), case.ranks, case.pins)
    *_, state = best_first(space.choices, [SearchBatch(batch) for batch in drawn()])
    said = answer(state, space, 10**6)
    assert {row["settings"]["deepspeed.zero_stage"] for row in said["rows"]} & {0, 1, 2}
    assert said["not_measured"]
    assert all("was not measured: seconds of parameters" in note for note in said["not_measured"])


def test_every_moment_has_a_true_bound():
    space, batches = space_of(DENSE, 4, CASES["dense"].pins), drawn(1)
    moments = [
        (state.best.mean_s, state.gap)
        for state in best_first(space.choices, [SearchBatch(batch) for batch in batches])
        if state.best
    ]
    least_s = moments[-1][0]
    for seconds, gap in moments:
        assert seconds / (1 + gap) <= least_s * (1 + 1e-9) <= seconds * (1 + 2e-9)
    gaps = [gap for _, gap in moments]
    assert gaps == sorted(gaps, reverse=True)
    assert gaps[-1] == 0.0


@needs("mesh")
def test_the_gradient_sum_overlaps_only_where_the_trainers_own_schedule_can_run_the_batch():
    pins = {"max_tokens": 1024, "parallel.tp": 1, "parallel.pp": 1, "train.recompute": False}
    choices = space_of(DENSE, 4, {**pins, "plugins.mesh.enabled": True}).choices
    overlapping, other = sorted(choices, key=lambda one: not one.values["megatron.overlap_grad_reduce"])
    longer, shorter = as_lengths([4096, 300, 200, 100]), as_lengths([400, 300, 200, 100])
    assert math.isinf(in_schedule_s(overlapping.chain, longer))
    assert step_floor_s(overlapping.chain, longer) == step_floor_s(other.chain, longer)
    assert step_floor_s(overlapping.chain, shorter) < step_floor_s(other.chain, shorter)


@needs("mesh")
def test_a_sequence_of_just_the_cap_is_one_that_the_trainers_own_schedule_runs():
    pins = {"max_tokens": 1024, "parallel.tp": 1, "parallel.pp": 1, "train.recompute": False}
    choices = space_of(DENSE, 4, {**pins, "plugins.mesh.enabled": True}).choices
    chain = next(one.chain for one in choices if one.values["megatron.overlap_grad_reduce"])
    times_s = [in_schedule_s(chain, as_lengths([longest, 300, 200, 100])) for longest in (1023, 1024, 1025)]
    assert 0 < times_s[0] < times_s[1] < math.inf
    assert times_s[2] == math.inf


@needs("mesh", "packing")
def test_what_a_device_lacks_before_there_is_a_plan_is_what_keys_of_a_cut_sequence_take_beyond_its_ranks():
    """Where ranks share a sequence all of them hold slices of it before any key waits; alone one does."""
    pins = {"max_tokens": 1024, "parallel.tp": 1, "parallel.pp": 1, "train.recompute": False}
    lacking = {}
    for shares in (True, False):
        choice = space_of(DENSE, 4, {**pins, "plugins.mesh.enabled": shares}).choices[0]
        kv_bytes = choice.chain.caps.memory.kv_bytes_per_token
        assert kv_bytes > 0
        none = choice.lacking_bytes(as_lengths([1024, 7]))
        lacking[shares] = [
            (choice.lacking_bytes(as_lengths([7, longest])) - none) / kv_bytes for longest in (1024, 1025, 4096, 5000)
        ]
    assert lacking[True] == pytest.approx([0, 0, 0, 5000 - 4 * 1024])
    assert lacking[False] == pytest.approx([0, 1, 3 * 1024, 5000 - 1024])


def test_a_layout_that_is_asked_for_is_planned_beside_the_best_and_changes_no_certificate():
    space, batches = space_of(DENSE, 4, CASES["dense"].pins), [SearchBatch(drawn(1)[0])]
    *_, state = best_first(space.choices, batches)
    best, layouts = state.best, {one.choice.chain.context.layout for one in state.played}
    planned = {one.choice.chain.context.layout for one in state.played if one.steps}
    assert planned < layouts
    *_, state = beside(state, batches, lambda _: True)
    done = {one.choice.chain.context.layout for one in state.played if one.whole or one.out}
    assert done == layouts
    assert state.best is best
    assert state.gap == 0.0


@pytest.mark.parametrize("longest", [300, 4096])
def test_plans_that_overlap_nothing_are_made_once_for_both_settings_of_overlap(longest):
    batch = as_lengths([longest, 300, 200, 100, 50])
    choices = space_of(DENSE, 4, {"max_tokens": 1024, "parallel.tp": 1}).choices
    *_, state = best_first(choices, [SearchBatch(batch)])
    pairs = [one.alike for one in state.played if all(other.whole for other in one.alike) and len(one.alike) == 2]
    same = [one.steps[0] is other.steps[0] for one, other in pairs]
    assert any(same) is (longest > 1024)
    shown = distinct(ranked(state))
    assert len({id(one.steps[0].plan) for one in shown}) == len(shown)
    for one in (one for pair in pairs for one in pair):
        assert one.steps[0].step_s == judge(one.choice.chain.plan(batch), one.choice.chain.context).step_s


def _searched(out=None, pins=(), **changes):
    lengths = np.concatenate(drawn(3))
    return search(
        DENSE.changed(changes), lengths, [4], ("max_tokens=1024", *pins), steps=2, enough=Enough(0.0), out=out
    )


def test_the_recipe_that_is_written_is_what_its_own_settings_give(tmp_path):
    path = tmp_path / "best.yaml"
    best = _searched(path)["rows"][0]
    again = api.load_recipe(path)
    assert path.read_text().startswith("# Megatron-LM: ")
    pins = tuple(f"{key}={str(value).lower()}" for key, value in best["settings"].items() if key != "max_tokens")
    assert _searched(pins=pins)["rows"][0]["step_s"] == best["step_s"]
    layout = again.layout(4)
    chain = PlanChain.of_recipe(again, layout)
    drawing = Drawing(None, as_lengths(np.concatenate(drawn(3))), batch_size(again), chain, seed=again.train.seed)
    steps = [judge(chain.plan(as_lengths(drawing().lengths)), chain.context).step_s for _ in range(2)]
    assert sum(steps) / 2 == best["step_s"]
    degrees = {f"parallel.{name}": getattr(layout, name) for name in ("tp", "pp", "ep")}
    assert degrees.items() <= best["settings"].items()


@pytest.mark.parametrize(
    ("asks", "says"),
    [
        (lambda: _searched(pins=("parallel.tp=3",)), "a pin is outside of its axis"),
        (lambda: _searched(pins=("parallel.tpp=1",)), "parallel.tp"),
        (lambda: _searched(pins=("nonsense",)), "--pin parallel.tp=1"),
        (lambda: _searched(Path(__file__)), "--out is there already"),
        (lambda: search(DENSE, drawn(1)[0], [4], ("max_tokens=1024",), memory_gib=1e-6), "lacks least"),
        (lambda: search(DENSE, drawn(1)[0][:3], [4]), "fewer"),
    ],
)
def test_bad_requests_are_refused_by_name(asks, says):
    with pytest.raises(EvenloadError, match=says):
        asks()


def test_seven_ranks_have_data_parallelism_alone():
    assert search(DENSE, drawn(1)[0], [7], ("max_tokens=1024",))["rows"]


def test_rules_of_thumb_go_by_the_size_of_the_model():
    space = space_of(DENSE, 4, {"max_tokens": 1024})
    layouts = [one.chain.context.layout for one in space.choices]
    of_degrees = {(layout.tp, layout.pp): layout for layout in layouts}
    named = {weights: {at for at, one in of_degrees.items() if by_hand(one, weights)} for weights in (10**8, 5 * 10**9)}
    assert named == {10**8: {(1, 1)}, 5 * 10**9: {(2, 1), (4, 1)}}


@pytest.mark.parametrize(("costs", "counted"), [("auto", True), ("galvatron-llama2-7b", False)])
def test_costs_without_bytes_of_activations_are_said(costs, counted):
    case = CASES["dense"]
    space, batches = space_of(recipe_of(case).changed({"costs": costs}), case.ranks, case.pins), drawn(1)
    *_, state = best_first(space.choices, [SearchBatch(batch) for batch in batches])
    said = {**answer(state, space, 10**6), "search_s": 1.0, "first_answer_s": 0.5, "out": None}
    assert said["activations_counted"] is counted
    assert ("know no bytes of activations" in _certificate(said)) is not counted
