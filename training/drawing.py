"""Draws global batches in the order of the samples; what a plugin holds back waits here for a later step.

A pure function of data, seed, samples consumed and what waits, so every rank draws the same, and a resumed run goes on
with the same batches. Without a plugin that holds back, a batch is what ``size`` takes next. With one it may hold more
or fewer: the waiting ones that run now (oldest first), then the drawn ones that do not wait. Losses are divided by the
target tokens of what runs, so nothing else changes. Every sample runs exactly once; the saved state names those that
still wait, and for how many ranks the rule decides, because a run that goes on with other ranks must see the same
batches. A state with waiting samples that is resumed without the plugin runs them in its first step.

A sample without one token that carries loss changes no sum: it is drawn in its turn, left out and counted, in the
divisor of weighted losses too, where one is given. Where a
batch has no other the draw is empty, which the planner refuses when its step comes.

Where samples are in groups, the order is one of groups, and a batch takes whole ones (`WholeGroups`). Where they are of
domains, each has an order of its own and a share of what is drawn (`Mixture`); what waits keeps domain and weight, and
where its domain is gone it waits in the state until that comes back.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..core.aliases import Floats, Ints
from ..core.errors import EvenloadError
from ..core.plan.step_plan import as_lengths
from ..core.planning.chain import PlanChain
from ..core.planning.planner import Draw
from ..core.planning.stage_layers import settled
from ..core.policies import objective_weights
from ..core.recipe.recipe import Recipe
from ..core.recipe.sections import Data
from ..core.recipe.shares import recorded, shares_of
from ..core.registry import DataPlugin
from ..data.mixed import MixedSource
from ..data.samples.mixture import MixState, Mixture
from ..data.samples.order import BatchSize, SampleOrder
from ..data.samples.whole_groups import WholeGroups
from ..data.sources import Source, targets_of

logger = logging.getLogger("evenload")

_NONE = np.zeros(0, dtype=np.int64)


class Domains(NamedTuple):
    """A mixture, and what its draws say of their samples."""

    mixture: Mixture
    weights: tuple[float, ...]
    """[domains] of the samples of each in the loss."""
    first_shares: Mapping[str, Any] = {}
    """Where a policy of data moves the shares: the share record before the first step."""

    @classmethod
    def of_source(cls, recipe: Recipe, source: Source) -> Domains | None:
        """The domains of a recipe's data; None where it has one source."""
        return cls.of_lengths(recipe, *source.columns()) if isinstance(source, MixedSource) else None

    @classmethod
    def of_data(cls, data: Data, size: BatchSize, source: Source) -> Domains | None:
        """The domains of data that no policy moves; None where there is one source."""
        return cls._of(data, size, *source.columns(), {}) if isinstance(source, MixedSource) else None

    @classmethod
    def of_lengths(
        cls,
        recipe: Recipe,
        lengths: Mapping[str, Ints],
        targets: Mapping[str, Ints],
        groups: Mapping[str, Ints] | None = None,
    ) -> Domains:
        """The domains whose samples have so many tokens and targets, and are in these groups, by their names."""
        names = sorted(lengths)
        samples = [len(lengths[name]) for name in names]
        moved = (one.first_shares(recipe, names, samples) for one in recipe.enabled_of(DataPlugin) if one.first_shares)
        first = next(filter(None, moved), {})
        return cls._of(recipe.data, batch_size(recipe), lengths, targets, groups, first)

    @classmethod
    def _of(
        cls,
        data: Data,
        size: BatchSize,
        lengths: Mapping[str, Ints],
        targets: Mapping[str, Ints],
        groups: Mapping[str, Ints] | None,
        first: Mapping[str, Any],
    ) -> Domains:
        assert data.domains is not None
        prices = targets if data.mix.unit == "targets" else None
        shares = recorded(first) if first else shares_of(data)
        mixture = Mixture(lengths, prices, size, shares, groups)
        return cls(mixture, tuple(data.domains[name].weight for name in mixture.names), first)

    def marked(self, draw: Draw) -> Draw:
        """The draw with the domain of each sample, and its weight where a policy has an objective or any domain another
        than 1."""
        places = self.mixture.numbers.domain_of(draw.samples)
        objective = (draw.state["policy"] or self.first_shares).get("objective") if self.first_shares else None
        if objective is not None:
            counts = draw.num_targets.astype(np.float64) if draw.own_sums is None else draw.own_sums
            return draw._replace(domain=places, weight=objective_weights(objective, places, counts))
        unlike = any(weight != 1 for weight in self.weights)
        return draw._replace(domain=places, weight=np.array(self.weights)[places] if unlike else 1.0)


