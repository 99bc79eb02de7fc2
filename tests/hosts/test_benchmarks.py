"""The benchmarks of hosts run, and their figures are possible: equal losses, less computed.

Their runs come from a forge; in the full run upstream's script runs with evenload as a user starts it, so that a
launched run is held against one of the forge.
"""

from __future__ import annotations

import json
import runpy
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import launching
import pytest
from harness.cases import full

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks" / "hosts"

Result = Callable[..., dict[str, Any]]


@pytest.fixture
def result(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Result]:
    """``result("pairs.py", *words)``: what a script writes as JSON; modules beside it have plain names."""

    def run(script: str, *words: object) -> dict[str, Any]:
        out = tmp_path / "result.json"
        monkeypatch.syspath_prepend(str(BENCHMARKS))
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
        monkeypatch.setattr(sys, "argv", [script, *map(str, words), "--out", str(out)])
        runpy.run_path(str(BENCHMARKS / script), run_name="__main__")
        written: dict[str, Any] = json.loads(out.read_text())
        return written

    yield run
    for name in ("cases", "megatron_cases"):
        sys.modules.pop(name, None)


@pytest.mark.slow
@full
def test_a_script_of_a_checkout_is_run_stock_and_with_evenload(
    result: Result, forged_launch: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch = launching.launch

    def by_either(script: Path, arguments: Any, folder: Path, recipe: Path | None, **more: Any) -> Any:
        return (launch if recipe else forged_launch)(script, arguments, folder, recipe, **more)

    monkeypatch.setattr(launching, "launch", by_either)
    script = tmp_path / "trl" / "trl" / "scripts" / "sft.py"
    script.parent.mkdir(parents=True)
    shutil.copy(launching.SCRIPTS / "trl_sft_script.py", script)
    (row,) = result("upstream.py", tmp_path / "trl", "--only", "LoRA", "--layouts", "zero2")["rows"]
    assert row["codes"] == [0, 0]
    assert row["steps"] == 20
    assert row["difference"]["loss"] < 1e-5
    assert row["difference"]["grad_norm"] < 5e-5
    assert row["tokens"][1] < 0.8 * row["tokens"][0]
    assert row["said"][1] == "planned 20 steps of Transformers' Trainer with packing"


@pytest.mark.slow
def test_pairs_are_equal_and_less_is_computed(
    result: Result, forged_launch: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(launching, "launch", forged_launch)
    words = ("--quick", "--repeats", "1", "--variants", "padded,evenload", "--svg", tmp_path / "run.svg")
    padded, ours = result("pairs.py", *words)["rows"]
    assert f"{ours['over_padded']:.2f}x" in (tmp_path / "run.svg").read_text()
    assert ours["apart"]["loss"] < 1e-5
    assert ours["apart"]["grad_norm"] < 5e-5
    assert ours["same_steps"]
    assert ours["tokens"] == padded["tokens"] <= ours["computed"] < 0.8 * padded["computed"]


@full
@pytest.mark.slow
def test_answers_of_a_prompt_are_equal_and_less_is_computed(result: Result) -> None:
    words = ("--quick", "--task", "dpo", "--repeats", "1", "--steps", "2", "--prompts", "64", "--longest", "64")
    stock, rows, trees = result("trees.py", *words)["rows"]
    for ours in (rows, trees):
        assert ours["apart"]["loss"] < 1e-5
        assert ours["apart"]["grad_norm"] < 5e-5
        assert ours["tokens"] == stock["tokens"]
    assert trees["computed"] < 0.8 * rows["computed"]


def test_runs_of_a_program_are_one_row_and_a_failed_one_says_why() -> None:
    """`make test-hosts` and the benchmark itself run the programs, in environments of their own."""
    of = runpy.run_path(str(launching.SCRIPTS.parents[2] / "benchmarks" / "hosts" / "programs.py"))
    run = {"printed": [[1.5, 0.25]], "updates": 3}
    pairs = [
        {"stock": {**run, "tokens": 200, "step_s": 2.0 * slow}, "planned": {**run, "tokens": 150, "step_s": slow}}
        for slow in (1.0, 2.0, 4.0)
    ]
    row = of["summary"]("axolotl", "full", pairs)
    assert (row["faster"], row["stock_step_s"], row["planned_step_s"], row["equal"]) == (2.0, 4.0, 2.0, True)
    pairs[0]["planned"]["printed"] = [[1.5, 0.26]]
    assert not of["summary"]("axolotl", "full", pairs)["equal"]
    failed = of["summary"]("axolotl", "lora", [{"stock": pairs[0]["stock"], "planned": {"failed": ["no space left"]}}])
    assert failed["failed"] == ["no space left"]
    assert of["table"]([row, failed]).row_count == 2
