"""Lawful plans for ranks that share experts."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path
from types import ModuleType

from evenload.core.laws import check
from evenload.core.plan.rounds import in_rounds
from evenload.core.plan.step_plan import StepPlan


def _load(file: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(file, Path(__file__).with_name(f"{file}.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


slices, shared = _load("slice_plans"), _load("shared_plans")
tokens_of, labels_of = slices.tokens_of, slices.labels_of


def named(name: str, ranks: int, in_step: int) -> StepPlan:
    """A plan of slice_plans, ``chains some`` or ``random 7``, or of shared_plans, in rounds of so many ranks."""
    kind, *words = name.split()
    if kind == "shared":
        made = shared.named(" ".join(words))
    elif kind == "random":
        made = slices.random_plan(int(words[0]), ranks)
    else:
        made = slices.whole_sequences(ranks) if kind == "whole_sequences" else getattr(slices, kind)(*words)
    limits = replace(made.limits, in_step=in_step)
    return check(in_rounds(made.revised(limits=limits)))
