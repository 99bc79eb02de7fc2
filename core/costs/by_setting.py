"""Costs of a setting, where several were measured: degrees of tensor parallelism, and what ranks divide between them.

Of a rank's work one part is divided by the degree and another is not, so its seconds and bytes times the degree are
linear in it: between two degrees that were measured those of a third lie on the line through both, and beyond them on
the line through the nearest two.

Where ranks divide the weights (ZeRO 3) the trainer gathers them around every layer and may run layers of its own, so
launches and tokens take longer than where it does not: measured apart, or those of another sharding, which the source
says then. What a rank holds of weights, gradients and optimizer states is counted for a sharding without measurements.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..input.validation import Frozen
from ..plan.limits import AMOUNTS, MemoryCost
from .costs import Costs, PassCost, SettingCosts, Sharding

UNMEASURED = "was not measured"


def unmeasured(source: str) -> list[str]:
    """What the source of costs says of settings that were not measured."""
    return [note for note in source.split("; ") if UNMEASURED in note]


def at_degree(costs: Costs, tp: int) -> Costs:
    """The costs of ranks of that degree, times it, alone; where it was not measured, ``source`` says what they are."""
    if costs.tp is None or not costs.by_tp:
        return costs
    known = {**costs.by_tp, costs.tp: _of(costs)}
    alone: dict[str, Any] = {"tp": None, "by_tp": {}}
    if tp in known:
        return costs.model_copy(update={**dict(known[tp]), **alone})
    nearest = sorted(sorted(known, key=lambda degree: (abs(degree - tp), degree))[:2])
    low, high = (known[degree] for degree in nearest)
    between = _between(low, high, (tp - nearest[0]) / (nearest[1] - nearest[0]))
    source = f"{costs.source}; parallel.tp {tp} {UNMEASURED}: on the line through {nearest[0]} and {nearest[1]}"
    return costs.model_copy(update={**dict(between), **alone, "source": source})


def at_sharding(costs: Costs, sharding: Sharding, state_bytes: Mapping[str, float]) -> Costs:
    """The costs where ranks divide that, alone; ``state_bytes``: of weights, gradients and optimizer states there, by
    their fields of a memory record, for a sharding that was not measured."""
    alone: dict[str, Any] = {"sharding": None, "by_sharding": {}}
    if costs.sharding in (None, sharding):
        return costs.model_copy(update=alone)
    if sharding in costs.by_sharding:
        return costs.model_copy(update={**dict(costs.by_sharding[sharding]), **alone})
    source = f"{costs.source}; sharding {sharding} {UNMEASURED}: seconds of {costs.sharding}, counted states"
    return costs.holding(**state_bytes).model_copy(update={**alone, "source": source})


def with_shardings(costs: Costs, others: Mapping[Sharding, Costs]) -> Costs:
    """The costs with what was measured where ranks divide otherwise."""
    return costs.model_copy(update={"by_sharding": {sharding: _of(one) for sharding, one in others.items()}})


def with_degrees(measured: Mapping[int, Costs]) -> Costs:
    """The costs of the first degree, with what was measured at the others."""
    first, *others = measured
    by_tp = {tp: _of(measured[tp]) for tp in others}
    return measured[first].model_copy(update={"tp": first, "by_tp": by_tp})


def _of(costs: Costs) -> SettingCosts:
    return SettingCosts(**{name: getattr(costs, name) for name in SettingCosts.model_fields})


def _between(low: SettingCosts, high: SettingCosts, place: float) -> SettingCosts:
    """On the line through both: 0 is the first, 1 the second; never negative."""

    def line(name: str, of: tuple[Frozen, Frozen] = (low, high)) -> float:
        first, second = (float(getattr(one, name)) for one in of)
        return max(0.0, first + place * (second - first))

    passes = (low.forward, high.forward), (low.backward, high.backward)
    forward, backward = (PassCost(**{name: line(name, both) for name in PassCost.model_fields}) for both in passes)
    memory = MemoryCost(**{name: line(name, (low.memory, high.memory)) for name in AMOUNTS})
    return SettingCosts(forward=forward, backward=backward, update_s=line("update_s"), memory=memory)
