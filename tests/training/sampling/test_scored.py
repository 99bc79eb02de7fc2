"""Functions of users draw what they like: what training draws next is the same. Figures of samples against all choices
of them and votes by hand, from what a host has generated to what a log has."""

import json
import random
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import combinations
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from evenload.api import load_recipe
from evenload.core import dealers
from evenload.core.cascade import rescored
from evenload.core.errors import RankError
from evenload.core.function_rows import FunctionRow, FunctionRows
from evenload.core.recipe.generated import ScoredSamples
from evenload.runtime.generate.request import Completion
from evenload.training.sampling import scored, scorers
from evenload.training.sampling.figures import pass_at
from evenload.training.sampling.scored import SampleScores, unchanged_random_states


def drawn():
    return random.random(), float(np.random.random()), float(torch.rand(1))


@pytest.mark.parametrize("raises", [False, True])
def test_random_states_are_those_of_before(raises):
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    want = drawn()
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])
    try:
        with unchanged_random_states():
            drawn()
            torch.manual_seed(3)
            if raises:
                raise ValueError
    except ValueError:
        assert raises
    assert drawn() == want


REWARDS = """
def told(prompt, text, row):
    assert prompt == row["prompt"]
    return row["scores"][text.strip()]
def off(prompt, text, row):
    return min(1.0, row["scores"][text.strip()] + 0.25 * (len(text) % 2))
def half(prompt, text, row):
    return 0.5
def vote(text):
    return {"none": None}.get(text.strip(), text.strip()[:1])
"""
SCORES = {"a1": 0.5, "a2": 0.0, "b": 1.0, "none": 0.75, "c": 0.25}
SAID = (("a1", "b", "a2", "none"), ("none", "b", "a1", "a2"), ("c", "b ", "b", "c "))
"""[prompts, samples] texts."""
ENDED = ("end", "stop", "limit")
"""By prompt."""


@pytest.fixture
def figures(tmp_path, monkeypatch):
    """``figures(**settings)``: what a validation with prompts that are answered so comes to."""
    (tmp_path / "told_rewards.py").write_text(REWARDS)
    prompts = tmp_path / "p.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": word, "scores": SCORES}) + "\n" for word in ("x", "yy", "z z")))
    monkeypatch.syspath_prepend(str(tmp_path))
    recipe = load_recipe("quickstart", ["generate.stop=[;]", "generate.end_tokens=[10]"])

    def completion(prompt, sample):
        how = ENDED[prompt]
        tokens = tuple((SAID[prompt][sample] + {"end": "\n", "stop": ";", "limit": ""}[how]).encode())
        return Completion(prompt, sample, tokens, (0.0,) * len(tokens), how)

    def generated(requests, settings, mark, dealer):
        run.settings.append(settings)
        run.dealers.append(dealer)
        return tuple(completion(one.number, sample) for one in requests for sample in one.samples)

    def run(times=1, keys=None, **more):
        config = ScoredSamples(
            **{"prompts": prompts, "samples": 4, "score": "told_rewards:told", "k": (1, 2, 3, 4)} | more
        )
        watchdog = SimpleNamespace(working=lambda *_: nullcontext(), at=lambda *_: None)
        scores = SampleScores(recipe.changed({"generate.keys": keys}), "bytes", config)
        return [scores.run(SimpleNamespace(generate=generated), watchdog, step) for step in range(times)][-1]

    run.settings, run.dealers = [], []
    return run


@pytest.mark.parametrize("passes", [0.25, 0.5, 0.75, 1.0])
def test_figures_are_those_of_every_choice_of_samples(figures, passes):
    """A score of just ``passes`` passes."""
    assert pass_at(2000, np.array([1]), 4000) == pytest.approx(0.5), "where choices are too many to be counted"
    row = figures(passes=passes)
    right = [[SCORES[text.strip()] >= passes for text in said] for said in SAID]
    for k in (1, 2, 3, 4):
        chances = [np.mean([any(choice) for choice in combinations(own, k)]) for own in right]
        assert row[f"pass_at_{k}"] == pytest.approx(np.mean(chances), abs=1e-12), k
    assert row["score"] == pytest.approx(np.mean([SCORES[text.strip()] for said in SAID for text in said]))
    assert row["cut_frac"] == pytest.approx(1 / 3), "a stop string cuts nothing"
    texts = [len(text) + (how != "limit") for said, how in zip(SAID, ENDED, strict=True) for text in said]
    assert row["tokens"] == sum(texts)


