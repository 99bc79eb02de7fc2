"""``training_step`` on regrouped units: each counts what it did in the script's batches, and so do TRL's metrics.

A stock step takes the mean of B units in each of its batches; a planned micro-batch of k takes the mean of k, times
k / B. A loss that is a sum over units, over a number of the whole step, needs no factor. TRL's Trainers gather their
figures over ranks inside ``compute_loss``, of as many units on each, and append one number a call to ``_metrics``:
planned, figures stay on their rank in the call, and the step gets their mean over its micro-batches, weighed by what
each is a mean of, once for each batch of a stock run. That is the stock figure where it is a mean of units; a mean of
tokens, and a least or a largest, are those of the step, not means of the batches' own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ....runtime.attention.pack import Pack
from ....runtime.attributes import with_attributes
from ....runtime.world.agreement import everyone
from ...huggingface.units import Unit, UnitForm, batch_of

_TOTAL, _OF_TOTAL = "_total_train_tokens", "num_tokens"
"""Tokens that a Trainer of TRL has seen, and the metric that repeats them."""


_SIDES, _MARGIN = ("rewards/chosen", "rewards/rejected"), "rewards/margins"
_ACCURACY = "mean_token_accuracy"
"""Of chosen answers."""
_OF_TOKENS = ("entropy", "logits/", _ACCURACY, "kl", "cispo_clip_ratio")
_LEAST, _MOST, _LEAST_OF, _MOST_OF = "min_", "max_", "_min", "_max"
_CLIPPED, _LEVEL = "clip_ratio/", "importance_sampling_level"
"""Ratios are clipped by token where a Trainer's level says so, else by row."""
"""How the names of figures begin that are means over tokens of answers; others are means over rows."""


class MicroBatchFigures(NamedTuple):
    """What the Trainer noted of a micro-batch."""

    tokens: int
    figures: dict[str, float]
    weights: dict[str, int]
    """What each figure is a mean of."""


class UnitCall:
    """The passes of one planned step on units.

    Args:
        call: the Trainer's own ``training_step`` of a batch.
        units: that this rank computes, by number.
        idle: stands for a unit where a rank has none, and counts nothing.
        divisor: units of each batch of the stock run, where its loss is their mean; None: it is a sum.
    """

    def __init__(
        self,
        trainer: Any,
        call: Callable[[dict[str, Any]], Tensor],
        units: Mapping[int, Unit],
        idle: Unit,
        form: UnitForm,
        divisor: int | None,
    ) -> None:
        self._trainer = trainer
        self._call = call
        self._units = units
        self._idle = idle
        self._form = form
        self._divisor = divisor
        self._own: list[Unit] = []
        """Of the micro-batch whose forward runs."""
        self._lists: dict[str, list[float]] = getattr(trainer, "_metrics", {}).get("train", {})
        self._total: int = getattr(trainer, _TOTAL, 0)
        self._rows: list[MicroBatchFigures] = []

    def inputs_of(self, pack: Pack) -> dict[str, Any]:
        """The micro-batch as a batch of the script's own."""
        self._own = [self._units[piece.sequence] for piece in pack.slices]
        return dict(batch_of(self._own or [self._idle], self._form, self._trainer.args.device))

    def __call__(self, inputs: dict[str, Any]) -> Tensor:
        accelerator = self._trainer.accelerator
        weight = float(bool(self._own)) if self._divisor is None else len(self._own) / self._divisor
        backward = accelerator.backward

        def weighed(loss: Tensor, **arguments: Any) -> None:
            backward(loss * weight, **arguments)

        before, tokens = {key: len(values) for key, values in self._lists.items()}, getattr(self._trainer, _TOTAL, 0)
        local = dict.fromkeys(("gather", "gather_for_metrics", "reduce"), _as_it_is)
        with with_attributes(accelerator, backward=weighed, **local):
            booked = self._call(inputs) * weight
        new = {key: values[before.get(key, 0) :] for key, values in self._lists.items() if key != _OF_TOTAL}
        for key, values in new.items():
            del self._lists[key][len(self._lists[key]) - len(values) :]
        if self._own:
            figures = {key: sum(values) / len(values) for key, values in new.items() if values}
            by_token = getattr(self._trainer, _LEVEL, None) == "token"
            weights = {key: _weight(key, self._own, by_token) for key in figures}
            self._rows.append(MicroBatchFigures(getattr(self._trainer, _TOTAL, 0) - tokens, figures, weights))
        return booked

    def book(self, times: int) -> None:
        """Give the Trainer the figures of the step, as often as it has batches. Collective."""
        rows = [row for of_rank in everyone(self._rows) for row in of_rank]
        of_step = {key: _merged(key, rows) for key in sorted({key for row in rows for key in row.figures})}
        if of_step.keys() >= {_MARGIN, *_SIDES}:
            of_step[_MARGIN] = of_step[_SIDES[0]] - of_step[_SIDES[1]]
        for key, value in of_step.items():
            self._lists[key] += [value] * times
        if tokens := sum(row.tokens for row in rows):
            total = self._total + tokens
            setattr(self._trainer, _TOTAL, total)
            self._lists[_OF_TOTAL] = [total]


def _weight(name: str, units: list[Unit], by_token: bool) -> int:
    """What a figure of a micro-batch is a mean of: rows, or tokens of answers, of all rows or of those of one side."""
    answers = [answer for unit in units for answer in unit.answers]
    side = next((side for side in ("chosen", "rejected") if name.endswith(side)), None)
    chosen = side == "chosen" or name == _ACCURACY
    own = answers if side is None and not chosen else [one for one in answers if one.chosen is chosen]
    of_tokens = name.startswith(_OF_TOKENS) or (by_token and name.startswith(_CLIPPED))
    return sum(one.num_tokens for one in own) if of_tokens else len(own)


def _merged(name: str, rows: list[MicroBatchFigures]) -> float:
    """A figure of the whole step."""
    own = [row for row in rows if row.weights.get(name)]
    values = [row.figures[name] for row in own]
    if name.startswith(_LEAST) or name.endswith(_LEAST_OF):
        return min(values)
    if name.startswith(_MOST) or name.endswith(_MOST_OF):
        return max(values)
    return sum(row.weights[name] * row.figures[name] for row in own) / max(1, sum(row.weights[name] for row in own))


def _as_it_is(value: Any, *_: Any, **__: Any) -> Any:
    """What is gathered stays on its rank."""
    return torch.as_tensor(value) if isinstance(value, (int, float)) else value
