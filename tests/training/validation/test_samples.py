"""Samples in a validation: they change nothing in training, and their scores go where those of losses go."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow
RECIPE = """
trainer: {trainer}
model: {{num_layers: 2, hidden_size: 32, num_attention_heads: 4, num_query_groups: 2}}
data:
  source: rows.jsonl
  max_length: 64
  long_samples: truncate
  validation: {{source: rows.jsonl, every: 2{generate}}}
parallel: {{dp: 2}}
train: {{steps: 5, global_batch_size: 6, lr: 3.0e-2, seed: 7}}
generate: {{max_new_tokens: 12, end_tokens: [10], temperature: 0.8}}
checkpoint: {{every: 2, keep: 2}}
plugins: {{packing: {{enabled: true, max_tokens: 256}}}}
"""
GENERATE = ", generate: {prompts: p.jsonl, samples: 3, score: 'rewards:vowels', answer: 'rewards:first', k: [1, 2, 3]}"
REWARDS = """
import random
import numpy as np
import torch
def vowels(prompt, text, row):
    random.random(), np.random.random(), torch.rand(3)
    with open(row["seen"], "a") as file:
        file.write(repr((row["id"], text)) + chr(10))
    return sum(letter in "aeiou" for letter in text) / max(1, len(text))
def first(text):
    return text[:1] or None
def raising(prompt, text, row):
    if row["id"] == 2:
        raise ValueError("no such answer")
    return True
def odd(prompt, text, row):
    return {"nan": float("nan"), "many": [0.5, 0.5], "large": 2}[row["gives"]] if row["id"] == 2 else True
