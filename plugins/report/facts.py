"""The numbers behind the pictures: where the ranks' time goes, planner by planner, in seconds and bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from ...core.costs.context import PlanningContext
from ...core.costs.costs import Costs
from ...core.plan.step_plan import MicroBatch, StepPlan
from ...core.simulate.predict import own_costs
from ...core.simulate.step import SPAN_KINDS, Span, SpanKind, simulate
from ...training.forecast.forecast import Forecast, Simulated
from ...training.pictures.planners import label, names, planners
from ...training.pipelines import Place, recomputed

Part = Literal["forward", "backward", "weights", "again", "padding", "exposed", "sum", "waiting"]

PARTS: dict[Part, str] = {
    "forward": "forward",
    "backward": "backward",
    "weights": "weight gradients",
    "again": "forward again",
    "padding": "padding",
    "exposed": "exposed communication",
    "sum": "gradient sum, update",
    "waiting": "waiting",
}
"""What a rank's time is spent on, and how it is called."""

_PART_OF: dict[SpanKind, Part] = {
    "F": "forward",
    "B": "backward",
    "W": "weights",
    "R": "again",
    "C": "exposed",
    "G": "sum",
    "U": "sum",
}

WHAT_THEY_DO = {
    "padded": "equal counts of samples, padded within a micro-batch",
    "whole": "whole sequences, balanced by cost",
    "chunks": "long sequences in chunks, the others packed",
    "in_order": "packed in the order of the batch",
    "whole_1f1b": "a sequence a micro-batch",
    "fixed_chunks": "chunks of equally many tokens, short sequences packed",
    "algorithm_1": "InfiniPipe's algorithm 1, pipelines drain in between",
    "dp_balanced": "packed in the order of the batch, as many packs a rank",
    "dynamic_cp": "groups of ranks by tokens, in rounds that share work",
    "best_fit": "best-fit bins, dealt out in turn",
    "karmarkar_karp": "sequences to ranks by largest differencing of cost",
}
"""Planners in a few words."""

AGAIN_KEY = "at a forward's foot: its layers that run again"
"""What green there says."""

FOOT = 0.5
"""Height of the foot of a forward all of whose layers run again, of the forward's."""

_MOST_ROWS = 32
"""Of a timeline."""

_TIE = 1e-3
"""Step times that differ by less are the same to a reader."""


class Stretch(NamedTuple):
    """A stretch of a rank's time."""

    part: Part
    start_s: float
    end_s: float
    title: str
    number: int = -1
    """Of the pass that it is, or begins; -1 for what is none."""
    again: float = 0.0
    """Of a forward the share of its layers that its backward runs again, because the plan says so."""

    @property
    def length_s(self) -> float:
        return self.end_s - self.start_s


@dataclass(frozen=True)
class PlannerFacts:
    """One planner over all steps."""

    name: str
    steps: tuple[Simulated, ...]
    step_s: float
    """Mean of the steps."""
    parts: dict[Part, float]
    """Mean seconds of a rank and step; they sum to ``step_s``."""
    imbalance: float
    padding_frac: float
    bubble_frac: float
    exposed_frac: float
    peak_bytes: float
    """The most that any rank holds in any step."""

    @property
    def label(self) -> str:
        return label(self.name)


