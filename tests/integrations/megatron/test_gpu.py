"""Planned steps on one CUDA card against plain training of the same weights; the kernels are those the card chooses."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

LENGTHS = (700, 130, 33, 1, 512, 64, 257, 1024)
PACKS = {
    "even": [(0, (0, 1, 2)), (0, (3, 4, 5, 6)), (0, (7,))],
    "one pack": [(0, tuple(range(8)))],
    "one by one": [(0, (i,)) for i in range(8)],
}
WIDE = {"model__hidden_size": 256, "model__num_attention_heads": 4, "data__max_length": 1024}
"""Heads of 64, which every kernel takes."""


@pytest.fixture(scope="module")
def card():
    """The jobs of the CPU tests, and a world of one on the card."""
    pytest.importorskip("megatron.core")
    from evenload.runtime.world.world import close_world, init_world
    from megatron_tests import jobs

    world = init_world()
    yield jobs, world
    close_world(world)


def errors(jobs, world, dtype, packs):
    """Relative errors of loss and worst gradient against the reference, and the step's result."""
    from evenload.integrations.megatron.plain import grad_rel_err, reference

    with jobs.hosted(world, train__dtype=dtype, **WIDE) as host:
        data, plan = jobs.tokens(LENGTHS), jobs.plan(1, LENGTHS, packs)
        expected_loss, expected = reference(host.recipe, host, data, plan.lengths)
        result, gradients = host.gradients(plan, data)
        return abs(result.loss - expected_loss) / expected_loss, grad_rel_err(gradients, expected), result


@pytest.mark.parametrize("packs", PACKS.values(), ids=PACKS)
@pytest.mark.parametrize(("dtype", "loss_error", "grad_error"), [("fp32", 1e-6, 2e-5), ("bf16", 1e-3, 5e-2)])
def test_a_planned_step_has_the_reference_gradients(card, dtype, loss_error, grad_error, packs):
    loss, grad, result = errors(*card, dtype, packs)
    assert loss <= loss_error
    assert grad <= grad_error
    assert sorted(result.executed) == [(i, 0, n) for i, n in enumerate(LENGTHS)]
    assert result.num_targets == sum(LENGTHS) - len(LENGTHS)
    assert 0 < result.forward_s < result.busy_s


@pytest.mark.parametrize("mutant", ["dropped token", "restarted position"])
def test_mutants_are_caught_on_the_card(card, mutant):
    jobs, world = card
    with jobs.mutation(mutant):
        loss, grad, _ = errors(jobs, world, "fp32", PACKS["even"])
    assert max(loss, grad) > 1e-3


def test_bf16_takes_a_kernel_of_the_card(card):
    jobs, world = card
    with jobs.hosted(world, train__dtype="bf16", **WIDE) as host:
        assert host.describe()["attention"] != "sdpa"


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_training_goes_down_and_does_not_depend_on_the_plan(card, dtype):
    jobs, world = card
    losses = []
    for packs in PACKS.values():
        with jobs.hosted(world, train__dtype=dtype, **WIDE) as host:
            data, plan = jobs.tokens(LENGTHS), jobs.plan(1, LENGTHS, packs)
            losses.append([host.train_step(plan, data, lr=1e-3).loss for _ in range(4)])
    for mine in losses:
        assert mine == sorted(mine, reverse=True)
        assert np.allclose(mine, losses[0], rtol=1e-4 if dtype == "fp32" else 2e-2)
