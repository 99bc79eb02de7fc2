"""The proof kit: plans on a trainer's host against plain training of whole sequences, the same for every trainer.

On the ranks, where a job has opened a host:

    plans = [(name, planned(host, name)) for name in ("slices", "7", "shared 3")]
    found = errors_of_plans(host, plans, planted=fault("dropped accumulator"))

In the test, with what all ranks found:

    exact(results)                                  # float64; exact(results, ROUNDING) in float32
    assert caught(results)                          # where a fault was planted

Plans are those of `by_hand`, or `drawn` from a seed; faults are those of `faults`. `tenants` and `experts` have what
such plans need besides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from importlib import import_module
from random import Random
from typing import Any

import numpy as np
import torch
from evenload.core.errors import EvenloadError
from evenload.core.laws import check
from evenload.core.plan.rounds import in_rounds
from evenload.core.plan.step_plan import StepPlan, as_lengths
from evenload.core.simulate.v_shape import merged
from evenload.integrations.reference.exactness import largest_error
from evenload.runtime.attention.labels import Labels, count_targets
from evenload.training.proof.compare import compare_number
from evenload.training.proof.masking import half_masked
from evenload.training.proof.weighing import drawn_weights, scale_of

from ..references import kept
from .by_hand import by_hand
from .drawn import LENGTHS, random_plan, random_shared_plan
from .pipelines import random_pipeline

ROUNDING = 2e-6
"""Of float32: what losses, gradients and norms may differ by."""
VOCABULARY = 96

Found = dict[str, Any]
"""What a rank found of one plan (`errors_of_plans`)."""


def planned(host: Any, name: str | int, lengths: Sequence[int] = LENGTHS, **drawn: Any) -> StepPlan:
    """A plan for a host's layout: ``7`` is drawn from that seed, ``shared 7`` by another of `_DRAWN`; any other name is
    one of `by_hand`. ``drawn``: further arguments of those functions.

    In rounds where ranks share experts, merged where devices have two stages.
    """
    layout, model = host.layout, host.recipe.model
    stages = layout.num_stages
    layers = max(layout.layers, default=model.num_layers // stages)
    sizes: dict[str, Any] = {"num_ranks": layout.dp_cp_size, "num_stages": stages, "layers_per_stage": layers}
    heads = model.num_attention_heads // layout.tp
    kind, _, seed = str(name).rpartition(" ")
    if not seed.isdigit():
        plan = by_hand(str(name), heads=heads, node_ranks=2, **sizes, **drawn)
    elif kind == "pipeline":
        own = {"layers": layout.layers, "v_shape": layout.v_shape, "replay": "some"}
        plan = random_pipeline(Random(int(seed)), lengths, **sizes, **own, **drawn)
    elif kind == "shared":
        plan = random_shared_plan(int(seed), lengths, heads=heads, **sizes, **drawn)
    else:
        plan = random_plan(int(seed), lengths, layers=layout.layers, **sizes, **_DRAWN[kind], **drawn)
    if layout.ep == 1 and not layout.v_shape:
        return plan
    in_step = layout.dp_cp_size if layout.ep > 1 and getattr(host, "stage", 0) == 3 else layout.ep
    limits = replace(plan.limits, in_step=in_step, v_shape=layout.v_shape)
    return check(merged(in_rounds(replace(plan, limits=limits))))


_DRAWN: dict[str, dict[str, Any]] = {
    "": {},
    "idle": {"idle": (1,), "asymmetric": False},
    "recomputed": {"recompute": True, "asymmetric": False},
}
"""Draws of `random_plan`; ``shared``, with micro-batches that ranks share, and ``pipeline``, with weight gradients as
passes of their own, have functions of their own."""


def tokens(lengths: Sequence[int] = LENGTHS, seed: int = 3) -> Callable[[int], Any]:
    """Token ids of each sequence of a batch, by its number."""
    generator = np.random.default_rng(seed)
    samples = [generator.integers(0, VOCABULARY, n) for n in lengths]
    return samples.__getitem__


def labels_in_turn(
    turn: int, lengths: Sequence[int] = LENGTHS, tenants: Any = None, *, centred: bool = False
) -> Labels | None:
    """Every token; half of them; with weights by sequence; half of them, with weights by token that add up to 0, and so
    on. ``centred``: such ones in each turn, others every time."""
    batch, data = as_lengths(lengths), tokens(lengths, 100)
    labels = half_masked(None, data, np.arange(len(batch)), batch, 0) if turn % 2 else None
    if turn % 4 < 2 and not centred:
        return labels
    by, seed = ("centred", turn) if centred else ("centred" if turn % 2 else "sequence", turn % 4)
    return drawn_weights(labels, data, batch, by, [seed], tenants)


def in_turn(plans: Iterable[tuple[Any, StepPlan]], drawings: int) -> list[tuple[Any, StepPlan]]:
    """So many of the plans, again from the first one on; 0: each once."""
    listed = list(plans)
    return [listed[number % len(listed)] for number in range(drawings)] if drawings else listed


def errors_of_plans(
    host: Any,
    plans: Iterable[tuple[Any, StepPlan]],
    lengths: Sequence[int] = LENGTHS,
    planted: Callable[[], AbstractContextManager[Any]] = nullcontext,
    reference: Callable[..., tuple[float, Any]] | None = None,
    drawings: int = 0,
) -> list[Found]:
    """Of each named plan, each with other labels, how far a host is from plain training of its weights.

    ``planted`` is entered around each run of the host. ``reference``: of the trainer, unless it is another one.
    ``drawings``: so many, each with weights that add up to 0, by the plans in turn.

    Found are relative errors of ``loss``, of ``grad`` (of the worst parameter) and of ``norm``, ``miscounted`` targets,
    what was ``executed``, the ``branches`` that the step took, and the names of gradients here (``names``) and in the
    reference (``all_names``); or the ``error`` that the host raised.
    """
    reference = reference or import_module(f"evenload.integrations.{host.recipe.trainer}.plain").reference
    data, batch, rows = tokens(lengths), as_lengths(lengths), []
    references: dict[int, Any] = {}
    for number, (name, plan) in enumerate(in_turn(plans, drawings)):
        labels, turn = labels_in_turn(number, lengths, centred=drawings > 0), number % (drawings or 4)
        if turn not in references:
            references[turn] = kept(reference, host.recipe, host, data, batch, labels)
        loss, expected = references[turn]
        try:
            with planted():
                result, gradients = host.gradients(plan, data, labels)
        except EvenloadError as error:
            rows.append({"plan": name, "error": error.what})
            continue
        row = {"plan": name, "executed": result.executed, "branches": result.branches}
        row |= {"names": sorted(gradients), "all_names": sorted(expected)}
        row |= {
            "loss": compare_number(result.loss, loss, scale_of(labels, batch)),
            "grad": largest_error(gradients, expected).error,
        }
        row |= {"miscounted": result.num_targets - count_targets(batch, labels), "norm": 0.0}
        if host.layout.tp == 1:  # else the reference has shards
            norm = float(torch.stack([g.double().norm() for g in expected.values()]).norm())
            row["norm"] = abs(result.grad_norm / norm - 1)
        rows.append(row)
    return rows


def exact(
    results: Sequence[Sequence[Found]],
    rounding: float | None = None,
    *,
    lengths: Sequence[int] = LENGTHS,
    copies: int = 1,
    **bounds: float,
) -> None:
    """Assert that all plans gave the reference on all ranks, which together have every parameter's gradient and ran the
    backward of every token once, on each of ``copies`` ranks that hold a model together.

    Args:
        results: what each rank found.
        rounding: what may be off; None: what float64 may.
        bounds: other ones, of ``loss``, ``grad`` or ``norm``.
    """
    bounds = {"loss": rounding or 1e-12, "grad": rounding or 1e-9, "norm": rounding or 1e-9, **bounds}
    for plans in zip(*results, strict=True):
        for found in plans:
            assert found.get("error") is None, found
            assert found["miscounted"] == 0, found["plan"]
            for what, bound in bounds.items():
                assert found[what] <= bound, (found["plan"], what, found[what])
        ran = sorted((s[0], t) for found in plans for s in found["executed"] for t in range(s[1], s[2]))
        assert ran == sorted((i, t) for i, n in enumerate(lengths) for t in range(n) for _ in range(copies))
        names = set().union(*(found["names"] for found in plans))
        assert sorted(names) == plans[0]["all_names"], plans[0]["plan"]


def caught(results: Sequence[Sequence[Found]]) -> bool:
    """Whether every plan shows, on some rank, that something is wrong."""
    return all(
        any(found.get("error") or max(found["loss"], found["grad"]) > 1e-4 for found in plans)
        for plans in zip(*results, strict=True)
    )