@dataclass(frozen=True)
class Facts:
    """The numbers of a forecast that pictures show."""

    forecast: Forecast
    ours: PlannerFacts
    others: tuple[PlannerFacts, ...]
    """The baselines, stock first."""
    bounds_s: tuple[float, ...]
    """The steps' lower bounds."""

    @property
    def context(self) -> PlanningContext:
        return self.forecast.chain.context

    @property
    def remapped(self) -> bool:
        """A plugin is switched on; else evenload's plan is stock's, and only stock is shown."""
        return bool(self.forecast.chain.links)

    @property
    def bound_s(self) -> float:
        """Mean of the steps' lower bounds."""
        return float(np.mean(self.bounds_s))

    @property
    def basis(self) -> str:
        """What the headline's numbers are."""
        steps = len(self.bounds_s)
        return f"({self.forecast.times}{f', mean of {steps:,} steps' if steps > 1 else ''})"

    @property
    def reference(self) -> PlannerFacts:
        """The baseline of the headline: stock, where it is among them."""
        return self.others[0]

    @property
    def rival(self) -> PlannerFacts | None:
        """The fastest baseline other than the reference; of equals the first."""
        best: PlannerFacts | None = None
        for one in self.others[1:]:
            if best is None or one.step_s < best.step_s * (1 - _TIE):
                best = one
        return best

    @property
    def shown(self) -> tuple[PlannerFacts, ...]:
        """The planners that the timelines show: stock, the strongest of the others, evenload."""
        if not self.remapped:
            return (self.reference,)
        return tuple(one for one in (self.reference, self.rival, self.ours) if one is not None)

    @property
    def ranked(self) -> tuple[PlannerFacts, ...]:
        """All planners, slowest first; evenload is the last of equals."""
        if not self.remapped:
            return (self.reference,)
        ours_s = self.ours.step_s

        def key(one: PlannerFacts) -> tuple[float, bool]:
            equal = abs(one.step_s - ours_s) <= _TIE * ours_s
            return -(ours_s if equal else one.step_s), one is self.ours

        return tuple(sorted((*self.others, self.ours), key=key))


def facts_of(forecast: Forecast) -> Facts:
    """Gather the numbers; steps that were simulated without spans are simulated again."""
    ours, *others = (_planner(name, forecast) for name in names(forecast))
    return Facts(forecast, ours, tuple(others), tuple(step.bound_s for step in forecast.steps))


def _planner(name: str, forecast: Forecast) -> PlannerFacts:
    context = forecast.chain.context
    own = (planners(step)[name] for step in forecast.steps)
    steps = tuple(s if s.outcome.spans else replace(s, outcome=simulate(s.plan, context, record=True)) for s in own)
    parts = [parts_of(one, context) for one in steps]
    slots = sum(one.plan.num_padded_tokens for one in steps)
    means = ("step_s", "imbalance", "bubble_frac", "exposed_frac")
    return PlannerFacts(
        name,
        steps,
        parts={part: float(np.mean([each[part] for each in parts])) for part in PARTS},
        padding_frac=1.0 - sum(one.plan.num_tokens for one in steps) / max(1, slots),
        peak_bytes=max(one.peak_bytes for one in steps),
        **{key: float(np.mean([getattr(one.outcome, key) for one in steps])) for key in means},
    )


def parts_of(one: Simulated, context: PlanningContext) -> dict[Part, float]:
    """Mean seconds that a rank spends on what; they sum to the step."""
    plan, outcome = one.plan, one.outcome
    useful = _useful(plan, context.costs)
    num_places = plan.limits.num_ranks * plan.limits.num_devices
    seconds: dict[Part, float] = dict.fromkeys(PARTS, 0.0)
    for span in outcome.spans:
        taken, share = span.end_s - span.start_s, useful(span)
        seconds[_PART_OF[span.kind]] += taken * share / num_places
        seconds["padding"] += taken * (1.0 - share) / num_places
    seconds["waiting"] = max(0.0, outcome.step_s - sum(seconds.values()))
    return seconds


def pieces_of(one: Simulated, costs: Costs, places: Iterable[Place]) -> dict[Place, list[Stretch]]:
    """What some ranks of stages do in one step; the padding of a pass is drawn at its end."""
    useful = _useful(one.plan, costs)
    pieces: dict[Place, list[Stretch]] = {place: [] for place in places}
    for span in one.outcome.spans:
        row = pieces.get((span.stage, span.rank))
        if row is None:
            continue
        share = useful(span)
        middle = span.start_s + share * (span.end_s - span.start_s)
        title = SPAN_KINDS[span.kind] + _describe(one.plan, span)
        number = span.micro_batch if span.kind in "FBW" else -1
        if share > 0:
            layers = one.plan.limits.at(span.stage).layers_per_stage
            again = recomputed(one.plan, span.stage, number) / layers if span.kind == "F" else 0.0
            row.append(Stretch(_PART_OF[span.kind], span.start_s, middle, title, number, again))
        if share < 1:
            number = -1 if share > 0 else number
            row.append(Stretch("padding", middle, span.end_s, f"padding of {title}", number))
    return pieces


