"""Time decode steps of the trainer's real model, all ranks at once, and fit what a step, a sample and a key take.

Each case is a generation of its own (`runtime.generate.engine`): prompts that are prefilled at once, then steps of one
token more for each sample; a step is all from one call of the model to the next: schedule, pack, model and drawing. Of
a case's steps the median counts, of two runs the lower one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
from torch import Tensor

from ...core.costs.decode import DecodeCost, fit_decode
from ...core.recipe.recipe import Recipe
from ...integrations.host.generating import unfit
from ...runtime.attention.pack import Pack
from ...runtime.generate.engine import Decoder, generate
from ...runtime.generate.request import Generation, Request
from ..job import Job

ROWS, PROMPTS, STEPS, RUNS = (1, 8, 32), (16, 512), 9, 2
"""Samples of a case, tokens of each one's prompt at most, steps that are timed, and times that it runs."""


def measure_decoding(job: Job, clock: Callable[[], float]) -> DecodeCost | None:
    """The mean of the ranks; None where the recipe's model is not generated from. Collective."""
    recipe = job.recipe
    longest = recipe.data.max_length - STEPS - 2
    if recipe.adapts or any(odd for odd, *_ in unfit(recipe)) or longest < 2 * PROMPTS[0]:
        return None
    cases = [(rows, min(prompt, longest)) for rows in ROWS for prompt in PROMPTS]
    times = []
    with job.host.decoding() as decoder:
        for rows, prompt in cases:
            job.watchdog.at(f"timing decode steps of {rows} samples after {prompt} tokens")
            times.append(np.min([_timed(recipe, decoder, rows, prompt, clock) for _ in range(RUNS)], axis=0))
    steps_s, prefills_s = np.array([job.gather(*of_case).mean(axis=0) for of_case in times]).T
    rows, prompts = np.array(cases).T
    keys = rows * (prompts + (STEPS + 1) / 2)
    costs = fit_decode(rows, keys, steps_s)
    longest_case = int((rows * prompts).argmax())
    tokens = rows[longest_case] * (prompts[longest_case] - 1)
    prompt_s = max(0.0, float(prefills_s[longest_case]) - costs.step_s) / tokens
    fitted = costs.step_s + costs.row_s * rows + costs.key_s * keys
    numbers = {**costs.model_dump(), "prompt_s": prompt_s, "fit_error": np.abs(fitted / steps_s - 1).mean()}
    return DecodeCost(**{name: float(f"{value:.4g}") for name, value in numbers.items()})


def _timed(recipe: Recipe, decoder: Decoder, rows: int, prompt: int, clock: Callable[[], float]) -> tuple[float, float]:
    """Seconds of a step of so many samples, and of the forward that computes their prompts."""
    draw = np.random.default_rng(0)
    vocabulary = recipe.model.vocab_size or 2
    prompts: Any = draw.integers(0, vocabulary, (rows, prompt)).tolist()
    requests = [Request(number, tuple(tokens), STEPS + 2) for number, tokens in enumerate(prompts)]
    starts: list[float] = []

    def logits(pack: Pack, slots: Tensor) -> Tensor | None:
        starts.append(clock())
        return decoder.logits(pack, slots)

    for _ in generate(requests, Generation(slots=rows, step_tokens=rows * prompt), replace(decoder, logits=logits)):
        pass
    prefill_s, *steps_s = (end - start for start, end in pairwise(starts))
    return float(np.median(steps_s)), prefill_s
