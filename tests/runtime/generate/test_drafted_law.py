"""Law against law: what drafts keep is a draw from the model's distribution, however the drafts came about."""

import numpy as np
from evenload.runtime.generate import engine
from evenload.runtime.generate.noise import gumbel
from evenload.runtime.generate.request import Generation, Request
from evenload.runtime.generate.schedule import Running

SAMPLES, VOCABULARY = 100_000, 24
LEVEL = 49.7
"""Chi-square of 23 degrees of freedom that one law in a thousand is above."""


def laws():
    """The model's probabilities, and those of a model that has moved."""
    logits = np.random.default_rng(7).normal(size=(2, VOCABULARY))
    logits[1] = logits[0] + 0.7 * logits[1]
    return np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)


def chi_square(tokens, law):
    counts = np.bincount(tokens, minlength=VOCABULARY)
    return float(((counts - law * len(tokens)) ** 2 / (law * len(tokens))).sum())


def taken(draft, pick):
    """The token that the engine gives a sample."""
    sample = Running(Request(0, (1,), 9), 0, 0, drafted=[draft])
    engine._taken(sample, [(pick, 0.0), (0, 0.0)], Generation())
    return sample.new[0]


def test_drafts_by_the_same_noise_keep_the_law_and_those_that_are_kept_by_their_own_probability_do_not():
    law, moved = laws()
    noise_SV = gumbel(np.arange(SAMPLES), np.full(SAMPLES, 5), np.arange(VOCABULARY))
    drafts = (np.log(moved) + noise_SV).argmax(axis=1)  # what the sample said at earlier weights
    picks = (np.log(law) + noise_SV).argmax(axis=1)
    equal = drafts == picks
    assert 0.5 < equal.mean() < 0.95, "coupled, and not the same"
    tokens = [taken(*pair) for pair in zip(drafts.tolist(), picks.tolist(), strict=True)]
    assert chi_square(tokens, law) < LEVEL
    assert chi_square(drafts, law) > 10 * LEVEL

    draws = np.random.default_rng(8)
    keep = draws.random(SAMPLES) < law[drafts]  # a kept token, by its own probability
    others = draws.choice(VOCABULARY, size=SAMPLES, p=law)
    assert chi_square(np.where(keep, drafts, others), law) > 4 * LEVEL
    residual = np.maximum(law - moved, 0)
    keep = draws.random(SAMPLES) < np.minimum(1, law / moved)[drafts]  # drafts that were drawn by themselves: right
    others = draws.choice(VOCABULARY, size=SAMPLES, p=residual / residual.sum())
    assert chi_square(np.where(keep, drafts, others), law) < LEVEL
