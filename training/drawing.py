"""Draws global batches in the order of the samples; what a plugin holds back waits here for a later step.

A pure function of data, seed, samples consumed and what waits, so every rank draws the same, and a resumed run goes on
with the same batches. Without a plugin that holds back, a batch is what ``size`` takes next. With one it may hold more
or fewer: the waiting ones that run now (oldest first), then the drawn ones that do not wait. Losses are divided by the
target tokens of what runs, so nothing else changes. Every sample runs exactly once; the saved state names those that
still wait, and for how many ranks the rule decides, because a run that goes on with other ranks must see the same
batches. A state with waiting samples that is resumed without the plugin runs them in its first step.

A sample without one token that carries loss changes no sum: it is drawn in its turn, left out and counted. Where a
batch has no other the draw is empty, which the planner refuses when its step comes.

Where samples are in groups, the order is one of groups, and a batch takes whole ones (`WholeGroups`).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..core.aliases import Ints
from ..core.errors import EvenloadError
from ..core.plan.step_plan import as_lengths
from ..core.planning.chain import PlanChain
from ..core.planning.planner import Draw
from ..core.recipe.recipe import Recipe
from ..core.search.stage_layers import settled
from ..data.samples.order import BatchSize, SampleOrder
from ..data.samples.whole_groups import WholeGroups
from ..data.sources import Source

logger = logging.getLogger("evenload")

_NONE = np.zeros(0, dtype=np.int64)


class Waiting(NamedTuple):
    """The queue after a step."""

    samples: Ints
    """Numbers of the samples that wait, oldest first."""
    steps: Ints
    """How many steps each has waited."""
    num_ranks: int
    """Ranks for which the rule decides."""


class Drawing:
    """Gives the next `Draw` at every call; ``state`` of a draw goes into the checkpoint and comes back to `resume`."""

    def __init__(
        self,
        order: SampleOrder,
        lengths: NDArray[np.int64],
        size: BatchSize,
        chain: PlanChain,
        waiting: Waiting | None = None,
        *,
        targets: NDArray[np.int64] | None = None,
        groups: NDArray[np.int64] | None = None,
    ) -> None:
        self._order = order
        self._lengths = lengths
        self._groups = groups
        self._take = partial(size.take, lengths=lengths) if groups is None else WholeGroups(groups, lengths, size).take
        self._situation = chain.context
        self._targets = targets
        asked = [plugin.hold_back(config) for plugin, config in chain.links if plugin.hold_back]
        self._rules = [rule for rule in asked if rule is not None]
        self._waiting = waiting or Waiting(_NONE, _NONE, chain.limits.num_ranks)

    @classmethod
    def resume(
        cls,
        state: Mapping[str, Any] | None,
        lengths: NDArray[np.int64],
        size: BatchSize,
        chain: PlanChain,
        *,
        seed: int = 0,
        targets: NDArray[np.int64] | None = None,
        groups: NDArray[np.int64] | None = None,
    ) -> Drawing:
        """Go on where `Draw.state` was taken; None: begin, in the order of the seed. Raises EvenloadError for a state
        that is damaged or of other data."""
        count = len(lengths) if groups is None else int(groups.max()) + 1
        waiting = _read(state["waiting"], len(lengths)) if state and "waiting" in state else None
        order = SampleOrder(count, seed) if state is None else SampleOrder.from_state(state, count)
        return cls(order, lengths, size, chain, waiting, targets=targets, groups=groups)

    @property
    def num_ranks(self) -> int | None:
        """Ranks for which a rule decides, those that the run began with; None where nothing is held back."""
        return self._waiting.num_ranks if self._rules else None

    def __call__(self) -> Draw:
        drawn, self._order = self._take(self._order)
        num_drawn = len(drawn)
        if self._targets is not None:
            drawn = drawn[self._targets[drawn] > 0]
        samples = np.concatenate([self._waiting.samples, drawn])
        waited = np.concatenate([self._waiting.steps, np.zeros(len(drawn), dtype=np.int64)])
        lengths = self._lengths[samples]
        runs = ~self._held_back(lengths, waited)
        self._waiting = self._waiting._replace(samples=samples[~runs], steps=waited[~runs] + 1)
        delay_steps = float(np.average(waited[runs], weights=lengths[runs])) if runs.any() else 0.0
        targets = None if self._targets is None else self._targets[samples[runs]]
        groups = None if self._groups is None else self._groups[samples[runs]]
        left_out = num_drawn - len(drawn)
        return Draw(samples[runs], lengths[runs], self._state(), delay_steps, targets, left_out, groups=groups)

    def _held_back(self, lengths: NDArray[np.int64], waited: NDArray[np.int64]) -> NDArray[np.bool_]:
        waits = np.zeros(len(lengths), dtype=np.bool_)
        for rule in self._rules if len(lengths) else ():
            waits |= rule(lengths, waited, self._waiting.num_ranks, self._situation)
        assert not (len(waits) and waits.all()), "a plugin held back the whole batch"
        return waits

    def _state(self) -> dict[str, Any]:
        state, waiting = self._order.state(), self._waiting
        if not self._rules and not len(waiting.samples):
            return state
        queue = {"samples": waiting.samples.tolist(), "steps": waiting.steps.tolist(), "ranks": waiting.num_ranks}
        return {**state, "waiting": queue}


def with_layers(recipe: Recipe, num_ranks: int, lengths: NDArray[np.int64], **of_source: Any) -> Recipe:
    """The recipe with numbers in place of ``parallel.layers: auto``, those for its first batch of these samples.

    ``of_source``: their targets and groups, if any (`Drawing.resume`). Raises EvenloadError.
    """
    if recipe.parallel.layers != "auto":
        return recipe
    chain = PlanChain.of_recipe(recipe, recipe.layout(num_ranks))
    first = Drawing.resume(None, lengths, batch_size(recipe), chain, seed=recipe.train.seed, **of_source)()
    recipe = settled(recipe, num_ranks, as_lengths(first.lengths), groups=first.groups)
    logger.info("parallel.layers auto: stages have %s layers", ", ".join(map(str, recipe.parallel.layers or ())))
    return recipe


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


def _read(queue: Any, num_samples: int) -> Waiting:
    with suppress(KeyError, TypeError, ValueError, OverflowError):
        samples, steps = (np.array(queue[name], dtype=np.int64) for name in ("samples", "steps"))
        waiting = Waiting(samples, steps, int(queue["ranks"]))
        whole = waiting.samples.ndim == 1 and waiting.samples.shape == waiting.steps.shape and waiting.num_ranks > 0
        if whole and ((waiting.samples >= 0) & (waiting.samples < num_samples)).all():
            return waiting
    raise EvenloadError("the saved queue of waiting samples is damaged", f"{queue}", "resume from another checkpoint")


def scorable(source: Source) -> NDArray[np.int64]:
    """Numbers of the samples that have a target, ascending."""
    return np.flatnonzero(source.lengths > 1 if source.targets is None else source.targets > 0)


def draws_of(source: Source, recipe: Recipe) -> list[Draw]:
    """The batches of an evaluation; the last one may be smaller. Raises EvenloadError where no sample has a target."""
    assert recipe.data.validation is not None
    config, size = recipe.data.validation, batch_size(recipe).mean_samples(source.lengths)
    batches = held_out_batches(source, config.batches, size, recipe.train.seed)
    if not batches:
        detail = f"{len(source.lengths)} samples of {config.source}"
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
    return Draw(samples, source.lengths[samples], {}, targets=targets)
