"""What tenants save by sharing steps: all together against one after another, on the same ranks. Predicted.

    saving  = sum over tenants of the step that the chain plans for each alone / the step that it plans for all
    at most = that sum / the least that any plan of them all could take

What a tenant takes alone is planned as well as what all take together, by the same plugins, and with its own adapter.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ...core.aliases import Ints
from ...core.input.bounds import refuse_endless
from ...core.input.format import percent, seconds
from ...core.machine.shape import Shape
from ...core.plan.step_plan import StepPlan, as_lengths
from ...core.planning.adapters import TenantLoad, with_tenants
from ...core.planning.chain import PlanChain
from ...core.planning.judge import certified_s, outcome_of
from ...core.planning.planner import Draw
from ...core.recipe.adapter import adapter_weights
from ..drawing import Drawing
from .reading import Member, naming

HEAD = ("tenant", "samples", "tokens", "share of the step", "alone", "adapter")


class TenantStep(NamedTuple):
    """A tenant in one step."""

    number: int
    samples: int
    tokens: int
    share: float
    """Of the seconds of compute of all samples of the step."""
    alone_s: float
    """The step that it would take by itself on all ranks."""


class SharedStep(NamedTuple):
    """All tenants in one step."""

    tenants: tuple[TenantStep, ...]
    together_s: float
    bound_s: float
    """The least that any plan of the step takes; 0: none is certified."""


class SharedPlan:
    """The tenants of a plan: their batches, one step after the other, and what planning them together saves.

    Args:
        chain: of the recipe, which knows none of its tenants.
    """

    def __init__(self, members: Sequence[Member], chain: PlanChain, shape: Shape) -> None:
        self.members, self._shape = tuple(members), shape
        loads = [TenantLoad(member.config.adapter, member.tokens_of_step) for member in members]
        self.chain = with_tenants(chain, shape, loads)
        self._alone = [with_tenants(chain, shape, [load]) for load in loads]
        self._drawings = [_drawing(member, chain) for member in members]
        self._step = 0
        for member in members:
            with naming(member.name):
                refuse_endless(member.lengths, chain.largest_slice)

    @property
    def lengths(self) -> Ints:
        """Lengths of all samples of all tenants."""
        return np.concatenate([member.lengths for member in self.members])

    @property
    def more(self) -> bool:
        """Whether any tenant has another step."""
        return any(self._step < member.steps for member in self.members)

    def draw(self) -> Draw:
        """The batches of all tenants that have another step, side by side."""
        here = [number for number, member in enumerate(self.members) if self._step < member.steps]
        draws = [self._drawings[number]() for number in here]
        self._step += 1
        return Draw(
            np.concatenate([draw.samples for draw in draws]),
            np.concatenate([draw.lengths for draw in draws]),
            {},
            float(np.mean([draw.delay_steps for draw in draws])),
            tenants=np.repeat(np.array(here, dtype=np.int64), [len(draw.samples) for draw in draws]),
        )

    def step(self, plan: StepPlan) -> SharedStep:
        """What a plan of such a draw comes to, beside each of its tenants alone. Raises EvenloadError."""
        seconds = self.chain.context.costs.sequence_s(plan.lengths)
        tenants = []
        for number in np.unique(plan.tenants).tolist():
            own = plan.tenants == number
            lengths, alone = plan.lengths[own], self._alone[number]
            alone_s = outcome_of(alone.plan(as_lengths(lengths)), alone.context).step_s
            share = float(seconds[own].sum() / seconds.sum())
            tenants.append(TenantStep(number, len(lengths), int(lengths.sum()), share, alone_s))
        bound_s = certified_s(plan, self.chain.context)
        return SharedStep(tuple(tenants), outcome_of(plan, self.chain.context).step_s, bound_s)

    def to_json(self, steps: Sequence[SharedStep]) -> dict[str, Any]:
        """``tenants`` of ``plan --json``: means of the steps that a tenant takes part in, sums of seconds."""
        rows = []
        for number, member in enumerate(self.members):
            own = [one for step in steps for one in step.tenants if one.number == number]
            means = {
                key: float(np.mean([getattr(one, key) for one in own])) if own else 0.0
                for key in ("samples", "tokens", "share", "alone_s")
            }
            weights = adapter_weights(self._shape, member.config.adapter)
            named = {"name": member.name, "number": number, "steps": len(own), "adapter_weights": weights}
            rows.append({**named, **means})
        together_s, bound_s = sum(step.together_s for step in steps), sum(step.bound_s for step in steps)
        alone_s = sum(one.alone_s for step in steps for one in step.tenants)
        certified = all(step.bound_s > 0 for step in steps)
        return {
            "predicted": True,
            "tenants": rows,
            "together_s": together_s,
            "one_after_another_s": alone_s,
            "saving": alone_s / together_s,
            "bound_s": bound_s if certified else None,
            "saving_at_most": alone_s / bound_s if certified else None,
        }


def _drawing(member: Member, chain: PlanChain) -> Drawing:
    seed, targets, domains = member.config.train.seed, member.targets, member.domains
    return Drawing.resume(None, member.lengths, member.size, chain, seed=seed, targets=targets, domains=domains)


def said(tenants: dict[str, Any]) -> list[str]:
    """What a shared plan saves, in sentences."""
    together_s, alone_s = tenants["together_s"], tenants["one_after_another_s"]
    lines = [
        f"together {seconds(together_s)}, one after another {seconds(alone_s)} on the same ranks, each planned as well:"
        f" {tenants['saving']:.2f}x"
    ]
    if tenants["saving_at_most"] is not None:
        most = f"{tenants['saving_at_most']:.2f}x at most"
        lines.append(f"the certified bound of all together is {seconds(tenants['bound_s'])}: {most}")
    return lines


def rows(tenants: dict[str, Any]) -> list[tuple[str, ...]]:
    return [
        (
            row["name"],
            f"{row['samples']:.4g}",
            f"{row['tokens']:,.0f}",
            percent(row["share"]),
            seconds(row["alone_s"]),
            f"{row['adapter_weights']:,} weights",
        )
        for row in tenants["tenants"]
    ]
