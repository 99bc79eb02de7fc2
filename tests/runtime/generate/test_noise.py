"""Noise is a pure function of what it is for, and draws what a softmax says."""

import numpy as np
import pytest
import torch
from evenload.runtime.generate.noise import gumbel, stream_of
from evenload.runtime.generate.request import Sampling
from evenload.runtime.generate.sampling import allowed, pick

from . import tiny


def test_bits_are_those_of_splitmix_and_the_same_in_numpy_and_torch():
    assert [tiny.splitmix(1234567 + i * tiny.GOLDEN) for i in (1, 2)] == [6457827717110365317, 3203168211198807973]
    keys = [(3, 0, 0), (3, 1, 0), (3, 0, 1), (2**40, 7, 11)]
    streams = np.array([stream_of(*key) for key in keys])
    places = np.array([1, 1, 5, 4000])
    want = np.stack([tiny.plain_noise(*key, int(place), 50) for key, place in zip(keys, places, strict=True)])
    np.testing.assert_allclose(gumbel(streams, places, np.arange(50)), want, rtol=0, atol=1e-13)
    of_torch = gumbel(*(torch.from_numpy(x) for x in (streams, places)), torch.arange(50))
    np.testing.assert_allclose(of_torch.numpy(), want, rtol=0, atol=1e-13)


def test_tokens_are_drawn_as_often_as_they_are_probable():
    draws = 40_000
    logits = torch.tensor([2.0, 0.5, 0.0, -1.0, -3.0], dtype=torch.float64)
    streams = torch.tensor([stream_of(1, prompt, 0) for prompt in range(200)]).repeat_interleave(200)
    noise = gumbel(streams, torch.arange(200).repeat(200), torch.arange(5))
    tokens, log_probs = pick(logits.expand(draws, 5), noise, Sampling())
    shares = logits.softmax(0)
    counts = torch.bincount(tokens.long(), minlength=5)
    chi2 = float(((counts - draws * shares) ** 2 / (draws * shares)).sum())
    assert chi2 < 18.5  # 4 degrees of freedom: one of a thousand draws is beyond
    assert torch.allclose(log_probs, shares.log()[tokens.long()])


@pytest.mark.parametrize(
    ("sampling", "kept"),
    [
        (Sampling(top_k=2), [0, 3]),
        (Sampling(top_k=9), [0, 1, 2, 3, 4]),
        (Sampling(top_p=0.5), [0]),
        (Sampling(top_p=0.75), [0, 3]),
        (Sampling(temperature=10.0, top_p=0.75), [0, 2, 3, 4]),
        (Sampling(top_k=3, top_p=0.85), [0, 3]),
    ],
)
def test_what_may_be_drawn(sampling, kept):
    shares = torch.tensor([[0.6, 0.05, 0.1, 0.2, 0.05]], dtype=torch.float64)
    shares[0, 4] += 1e-9
    left = allowed(shares.log(), sampling)[0]
    assert left.isfinite().nonzero()[:, 0].tolist() == kept
    torch.testing.assert_close(left[kept], (shares.log() / sampling.temperature)[0, kept])


@pytest.mark.parametrize(("top_k", "kept"), [(1, [3]), (2, [0, 1, 3, 4]), (3, [0, 1, 3, 4]), (4, [0, 1, 3, 4])])
def test_what_equals_the_last_of_the_most_probable_tokens_may_be_drawn_too(top_k, kept):
    logits = torch.tensor([[1.5, 1.5, 0.0, 2.0, 1.5]])
    assert allowed(logits, Sampling(top_k=top_k))[0].isfinite().nonzero()[:, 0].tolist() == kept
