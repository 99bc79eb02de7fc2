"""The rule of drawing in numpy is the engine's, and its borders can be moved."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from evenload.integrations.reference.textbook_sampling import log_probs, noise, scores
from evenload.runtime.generate.noise import gumbel, stream_of
from evenload.runtime.generate.request import Sampling
from evenload.runtime.generate.sampling import pick

KEYS = [(3, 0, 0, 1), (3, 1, 0, 1), (0, 0, 1, 5), (2**40, 7, 11, 4000)]
LOGITS = np.random.default_rng(2).normal(size=(len(KEYS), 60)) * 3


@pytest.mark.parametrize(
    "sampling",
    [Sampling(), Sampling(0.0, 3, 0.5), Sampling(0.7), Sampling(1.3, 5), Sampling(1.0, 0, 0.4), Sampling(0.8, 9, 0.9)],
)
def test_tokens_and_log_probabilities_are_those_of_the_engine(sampling: Sampling) -> None:
    drawn = np.stack([noise(key, 60) for key in KEYS])
    streams = torch.tensor([stream_of(*key[:3]) for key in KEYS])
    want = gumbel(streams, torch.tensor([key[3] for key in KEYS]), torch.arange(60)).numpy()
    np.testing.assert_allclose(drawn, want, rtol=0, atol=1e-13)
    tokens, known = pick(torch.tensor(LOGITS), torch.tensor(drawn) if sampling.temperature else None, sampling)
    for row in range(len(KEYS)):
        token = scores(LOGITS[row], drawn[row], sampling).argmax()
        assert token == int(tokens[row])
        assert abs(log_probs(LOGITS[row])[token] - float(known[row])) < 1e-13


def test_slack_lets_more_tokens_through_or_fewer() -> None:
    logits, none = np.log([0.5, 0.2501, 0.2499]), np.zeros(3)

    def through(sampling: Sampling, slack: float) -> list[int]:
        return np.flatnonzero(np.isfinite(scores(logits, none, sampling, slack))).tolist()

    assert [through(Sampling(1.0, 2), slack) for slack in (0, 1e-2, -1e-2)] == [[0, 1], [0, 1, 2], [0]]
    assert [through(Sampling(1.0, 0, 0.75), slack) for slack in (0, 1e-3, -0.3)] == [[0, 1], [0, 1, 2], [0]]
