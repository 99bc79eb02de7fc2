"""Samples that are drawn of prompts and scored by functions of the user's own, on all ranks together.

Nothing of a training run changes by it: hosts generate without changing their state, and random states are those of
before when the user's functions have run, whatever these have drawn.
"""

from __future__ import annotations

import hashlib
import json
import logging
import random
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from ...core.aliases import Floats
from ...core.cascade import cascaded, functions_of, rescored
from ...core.dealers import dealer_of
from ...core.errors import RankError, refuse_first, shorten
from ...core.input.user_function import scored_by, user_function
from ...core.recipe.generated import ScoredSamples, scorers_of
from ...core.recipe.recipe import Recipe
from ...integrations.host.generating import unfit
from ...integrations.host.host import Host
from ...runtime.generate.request import Completion
from ...runtime.watchdog.watchdog import Watchdog
from ...runtime.world.agreement import agree, rank_and_size
from .figures import majority_at, pass_at
from .prompted import prompted
from .scorers import on_ranks, score_on_ranks

log = logging.getLogger("evenload")

_KEY = "data.validation.generate"
_SCORING = "scoring the samples of the validation"


class SampleScores:
    """The prompts of a validation, and what their samples score. Making it is collective.

    Raises EvenloadError for a model that does not generate, for prompts and for functions that cannot be.
    """

    def __init__(self, recipe: Recipe, tokenizer_name: str, config: ScoredSamples) -> None:
        refuse_first(*((odd, f"{_KEY}: {what}", has, f"{do}, or leave it out") for odd, what, has, do in unfit(recipe)))
        if recipe.generate.keys:
            log.warning("samples of %s are those of the model itself: generate.keys has no effect on them", _KEY)
            recipe = recipe.changed({"generate.keys": None})
        self._recipe, self._config = recipe, config
        self._prompted = prompted(recipe, tokenizer_name, config.prompts, config.samples)
        self._names = [scorer.by for scorer in scorers_of(config.score)]
        self._scorers = functions_of(config, _KEY)
        self._alike: set[str] = set()
        self._answer = user_function(config.answer, f"{_KEY}.answer") if config.answer else None
        self._texts = [row.text(self._prompted.tokenizer) for row in self._prompted.rows]
        unmoved = {"prompts", "every", *([] if config.bands else ["rescore"])}
        about = (
            config.model_dump(mode="json", exclude=unmoved),
            recipe.generate.model_dump(mode="json", exclude={"drafts", "keys"}),
        )
        rows = [[row.tokens, row.limit, row.row] for row in self._prompted.rows]
        text = json.dumps([*about, rows, recipe.train.seed, self._prompted.tokenizer.identity], sort_keys=True)
        self.identity = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
        """Hash of the prompts, and of how samples are drawn and scored."""
        agree(bytes.fromhex(self.identity), f"prompts of {_KEY}", 0)
        self._earlier: tuple[Completion, ...] = ()
        """Samples of the last validation, by which those of the next one are drafted, and dealt."""

    def run(self, host: Host, watchdog: Watchdog, done: int) -> dict[str, float]:
        """Draw and score by the weights as they are. Collective. Raises RankError, on every rank, where a function of
        the user's fails."""
        begin = time.perf_counter()
        samples = self._earlier = host.generate(
            self._prompted.requests,
            replace(self._prompted.settings, earlier=self._earlier),
            mark=lambda where: watchdog.at(f"validation, {where}", done),
            dealer=dealer_of(self._recipe, self._earlier),
        )
        drawn_s = time.perf_counter()
        size, keys = rank_and_size()[1], [f"{sample.prompt} {sample.sample}" for sample in samples]
        costs = np.array([len(self._prompted.rows[one.prompt].tokens) + len(one.tokens) for one in samples], np.float64)
        in_turn = [range(rank, len(samples), size) for rank in range(size)]
        score = score_on_ranks(self._names, costs, in_turn, partial(self._scored, samples, watchdog, done), self._alike)
        with watchdog.working(_SCORING, done), unchanged_random_states():
            of = cascaded(self._config.bands, rescored(keys, self._config.rescore, self._prompted.settings.seed), score)
            votes, _ = on_ranks(in_turn, lambda own: [self._vote(samples[place]) for place in own])
        return {
            **self._figures(of.scores, votes),
            **(of.figures if self._config.bands else {}),
            "tokens": sum(len(sample.tokens) for sample in samples),
            "cut_frac": float(np.mean([sample.ended == "limit" for sample in samples])),
            "generate_s": drawn_s - begin,
            "score_s": time.perf_counter() - drawn_s,
        }

    def _scored(
        self, samples: Sequence[Completion], watchdog: Watchdog, done: int, number: int, places: Sequence[int]
    ) -> list[float]:
        """Scores of the samples at these places by one of the scorers."""
        key, function = self._scorers[number]
        if self._config.bands:
            watchdog.at(f"{_SCORING} by {self._names[number]}", done)
        said = [(samples[place].prompt, self._said(samples[place])) for place in places]
        return [scored_by(function, key, prompt, one, share=True) for prompt, one in said]

    def _said(self, sample: Completion) -> tuple[str, str, Any]:
        """What a scorer reads of a sample."""
        number = sample.prompt
        return self._texts[number], self._prompted.stops.text_of(sample), self._prompted.rows[number].row

    def _vote(self, sample: Completion) -> Hashable:
        _, text, _ = self._said(sample)
        return text.strip() if self._answer is None else _answered(self._answer, sample.prompt, text)

    def _figures(self, scored: Floats, votes: Sequence[Hashable]) -> dict[str, float]:
        """Figures of samples in the order of prompts, by the names that a log has."""
        of = self._config.samples
        scores = scored.reshape(-1, of)
        answers = [votes[first : first + of] for first in range(0, len(votes), of)]
        right = (scores >= self._config.passes).sum(axis=1)
        passed = {f"pass_at_{k}": pass_at(k, right, of) for k in self._config.counts}
        voted = {f"maj_at_{k}": majority_at(k, scores, answers) for k in self._config.counts if k > 1}
        return {"score": float(scores.mean()), **passed, **voted}


def _answered(function: Callable[[str], Any], number: int, text: str) -> Hashable:
    try:
        answer: Hashable = function(text)
        hash(answer)
    except Exception as error:  # whatever the user's function raises
        what = f"{_KEY}.answer failed on a sample of prompt {number}: {type(error).__name__}: {shorten(str(error))}"
        raise RankError(what, shorten(f"sample: {text!r}"), "return a text or a number, or null for none") from error
    return answer


@contextmanager
def unchanged_random_states() -> Iterator[None]:
    """Whatever is drawn inside, generators of Python, numpy and torch go on from where they were."""
    of_python, of_numpy = random.getstate(), np.random.get_state()
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices=devices):
        try:
            yield
        finally:
            random.setstate(of_python)
            np.random.set_state(of_numpy)
