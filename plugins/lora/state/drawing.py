"""The batch of a step: the union of the batches that the tenants would draw alone.

Each tenant's samples come in the order of its own seed, so many at a time as its own batch size says, whoever else is
there. A batch is drawn one or two steps before it is trained on. Where the tenants change meanwhile, what was drawn and
not trained on is put back, so that nobody loses a sample or sees one twice, and a change counts for the next step.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ....core.planning.planner import Draw
from ....core.recipe.adapter import TenantTrain
from ....data.samples.order import BatchSize
from ....data.sources import Source
from ....training.drawing import Domains, Drawing

if TYPE_CHECKING:
    from .tenant import ActiveTenant

OWN = "tenants"
"""In the state of a draw: the own draw of each tenant by its number."""


class _Before(NamedTuple):
    """What a tenant's batches were before one of them was drawn."""

    tenant: ActiveTenant
    drawing: Drawing


class TenantDrawing:
    """Gives the next `Draw` of the tenants that ``active`` names, each time it is called: what ``part_of`` it is this
    replica's."""

    def __init__(
        self, active: Callable[[], Iterable[ActiveTenant]], part_of: Callable[[Draw], Draw] = lambda draw: draw
    ) -> None:
        self._active, self._part_of = active, part_of
        self._open: list[list[_Before]] = []
        """Of batches that were drawn and not trained on, from the oldest to the newest."""

    @property
    def more(self) -> bool:
        """Whether any tenant has another batch."""
        return any(map(self._draws, self._active()))

    @property
    def num_open(self) -> int:
        """Batches that were drawn and not trained on."""
        return len(self._open)

    def __call__(self) -> Draw:
        tenants = [tenant for tenant in self._active() if self._draws(tenant)]
        self._open.append([_Before(tenant, copy.copy(tenant.drawing)) for tenant in tenants])
        return self._part_of(union({tenant.number: next_of(tenant.drawing) for tenant in tenants}))

    def trained(self) -> None:
        """The oldest of the open batches was trained on."""
        del self._open[0]

    def put_back(self) -> None:
        """The open batches will be drawn again, by whoever is there then."""
        for before in (before for batch in reversed(self._open) for before in batch):
            before.tenant.drawing = before.drawing
        self._open.clear()

    def _draws(self, tenant: ActiveTenant) -> bool:
        ahead = sum(before.tenant is tenant for batch in self._open for before in batch)
        return tenant.step + ahead < tenant.until


def steps_of(train: TenantTrain, lengths: NDArray[np.int64], domains: Domains | None) -> int:
    """Updates that the adapter of a tenant gets, whose samples have these lengths."""
    if train.epochs is None:
        return train.steps
    if domains is not None:
        return domains.mixture.steps(train.seed, epochs=train.epochs)
    return BatchSize(train.batch_size).steps(lengths, train.seed, epochs=train.epochs)


def next_of(drawing: Drawing) -> Draw:
    """The next batch that has a target; the data has one, or it would not have been opened."""
    draw, left_out = drawing(), 0
    while not len(draw.samples):
        left_out, draw = left_out + draw.without_target, drawing()
    return draw._replace(without_target=draw.without_target + left_out)


def union(draws: Mapping[int, Draw]) -> Draw:
    """The draws of tenants, by their numbers, as one; empty of none."""
    parts, numbers = list(draws.values()), list(draws)
    lengths = _joined([draw.lengths for draw in parts])
    unlike = any(draw.targets is not None for draw in parts)
    targets = _joined([draw.num_targets for draw in parts]) if unlike else None
    weighed = any(draw.own_sums is not None for draw in parts)
    own_sums = [draw.num_targets if draw.own_sums is None else draw.own_sums for draw in parts] if weighed else None
    divisors = {number: draw.divisor for number, draw in draws.items() if isinstance(draw.divisor, float)}
    factors = [np.broadcast_to(draw.weight, len(draw.samples)) for draw in parts]
    delays = [draw.delay_steps for draw in parts]
    return Draw(
        samples=_joined([draw.samples for draw in parts]),
        lengths=lengths,
        state={OWN: dict(draws)},
        delay_steps=float(np.average(delays, weights=[draw.lengths.sum() for draw in parts])) if parts else 0.0,
        targets=targets,
        without_target=sum(draw.without_target for draw in parts),
        weight=_joined(factors) if any((one != 1).any() for one in factors) else 1.0,
        own_sums=_joined(own_sums) if own_sums else None,
        divisor=divisors or None,
        tenants=np.repeat(np.array(numbers, dtype=np.int64), [len(draw.samples) for draw in parts]),
    )


def own_draws(draw: Draw) -> Mapping[int, Draw]:
    """What `union` made a draw of."""
    own: Mapping[int, Draw] = draw.state[OWN]
    return own


def labels_in(source: Source, sample: int) -> NDArray[np.int64]:
    """The labels of a sample; its tokens, where each of them is a target."""
    return source.tokens(sample) if source.targets is None else source.labels(sample)


def _joined(parts: Sequence[NDArray[Any]]) -> NDArray[Any]:
    return np.concatenate([np.zeros(0, dtype=np.int64), *parts])