def test_votes_are_texts_without_white_space_or_answers_of_the_users_own(figures):
    """By hand: the votes of the first k samples, and the mean score of those who gave the answer of most."""
    row = figures()
    assert row["maj_at_2"] == pytest.approx(((0.5 + 1.0) / 2 + (0.75 + 1.0) / 2 + (0.25 + 1.0) / 2) / 3)
    assert row["maj_at_3"] == pytest.approx(((0.5 + 1.0 + 0.0) / 3 + (0.75 + 1.0 + 0.5) / 3 + 1.0) / 3), "b is two"
    row = figures(answer="told_rewards:vote")
    assert row["maj_at_2"] == pytest.approx(((0.5 + 1.0) / 2 + 1.0 + (0.25 + 1.0) / 2) / 3), "none votes for nothing"
    assert row["maj_at_3"] == pytest.approx(((0.5 + 0.0) / 2 + (1.0 + 0.5) / 2 + 1.0) / 3)
    assert row["maj_at_4"] == pytest.approx(((0.5 + 0.0) / 2 + (0.5 + 0.0) / 2 + (0.25 + 1.0) / 2) / 3)
    assert "maj_at_1" not in row


def test_samples_are_drafted_by_those_of_the_last_validation(figures):
    figures(times=2)
    first, second = figures.settings
    assert (first.earlier, len(second.earlier)) == ((), 12)
    assert replace(second, earlier=()) == first


def test_samples_are_dealt_by_the_lengths_of_the_last_validation(figures, monkeypatch):
    rows = FunctionRows("dealer", FunctionRow)
    monkeypatch.setattr(dealers, "DEALERS", rows)
    figures()
    rows.register(FunctionRow("known", "builtins:tuple"))
    monkeypatch.setattr(rows, "imported", lambda row: lambda recipe, known: (row.name, len(known)))
    figures(times=2)
    assert figures.dealers == [None, ("known", 0), ("known", 12)]


def test_the_identity_is_that_of_all_that_moves_a_figure(figures, tmp_path):
    """Or the best checkpoint is compared by figures of other samples."""
    prompts = tmp_path / "p.jsonl"

    def identity(*words, **more):
        recipe = load_recipe("quickstart", ["generate.end_tokens=[10]", *words])
        config = {"prompts": prompts, "samples": 4, "score": "told_rewards:told", **more}
        return SampleScores(recipe, "bytes", ScoredSamples(**config)).identity

    assert identity(every=3) == identity() == identity("generate.drafts.by=texts")
    assert identity("generate.keys=int8") == identity()
    assert identity(rescore=0.5) == identity(), "which a single scorer does not heed"
    lists = [{"score": LIST}, {"score": LIST, "rescore": 0.5}, {"score": LIST[1:]}]
    lists.append({"score": ({**LIST[0], "unsure": (0.25, 0.5)}, *LIST[1:])})
    others = *lists, {"samples": 2}, {"passes": 0.5}, {"answer": "told_rewards:vote"}, {"score": "told_rewards:vote"}
    known = [identity(), *(identity(**one) for one in others)]
    known += [identity(word) for word in ("train.seed=9", "generate.temperature=0.5", "generate.max_new_tokens=3")]
    prompts.write_text(json.dumps({"prompt": "x", "scores": {}}) + "\n")
    known.append(identity())
    assert len(set(known)) == len(known)


def test_scores_are_those_of_keys_that_are_not_rounded(figures, caplog):
    figures(keys="int8")
    assert figures.settings[0].keys is None
    assert caplog.text.count("generate.keys has no effect on them") == 1


LIST = (
    {"by": "told_rewards:off", "unsure": (0.25, 0.75)},
    {"by": "told_rewards:off", "unsure": (0.5, 0.5)},
    {"by": "told_rewards:told"},
)


