"""A log as it grows: what is read of it, when the run has ended, and what a terminal shows."""

import json
import os
import threading
import time
from io import StringIO

import hypothesis
import hypothesis.strategies as st
import pytest
from evenload.commands.tables.watch import table
from evenload.core.errors import EvenloadError
from evenload.training.run import watching
from evenload.training.run.watching import Watched, log_of
from rich.console import Console

NUMBERS = {"tokens": 100, "step_s": 0.5, "plan_s": 0.01, "plan_wait_s": 0.05, "imbalance": 1.25, "padding_frac": 0.0}
FULL, LIGHT, DOT, BAR = "\u2588", "\u2591", "\u00b7", "\u2502"


def line(step, **more):
    row = {"step": step, **NUMBERS, "bubble_frac": 0.4, "predicted_s": 0.25, "loss": 4.0 - step, "of_steps": 3}
    return json.dumps({**row, "ends": "done" if step == 2 else None, "samples": [1], **more}) + "\n"


def shown(result, width=80):
    console = Console(width=width, record=True, file=StringIO())
    console.print(table({"quiet_s": 0.0, **result}))
    return console.export_text()


def test_a_log_is_read_as_it_grows_and_by_whole_lines(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_text(line(0)[:-9])
    watched = Watched(path)
    assert not watched.read()
    assert "no step yet" in " ".join(shown(watched.to_json()).split())
    path.write_text(line(0))
    assert watched.read()
    with path.open("a") as file:
        file.write(json.dumps({"validation": {"step": 1, "loss": 3.5}}) + "\nspoilt\n" + line(1))
    assert watched.read()
    assert not watched.read()
    result = watched.to_json()
    assert (result["steps"], result["tokens"], result["ends"], result["validation"]["loss"]) == (2, 200, None, 3.5)
    assert (result["tokens_per_s"], result["means"]["imbalance"]) == (200.0, 1.25)
    assert [row["step"] for row in result["last"]] == [0, 1]
    assert "samples" not in result["last"][0]


@pytest.mark.parametrize("how", ["cut", "replaced", "behind"])
def test_a_run_that_begins_anew_is_read_from_there(tmp_path, how):
    path = tmp_path / "log.jsonl"
    path.write_text(line(0) + line(1) + line(2))
    watched = Watched(path)
    watched.read()
    assert watched.ends == "done"
    if how == "behind":
        path.write_text(path.read_text() + line(0, loss=9.0))
    else:
        aside = path if how == "cut" else tmp_path / "aside"
        aside.write_text(line(0, loss=9.0))
        os.replace(aside, path)
    assert watched.read()
    assert (watched.ends, watched.steps, watched.rows[0]["loss"]) == (None, 1, 9.0)


def test_tenants_have_their_losses_and_an_end_of_their_own(tmp_path):
    path = tmp_path / "log.jsonl"
    rows = [json.loads(line(step, tenants={"acme": {"loss": 2.0 - step}})) for step in range(2)]
    rows = [{k: v for k, v in row.items() if k not in ("loss", "of_steps", "predicted_s", "ends")} for row in rows]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in [*rows, {"ends": "done"}]))
    watched = Watched(path)
    watched.read()
    assert (watched.tenants, watched.ends) == ({"acme": 1.0}, "done")
    assert "losses: acme 1.0000" in shown(watched.to_json())


def test_the_picture_is_as_long_as_the_steps_and_fits_80_columns(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_text(line(0) + line(1, step_s=0.25, bubble_frac=0.2, plan_wait_s=0.0))
    watched = Watched(path)
    watched.read()
    text = shown(watched.to_json())
    assert all(len(row) <= 80 for row in text.splitlines())
    first, second = (row for row in text.splitlines() if FULL in row and "passes" not in row and "loss" not in row)
    # 56 characters of half a second: 60 % of it passes, 10 % waiting for the plan; predicted is a quarter of a second.
    assert [first.replace(BAR, FULL).count(kind) for kind in (FULL, LIGHT, DOT)] == [33, 17, 6]
    assert first[7 + 28] == second[7 + 28] == BAR
    assert len(second.rstrip()) == 7 + 28 + 1
    assert "step 2 of 3, about 0:00:00 left" in " ".join(text.split())
    assert "nothing new for 0:01:00" in " ".join(shown({**watched.to_json(), "quiet_s": 60.0}).split())


def test_it_follows_to_the_end_of_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr(watching, "_LOOK_S", 0.02)
    path, seen = tmp_path / "log.jsonl", []
    path.write_text(line(0))

    def train():
        for step in (1, 2):
            time.sleep(0.1)
            with path.open("a") as file:
                file.write(line(step))

    thread = threading.Thread(target=train)
    thread.start()
    result = watching.watch(tmp_path, lambda now: seen.append(now["steps"]))
    thread.join()
    assert (result["ends"], result["steps"]) == ("done", 3)
    assert set(seen) >= {1, 3}
    path.write_text(line(0))
    assert watching.watch(path, None)["steps"] == 1, "nothing is shown live: the log as it is"


ODD = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["step", "loss", "score"]), inner),
)
KEYS = ("step", *NUMBERS, "bubble_frac", "predicted_s", "loss", "of_steps", "ends", "tenants", "validation")


@hypothesis.given(st.lists(st.dictionaries(st.sampled_from(KEYS), ODD), max_size=4))
def test_lines_of_any_kind_are_shown_or_passed_over(tmp_path_factory, rows):
    path = tmp_path_factory.mktemp("odd") / "log.jsonl"
    path.write_text(line(0) + "".join(json.dumps({**json.loads(line(1)), **row}) + "\n" for row in rows) + line(2))
    watched = Watched(path)
    watched.read()
    assert shown(watched.to_json())
    assert watched.rows[-1]["step"] == 2


def test_a_line_that_is_no_step_is_passed_over(tmp_path):
    texts = '{"step": 1, "step_s": 1}', "[" * 99_999, '{"step": "1", "step_s": "1", "tokens": "9"}'
    (tmp_path / "log.jsonl").write_text("\n".join([*texts, line(0), *texts]))
    watched = Watched(tmp_path / "log.jsonl")
    watched.read()
    assert (watched.steps, [row["step"] for row in watched.rows]) == (1, [0])


def test_what_is_no_regular_file_or_has_no_end_is_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    os.symlink("/dev/zero", tmp_path / "zeros")
    with open(tmp_path / "hole", "wb") as file:
        file.truncate(1 << 40)
    for name, why in {"pipe": "a pipe", "zeros": "a device", "hole": "line without end"}.items():
        with pytest.raises(EvenloadError, match=why):
            Watched(tmp_path / name).read()


def test_a_folder_without_one_log_is_refused(tmp_path):
    for name, words in (("nothing", "there is no run"), (".", "has not one log")):
        with pytest.raises(EvenloadError, match=words) as caught:
            log_of(tmp_path / name)
        assert "log.jsonl=RUN/log.jsonl" in caught.value.do
    (tmp_path / "other.jsonl").write_text(line(0))
    assert log_of(tmp_path).name == "other.jsonl"