class Waiting(NamedTuple):
    """The queue after a step."""

    samples: Ints
    """Numbers of the samples that wait, oldest first."""
    steps: Ints
    """How many steps each has waited."""
    num_ranks: int
    """Ranks for which the rule decides."""
    absent: tuple[tuple[Any, int], ...] = ()
    """Samples of domains that are not here, each with the steps it has waited."""


class Selected(NamedTuple):
    """What a selection has taken for the next batches."""

    samples: Ints
    """That are not drawn yet, in their order."""
    state: Mapping[str, Any]
    """What a checkpoint keeps of the selection, ready for JSON."""


class Drawing:
    """Gives the next `Draw` at every call. ``state``: the `Draw.state` that it goes on from, which a checkpoint keeps;
    None: it begins, in the order of the seed. Raises EvenloadError for a state that is damaged or of other data."""

    def __init__(
        self,
        state: Mapping[str, Any] | None,
        lengths: NDArray[np.int64],
        size: BatchSize,
        chain: PlanChain,
        *,
        seed: int = 0,
        targets: NDArray[np.int64] | None = None,
        groups: NDArray[np.int64] | None = None,
        trunks: NDArray[np.int64] | None = None,
        weight_sums: Floats | None = None,
        divisor: float | Ints | None = None,
        domains: Domains | None = None,
    ) -> None:
        self._lengths = lengths
        self._groups, self._trunks = groups, trunks
        self._targets, self._weight_sums = targets, weight_sums
        self._divisor = divisor
        self._size, self._domains = size, domains
        mixture = domains.mixture if domains else None
        self._order: Any
        self._take: Callable[[Any], tuple[NDArray[np.int64], Any]]
        if mixture is not None:
            self._order = mixture.begin(seed) if state is None else mixture.resume(state, seed)
            self._take = mixture.take
        else:
            count = len(lengths) if groups is None else int(groups.max()) + 1
            self._order = SampleOrder(count, seed) if state is None else SampleOrder.from_state(state, count)
            whole = None if groups is None else WholeGroups(groups, lengths, size)
            self._take = whole.take if whole else partial(size.take, lengths=lengths)
        self._situation = chain.context
        asked = [plugin.hold_back(config) for plugin, config in chain.links if plugin.hold_back]
        self._rules = [rule for rule in asked if rule is not None]
        self._overrides: list[Mapping[str, Any]] = []
        """Share records of the next batches; the last one stays."""
        self._waiting = Waiting(_NONE, _NONE, chain.limits.num_ranks)
        if state and "waiting" in state:
            self._waiting = _read(state["waiting"], len(lengths), mixture)
        self.selected: Selected | None = None
        """Where a selection says what is drawn: what it has taken. None: samples are drawn in their order."""

    @property
    def num_ranks(self) -> int | None:
        """Ranks for which a rule decides, those that the run began with; None where nothing is held back."""
        return self._waiting.num_ranks if self._rules else None

    def __call__(self) -> Draw:
        if self._overrides:
            self._order = replace(self._order, shares_override=self._overrides[0])
            self._overrides = self._overrides[1:] or self._overrides
        drawn, left_out = self._next(), _NONE
        if self._targets is not None:
            drawn, left_out = drawn[self._targets[drawn] > 0], drawn[self._targets[drawn] == 0]
        samples = np.concatenate([self._waiting.samples, drawn])
        waited = np.concatenate([self._waiting.steps, np.zeros(len(drawn), dtype=np.int64)])
        lengths = self._lengths[samples]
        runs = ~self._held_back(lengths, waited)
        self._waiting = self._waiting._replace(samples=samples[~runs], steps=waited[~runs] + 1)
        delay_steps = float(np.average(waited[runs], weights=lengths[runs])) if runs.any() else 0.0
        targets = None if self._targets is None else self._targets[samples[runs]]
        groups = None if self._groups is None else self._groups[samples[runs]]
        trunks = None if self._trunks is None else self._trunks[samples[runs]]
        sums = None if self._weight_sums is None else self._weight_sums[samples[runs]]
        draw = Draw(
            samples[runs],
            lengths[runs],
            self._state(),
            delay_steps,
            targets,
            without_target=len(left_out),
            groups=groups,
            trunks=trunks,
            own_sums=sums,
            divisor=_divisor_of(self._divisor, samples[runs], left_out),
        )
        return draw if self._domains is None else self._domains.marked(draw)

    def _next(self) -> Ints:
        if self.selected is None:
            drawn, self._order = self._take(self._order)
            return drawn
        batch, rest = np.split(self.selected.samples, [self._size.samples])
        self.selected = self.selected._replace(samples=rest)
        if isinstance(self._order, MixState):
            self._order = replace(self._order, step=self._order.step + 1)
        return batch

    def candidates(self, batches: int) -> Ints:
        """The samples with a target of so many batches, in their order, each once. They are drawn and count as no
        batch: a selection takes batches of them."""
        parts: list[Ints] = []
        for _ in range(batches):
            if self._overrides:
                self._order = replace(self._order, shares_override=self._overrides[0])
            before = self._order
            part, self._order = self._take(before)
            parts.append(part)
            if isinstance(before, MixState):
                self._order = replace(self._order, step=before.step)
        numbers = np.concatenate(parts)
        numbers = numbers[np.sort(np.unique(numbers, return_index=True)[1])]
        targets = self._lengths - 1 if self._targets is None else self._targets
        carrying: Ints = numbers[targets[numbers] > 0]
        return carrying

    def use(self, shares: Mapping[str, Any], first: Mapping[str, Any] | None = None) -> None:
        """Draw the next batches by another share record; ``first``: the next one alone by a record of its own."""
        self._overrides = [shares] if first is None else [first, shares]

    def _held_back(self, lengths: NDArray[np.int64], waited: NDArray[np.int64]) -> NDArray[np.bool_]:
        waits = np.zeros(len(lengths), dtype=np.bool_)
        for rule in self._rules if len(lengths) else ():
            waits |= rule(lengths, waited, self._waiting.num_ranks, self._situation)
        assert not (len(waits) and waits.all()), "a plugin held back the whole batch"
        return waits

    def _state(self) -> dict[str, Any]:
        state: dict[str, Any] = self._order.state()
        if self.selected is not None:
            state["select"] = {**self.selected.state, "samples": self.selected.samples.tolist()}
        waiting = self._waiting
        if not self._rules and not len(waiting.samples) and not waiting.absent:
            return state
        samples = self._domains.mixture.numbers.named(waiting.samples) if self._domains else waiting.samples.tolist()
        rows = [*zip(samples, waiting.steps.tolist(), strict=True), *waiting.absent]
        queue = {"samples": [one for one, _ in rows], "steps": [steps for _, steps in rows]}
        return {**state, "waiting": {**queue, "ranks": waiting.num_ranks}}


