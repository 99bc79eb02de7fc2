"""Validation of a run and its samples: they change nothing in training, a resumed run goes on with their series, and
the best is kept."""

import json
import shutil
from itertools import combinations

import pytest
from evenload.training.checkpoint.manifest import read as load_manifest

pytestmark = pytest.mark.slow
RECIPE = """
trainer: {trainer}
model: {{num_layers: 2, hidden_size: 32, num_attention_heads: 4, num_query_groups: 2}}
data:
  source: rows.jsonl
  max_length: 64
  long_samples: truncate
  validation:
    source: held_out.jsonl
    every: 2
    generate: {{prompts: p.jsonl, samples: 3, score: 'rewards:vowels', answer: 'rewards:first', k: [1, 2, 3]}}
parallel: {{dp: 2}}
train: {{steps: 5, global_batch_size: 6, lr: 3.0e-2, seed: 7, dtype: {dtype}}}
generate: {{max_new_tokens: 12, end_tokens: [10], temperature: 0.8}}
checkpoint: {{every: 2, keep: 9}}
plugins: {{packing: {{enabled: true, max_tokens: 256}}}}
"""
DTYPES = {"megatron": "fp64", "deepspeed": "fp32"}
BEST = {"megatron": "true", "deepspeed": "generate.score"}
LENGTHS = (23, 64, 5, 35, 15, 9, 62, 3, 30, 11)
REWARDS = """
import random
import numpy as np
import torch
def vowels(prompt, text, row):
    random.random(), np.random.random(), torch.rand(3)
    with open(row["seen"], "a") as file:
        file.write(repr((row["id"], text)) + chr(10))
    return sum(letter in "aeiou" for letter in text) / max(1, len(text))
def careful(prompt, text, row):
    random.random(), np.random.random(), torch.rand(3)
    return len(set(text)) / max(1, len(text))
def asleep(prompt, text, row):
    import os, time
    time.sleep(600 if os.environ["RANK"] == "1" else 0)
    return 1.0
def first(text):
    return text[:1] or None
def raising(prompt, text, row):
    if row["id"] == 2:
        raise ValueError("no such answer")
    return True
"""


def written(folder, trainer):
    """A folder with samples, held-out ones (a third of each masked, of one all), prompts, rewards and a recipe."""
    rows = [{"text": f"{word} {n} " * (n % 5 + 1)} for n, word in enumerate(["one", "tea", "area", "idea"] * 8)]
    prompts = [{"prompt": text, "id": n, "seen": "seen.txt"} for n, text in enumerate(["one ", "tea", "a", "ide", "i"])]
    prompts[3]["max_new_tokens"] = 4
    held_out = []
    for i, length in enumerate(LENGTHS):
        ids = [(7 * i + k * k) % 251 for k in range(length)]
        masked = length if i == 3 else length // 3
        held_out.append({"input_ids": ids, "labels": [-100] * masked + ids[masked:]})
    for name, content in (("rows", rows), ("p", prompts), ("held_out", held_out)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in content))
    (folder / "rewards.py").write_text(REWARDS)
    (folder / "r.yaml").write_text(RECIPE.format(trainer=trainer, dtype=DTYPES[trainer]))
    return folder


class Runs:
    """Runs of a trainer: without a validation, with one, and one that goes on from the second step of that."""

    def __init__(self, trainer, place, forged):
        self.trainer, self.place, self._forged = trainer, place, forged
        best = f"checkpoint.best={BEST[trainer]}"
        self.alone, none = self.run("data.validation=null")
        assert not none
        self.steps, self.rows = self.run("checkpoint.dir=kept", best, "log.jsonl=steps.jsonl", "log.tensorboard=board")
        self.said, self.seen = self.newest.stderr, (place / "seen.txt").read_text().splitlines()
        shutil.copytree(place / "kept" / "step00000002", place / "resumed" / "step00000002")
        self.more = self.run("checkpoint.dir=resumed", best)

    def run(self, *words):
        """Losses and norms of steps, bit for bit, and what its validations came to."""
        self.newest = self._forged(self.place, "train", "r.yaml", *words, "--json")
        assert self.newest.returncode == 0, self.newest.stderr[-3000:]
        result = json.loads(self.newest.stdout)
        return [row["loss"].hex() + row["grad_norm"].hex() for row in result["steps"]], result["validation"]

    @property
    def best(self):
        """The step of the best validation after the first step."""
        if BEST[self.trainer] == "true":
            return min(self.rows[1:], key=lambda row: row["loss"])["step"]
        return max(self.rows[1:], key=lambda row: row["generate"]["score"])["step"]


