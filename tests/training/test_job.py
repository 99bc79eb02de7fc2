"""What a rank reads of a batch: the tokens of its samples, and which of them carry loss."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from evenload.api import load_plugins
from evenload.core.planning.planner import Draw
from evenload.core.recipe.recipe import parse
from evenload.training.job import Job
from evenload.training.preflight import preflight

NOBODY: Any = None
ROWS: list[dict[str, Any]] = [{"prompt": "a" * n, "completion": "b" * (n % 4)} for n in range(1, 13)]


@pytest.fixture
def ready(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("EVENLOAD_CACHE", str(tmp_path / "cache"))
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in ROWS))
    load_plugins()
    return preflight(parse({"data": {"source": str(tmp_path / "rows.jsonl")}, "train": {"global_batch_size": 6}}))


def test_the_labels_of_a_draw_are_those_of_its_samples(ready: Any) -> None:
    job = Job(ready.recipe, NOBODY, NOBODY, ready.chain, NOBODY, ready.source)
    drawing = job.drawing()
    draws = [drawing(), drawing()]
    assert [draw.without_target for draw in draws] == [6 - len(draw.samples) for draw in draws]
    assert sum(draw.without_target for draw in draws) == 3
    for draw in draws:
        labels, tokens = job.labels_of(draw), job.tokens_of(draw)
        assert labels is not None
        for place, sample in enumerate(draw.samples.tolist()):
            row = ROWS[sample]
            assert bytes(tokens(place).tolist()).decode() == row["prompt"] + row["completion"]
            assert (labels.of(place) != -100).sum() == labels.targets[place] == len(row["completion"])


def test_without_targets_of_its_own_a_batch_has_no_labels(ready: Any) -> None:
    job = Job(ready.recipe, NOBODY, NOBODY, ready.chain, NOBODY, ready.source)
    assert job.labels_of(Draw(np.arange(3), np.arange(3), {})) is None
