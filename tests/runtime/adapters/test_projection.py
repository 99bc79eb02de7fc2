"""Projections by hashed signs: those of their equation, sums over shards, inner products kept."""

import hashlib
import math

import numpy as np
import pytest
import torch
from evenload.plugins.data.draws import mixed
from evenload.runtime.adapters.projection import preconditioned, projection

RNG = np.random.default_rng(7)


def ours(name, values, places, columns, seed=0):
    return projection(name, torch.tensor(values), torch.tensor(places), columns, seed).numpy()


@pytest.mark.parametrize("columns", [1, 64, 100])
def test_signs_are_bits_of_the_hash(columns):
    """By numpy's unsigned integers, one word a place and 64 columns."""
    places = RNG.permutation(5000)[:2500]
    key = np.frombuffer(hashlib.blake2b(b"3 layer.weight", digest_size=8).digest(), np.uint64)
    blocks = np.arange(columns, dtype=np.uint64) // np.uint64(64)
    words = mixed(mixed(places.astype(np.uint64) ^ key)[:, None] ^ mixed(blocks)[None])
    signs = 1.0 - 2.0 * (words >> np.arange(columns, dtype=np.uint64) % np.uint64(64) & np.uint64(1))
    rows = RNG.normal(size=(3, 2500))
    expected = rows @ signs / math.sqrt(columns)
    np.testing.assert_allclose(ours("layer.weight", rows, places, columns, 3), expected, rtol=1e-10, atol=1e-10)
    single = projection("layer.weight", torch.tensor(rows).float(), torch.tensor(places), columns, 3)
    assert single.dtype == torch.float64
    np.testing.assert_allclose(single.numpy(), expected, rtol=0, atol=1e-4 * math.sqrt(2500 / columns))


@pytest.mark.parametrize("cuts", [1, 2, 4])
def test_projections_of_shards_add_up_to_that_of_the_whole(cuts):
    gradient = RNG.normal(size=(40, 20))
    whole = ours("layer.weight", gradient.ravel(), np.arange(800), 100, seed=3)
    places = np.arange(800).reshape(40, 20)
    parts = zip(np.array_split(gradient, cuts, axis=1), np.array_split(places, cuts, axis=1), strict=True)
    total = sum(ours("layer.weight", part.ravel(), own.ravel(), 100, seed=3) for part, own in parts)
    np.testing.assert_allclose(total, whole, rtol=1e-12, atol=1e-12)
    other = ours("other.weight", gradient.ravel(), np.arange(800), 100, seed=3)
    assert abs(np.corrcoef(other, whole)[0, 1]) < 0.4


def test_the_direction_of_adam_is_that_of_its_equation():
    g, m, v = RNG.normal(size=(3, 10))
    direction = preconditioned(*map(torch.tensor, (g, m, v**2)), (0.9, 0.99), 1e-8)
    for i in range(10):
        mean, square = 0.9 * m[i] + 0.1 * g[i], 0.99 * v[i] ** 2 + 0.01 * g[i] ** 2
        assert float(direction[i]) == pytest.approx(mean / (math.sqrt(square) + 1e-8), rel=1e-12)
