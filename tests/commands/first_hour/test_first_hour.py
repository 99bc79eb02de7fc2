"""`evenload doctor --gpu` without a GPU: it says so; its parts end in time, go on after a failure, and fill a page."""

import json
from pathlib import Path

import pytest
from evenload.api import load_recipe
from evenload.commands.first_hour import parts
from evenload.commands.first_hour.page import page
from evenload.commands.first_hour.parts import TimedPart
from evenload.core.errors import EvenloadError
from evenload.training.progress import silent
from harness.commands import command


def test_a_machine_without_a_gpu_and_out_without_gpu_are_refused(tmp_path):
    done = command(tmp_path, "doctor", "--gpu")
    assert (done.returncode, "there is no GPU here\n  found: torch" in done.stderr) == (2, True)
    done = command(tmp_path, "doctor", "--out", "here")
    assert (done.returncode, "add --gpu" in done.stderr) == (2, True)
    assert list(tmp_path.iterdir()) == []


def test_no_torch_and_a_rank_are_refused(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    with pytest.raises(EvenloadError, match="starts its ranks itself"):
        parts.num_gpus()
    monkeypatch.setattr(parts, "find_spec", lambda name: None)
    with pytest.raises(EvenloadError, match="no torch"):
        parts.num_gpus()


DEVICES = {
    "gpus": [{"name": "NVIDIA H200", "memory_bytes": 1 << 30, "capability": "9.0"}],
    "links": [{"from": "host", "to": "GPU 0", "how": "pageable", "bytes_per_s": 2.5e10}],
    "torch": "2.13.0",
    "cuda": None,
}


def run(monkeypatch, folder, table, limit_s=60):
    monkeypatch.setattr(parts, "num_gpus", lambda: 1)
    monkeypatch.setattr(parts, "parts", lambda *_: table)
    return parts.first_hour(None, (), folder, limit_s, silent)


@pytest.mark.slow
def test_a_part_that_fails_or_hangs_is_said_and_the_others_go_on(monkeypatch, tmp_path):
    table = [
        TimedPart("kernels", ("-c", "raise SystemExit('no | kernel')"), 20),
        TimedPart("verify", ("-c", "import time; time.sleep(60)"), 1),
        TimedPart("devices", ("-c", f"print('''{json.dumps(DEVICES)}''')"), 20),
    ]
    result = run(monkeypatch, tmp_path / "deep" / "hour", table)
    ends = {name: row["exit_code"] for name, row in result["parts"].items()}
    assert ends == {"kernels": 1, "verify": None, "devices": 0}
    assert result["well"] is False
    text = (tmp_path / "deep" / "hour" / "page.md").read_text()
    assert text == page(result)
    assert "| kernels | exit code 1 |" in text
    assert "| verify | out of time |" in text
    assert "| host | GPU 0 | pageable | 25 |" in text
    assert "## kernels\n\n```text\nno | kernel\n" in text
    assert text.startswith("# The first hour of evenload on NVIDIA H200\n")
    assert json.loads((tmp_path / "deep" / "hour" / "result.json").read_text()) == result


@pytest.mark.slow
def test_all_parts_share_a_limit(monkeypatch, tmp_path):
    hangs = ("-c", "import time; time.sleep(60)")
    result = run(monkeypatch, tmp_path, [TimedPart("kernels", hangs, 50), TimedPart("train", hangs, 50)], limit_s=1)
    assert [row["timed_out"] for row in result["parts"].values()] == [True, True]
    assert sum(row["wall_s"] for row in result["parts"].values()) < 20


def test_a_folder_that_cannot_be_made_is_refused(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(EvenloadError, match="--out cannot be written"):
        run(monkeypatch, tmp_path / "file" / "hour", [])


@pytest.mark.parametrize(
    ("words", "gpus", "dp"),
    [((), 1, 1), ((), 8, 2), (("parallel.tp=2", "parallel.dp=null"), 8, 4), (("parallel.pp=2", "parallel.dp=2"), 1, 1)],
)
def test_parts_ask_for_what_exists_and_for_no_more_ranks_than_gpus(words, gpus, dp, tmp_path):
    table = {part.name: part.arguments[3:] for part in parts.parts(None, words, gpus, tmp_path)}
    assert list(table) == ["devices", "installed", "kernels", "verify", "train", "profile"]
    for name in ("verify", "train"):
        verb, recipe, *rest = table[name]
        assert verb == name
        asked = load_recipe(recipe, [word for word in rest if "=" in word])
        assert (asked.parallel.dp, asked.train.dtype) == (dp, {"verify": "fp32", "train": "bf16"}[name])
    assert table["profile"][:2] == ("profile", "gpu-node")
    assert str(gpus) in table["profile"]


def test_a_recipe_takes_the_place_of_both_and_writes_nothing(tmp_path):
    words = ("checkpoint.dir=runs", "train.export=out", "train.steps=5")
    table = {part.name: part.arguments for part in parts.parts(Path("slices"), words, 2, tmp_path)}
    assert {table[name][4] for name in ("installed", "verify", "train", "profile")} == {"slices"}
    asked = load_recipe("slices", [word for word in table["train"] if "=" in word])
    assert (asked.checkpoint.dir, asked.train.export, asked.train.steps) == (None, None, 5)