def _describe(plan: StepPlan, span: Span) -> str:
    """`` 3: 8,192 tokens in 5 slices, 2 of 8 layers recomputed`` for a pass; empty for what is none."""
    if span.micro_batch < 0 or span.kind == "C":
        return ""
    micro_batch = plan.passes("F" if span.kind == "F" else "B")[span.micro_batch]
    text = f" {span.micro_batch}: {micro_batch.num_tokens:,} tokens in {len(micro_batch.slices)} slices"
    if again := recomputed(plan, span.stage, span.micro_batch):
        text += f", {again} of {plan.limits.at(span.stage).layers_per_stage} layers recomputed"
    return text


def _useful(plan: StepPlan, costs: Costs) -> Callable[[Span], float]:
    """Gives the share of a pass that computes tokens, and not padding."""
    of_plan = own_costs(plan, costs)

    @cache
    def shares(kind: Literal["F", "B"], number: int) -> dict[str, float]:
        return _shares(plan.passes(kind)[number], of_plan)

    def share(span: Span) -> float:
        if span.micro_batch < 0 or span.kind == "C":
            return 1.0
        return shares("F" if span.kind == "F" else "B", span.micro_batch)[span.kind]

    return share


def _shares(micro_batch: MicroBatch, costs: Costs) -> dict[str, float]:
    """By kind of pass; R is a forward inside a backward."""
    if not micro_batch.slices or not micro_batch.pad_to:
        return dict.fromkeys("FBRW", 1.0 if micro_batch.slices else 0.0)
    forward, backward = costs.micro_batch_s(micro_batch)
    bare_forward, bare_backward = costs.micro_batch_s(micro_batch._replace(pad_to=0))
    if costs.recompute:  # those of a backward hold a forward
        backward, bare_backward = backward - forward, bare_backward - bare_forward
    ahead = bare_forward / forward if forward else 1.0
    behind = bare_backward / backward if backward else 1.0
    return {"F": ahead, "B": behind, "R": ahead, "W": micro_batch.num_tokens / micro_batch.num_padded_tokens}


def shown_places(one: Simulated, most_rows: int = _MOST_ROWS) -> tuple[list[Place], bool]:
    """What is drawn from top to bottom, the stages of a rank together, and whether that is all ranks: else some from
    the busiest to the idlest, evenly spaced."""
    limits, busy = one.plan.limits, one.outcome.busy_s.sum(axis=0)
    most_ranks = max(3, most_rows // limits.num_stages)
    complete = limits.num_ranks <= most_ranks
    ranks = list(range(limits.num_ranks))
    if not complete:
        evenly = np.linspace(0, limits.num_ranks - 1, most_ranks).round().astype(int)
        ranks = np.argsort(-busy, kind="stable")[evenly].tolist()
    return [(stage, rank) for rank in ranks for stage in range(limits.num_stages)], complete


def ends_of(places: Sequence[Place], complete: bool) -> tuple[str, str]:
    """Names of the first and the last row of a timeline."""
    first, last = places[0], places[-1]
    if len(places) > 1 and first[1] == last[1]:
        return f"stage {first[0]}", f"stage {last[0]}"
    return (f"rank {first[1]}", f"rank {last[1]}") if complete else ("busiest", "idlest")


def histogram(lengths: npt.NDArray[np.int64]) -> tuple[list[int], dict[str, list[float]]]:
    """Edges of the bins (powers of two), and each bin's share of sequences, tokens, and attention's work."""
    low, high = int(np.log2(max(1, lengths.min()))), int(np.ceil(np.log2(lengths.max())))
    edges = [2**k for k in range(low, max(high, low + 1) + 1)]
    weights = {"sequences": lengths * 0.0 + 1, "tokens": lengths * 1.0, "attention": lengths.astype(np.float64) ** 2}
    shares = {name: np.histogram(lengths, edges, weights=w)[0] / w.sum() for name, w in weights.items()}
    return edges, {name: share.tolist() for name, share in shares.items()}
