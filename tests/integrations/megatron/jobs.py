"""What the ranks of a test do; each function gets the world and returns something that can be pickled."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from evenload.core.errors import EvenloadError
from evenload.core.recipe import parse
from evenload.core.workload import Limits, MicroBatch, Slice, StepPlan, sequences
from evenload.integrations.megatron import open_host
from evenload.integrations.megatron import batch as batch_module
from evenload.integrations.megatron import reduction as reduction_module
from evenload.integrations.megatron.verify import grad_rel_err, reference

VOCABULARY = 96
LENGTHS = (37, 5, 64, 2, 18, 41, 9, 23)


def recipe(**changes: Any) -> Any:
    data: dict[str, Any] = {
        "trainer": "megatron",
        "model": {
            "num_layers": 4,
            "hidden_size": 32,
            "num_attention_heads": 4,
            "num_query_groups": 2,
            "vocab_size": VOCABULARY,
        },
        "data": {"max_length": 128},
        "parallel": {"dp": None},
        "train": {"global_batch_size": 8, "dtype": "fp64", "clip_grad": 1.0, "seed": 7},
        "megatron": {},
    }
    for key, value in changes.items():
        section, _, name = key.partition("__")
        data[section][name] = value
    return parse(data)


def tokens(lengths: Any = LENGTHS, seed: int = 3) -> Callable[[int], np.ndarray]:
    generator = np.random.default_rng(seed)
    samples = [generator.integers(0, VOCABULARY, n) for n in lengths]
    return lambda index: samples[index]


def plan(num_ranks: int, lengths: Any = LENGTHS, packs: Any = None, pad: bool = False) -> StepPlan:
    """Whole sequences; ``packs`` lists (rank, sequence indices), by default two micro-batches on rank 0, rest on others."""
    if packs is None:
        packs = {
            1: [(0, (2, 1)), (0, (0, 3, 6)), (0, (4, 5, 7))],
            2: [(0, (2, 1)), (1, (0, 3)), (0, (4, 6)), (0, (5,)), (1, (7,))],
        }[num_ranks]
    micro_batches = tuple(
        MicroBatch(
            tuple(Slice(i, 0, lengths[i]) for i in indices), (rank,), max((lengths[i] for i in indices), default=0) * pad
        )
        for rank, indices in packs
    )
    return StepPlan(sequences(lengths), micro_batches, Limits(num_ranks, 4096)).check()


@contextmanager
def hosted(world: Any, **changes: Any) -> Any:
    host = open_host(recipe(**changes), world)
    try:
        yield host
    finally:
        host.close()


def exactness(world: Any, *, pad: bool = False, packs: Any = None, mutant: str = "", **changes: Any) -> dict[str, float]:
    """Errors of loss and gradients against plain training."""
    with hosted(world, **changes) as host:
        data = tokens()
        the_plan = plan(host.layout.plane_size, packs=packs, pad=pad)
        expected_loss, expected = reference(host.recipe, host, data, the_plan.sequences)
        with mutation(mutant):
            result, gradients = host.gradients(the_plan, data)
        return {
            "loss": abs(result.loss - expected_loss) / expected_loss,
            "grad": grad_rel_err(gradients, expected),
            "targets": result.num_targets,
            "names": sorted(gradients),
            "executed": sorted(result.executed),
            "norm": result.grad_norm,
            "busy_s": result.busy_s,
        }


@contextmanager
def mutation(name: str) -> Any:
    """Plant a fault in the planned path."""
    build, finalize = batch_module.build_pack, reduction_module._sum_over_world

    def build_wrong(micro_batch: Any, *rest: Any) -> Any:
        pack = build(micro_batch, *rest)
        if name == "restarted position" and len(pack.slices) > 1:
            positions = pack.positions_T.clone()
            positions[pack.segments[1] :] = torch.arange(pack.num_slots - pack.segments[1])
            return replace(pack, positions_T=positions, slices=(Slice(0, 0, pack.num_slots),))
        if name == "moved border" and len(pack.slices) > 1:
            cu = pack.cu_seqlens.clone()
            cu[1] += 1
            return replace(pack, cu_seqlens=cu, segments=tuple(cu.tolist()))
        if name == "dropped token":
            labels = pack.labels_T.clone()
            labels[0] = batch_module.IGNORE
            return replace(pack, labels_T=labels, num_targets=pack.num_targets - 1)
        return pack

    def sum_wrong(loss: Any, count: int, device: Any) -> Any:
        loss, count = finalize(loss, count, device)
        return loss, count + 1

    batch_module.build_pack = build_wrong
    if name == "wrong scale":
        reduction_module._sum_over_world = sum_wrong
    try:
        yield
    finally:
        batch_module.build_pack, reduction_module._sum_over_world = build, finalize
