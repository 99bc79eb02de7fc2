"""`generate.collect`: which samples are kept is the same on any ranks, through kills and resumes, and is said."""

import json

import pytest
from evenload.api import load_recipe
from evenload.core.errors import EvenloadError
from evenload.plugins.rollout import generate as verb
from evenload.plugins.rollout.generate import mark_of, resolve_request
from evenload.runtime.generate.request import Completion

RECIPE = """
trainer: megatron
model: {num_layers: 2, hidden_size: 32, num_attention_heads: 4, num_query_groups: 2, vocab_size: 256}
data: {max_length: 64}
parallel: {dp: null}
train: {dtype: fp64, seed: 5}
generate:
  max_new_tokens: 40
  end_tokens: [10, 60, 110, 160, 200, 201, 202]
  slots: 3
  collect: {keep: 2, of: 5, every: 4, prune: {score: "process:even", below: 0.45, most: 2}}
"""
PROCESS = """
import os
def even(prompt, text, row):
    value = sum(map(ord, text)) % 97 / 97
    return value if os.environ["RANK"] == row.get("judge", os.environ["RANK"]) else 1 - value
def odd(prompt, text, row):
    return 0.25
def none(prompt, text, row):
    return float("nan") if prompt == "import os" else 0.0
"""
PROMPTS = ["def f(x):", "import os", [7, 8, 9, 200], "class A:\\n    pass"]
KILLED = """
import os, signal
import evenload.plugins.rollout.sample_file as files
line = files.SampleFile._line
made = []
def dying(file, sample):
    made.append(sample)
    if len(made) == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return line(file, sample)
files.SampleFile._line = dying
"""


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    return written(tmp_path)


def written(folder):
    """The folder with a recipe, prompts, and what gives samples their scores."""
    (folder / "r.yaml").write_text(RECIPE)
    (folder / "p.jsonl").write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS))
    (folder / "process.py").write_text(PROCESS)
    return folder


def generate(forge, place, out, ranks, *words, planted=""):
    command = ("generate", "r.yaml", *words, "--prompts", "p.jsonl", "--out", out, "--json")
    return forge("megatron").run(place, command, ranks, planted, limit_s=120)


def kept(path):
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [(row["prompt"], row["sample"], tuple(row["tokens"]), row["score"], row["ended"]) for row in rows]


@pytest.fixture(scope="module")
def want(tmp_path_factory, forge):
    """What one rank keeps that makes one sample after the other."""
    place = written(tmp_path_factory.mktemp("alone"))
    alone = json.loads(generate(forge, place, "alone.jsonl", 1, "generate.slots=1").stdout)
    row = alone["collected"]
    assert (alone["samples"], row["kept"], row["kept"] + row["pruned"] + row["left"]) == (8, 8, 20)
    assert row["pruned"] > 0
    assert row["tokens"] < row["tokens_of_all"]
    assert row["kept_tokens"] < row["mean_tokens"]
    rows = kept(place / "alone.jsonl")
    assert [sample[0] for sample in rows] == [0, 0, 1, 1, 2, 2, 3, 3]
    return rows


@pytest.mark.slow
def test_what_is_kept_is_the_same_on_any_ranks_and_after_a_kill(place, forge, want):
    killed = generate(forge, place, "out.jsonl", 2, "generate.slots=64", planted=KILLED)
    assert killed.returncode != 0
    assert not (place / "out.jsonl").exists()
    on = json.loads(generate(forge, place, "out.jsonl", 1, "generate.cache_tokens=112").stdout)
    assert on["samples_before"] in (2, 4), "prompts that are decided stay"
    assert kept(place / "out.jsonl") == want
    again = json.loads(generate(forge, place, "out.jsonl", 2).stdout)
    assert (again["samples_before"], again["tokens"], again["collected"]) == (8, 0, None)
    whole = generate(forge, place, "whole.jsonl", 2, "generate.collect=null", "--samples", "5")
    assert whole.returncode == 0
    samples = [json.loads(line) for line in (place / "whole.jsonl").read_text().splitlines()]
    tokens = {(row["prompt"], row["sample"]): tuple(row["tokens"]) for row in samples}
    assert all(tokens[sample[:2]] == sample[2] for sample in want)
    first = generate(forge, place, "first.jsonl", 1, "generate.collect.prune=null")
    assert first.returncode == 0
    shortest = {p: sorted((len(tokens[p, s]), s) for s in range(5))[:2] for p in range(4)}
    lines = [json.loads(line) for line in (place / "first.jsonl").read_text().splitlines()]
    assert {(row["prompt"], row["sample"]) for row in lines} == {(p, s) for p in shortest for _, s in shortest[p]}
    assert "score" not in lines[0]


