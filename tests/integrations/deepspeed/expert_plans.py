"""Lawful plans for ranks that share experts."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path

from evenload.core.laws import check
from evenload.core.plan.rounds import in_rounds
from evenload.core.plan.step_plan import StepPlan

_spec = importlib.util.spec_from_file_location("slice_plans", Path(__file__).with_name("slice_plans.py"))
slices = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(slices)
tokens_of = slices.tokens_of


def named(name: str, ranks: int, in_step: int) -> StepPlan:
    """A plan of slice_plans, ``chains some`` or ``random 7``, in rounds of so many ranks."""
    kind, *words = name.split()
    if kind == "random":
        made = slices.random_plan(int(words[0]), ranks)
    else:
        made = slices.whole_sequences(ranks) if kind == "whole_sequences" else getattr(slices, kind)(*words)
    limits = replace(made.limits, in_step=in_step)
    return check(in_rounds(made.revised(limits=limits)))