@pytest.mark.parametrize("score", ["told_rewards:told", LIST], ids=["one", "list"])
@pytest.mark.parametrize("size", [2, 3, 4, 5])
def test_scores_of_all_ranks_come_back_in_the_order_of_samples(figures, size, score, monkeypatch):
    """12 samples, which five ranks do not divide alike; a rank is a thread here."""
    figures = partial(figures, score=score, rescore=0.2)
    alone, own, parts, meet = figures(), threading.local(), [None] * size, threading.Barrier(size, timeout=60)

    def everyone(value):
        parts[own.rank] = value
        meet.wait()
        of_all = [*parts]
        meet.wait()
        return of_all

    def run(rank):
        own.rank = rank
        return figures()

    for module in (scored, scorers):
        monkeypatch.setattr(module, "rank_and_size", lambda: (own.rank, size))
    monkeypatch.setattr(scorers, "everyone", everyone)
    monkeypatch.setattr(scorers, "all_or_none", lambda work: work())
    with ThreadPoolExecutor(size) as pool:
        rows = [*pool.map(run, range(size))]
    timed = {key for key in alone if key.endswith("_s")}
    assert [{key: row[key] for key in row.keys() - timed} for row in rows] == [
        {key: alone[key] for key in alone.keys() - timed}
    ] * size


def test_figures_of_a_list_are_those_of_a_loop_over_samples(figures):
    """Scores of samples are those of the scorers that they came to; the mean alone is corrected."""
    row, seed = figures(score=LIST, rescore=0.2), load_recipe("quickstart").train.seed
    chosen = rescored([f"{prompt} {sample}" for prompt in range(3) for sample in range(4)], 0.2, seed)
    cheap, dear, counts = [], [], {"scored_1": 12, "scored_2": 0, "scored_3": 0}
    for number, text in enumerate(text for said in SAID for text in said):
        told = SCORES[text.strip()]
        score = min(1.0, told + 0.25 * (len(text) % 2))
        counts["scored_2"] += 0.25 <= score <= 0.75
        goes_on = score == 0.5
        counts["scored_3"] += goes_on or bool(chosen[number])
        cheap.append(told if goes_on else score)
        dear.append(told)
    errors = [dear[number] - cheap[number] for number in np.flatnonzero(chosen)]
    assert counts.items() <= row.items()
    assert 0 < counts["scored_3"] < counts["scored_2"] < 12
    assert row["score_uncorrected"] == pytest.approx(np.mean(cheap), abs=1e-12)
    assert row["score"] == pytest.approx(np.mean(cheap) + np.mean(errors), abs=1e-12)
    assert row["rescored"] == len(errors) == 2
    right = (np.array(cheap).reshape(3, 4) >= 1.0).sum(1)
    assert row["pass_at_2"] == pytest.approx(pass_at(2, right, 4))
    assert row["tokens"] == figures()["tokens"]
    assert "scored_1" not in figures()


def test_a_scorer_that_tells_nothing_apart_is_named_once(figures, caplog):
    """The last one may: all samples may be right."""
    figures(times=2, score=({"by": "told_rewards:half", "unsure": (0.4, 0.6)}, {"by": "told_rewards:half"}))
    said = [record.getMessage() for record in caplog.records]
    assert said == ["the scorer told_rewards:half gives each of 12 samples 0.5: it tells nothing apart"]


@pytest.mark.parametrize("score", ["1.25", "float('nan')", "'a'", "[0, 1]", "1 / 0"])
def test_a_scorer_of_a_list_that_gives_no_share_is_named(figures, tmp_path, score):
    (tmp_path / "odd_rewards.py").write_text(f"def odd(prompt, text, row): return {score}")
    sys.modules.pop("odd_rewards", None)
    with pytest.raises(RankError, match=r"data\.validation\.generate\.score\.1\.by (gave|raised)"):
        figures(score=({"by": "told_rewards:half", "unsure": (0.4, 0.6)}, {"by": "odd_rewards:odd"}))


def test_code_named_in_prompts_never_runs(figures, tmp_path):
    """Scorers come from the recipe alone, whatever a line of the data calls itself."""
    (tmp_path / "planted.py").write_text("open('ran', 'w').write('ran')\ndef score(*_): return 1.0")
    named = {"by": "planted:score", "unsure": [0, 1]}
    line = {"scores": SCORES, "score": [named], "by": "planted:score", "answer": "planted:score", "rescore": 1.0}
    prompts = tmp_path / "p.jsonl"
    prompts.write_text("".join(json.dumps(line | {"prompt": word}) + "\n" for word in ("x", "yy", "z z")))
    assert figures(score=LIST)["rescored"] == 2
    assert "planted" not in sys.modules
