"""Functions of users draw what they like: what training draws next is the same. Figures of samples against all choices
of them and votes by hand, from what a host has generated to what a log has."""

import json
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from itertools import combinations
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from evenload.api import load_recipe
from evenload.core.recipe.generated import ScoredSamples
from evenload.runtime.generate.request import Completion
from evenload.training.sampling import scored
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

    def generated(requests, settings, mark):
        run.settings.append(settings)
        return tuple(completion(one.number, sample) for one in requests for sample in one.samples)

    def run(times=1, **more):
        config = ScoredSamples(prompts=prompts, samples=4, score="told_rewards:told", k=(1, 2, 3, 4), **more)
        watchdog = SimpleNamespace(working=lambda *_: nullcontext(), at=lambda *_: None)
        scores = SampleScores(recipe, "bytes", config)
        return [scores.run(SimpleNamespace(generate=generated), watchdog, step) for step in range(times)][-1]

    run.settings = []
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


def test_the_identity_is_that_of_all_that_moves_a_figure(figures, tmp_path):
    """Or the best checkpoint is compared by figures of other samples."""
    prompts = tmp_path / "p.jsonl"

    def identity(*words, **more):
        recipe = load_recipe("quickstart", ["generate.end_tokens=[10]", *words])
        config = {"prompts": prompts, "samples": 4, "score": "told_rewards:told", **more}
        return SampleScores(recipe, "bytes", ScoredSamples(**config)).identity

    assert identity(every=3) == identity() == identity("generate.drafts.by=texts")
    others = {"samples": 2}, {"passes": 0.5}, {"answer": "told_rewards:vote"}, {"score": "told_rewards:vote"}
    known = [identity(), *(identity(**one) for one in others)]
    known += [identity(word) for word in ("train.seed=9", "generate.temperature=0.5", "generate.max_new_tokens=3")]
    prompts.write_text(json.dumps({"prompt": "x", "scores": {}}) + "\n")
    known.append(identity())
    assert len(set(known)) == len(known)


@pytest.mark.parametrize("size", [2, 3, 5])
def test_scores_of_all_ranks_come_back_in_the_order_of_samples(figures, size, monkeypatch):
    """12 samples, which five ranks do not divide alike; a rank is a thread here."""
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

    monkeypatch.setattr(scored, "rank_and_size", lambda: (own.rank, size))
    monkeypatch.setattr(scored, "everyone", everyone)
    with ThreadPoolExecutor(size) as pool:
        rows = [*pool.map(run, range(size))]
    timed = {"generate_s", "score_s"}
    assert [{key: row[key] for key in row.keys() - timed} for row in rows] == [
        {key: alone[key] for key in alone.keys() - timed}
    ] * size
