"""Pipelines in pictures and numbers: weight gradients of their own, layers that run again, chunks, hand-overs."""

import json
import re
from dataclasses import replace

import numpy as np
import pytest
from evenload.api import load_recipe
from evenload.commands.tables.plan import table as table_of_plan
from evenload.core.costs.memory import peaks_of_stage
from evenload.core.laws import check
from evenload.core.plan.step_plan import MicroBatch, Op, Slice, StepPlan, as_lengths
from evenload.core.simulate.step import simulate
from evenload.plugins.report import plot
from evenload.plugins.report.facts import PARTS, facts_of, parts_of, pieces_of
from evenload.plugins.report.page import page_of
from evenload.training import pictures
from evenload.training.forecast.forecast import Simulated, look_ahead, over_caps

RECIPE = """
model: {num_layers: 8}
parallel: {pp: 2, dp: 1}
train: {global_batch_size: 3}
data: {max_length: 2048, min_length: 8}
plugins: {packing: {enabled: true, max_tokens: 1024}}
"""
LENGTHS = (2000, 600, 300)
MICRO_BATCHES = ((Slice(0, 0, 1000),), (Slice(0, 1000, 2000),), (Slice(1, 0, 600), Slice(2, 0, 300)))
ORDER = ("F0 F1 B1 F2 B0 W1 W0 B2", "F0 F1 B1 W1 F2 B0 B2 W2")
RECOMPUTE = ((4, 1, 0), (0, 0, 2))
"""Of four layers a stage."""


def ops(text):
    return tuple(Op(word[0], int(word[1:])) for word in text.split())


@pytest.fixture(scope="module")
def forecast(tmp_path_factory):
    """A step whose plan is drawn by hand, beside its baselines."""
    place = tmp_path_factory.mktemp("pipeline")
    (place / "recipe.yaml").write_text(RECIPE)
    found = look_ahead(load_recipe(place / "recipe.yaml"), np.array(LENGTHS), 1, record=True)
    plan = check(
        StepPlan(
            as_lengths(LENGTHS),
            tuple(MicroBatch(slices, (0,)) for slices in MICRO_BATCHES),
            found.chain.limits,
            order=tuple(map(ops, ORDER)),
            recompute=RECOMPUTE,
            made_by="hand",
        )
    )
    ours = Simulated(plan, simulate(plan, found.chain.context))
    return replace(found, steps=(replace(found.steps[0], ours=ours),))


def step_of(forecast):
    return forecast.steps[0]


def test_json_tells_the_pipeline_stage_by_stage(forecast):
    found = forecast.to_json()["steps"][0]["pipeline"]
    assert (found["micro_batches"], found["cut_sequences"], found["chunks"], found["most_chunks"]) == (3, 1, 2, 2)
    first, second = found["stages"]
    assert [first[k] for k in ("recomputed_layers", "layers", "weight_passes", "in_flight")] == [5, 12, 2, 2]
    assert [second[k] for k in ("recomputed_layers", "layers", "weight_passes", "in_flight")] == [2, 12, 2, 2]
    outcome = step_of(forecast).ours.outcome
    assert np.mean([s["bubble_frac"] for s in found["stages"]]) == pytest.approx(outcome.bubble_frac)
    assert max(s["peak_bytes"] for s in found["stages"]) == outcome.peak_bytes.max()
    # What `bench` predicts and measures, and what activation_gib caps.
    plan = step_of(forecast).ours.plan
    assert [s["peak_activation_bytes"] for s in found["stages"]] == [peaks_of_stage(plan, s)[0][0] for s in (0, 1)]


def test_the_table_of_plan_has_a_row_a_stage(forecast, shown):
    text = shown(table_of_plan(forecast.to_json()))
    assert re.search(r"stage 0 +5 of 12: 41\.7 % +2 +2 ", text)
    assert "3 micro-batches; 1 sequences are cut into 2 chunks, at most 2 each" in text


def test_a_baseline_that_is_faster_because_it_breaks_a_cap_is_said_to(forecast, shown):
    step = step_of(forecast)
    context = forecast.chain.context
    ours = replace(step.ours, plan=replace(step.ours.plan, limits=replace(step.ours.plan.limits, max_tokens=1024)))
    assert "a micro-batch is over the token cap" in (over_caps(step.baselines["padded"], ours, context) or "")
    chunks = step.baselines["chunks"]
    assert over_caps(chunks, ours, context) is None
    held = replace(chunks.outcome, peak_bytes=chunks.outcome.peak_bytes + context.cluster.memory_bytes)
    assert "of the device" in (over_caps(replace(chunks, outcome=held), ours, context) or "")
    for step_s, is_said in ((1e-9, False), (1e9, True)):
        timed = replace(step, ours=replace(ours, outcome=replace(ours.outcome, step_s=step_s)))
        text = " ".join(shown(table_of_plan(replace(forecast, steps=(timed,)).to_json())).split())
        assert ("padded is faster, but may not be run: a micro-batch is over" in text) == is_said
        assert "chunks is faster" not in text
        assert re.search(r"stock \(padded\) .* % .* [GM]iB", text)


