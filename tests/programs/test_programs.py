"""LLaMA-Factory, Axolotl and ms-swift, each by its own command and YAML: what they print is what they print without
evenload. Run by `make test-hosts`, each in an environment of its own; elsewhere there is nothing to run."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
HERE = [name for name in ("llamafactory", "axolotl", "swift") if Path(sys.prefix).name == f".venv-{name}"]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import programs

    folder = tmp_path_factory.mktemp("data")
    programs.make(folder)
    return folder


@pytest.mark.parametrize("tuning", ["full", "lora"])
@pytest.mark.parametrize("name", HERE)
def test_losses_and_norms_are_stock_to_the_printed_digit(name: str, tuning: str, data: Path, tmp_path: Path) -> None:
    import programs

    runs: list[Any] = []
    for recipe in ("", programs.RECIPE):
        runs.append(programs.train(name, tuning, data, tmp_path / str(len(runs)), recipe))
        assert runs[-1].code == 0, runs[-1].output[-6000:]
    stock, planned = runs
    assert "planned 6 steps of Transformers' Trainer with packing" in planned.output
    assert len(stock.printed()) == 6
    assert planned.printed() == stock.printed()
    assert planned.tokens < 0.85 * stock.tokens