def with_layers(recipe: Recipe, num_ranks: int, drawing: Callable[[PlanChain], Drawing]) -> Recipe:
    """The recipe with numbers in place of ``parallel.layers: auto``, those for the first batch of a drawing for these
    planners. Raises EvenloadError."""
    if recipe.parallel.layers != "auto":
        return recipe
    first = drawing(PlanChain.of_recipe(recipe, recipe.layout(num_ranks)))()
    recipe = settled(recipe, num_ranks, as_lengths(first.lengths), groups=first.groups)
    logger.info("parallel.layers auto: stages have %s layers", ", ".join(map(str, recipe.parallel.layers or ())))
    return recipe


def drawing_of(recipe: Recipe, source: Source, chain: PlanChain, state: Mapping[str, Any] | None = None) -> Drawing:
    """The global batches of a source from the first step on, or from where a checkpoint's state was taken."""
    size, seed, domains = batch_size(recipe), recipe.train.seed, Domains.of_source(recipe, source)
    return Drawing(state, source.lengths, size, chain, seed=seed, domains=domains, **columns_of(source))


def batch_size(recipe: Recipe) -> BatchSize:
    """What a global batch of the recipe takes."""
    return BatchSize(recipe.train.global_batch_size, recipe.train.global_batch_tokens)


