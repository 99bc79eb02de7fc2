"""Labels with half of their targets masked: the same on every rank, of each kind, and never none at all."""

import numpy as np
from evenload.runtime.attention.labels import Labels, count_targets
from evenload.runtime.attention.pack import IGNORE
from evenload.training.proof.masking import half_masked

LENGTHS = np.random.default_rng(0).integers(1, 400, 64)
SAMPLES = np.random.default_rng(1).permutation(1000)[:64]
TOKENS = [np.random.default_rng(n).integers(0, 97, n) for n in LENGTHS]


def masked(labels=None, seed=5):
    return half_masked(labels, TOKENS.__getitem__, SAMPLES, LENGTHS, seed)


def test_half_of_all_tokens_carry_no_loss_and_the_others_keep_their_labels():
    labels = masked()
    rows = [labels.of(i) for i in range(64)]
    assert all(len(row) == n for row, n in zip(rows, LENGTHS, strict=True))
    assert 0.4 < count_targets(LENGTHS, labels) / count_targets(LENGTHS) < 0.6
    assert [int((row[1:] != IGNORE).sum()) for row in rows] == labels.targets.tolist()
    assert all((row == tokens)[row != IGNORE].all() for row, tokens in zip(rows, TOKENS, strict=True))
    # Sequences without a target, with all of them, with a prompt, and with holes.
    long = [row != IGNORE for row, n in zip(rows, LENGTHS, strict=True) if n > 50]
    prompts = [row for row in long if (np.diff(row.astype(int)) >= 0).all()]
    assert any(not row.any() for row in prompts)
    assert any(row.all() for row in prompts)
    assert any(row.any() and not row.all() for row in prompts)
    assert len(prompts) < len(long)


def test_masks_are_drawn_by_samples_and_seed():
    assert all((masked().of(i) == masked().of(i)).all() for i in range(64))
    assert any((masked(seed=6).of(i) != masked().of(i)).any() for i in range(64))


def test_what_carries_no_loss_stays_masked():
    rows = [np.where(np.arange(len(row)) % 3 == 0, row, IGNORE) for row in TOKENS]
    own = Labels(rows.__getitem__, np.array([np.count_nonzero(row[1:] != IGNORE) for row in rows]))
    labels = masked(own)
    assert 0 < labels.targets.sum() < own.targets.sum()
    assert all((labels.of(i)[rows[i] == IGNORE] == IGNORE).all() for i in range(64))


def test_a_batch_keeps_a_target():
    two = np.array([2]), np.array([2])
    counts = [int(half_masked(None, lambda _: np.arange(2), *two, seed).targets.sum()) for seed in range(20)]
    assert set(counts) == {1}
