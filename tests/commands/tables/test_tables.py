"""What tables show of a result, and what they leave out."""

from io import StringIO
from pathlib import Path

import numpy as np
import pytest
from evenload.commands.tables import progress
from evenload.commands.tables.plan import table as table_of_plan
from evenload.commands.tables.scorers import lines_of
from evenload.commands.tables.show import grid
from evenload.commands.tables.sweep import table as table_of_sweep
from evenload.commands.tables.train import table as table_of_train
from evenload.core.cascade import cascaded
from evenload.training.metrics import totals
from harness.without import needs
from rich.console import Console

NUMBERS = ("tokens_per_s", "imbalance", "padding_frac", "bubble_frac", "bubble_worst", "step_s", "predicted_s", "loss")


def shown(table, width=160):
    console = Console(width=width, record=True, file=StringIO())
    console.print(table)
    return console.export_text()


PLANNED = ("plan_s", "step_s", "bound_s", "imbalance", "padding_frac", "bubble_frac", "exposed_frac", "peak_bytes")
STEP = {**dict.fromkeys(PLANNED, 0.5), "step": 0, "notes": [], "pipeline": None, "baselines": {}}


def trained(**ratio):
    one = dict.fromkeys(NUMBERS, 0.5)
    own = {"plan_share": 0.0, "trace": None, "steps": [], "delay_steps": 0.0, "waiting": 0, "bubbles": {}, "host": {}}
    done = {**totals([], None), "steps": 1, "loss": 2.5, "best_loss": 2.5, "best_step": 0}
    own |= {"pictures": {}, "comparison": {}, "summary": done, "validation": []}
    return {**own, "variants": {**dict.fromkeys(ratio, one), "evenload": one}, "ratio": ratio}


def test_a_run_that_was_done_already_says_so_and_shows_no_zeros():
    text = shown(table_of_train({**trained(), "summary": totals([], Path("kept/step00000004"))}))
    assert "no step was left to train: raise train.steps to train on" in " ".join(text.split())
    assert "kept/step00000004" in text
    assert not any(word in text for word in ("tokens/s", "MFU", "imbalance", "loss"))


@needs("lora")
def test_a_run_of_tenants_says_its_rates_where_it_trained():
    rates = {"tokens": 9, "targets": 8, "train_s": 7.0, "tokens_per_s": 6.0, "checkpoint": None, "out": "out"}
    tenants = {"tenants": [], "sweeps": [], "refused": {}}
    text = shown(table_of_train({**tenants, "summary": {"steps": 1, **rates}}))
    assert "time in steps" in text
    text = shown(table_of_train({**tenants, "summary": {"steps": 0, **rates}}))
    assert "time in steps" not in text
    assert "tokens/s" not in text


def test_the_best_checkpoint_is_named_with_the_command_that_exports_it():
    kept = totals([], Path("kept/step00000004"), Path("kept/best/step00000002"))
    for summary in (kept, {**kept, "steps": 1, "loss": 2.5, "best_loss": 2.5, "best_step": 0}):
        text = shown(table_of_train({**trained(), "summary": summary}))
        assert "evenload export kept/best/step00000002 --out DIR" in text
    assert "export" not in shown(table_of_train(trained()))


def test_validations_are_shown_with_the_first_the_lowest_and_the_last_of_many():
    size = {"sequences": 9, "tokens": 500, "targets": 400, "without_target": 1, "validation_s": 0.25, "domains": None}
    losses = [5.5, *(4.0 if step == 7 else 4.5 + step / 100 for step in range(1, 40))]
    rows = [{**size, "step": i, "loss": loss, "perplexity": 2.0**loss, "best": i == 7} for i, loss in enumerate(losses)]
    text = " ".join(shown(table_of_train({**trained(), "validation": rows})).split())
    assert "12 of 40 validations" in text
    assert "1 samples without a target are left out" in text
    assert all(f"{losses[i]:.4f}" in text for i in (0, 7, 39))
    assert f"{losses[20]:.4f}" not in text


