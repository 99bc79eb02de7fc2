"""Validation of a run: it changes nothing in training, a resumed run goes on with its series, and the best is kept."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from evenload.training.checkpoint.manifest import read as load_manifest

pytestmark = pytest.mark.slow
RECIPE = """
trainer: {trainer}
model: {{num_layers: 2, hidden_size: 32, num_attention_heads: 4, num_query_groups: 2}}
data: {{max_length: 256, long_samples: truncate, validation: {validation}}}
parallel: {{dp: 2}}
train: {{steps: 5, global_batch_size: 6, lr: 1.0e-2}}
checkpoint: {{every: 2, keep: 2}}
plugins: {{packing: {{enabled: true, max_tokens: 512}}}}
"""
LENGTHS = (90, 256, 17, 140, 61, 33, 250, 8, 120, 45)
VALIDATION = "{source: held_out.jsonl, every: 2}"
Forged = Callable[..., Any]


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with held-out samples, a third of which is masked and of one all, and recipes with and without them."""
    rows = []
    for i, length in enumerate(LENGTHS):
        ids = [(7 * i + k * k) % 251 for k in range(length)]
        masked = length if i == 3 else length // 3
        rows.append({"input_ids": ids, "labels": [-100] * masked + ids[masked:]})
    (tmp_path / "held_out.jsonl").write_text("\n".join(map(json.dumps, rows)))
    for trainer in ("megatron", "deepspeed"):
        for name, validation in ((trainer, VALIDATION), (f"{trainer}-alone", "null")):
            (tmp_path / f"{name}.yaml").write_text(RECIPE.format(trainer=trainer, validation=validation))
    return tmp_path


def trained(done: Any) -> tuple[list[str], list[tuple[int, str]]]:
    """Losses of steps, and those of validations with the number of steps before, bit for bit."""
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout)
    steps = [row["loss"].hex() + row["grad_norm"].hex() for row in result["steps"]]
    return steps, [(row["step"], row["loss"].hex()) for row in result["validation"]]


def refuse_other_logs(place: Path, series: list[tuple[int, str]]) -> None:
    """Logs have a line for each step and each validation, in the order in which they ran."""
    lines = [json.loads(line) for line in (place / "steps.jsonl").read_text().splitlines()]
    places = ["validation" in line for line in lines]
    assert places == [True, False, False, True, False, False, True, False, True]
    assert [(r["step"], r["loss"].hex()) for line in lines if (r := line.get("validation"))] == series
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(place / "board")).Reload()
    shown = [(event.step, event.value) for event in board.Scalars("evenload/validation/loss")]
    assert shown == [(step, pytest.approx(float.fromhex(loss), rel=1e-6)) for step, loss in series]


@pytest.mark.parametrize("trainer", ["megatron", "deepspeed"])
def test_validation_disturbs_nothing_and_goes_on_after_a_resume(trainer: str, place: Path, forged: Forged) -> None:
    recipe, saved = f"{trainer}.yaml", ("checkpoint.dir=kept", "checkpoint.best=true", "--json")
    alone, none = trained(forged(place, "train", f"{trainer}-alone.yaml", "--json"))
    assert not none
    steps, series = trained(forged(place, "train", recipe, "log.jsonl=steps.jsonl", "log.tensorboard=board", "--json"))
    assert steps == alone
    assert [step for step, _ in series] == [0, 2, 4, 5]
    refuse_other_logs(place, series)
    first_steps, first_series = trained(forged(place, "train", recipe, "train.steps=2", *saved))
    resumed = forged(place, "train", recipe, *saved)
    more_steps, more_series = trained(resumed)
    assert (first_steps + more_steps, first_series + more_series) == (steps, series)
    best = min(series[1:], key=lambda row: float.fromhex(row[1]))[0]
    assert (place / "kept" / "best" / "latest").read_text() == f"step{best:08d}"
    assert [d.name for d in (place / "kept" / "best").iterdir() if d.is_dir()] == [f"step{best:08d}"]
    state = load_manifest(place / "kept" / "step00000005").state
    assert state["validation"]["best"].hex() == min(series[1:], key=lambda row: float.fromhex(row[1]))[1]
    goes_on = forged(place, "train", recipe, "train.steps=6", "checkpoint.dir=kept/best", "--json")
    assert f"resumed from kept/best/step{best:08d}" in goes_on.stderr
    rows = json.loads(resumed.stdout)["validation"]
    targets = sum(n - n // 3 for i, n in enumerate(LENGTHS) if i != 3)
    assert [(row["sequences"], row["targets"], row["without_target"]) for row in rows] == [(9, targets, 1)] * len(rows)
