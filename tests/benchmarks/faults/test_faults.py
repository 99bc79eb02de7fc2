"""The drill: its quick half runs, and its judge finds what is wrong with a job that ended otherwise than it should."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from harness.cases import only_full

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"


@pytest.fixture
def drill(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The modules of benchmarks/faults/drill, which have plain names."""
    monkeypatch.syspath_prepend(str(BENCHMARKS / "faults" / "drill"))
    import runs

    yield runs
    for name in ("cases", "plant", "runs"):
        sys.modules.pop(name, None)


QUICK = ("meeting", "packing, forward, stop", "nan", "ring", "hand-over", "convert", "terminate")
"""Words of the name of every quick case."""
GONE = "evenload: rank 1 of 2 is gone: killed by SIGKILL in 'update'"


def row_of(case: Any, **changes: Any) -> dict[str, Any]:
    """What a job leaves that ended as it should."""
    row = {"mark": "update", "seconds": 1.5, "code": int(case.ends), "messages": [GONE] if case.ends else []}
    return {**row, "orphans": [], "loss_apart": 0.0, **dict.fromkeys(("resumed", "lost", "repeated"), 0), **changes}


def case_of(runs: Any, how: str, phase: str = "update") -> Any:
    from cases import BY_NAME, SETTINGS, Case

    return Case(SETTINGS[0], BY_NAME[phase], how, 1)


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"code": None}, "not ended"),
        ({"code": 2}, "exit code 2"),
        ({"code": 0}, "exit code 0"),
        ({"messages": []}, "0 messages"),
        ({"messages": [GONE] * 2}, "2 messages"),
        ({"messages": [GONE.replace("rank 1", "rank 0")]}, "another rank"),
        ({"messages": [GONE.replace("update", "forward")]}, "another phase"),
        ({"orphans": ["python converter.py"]}, "orphans"),
        ({"resumed": 1}, "resume failed"),
        ({"lost": 1}, "samples lost"),
        ({"repeated": 1}, "samples repeated"),
        ({"loss_apart": 1e-7}, "losses differ"),
        ({"seconds": None}, "the fault never happened"),
    ],
)
def test_whatever_is_not_as_it_should_be_is_listed(drill: Any, changes: dict[str, Any], fault: str) -> None:
    case = case_of(drill, "kill")
    assert drill.faults_of(case, row_of(case)) == []
    assert any(fault in text for text in drill.faults_of(case, row_of(case, **changes)))


def test_a_slow_rank_must_change_nothing(drill: Any) -> None:
    case = case_of(drill, "slow")
    assert drill.faults_of(case, row_of(case)) == []
    assert drill.faults_of(case, row_of(case, code=1)) == ["exit code 1"]
    assert drill.faults_of(case, row_of(case, messages=[GONE])) == ["a message"]


def test_a_job_that_is_told_to_end_keeps_the_step_that_ran(drill: Any) -> None:
    case = case_of(drill, "terminate")
    ended = row_of(case, code=75, messages=[], last_good="step00000004")
    assert drill.faults_of(case, ended) == []
    assert drill.faults_of(case, {**ended, "code": 143}) == ["exit code 143"]
    assert drill.faults_of(case, {**ended, "last_good": "step00000002"}) == ["kept 2"]
    early = case_of(drill, "terminate", "build")
    assert drill.faults_of(early, {**ended, "code": 143, "last_good": None}) == []


def test_messages_are_separated_from_what_is_logged(drill: Any) -> None:
    text = (
        'evenload: {"trainer": "megatron"}\n'
        "evenload: resumed from kept/step00000002 at step 2\n"
        "evenload: rank 1 of 2 (host) is stuck in 'forward'\n  found: no rank made progress\n  do: see above\n"
        "evenload: in 'comparing times': the loss or its gradient is not finite\n"
    )
    assert [message.splitlines()[0][10:20] for message in drill.messages_of(text)] == ["rank 1 of ", "in 'compar"]
    assert "do: see above" in drill.messages_of(text)[0]


def test_cases_have_names_of_their_own_and_every_quick_one_is_one_of_all(drill: Any) -> None:
    from cases import SETTINGS, cases_of, quick_cases

    names = [case.name for setting in SETTINGS for case in cases_of(setting, ("all_reduce", "barrier"))]
    assert len(set(names)) == len(names)
    assert {case.name for case in quick_cases()} <= set(names)


def rows_of(script: str, *words: str, place: Path) -> list[dict[str, Any]]:
    """The cases of a drill, by its command."""
    command = [sys.executable, str(BENCHMARKS / "faults" / script), *words, "--json"]
    clean = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    done = subprocess.run(command, cwd=place, env=clean, capture_output=True, text=True, timeout=550)
    assert done.returncode == 0, done.stderr[-3000:]
    rows: list[dict[str, Any]] = json.loads(done.stdout)["cases"]
    return rows


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("only", [only_full(words) for words in QUICK])
def test_jobs_that_fail_end_with_one_message_and_lose_nothing(only: str, tmp_path: Path) -> None:
    (row,) = rows_of("faults.py", "--quick", "--only", only, place=tmp_path)
    assert row["faults"] == []
