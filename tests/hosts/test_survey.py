"""What the survey reads of upstream's recipes; the guards themselves are asked with a checkout alone."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest
import yaml

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks" / "hosts"


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], ModuleType]]:
    """``benchmark("survey")``: a module of that folder, which imports its neighbours."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.setattr(sys, "argv", ["benchmark"])
    before = set(sys.modules)
    yield import_module
    for name in set(sys.modules) - before:
        if Path(getattr(sys.modules[name], "__file__", None) or "").parent == BENCHMARKS:
            del sys.modules[name]


def write(checkout: Path, kind: str, name: str, **content: object) -> None:
    folder = checkout / "tests" / "functional_tests" / "test_cases" / kind / name
    folder.mkdir(parents=True)
    (folder / "model_config.yaml").write_text(yaml.safe_dump(content))


def test_recipes_without_a_micro_batch_are_no_training_recipes(
    benchmark: Callable[[str], ModuleType], tmp_path: Path
) -> None:
    write(tmp_path, "gpt", "a", MODEL_ARGS={"--micro-batch-size": 4}, ENV_VARS={"NCCL_ALGO": "Ring"})
    write(tmp_path, "moe", "b", MODEL_ARGS={"--micro-batch-size": 1}, MODE="inference")
    write(tmp_path, "common", "converter", MODEL_ARGS={"--load": "x"})
    read = benchmark("survey").recipes(tmp_path)
    assert [(one.kind, one.name, one.mode) for one in read] == [("gpt", "a", "pretraining"), ("moe", "b", "inference")]
    assert read[0].variables == {"NCCL_ALGO": "Ring"}


def test_the_table_counts_every_recipe_once(benchmark: Callable[[str], ModuleType]) -> None:
    from evenload.commands.tables.show import Console

    rows = [
        {"recipe": "a", "kind": "gpt", "verdict": "cut", "why": "", "detail": ""},
        {"recipe": "b", "kind": "gpt", "verdict": "refused", "why": "no graphs", "detail": "graphs"},
        {"recipe": "c", "kind": "t5", "verdict": "refused", "why": "no GPT", "detail": "t5"},
    ]
    console = Console(record=True, width=120, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(benchmark("survey").table({"checkout": "x", "rows": rows}))
    text = console.export_text()
    assert "1  refused: no graphs" in text
    (last,) = [line for line in text.splitlines() if line.split()[:1] == ["all"]]
    assert [int(word) for word in last.split()[1:]] == [1, 0, 0, 0, 2, 0, 0, 3]


def test_rows_of_packed_conversations_hold_each_once(benchmark: Callable[[str], ModuleType]) -> None:
    rows = benchmark("sft_packs").best_fit([700, 400, 300, 600, 20])
    assert sorted(length for row in rows for length in row) == [20, 300, 400, 600, 700]
    assert max(sum(row) for row in rows) <= 1024