@pytest.mark.slow
@pytest.mark.parametrize("words", [("parallel.tp=2",), ("parallel.pp=2",)], ids=str)
def test_ranks_that_hold_the_model_together_take_the_scores_of_one(words, place, forge, want):
    """The function gives two ranks unlike scores."""
    judge = "0" if "tp" in words[0] else "1"
    rows = [{"prompt": prompt, "judge": judge} for prompt in PROMPTS]
    (place / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = generate(forge, place, "out.jsonl", 2, *words)
    assert done.returncode == 0, done.stderr[-2000:]
    assert kept(place / "out.jsonl") == want


@pytest.mark.slow
def test_lists_of_scorers_keep_what_the_one_keeps_that_decides(place, forge, want):
    """The cheap one where nothing goes on, the dear one where all do; a share that is rescored moves nothing."""
    words = "generate.collect.prune.score=[{by: 'process:%s', unsure: %s}, {by: 'process:%s'}]"
    rescore = "generate.collect.prune.rescore=0.4"
    cheap = generate(forge, place, "cheap.jsonl", 2, words % ("even", "[2, 3]", "odd"), rescore)
    assert kept(place / "cheap.jsonl") == want
    row = json.loads(cheap.stdout)["scorers"]
    assert row["rescored"] == row["scored_2"] < row["scored_1"]
    assert row["score_low"] < row["score"] < row["score_high"]
    assert row["score"] == pytest.approx(0.25, abs=0.2)
    assert (
        json.loads(generate(forge, place, "cheap.jsonl", 1, words % ("even", "[2, 3]", "odd")).stdout)["scorers"]
        is None
    )
    dear = generate(
        forge, place, "dear.jsonl", 1, words % ("odd", "[0.25, 3]", "even"), "generate.collect.prune.rescore=0"
    )
    assert kept(place / "dear.jsonl") == want
    assert "generate.collect.prune: rescore is 0, so what a cheap scorer is sure of" in dear.stderr
    found = json.loads(dear.stdout)["scorers"]
    assert found["scored_2"] == found["scored_1"] == row["scored_1"]
    assert (found["rescored"], "score_low" in found) == (0, False)


@pytest.mark.slow
def test_a_score_that_is_no_number_ends_it_and_decided_prompts_stay(place, forge):
    done = generate(forge, place, "out.jsonl", 1, "generate.slots=1", "generate.collect.prune.score=process:none")
    assert done.returncode == 1
    assert "generate.collect.prune.score gave nan for a sample of prompt 1, not a finite number" in done.stderr
    assert {row[0] for row in kept(place / "out.jsonl.part-0")} == {0}


BAD = {
    "more than there are": (["generate.collect.keep=6"], 1, "keep is not from 1 to of"),
    "another number of samples": ([], 4, "both say how many samples there are"),
    "moves": (["generate.move_every=8"], 1, "samples of which some are kept stay on one rank"),
    "no function": (["generate.collect.prune.score=process:nothing"], 1, "has no attribute 'nothing'"),
    "a score that is no number": (["generate.collect.prune.below=.nan"], 1, "generate.collect.prune.below"),
}


@pytest.mark.parametrize("name", BAD)
def test_rules_that_cannot_be_are_refused_before_a_rank_starts(name, place, monkeypatch):
    words, samples, text = BAD[name]
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(EvenloadError, match=text):
        resolve_request(load_recipe(place / "r.yaml", words), place / "p.jsonl", place / "o.jsonl", samples)


def test_what_is_kept_is_part_of_the_mark_of_a_run(place):
    def run(*words, samples=1):
        return mark_of(
            resolve_request(load_recipe(place / "r.yaml", words), place / "p.jsonl", place / "o.jsonl", samples)
        )

    assert run(samples=5) == run()
    words = "generate.collect.keep=3", "generate.collect.prune.below=0.1", "generate.collect=null"
    assert len({run(), *map(run, words)}) == 4
    before, free = run(), run("generate.collect.prune=null")
    rows = [{"prompt": prompt, "judge": "1"} for prompt in PROMPTS]
    (place / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert (run() == before, run("generate.collect.prune=null") == free) == (False, True), "scores may be of the fields"


def test_of_a_prompt_that_is_not_decided_nothing_stays(place):
    """A kill between the lines of a prompt leaves some of its samples: which others are kept was never written."""
    wanted = resolve_request(load_recipe(place / "r.yaml"), place / "p.jsonl", place / "o.jsonl", 1)

    def made(*numbers):
        return [Completion(prompt, sample, (1,), (0.0,), "end", 0.5) for prompt, sample in numbers]

    there = made((0, 4), (1, 2), (2, 0), (0, 1), (3, 3), (3, 0))
    stay, left = verb._left(wanted, there)
    assert sorted(stay) == sorted(made((0, 1), (0, 4), (3, 0), (3, 3)))
    assert [one.samples for one in left] == [(), (0, 1, 2, 3, 4), (0, 1, 2, 3, 4), ()]
    whole = resolve_request(
        load_recipe(place / "r.yaml", ["generate.collect=null"]), place / "p.jsonl", place / "o.jsonl", 5
    )
    stay, left = verb._left(whole, there)
    assert stay == there
    assert [one.samples for one in left] == [(0, 2, 3), (0, 1, 3, 4), (1, 2, 3, 4), (1, 2, 4)]