@pytest.fixture(scope="module", params=DTYPES)
def runs(request, tmp_path_factory, forged):
    return Runs(request.param, written(tmp_path_factory.mktemp(request.param), request.param), forged)


def figures(rows):
    """Of each validation what does not depend on a clock."""
    own = [(row["step"], row["loss"].hex(), row["best"], row["generate"] or {}) for row in rows]
    return [(*one, {key: value for key, value in of.items() if not key.endswith("_s")}) for *one, of in own]


def test_they_disturb_nothing_and_go_on_after_a_resume(runs):
    assert runs.steps == runs.alone, "to the last bit"
    assert [row["step"] for row in runs.rows] == [0, 2, 4, 5]
    steps, rows = runs.more
    assert (steps, figures(rows)) == (runs.steps[2:], figures(runs.rows[2:]))
    targets = sum(n - n // 3 for i, n in enumerate(LENGTHS) if i != 3)
    assert {(row["sequences"], row["targets"], row["without_target"]) for row in runs.rows} == {(9, targets, 1)}


def test_the_best_is_kept_and_is_a_checkpoint_to_go_on_from(runs):
    kept, best = runs.place / "kept", runs.best
    assert (kept / "best" / "latest").read_text() == f"step{best:08d}"
    assert [d.name for d in (kept / "best").iterdir() if d.is_dir()] == [f"step{best:08d}"]
    if BEST[runs.trainer] == "true":
        state = load_manifest(kept / "step00000005").state
        assert state["validation"]["best"] == min(row["loss"] for row in runs.rows[1:])
    runs.run("train.steps=6", "checkpoint.dir=kept/best", "parallel.dp=1")
    assert f"resumed from kept/best/step{best:08d}" in runs.newest.stderr


def test_logs_have_a_line_for_each_step_and_each_validation_in_their_order(runs):
    lines = [json.loads(line) for line in (runs.place / "steps.jsonl").read_text().splitlines()]
    assert ["validation" in line for line in lines] == [True, False, False, True, False, False, True, False, True]
    of_log = [line["validation"] for line in lines if "validation" in line]
    for key in ("step", "loss", "generate"):
        assert [row[key] for row in of_log] == [row[key] for row in runs.rows]
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(runs.place / "board")).Reload()
    shown = {name: board.Scalars(f"evenload/validation/{name}") for name in ("loss", "generate/maj_at_2")}
    assert [event.step for event in shown["loss"]] == [row["step"] for row in runs.rows]
    assert [event.value for event in shown["loss"]] == pytest.approx([row["loss"] for row in runs.rows], rel=1e-6)
    voted = [row["generate"]["maj_at_2"] for row in runs.rows]
    assert [event.value for event in shown["generate/maj_at_2"]] == pytest.approx(voted, rel=1e-6)


def test_figures_are_those_of_the_texts_that_were_scored(runs):
    assert "its samples: score 0." in runs.said
    seen = [eval(line) for line in runs.seen]
    for number, row in enumerate(runs.rows):
        texts = seen[15 * number : 15 * number + 15]
        scores = [
            [sum(c in "aeiou" for c in t) / max(1, len(t)) for n, t in texts if n == prompt] for prompt in range(5)
        ]
        assert {len(own) for own in scores} == {3}
        got = row["generate"]
        assert got["score"] == pytest.approx(sum(map(sum, scores)) / 15)
        for k in (1, 2, 3):
            chances = [[any(own[i] >= 1 for i in chosen) for chosen in combinations(range(3), k)] for own in scores]
            assert got[f"pass_at_{k}"] == pytest.approx(sum(sum(one) / len(one) for one in chances) / 5)
        assert 0 <= got["maj_at_3"] <= 1
        assert {"tokens", "cut_frac", "generate_s", "score_s"} <= got.keys()