def test_samples_of_several_scorers_are_shown_with_their_mean_and_what_it_cannot_see():
    chosen = np.arange(20) < 4
    of = cascaded([(0.4, 0.6)], chosen, lambda number, own: (own / 20 if number else own % 2 / 2, np.array([2.0, 1.0])))
    sampled = {
        "score": 0.5,
        "pass_at_2": 0.75,
        **of.figures,
        "tokens": 9,
        "cut_frac": 0.0,
        "generate_s": 1,
        "score_s": 1,
    }
    size = {"sequences": 9, "tokens": 500, "targets": 400, "without_target": 0, "validation_s": 0.25, "domains": None}
    row = {**size, "step": 0, "loss": 1.0, "perplexity": 2.7, "best": True, "generate": sampled}
    text = " ".join(shown(table_of_train({**trained(), "validation": [row]})).split())
    assert of.counts.tolist() == [20, 12]
    assert f"{of.mean.mean:.3f} ({of.mean.low:.3f} to {of.mean.high:.3f}); {of.scores.mean():.3f}" in text
    assert "scorer 1: samples, time, of the busiest rank: 20, 3 s, 2 s" in text
    assert "scorer 2: samples, time, of the busiest rank: 12, 3 s, 2 s" in text
    assert "errors in 1.0 % of samples were missed by 4 rescored ones: 96.1 %" in text
    few = cascaded([(0.4, 0.6)], chosen & False, lambda number, own: (own / 20, np.array([1.0]))).figures
    assert ("mean, uncorrected", f"{few['score']:.3f}") in lines_of(few)
    assert lines_of({"score": 0.5}) == []


def test_what_was_left_out_of_a_plan_is_shown_before_other_notes():
    step = {**STEP, "notes": ["a", "b", "c", "left out of this plan: packing: a sequence is longer (900 tokens)"]}
    text = shown(table_of_plan(planned(step)))
    assert "left out of this plan: packing: a sequence is longer (900 tokens)" in text
    assert [word in text.split() for word in "abc"] == [True, True, False]


def planned(*steps, unused=()):
    about = {"costs": "counted", "costs_differ": None, "fixed_bytes": 1.0, "cluster": "local", "layout": {"ep": 1}}
    return {**about, "steps": list(steps), "unused": list(unused)}


def test_plugins_that_are_off_are_sold_with_their_line():
    mesh = {"plugins": ("mesh",), "line": "mesh: {enabled: true}", "gain": 2.27, "plan_s": 0.15}
    rows = (mesh, {**mesh, "plugins": ("packing",), "gain": 1.01}, {**mesh, "plugins": ("pipeline",), "gain": 0.0})
    text = shown(table_of_plan(planned(STEP, unused=rows)))
    assert "predicted speedup 2.27x with plugins.mesh, off here (planned in 150 ms a step); add below plugins:" in text
    assert "  mesh: {enabled: true}" in text
    assert "plugins.packing" not in text
    assert "plugins.pipeline is off, and was not planned" in text


def test_tables_fit_80_columns_with_every_word_whole():
    wide = {**STEP, "step_s": 0.302, "bound_s": 0.124, "plan_s": 0.0123, "imbalance": 4.867, "peak_bytes": 2.77e10}
    best = {"settings": {"parallel.cp": 2, "parallel.pp": 4}, "world_size": 128, "layout": {"dp": 8, "cp": 2}}
    best |= {"tokens_per_s": 1356035.0, "tokens_per_s_per_rank": 44504.0, "fits": True, "exposed_frac": 0.0, **wide}
    best |= {"strongest_baseline": {"name": "karmarkar_karp", "gain": 1.0}}
    swept = {"keys": ["parallel.cp", "parallel.pp"], "rows": [best], "best": 0, "steps": 1}
    for table in (table_of_plan(planned(wide)), table_of_sweep(swept), table_of_train(trained(stock=1.5))):
        text = shown(table, width=80)
        assert all(len(line) <= 80 for line in text.splitlines())
        words = set(text.split())
        assert "imbalance" in words
        assert not {"imbalanc", "plannin", "tokens/"} & words


NAMES = ["[/]", "[bold]x[/bold]", "[link=http://x]y[/link]", ":smile:", "a\\[b]", "[/red]", "x" * 500, "\U0001f600"]


@pytest.mark.parametrize("name", NAMES)
def test_names_are_shown_as_they_are(name):
    text = shown(grid(name, ["", name], [[name, 1.0], ["x", name]], caption=name))
    assert text.replace("\n", "").replace(" ", "").count(name.replace(" ", "")[:20]) >= 4


def test_what_would_steer_a_terminal_is_escaped():
    text = shown(grid("\x1b[31m", ["\x07", "\u202e"], [["\x1b]0;title\x07", "\udcff"]], caption="\x9b31m"))
    assert not {"\x1b", "\x07", "\u202e", "\udcff", "\x9b"} & set(text)
    text.encode()


@pytest.mark.parametrize("terminal", [True, False])
def test_progress_shows_names_as_they_are(terminal, monkeypatch):
    stream = StringIO()
    monkeypatch.setattr(progress, "Console", lambda **_: Console(file=stream, force_terminal=terminal, width=200))
    with progress.progress_shown() as told:
        told("sweep", 1, 1, "cluster=[/] [bold]x[/bold]")
    assert "cluster=[/] [bold]x[/bold]" in stream.getvalue()
