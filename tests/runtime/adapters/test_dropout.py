"""Which inputs are dropped: a hash of tenant, step, layer, sample, position and input, and of nothing else."""

import hypothesis.strategies as st
import pytest
import torch
from evenload.runtime.adapters.dropout import kept, key_of
from hypothesis import given

C = 24


def of(sample, first, stop, *, key=5, columns=(0, C), share=0.4):
    positions = torch.arange(first, stop)
    return kept(key, torch.full_like(positions, sample), positions, columns, share)


@given(st.integers(0, 1 << 40), st.integers(0, 1 << 20), st.integers(1, 30), st.integers(0, 30), st.integers(0, C))
def test_slices_and_shards_drop_what_the_whole_drops(sample, first, size, cut, column):
    whole, cut = of(sample, first, first + size), min(cut, size)
    parts = [of(sample, first, first + cut), of(sample, first + cut, first + size)]
    assert torch.equal(whole, torch.cat(parts))
    shards = [of(sample, first, first + size, columns=columns) for columns in ((0, column), (column, C))]
    assert torch.equal(whole, torch.cat(shards, 1))


@pytest.mark.parametrize("share", [0.01, 0.1, 0.5, 0.9])
def test_the_right_share_is_dropped_of_every_input_and_position(share):
    mask = of(3, 0, 20_000, share=share)
    assert mask.double().mean().item() == pytest.approx(1 - share, abs=0.003)
    spread = 5 * (share * (1 - share) / len(mask)) ** 0.5
    assert (mask.double().mean(0) - (1 - share)).abs().max() < spread


def test_seeds_steps_layers_and_samples_drop_other_inputs_and_independently():
    keys = [key_of(seed, step, name) for seed in (0, 1) for step in (0, 1) for name in ("q", "k")]
    assert len(set(keys)) == len(keys)
    masks = [of(3, 0, 4000, key=key, share=0.5) for key in keys] + [of(4, 0, 4000, key=keys[0], share=0.5)]
    masks.append(of(3, 1, 4001, key=keys[0], share=0.5))
    masks.append(masks[0].roll(1, 1))
    for i, first in enumerate(masks):
        for second in masks[:i]:
            assert (first == second).double().mean().item() == pytest.approx(0.5, abs=0.02)