@pytest.mark.parametrize("runs", ["megatron"], indirect=True)
def test_fewer_validations_have_samples_and_other_ranks_the_same(runs):
    best = "checkpoint.dir=other", "checkpoint.best=generate.score"
    _, fewer = runs.run("data.validation.generate.every=2", "parallel.dp=1", "parallel.tp=2", *best)
    assert [row["generate"] is not None for row in fewer] == [True, False, True, True]
    for (*_, one), (*_, other) in zip(figures(runs.rows), figures(fewer), strict=True):
        assert other in ({}, one)
    highest = max(fewer[2:], key=lambda row: row["generate"]["score"])["step"]
    assert (runs.place / "other" / "best" / "latest").read_text() == f"step{highest:08d}"


LIST = "data.validation.generate.score=[{by: 'rewards:vowels', unsure: [0.1, 0.4]}, {by: 'rewards:%s'}]"


@pytest.mark.parametrize("runs", ["megatron"], indirect=True)
def test_a_list_of_scorers_trains_alike_and_goes_on_after_a_kill_on_other_ranks(runs):
    words = LIST % "careful", "data.validation.generate.rescore=0.3"
    steps, rows = runs.run(*words, "checkpoint.dir=listed")
    assert "its samples: score 0." in runs.newest.stderr
    assert " to 0." in runs.newest.stderr
    assert steps == runs.steps, "to the last bit, as with one scorer"
    assert {row["generate"]["scored_1"] for row in rows} == {15}
    assert {0, 15}.isdisjoint(row["generate"]["scored_2"] for row in rows)
    assert all(
        row["generate"]["score_low"] <= row["generate"]["score"] <= row["generate"]["score_high"] for row in rows
    )
    shutil.copytree(runs.place / "listed" / "step00000002", runs.place / "killed" / "step00000002")
    _, after = runs.run(*words, "checkpoint.dir=killed", "parallel.dp=1")
    for (*_, one), (*_, other) in zip(figures(rows[2:]), figures(after), strict=True):
        assert one == pytest.approx(other, abs=1e-12)


@pytest.fixture
def place(tmp_path):
    return written(tmp_path, "megatron")


def test_a_score_that_is_none_ends_the_training_with_one_message(place, forged):
    done = forged(place, "train", "r.yaml", "data.validation.generate.score=rewards:raising", "--json")
    assert done.returncode == 1
    text = "raised ValueError for a sample of prompt 2: no such answer"
    assert done.stderr.count(text) == 1, done.stderr
    assert "prompt: 'a'" in done.stderr


@pytest.mark.full
def test_a_scorer_that_hangs_is_named(place, forged):
    done = forged(place, "train", "r.yaml", LIST % "asleep", "data.validation.generate.rescore=1", "safety.stuck_s=5")
    assert done.returncode == 1
    assert "rank 1" in done.stderr
    assert "scoring the samples of the validation by rewards:asleep" in done.stderr


BAD = {
    "no function of a list": ((LIST % "none",), "data.validation.generate.score.1.by cannot be imported"),
    "no end token": (("generate.end_tokens=null",), "nothing says which token ends a sample"),
    "no module": (("data.validation.generate.score=nowhere:f",), "No module named 'nowhere'"),
    "no function": (("data.validation.generate.answer=rewards:np",), "names no function"),
    "a model that does not generate": (
        ("plugins.pipeline={enabled: true, v_shape: true}", "parallel.pp=2", "model.num_layers=4"),
        "data.validation.generate: generation does not run two stages a device",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_sampled_is_refused_before_the_first_step(name, place, forged):
    words, text = BAD[name]
    done = forged(place, "train", "r.yaml", "parallel.dp=1", *words, "log.jsonl=steps.jsonl")
    assert done.returncode == 2, done.stderr[-2000:]
    assert text in done.stderr
    assert not (place / "steps.jsonl").exists() or not (place / "steps.jsonl").read_text()