"""
Forged = Callable[..., Any]


@pytest.fixture
def place(tmp_path: Path) -> Path:
    rows = [{"text": f"{word} {n} " * (n % 5 + 1)} for n, word in enumerate(["one", "tea", "area", "idea"] * 8)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    prompts = [{"prompt": text, "id": n, "seen": "seen.txt"} for n, text in enumerate(["one ", "tea", "a", "ide", "i"])]
    prompts[3]["max_new_tokens"] = 4
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompts))
    (tmp_path / "rewards.py").write_text(REWARDS)
    for trainer in ("megatron", "deepspeed"):
        for name, generate in ((trainer, GENERATE), (f"{trainer}-alone", "")):
            (tmp_path / f"{name}.yaml").write_text(RECIPE.format(trainer=trainer, generate=generate))
    return tmp_path


def trained(done: Any) -> tuple[list[str], list[dict[str, Any]]]:
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout)
    return [row["loss"].hex() + row["grad_norm"].hex() for row in result["steps"]], result["validation"]


def figures(rows: list[dict[str, Any]]) -> list[tuple[int, dict[str, float] | None]]:
    """Of each validation what does not depend on a clock."""
    own = [(row["step"], row["generate"]) for row in rows]
    return [(step, one and {key: value for key, value in one.items() if not key.endswith("_s")}) for step, one in own]


def refuse_other_figures(row: dict[str, Any], texts: list[tuple[int, str]]) -> None:
    """The figures of one validation against those of the texts that were scored."""
    scores = [[sum(c in "aeiou" for c in t) / max(1, len(t)) for n, t in texts if n == prompt] for prompt in range(5)]
    assert {len(own) for own in scores} == {3}
    got = row["generate"]
    assert got["score"] == pytest.approx(sum(map(sum, scores)) / 15)
    for k in (1, 2, 3):
        chances = [[any(own[i] >= 1 for i in chosen) for chosen in combinations(range(3), k)] for own in scores]
        assert got[f"pass_at_{k}"] == pytest.approx(sum(sum(one) / len(one) for one in chances) / 5)
    assert 0 <= got["maj_at_3"] <= 1
    assert {"tokens", "cut_frac", "generate_s", "score_s"} <= got.keys()


@pytest.mark.parametrize("trainer", ["megatron", "deepspeed"])
def test_samples_disturb_nothing_and_go_on_after_a_resume(trainer: str, place: Path, forged: Forged) -> None:
    recipe, best = f"{trainer}.yaml", ("checkpoint.dir=kept", "checkpoint.best=generate.score", "--json")
    alone, _ = trained(forged(place, "train", f"{trainer}-alone.yaml", "--json"))
    done = forged(place, "train", recipe, "log.jsonl=steps.jsonl", "log.tensorboard=board", "--json")
    steps, rows = trained(done)
    assert steps == alone, "to the last bit"
    assert [row["step"] for row in rows] == [0, 2, 4, 5]
    seen = [eval(line) for line in (place / "seen.txt").read_text().splitlines()]
    for number, row in enumerate(rows):
        refuse_other_figures(row, seen[15 * number : 15 * number + 15])
    assert "its samples: score 0." in done.stderr
    lines = [json.loads(line) for line in (place / "steps.jsonl").read_text().splitlines()]
    assert [line["validation"]["generate"] for line in lines if "validation" in line] == [r["generate"] for r in rows]
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(place / "board")).Reload()
    shown = [event.value for event in board.Scalars("evenload/validation/generate/maj_at_2")]
    assert shown == pytest.approx([row["generate"]["maj_at_2"] for row in rows], rel=1e-6)

    first_steps, first_rows = trained(forged(place, "train", recipe, "train.steps=2", *best))
    more_steps, more_rows = trained(forged(place, "train", recipe, *best))
    assert first_steps + more_steps == steps
    assert figures([*first_rows, *more_rows]) == figures(rows)
    highest = max(rows[1:], key=lambda row: row["generate"]["score"])["step"]
    assert (place / "kept" / "best" / "latest").read_text() == f"step{highest:08d}"


def test_fewer_validations_have_samples_and_other_ranks_the_same(place: Path, forged: Forged) -> None:
    _, rows = trained(forged(place, "train", "megatron.yaml", "train.dtype=fp64", "--json"))
    words = ("train.dtype=fp64", "data.validation.generate.every=2", "parallel.dp=1", "parallel.tp=2", "--json")
    _, fewer = trained(forged(place, "train", "megatron.yaml", *words))
    assert [row["generate"] is not None for row in fewer] == [True, False, True, True]
    for (_, one), (_, other) in zip(figures(rows), figures(fewer), strict=True):
        assert other is None or other == one


FAULTS = {
    "raising": ({}, "rewards:raising", "raised ValueError for a sample of prompt 2: no such answer"),
    "no number": ({"gives": "nan"}, "rewards:odd", "gave nan for a sample of prompt 2"),
    "another count": ({"gives": "many"}, "rewards:odd", "gave [0.5, 0.5] for a sample of prompt 2"),
    "beyond 1": ({"gives": "large"}, "rewards:odd", "gave 2 for a sample of prompt 2"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_score_that_is_none_ends_the_training_with_one_message(name: str, place: Path, forged: Forged) -> None:
    more, function, text = FAULTS[name]
    rows = [json.loads(line) | more for line in (place / "p.jsonl").read_text().splitlines()]
    (place / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = forged(place, "train", "megatron.yaml", f"data.validation.generate.score={function}", "--json")
    assert done.returncode == 1
    assert done.stderr.count(text) == 1, done.stderr
    assert "prompt: 'a'" in done.stderr


BAD = {
    "no prompts": ("", "", "has no prompt"),
    "prompts beyond the model": (json.dumps({"prompt": "a" * 60}), "", "prompt 0 and what may follow are longer"),
    "no end token": ('{"prompt": "a"}', "generate.end_tokens=null", "nothing says which token ends a sample"),
    "no module": ('{"prompt": "a"}', "data.validation.generate.score=nowhere:f", "No module named 'nowhere'"),
    "no function": ('{"prompt": "a"}', "data.validation.generate.answer=rewards:np", "names no function"),
    "a model that does not generate": (
        '{"prompt": "a"}',
        "plugins.pipeline={enabled: true, v_shape: true}",
        "data.validation.generate: generation does not run two stages a device",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_sampled_is_refused_before_the_first_step(name: str, place: Path, forged: Forged) -> None:
    prompts, word, text = BAD[name]
    (place / "p.jsonl").write_text(prompts)
    ranks = ("parallel.pp=2", "parallel.dp=1", "model.num_layers=4") if "v_shape" in word else ()
    done = forged(place, "train", "megatron.yaml", *filter(None, [word]), *ranks, "log.jsonl=steps.jsonl")
    assert done.returncode == 2, done.stderr[-2000:]
    assert text in done.stderr
    assert not (place / "steps.jsonl").exists() or not (place / "steps.jsonl").read_text()