def refuse_short_data(recipe: Recipe, lengths: Ints, what: str, more: str) -> None:
    """Raise EvenloadError for data of fewer samples, or tokens, than a global batch takes; ``what`` with a place for
    which of both, ``more`` of what to do."""
    key, unit, here = "global_batch_size", "samples", len(lengths)
    if recipe.train.global_batch_tokens is not None:
        key, unit, here = "global_batch_tokens", "tokens", int(lengths.sum())
    wanted = getattr(recipe.train, key)
    if here < wanted:
        raise EvenloadError(what.format(unit), f"{here} {unit}, train.{key} {wanted}", f"lower train.{key}{more}")


def num_waiting(state: Mapping[str, Any]) -> int:
    """Samples that still wait after the draw of this state."""
    return len(state["waiting"]["samples"]) if "waiting" in state else 0


def _read(queue: Any, num_samples: int, mixture: Mixture | None) -> Waiting:
    with suppress(KeyError, TypeError, ValueError, OverflowError):
        rows = list(zip(queue["samples"], map(int, queue["steps"]), strict=True))
        numbers = [one if mixture is None else mixture.numbers.number_of(*one) for one, _ in rows]
        here = [(number, steps) for number, (_, steps) in zip(numbers, rows, strict=True) if number is not None]
        samples, steps = np.array(here, dtype=np.int64).reshape(-1, 2).T
        absent = tuple(row for number, row in zip(numbers, rows, strict=True) if number is None)
        waiting = Waiting(samples, steps, int(queue["ranks"]), absent)
        whole = waiting.samples.ndim == 1 and waiting.samples.shape == waiting.steps.shape and waiting.num_ranks > 0
        if whole and ((waiting.samples >= 0) & (waiting.samples < num_samples)).all():
            return waiting
    raise EvenloadError("the saved queue of waiting samples is damaged", f"{queue}", "resume from another checkpoint")


def scorable(source: Source) -> NDArray[np.int64]:
    """Numbers of the samples that have a target, ascending."""
    return np.flatnonzero(targets_of(source) > 0)


def draws_of(source: Source, recipe: Recipe) -> list[Draw]:
    """The batches of an evaluation; the last one may be smaller. Raises EvenloadError where no sample has a target."""
    assert recipe.data.validation is not None
    config, size = recipe.data.validation, batch_size(recipe).mean_samples(source.lengths)
    batches = held_out_batches(source, config.batches, size, recipe.train.seed)
    if not batches:
        detail = f"{len(source.lengths)} samples of {source.name}"
        raise EvenloadError("no sample of data.validation has a target", detail, "use samples with targets")
    return [draw_of(source, samples) for samples in batches]


def held_out_batches(source: Source, batches: int | None, size: int, seed: int) -> list[NDArray[np.int64]]:
    """The samples of evaluations, the same each time, so that losses are a series: those that have a target, in the
    order of the seed; of so many batches, or all."""
    numbers = scorable(source)
    count = len(numbers) if batches is None else min(len(numbers), batches * size)
    taken, _ = SampleOrder(len(numbers), seed).take(count)
    return [numbers[taken[first : first + size]] for first in range(0, count, size)]


def draw_of(source: Source, samples: NDArray[np.int64]) -> Draw:
    """A batch of these samples, whatever the order says."""
    targets = None if source.targets is None else source.targets[samples]
    sums = None if source.weight_sums is None else source.weight_sums[samples]
    domain = source.numbers.domain_of(samples) if isinstance(source, MixedSource) else None
    divisor = _divisor_of(source.divisor, samples)
    return Draw(samples, source.lengths[samples], {}, targets=targets, own_sums=sums, domain=domain, divisor=divisor)


def _divisor_of(divisor: float | Ints | None, *samples: Ints) -> float | None:
    """What a source (`Source.divisor`) divides the losses of a batch of these samples by."""
    if isinstance(divisor, np.ndarray):
        return float(sum(divisor[numbers].sum() for numbers in samples))
    return divisor


def columns_of(source: Source) -> dict[str, Any]:
    """What `Drawing` knows of the samples of a source besides their lengths."""
    columns = {"targets": source.targets, "groups": source.groups, "trunks": source.trunks}
    return {**columns, "weight_sums": source.weight_sums, "divisor": source.divisor}