def test_weight_gradients_are_a_part_and_the_parts_are_the_step(forecast):
    one, context = step_of(forecast).ours, forecast.chain.context
    parts = parts_of(one, context)
    assert set(parts) == set(PARTS)
    assert sum(parts.values()) == pytest.approx(one.outcome.step_s)
    spans = [s.end_s - s.start_s for s in one.outcome.spans if s.kind == "W"]
    assert len(spans) == 4
    assert parts["weights"] == pytest.approx(sum(spans) / 2)
    assert parts["again"] > 0


def test_pieces_tell_their_number_and_what_runs_again(forecast):
    one = step_of(forecast).ours
    pieces = pieces_of(one, forecast.chain.context.costs, {(0, 0)})[0, 0]
    told = {(p.part, p.number): p for p in pieces if p.number >= 0}
    assert [(p.part[0].upper(), p.number) for p in pieces if p.number >= 0] == [tuple(op) for op in ops(ORDER[0])]
    assert told["forward", 0].again == 1.0
    assert told["forward", 1].again == 0.25
    assert told["forward", 2].again == 0.0
    assert told["backward", 0].again == 0.0
    assert told["forward", 1].title.endswith("1,000 tokens in 1 slices, 1 of 4 layers recomputed")
    assert "recomputed" not in told["forward", 2].title


def test_the_trace_has_arrows_words_and_chunks(forecast, tmp_path):
    pictures.draw(forecast, trace=tmp_path / "t.json")
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    ours = [e for e in events if e["pid"] == 1]
    threads = {e["args"]["name"]: e["tid"] for e in ours if e["name"] == "thread_name"}
    passes = {(e["tid"], e["name"]): e for e in ours if e["ph"] == "X"}
    assert {n for t, n in passes if n.startswith("weight")} == {f"weight gradients {k}" for k in range(3)}
    first = passes[threads["stage 0, rank 0"], "forward 1"]["args"]
    assert first["chunks"] == "1000 to 2000 of sequence 0"
    assert first["layers recomputed"] == 1
    assert passes[threads["stage 1, rank 0"], "forward 1"]["args"]["layers recomputed"] == 0
    assert "chunks" not in passes[threads["stage 1, rank 0"], "weight gradients 2"]["args"]
    ends = {(e["ph"], e["tid"], e["name"], e["ts"]) for e in ours if e["ph"] in "sf"}
    assert len(ends) == 2 * 6, "three forwards hand over, and three backwards"
    for number in range(3):
        taken = passes[threads["stage 1, rank 0"], f"forward {number}"]
        assert ("f", taken["tid"], "hidden states", taken["ts"]) in ends
        taken = passes[threads["stage 0, rank 0"], f"backward {number}"]
        assert ("f", taken["tid"], "gradients", taken["ts"]) in ends
    (whole,) = (e for e in ours if e.get("cat") == "step")
    assert whole["args"]["bubble"] == pytest.approx(step_of(forecast).ours.outcome.bubble_frac, abs=1e-4)
    of_ranks = [v for k, v in whole["args"].items() if k.startswith("bubble of stage")]
    assert np.mean(of_ranks) == pytest.approx(whole["args"]["bubble"], abs=1e-3)


def test_the_page_shows_both_and_says_what_green_is(forecast):
    text = page_of(forecast)
    assert text.count('class="weights edged"') == 4
    assert "weight gradients" in text
    assert "Green at a forward&#x27;s foot" in text
    # Three forwards have a foot, up to 8 of 16 high: all layers, a quarter, a half. The last bar is of all seconds.
    assert re.findall(r'class="again"[^>]* height="([0-9.]+)"', text) == ["8", "2", "4", "20"]


def test_the_plot_shows_weight_gradients_and_numbers(forecast, tmp_path):
    image = pytest.importorskip("matplotlib.image")
    colors = pytest.importorskip("matplotlib.colors")
    pictures.draw(forecast, plot=tmp_path / "p.png")
    pixels = image.imread(tmp_path / "p.png")
    for part in ("weights", "again"):
        wanted = np.array(colors.to_rgb(plot._COLOURS[part]))
        assert (np.abs(pixels[..., :3] - wanted).max(axis=-1) < 0.01).sum() > 100, part
    assert facts_of(forecast).shown[-1].name == "evenload"
