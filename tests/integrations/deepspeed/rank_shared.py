"""What the ranks of a test world run: every function here is a case of test_shared.py."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from evenload.integrations.deepspeed import open_host
from evenload.integrations.deepspeed.engine import stage as stage_module
from evenload.integrations.deepspeed.plain import reference, relative_error
from evenload.runtime.attention.sharing.ring import Ring
from evenload.runtime.world.world import init_world


def _load(file: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(file, Path(__file__).with_name(f"{file}.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


plans, slices = _load("shared_plans"), _load("rank_slices")


def exactness(stage: int, names: list[str], recompute: bool = False, dtype: str = "fp32") -> dict[str, Any]:
    """Errors of every plan against the plain reference, and the pieces that the rank ran."""
    made = slices.recipe(stage, recompute, dtype)
    host = open_host(made, init_world())
    found: dict[str, Any] = {}
    references: dict[Any, Any] = {}
    for number, name in enumerate(names):
        plan = plans.named(name)
        labels = plans.labels_of(plan, number)
        key = plan.sequences, number % 4
        if key not in references:
            references[key] = reference(made, host, plans.tokens_of(plan), plan.lengths, labels)
        loss, wanted = references[key]
        result, gradients = host.gradients(plan, plans.tokens_of(plan), labels)
        found[name] = {
            "loss": abs(result.loss / loss - 1),
            "grad": relative_error(gradients, wanted),
            "executed": [tuple(piece) for piece in result.executed],
            "gathered": slices._gathered(host),
        }
    host.close()
    return found


def mutants(stage: int) -> dict[str, tuple[float, float]]:
    """(loss error, gradient error) of deliberately broken runs, and of sound ones."""
    made = slices.recipe(stage)
    host = open_host(made, init_world())
    plan = plans.even()
    loss, wanted = reference(made, host, plans.tokens_of(plan), plan.lengths)

    def errors() -> tuple[float, float]:
        result, gradients = host.gradients(plan, plans.tokens_of(plan))
        return abs(result.loss - loss) / loss, relative_error(gradients, wanted)

    found = {"sound": errors()}
    for name, place, attribute, broken in (
        ("lost hop", Ring, "_pass_on", _lost(0)),
        ("dKV not home", Ring, "_pass_on", _lost(1)),
        ("wrong place", stage_module, "build_pack", _swapped_pack),
    ):
        with slices._patched(place, attribute, broken):
            found[name] = errors()
    found["sound again"] = errors()
    host.close()
    return found


def _lost(which: int) -> Any:
    """What comes in a ring's hops counts as nothing: keys and values (0), or their gradients (1)."""

    def pass_on(stock: Any, ring: Any, message: Any, hop: int, kind: int) -> Any:
        coming = stock(ring, message, hop, kind)
        return (lambda: torch.zeros_like(coming())) if kind == which else coming

    return pass_on


def _swapped_pack(build_pack: Any, micro_batch: Any, *args: Any, **more: Any) -> Any:
    """Two ranks of a ring have each other's tokens."""
    pack = build_pack(micro_batch, *args, **more)
    if pack.shared is None:
        return pack
    second, first, *others = micro_batch.ranks
    swapped = build_pack(micro_batch._replace(ranks=(first, second, *others)), *args, **more)
    return replace(swapped, shared=pack.shared)
