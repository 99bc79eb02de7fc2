"""Samples that are drawn of prompts and scored by functions of the user's own, on all ranks together.

Nothing of a training run changes by it: hosts generate without changing their state, and random states are those of
before when the user's functions have run, whatever these have drawn.
"""

from __future__ import annotations

import hashlib
import json
import random
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from ...core.errors import RankError, refuse_first, shorten
from ...core.input.user_function import scored_by, user_function
from ...core.recipe.generated import ScoredSamples
from ...core.recipe.recipe import Recipe
from ...integrations.host.generating import unfit
from ...integrations.host.host import Host
from ...runtime.generate.request import Completion
from ...runtime.watchdog.watchdog import Watchdog
from ...runtime.world.agreement import agree, all_or_none, everyone, rank_and_size
from .figures import majority_at, pass_at
from .prompted import prompted

_KEY = "data.validation.generate"


class SampleScores:
    """The prompts of a validation, and what their samples score. Making it is collective.

    Raises EvenloadError for a model that does not generate, for prompts and for functions that cannot be.
    """

    def __init__(self, recipe: Recipe, tokenizer_name: str, config: ScoredSamples) -> None:
        refuse_first(*((odd, f"{_KEY}: {what}", has, f"{do}, or leave it out") for odd, what, has, do in unfit(recipe)))
        self._config = config
        self._prompted = prompted(recipe, tokenizer_name, config.prompts, config.samples)
        self._score = user_function(config.score, f"{_KEY}.score")
        self._answer = user_function(config.answer, f"{_KEY}.answer") if config.answer else None
        self._texts = [row.text(self._prompted.tokenizer) for row in self._prompted.rows]
        about = (
            config.model_dump(mode="json", exclude={"prompts", "every"}),
            recipe.generate.model_dump(mode="json", exclude={"drafts"}),
        )
        rows = [[row.tokens, row.limit, row.row] for row in self._prompted.rows]
        text = json.dumps([*about, rows, recipe.train.seed, self._prompted.tokenizer.identity], sort_keys=True)
        self.identity = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
        """Hash of the prompts, and of how samples are drawn and scored."""
        agree(bytes.fromhex(self.identity), f"prompts of {_KEY}", 0)
        self._earlier: tuple[Completion, ...] = ()
        """Samples of the last validation, by which those of the next one are drafted."""

    def run(self, host: Host, watchdog: Watchdog, done: int) -> dict[str, float]:
        """Draw and score by the weights as they are. Collective. Raises RankError, on every rank, where a function of
        the user's fails."""
        begin = time.perf_counter()
        samples = self._earlier = host.generate(
            self._prompted.requests,
            replace(self._prompted.settings, earlier=self._earlier),
            mark=lambda where: watchdog.at(f"validation, {where}", done),
        )
        drawn_s = time.perf_counter()
        with watchdog.working("scoring the samples of the validation", done), unchanged_random_states():
            rank, size = rank_and_size()
            own = all_or_none(lambda: [self._scored(sample) for sample in samples[rank::size]])
            parts = everyone(own)
        scored = [parts[i % size][i // size] for i in range(len(samples))]
        return {
            **self._figures(scored),
            "tokens": sum(len(sample.tokens) for sample in samples),
            "cut_frac": float(np.mean([sample.ended == "limit" for sample in samples])),
            "generate_s": drawn_s - begin,
            "score_s": time.perf_counter() - drawn_s,
        }

    def _scored(self, sample: Completion) -> tuple[float, Hashable]:
        """The score of a sample, and its vote."""
        number, text = sample.prompt, self._prompted.stops.text_of(sample)
        arguments = self._texts[number], text, self._prompted.rows[number].row
        score = scored_by(self._score, f"{_KEY}.score", number, arguments, share=True)
        return score, text.strip() if self._answer is None else _answered(self._answer, number, text)

    def _figures(self, scored: Sequence[tuple[float, Hashable]]) -> dict[str, float]:
        """Figures of samples in the order of prompts, by the names that a log has."""
        of = self._config.samples
        scores = np.array([score for score, _ in scored]).reshape(-1, of)
        answers = [[answer for _, answer in scored[first : first + of]] for first in range(0, len(scored), of)]
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
