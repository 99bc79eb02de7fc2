"""Which samples an evaluation scores: the same ones each time, in the same batches, so that its losses are a series.

A run that does not score all of them takes the first of an order that the seed gives, as training would. Samples
without a target have no loss: they are left out, and counted.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..core.errors import EvenloadError
from ..core.planning.planner import Draw
from ..core.recipe.recipe import Recipe
from ..data.samples.order import SampleOrder
from ..data.sources import Source
from .drawing import batch_size


def scorable(source: Source) -> NDArray[np.int64]:
    """Numbers of the samples that have a target, ascending."""
    return np.flatnonzero(source.lengths > 1 if source.targets is None else source.targets > 0)


def draws_of(source: Source, recipe: Recipe) -> list[Draw]:
    """The batches of an evaluation; the last one may be smaller. Raises EvenloadError where no sample has a target."""
    assert recipe.data.validation is not None
    batches, numbers = recipe.data.validation.batches, scorable(source)
    size = batch_size(recipe).mean_samples(source.lengths)
    if not len(numbers):
        detail = f"{len(source.lengths)} samples of {recipe.data.validation.source}"
        raise EvenloadError("no sample of data.validation has a target", detail, "use samples with targets")
    count = len(numbers) if batches is None else min(len(numbers), batches * size)
    taken, _ = SampleOrder(len(numbers), recipe.train.seed).take(count)
    samples = numbers[taken]
    return [_draw(source, samples[first : first + size]) for first in range(0, count, size)]


def _draw(source: Source, samples: NDArray[np.int64]) -> Draw:
    targets = None if source.targets is None else source.targets[samples]
    return Draw(samples, source.lengths[samples], {}, targets=targets)
