"""``training_step`` on regrouped units: each counts what it did in the script's batches, and so do TRL's metrics.

A stock step takes the mean of B units in each of its batches; a planned micro-batch of k takes the mean of k, times
k / B. TRL's Trainers gather their figures over ranks inside ``compute_loss``, of as many units on each, and append one
number a call to ``_metrics``: planned, figures stay on their rank in the call, and the step gets the mean of its
micro-batches, weighed by their units, once for each batch of a stock run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ...runtime.attention.pack import Pack
from ...runtime.attributes import with_attributes
from ...runtime.world.agreement import everyone
from ..huggingface.units import Unit, UnitForm, batch_of

_TOTAL, _OF_TOTAL = "_total_train_tokens", "num_tokens"
"""Tokens that a Trainer of TRL has seen, and the metric that repeats them."""


class UnitCall:
    """The passes of one planned step on units.

    Args:
        call: the Trainer's own ``training_step`` of a batch.
        units: that this rank computes, by number.
        idle: stands for a unit where a rank has none, and counts nothing.
        divisor: units of each batch of the stock run.
    """

    def __init__(
        self,
        trainer: Any,
        call: Callable[[dict[str, Any]], Tensor],
        units: Mapping[int, Unit],
        idle: Unit,
        form: UnitForm,
        divisor: int,
    ) -> None:
        self._trainer, self._call, self._units, self._idle, self._form = trainer, call, units, idle, form
        self._divisor = divisor
        self._count = 0
        """Units of the micro-batch whose forward runs."""
        self._lists: dict[str, list[float]] = getattr(trainer, "_metrics", {}).get("train", {})
        self._total: int = getattr(trainer, _TOTAL, 0)
        self._rows: list[tuple[int, int, dict[str, float]]] = []
        """Units, tokens and figures of each micro-batch."""

    def inputs_of(self, pack: Pack) -> dict[str, Any]:
        """The micro-batch as a batch of the script's own."""
        own = [self._units[piece.sequence] for piece in pack.slices]
        self._count = len(own)
        return dict(batch_of(own or [self._idle], self._form, self._trainer.args.device))

    def __call__(self, inputs: dict[str, Any]) -> Tensor:
        accelerator, weight = self._trainer.accelerator, self._count / self._divisor
        backward = accelerator.backward

        def weighed(loss: Tensor, **arguments: Any) -> None:
            backward(loss * weight, **arguments)

        before, tokens = {key: len(values) for key, values in self._lists.items()}, getattr(self._trainer, _TOTAL, 0)
        local = {"gather": _as_it_is, "gather_for_metrics": _as_it_is}
        with with_attributes(accelerator, backward=weighed, **local):
            booked = self._call(inputs) * weight
        new = {key: values[before.get(key, 0) :] for key, values in self._lists.items() if key != _OF_TOTAL}
        for key, values in new.items():
            del self._lists[key][len(self._lists[key]) - len(values) :]
        if self._count:
            figures = {key: sum(values) / len(values) for key, values in new.items() if values}
            self._rows.append((self._count, getattr(self._trainer, _TOTAL, 0) - tokens, figures))
        return booked

    def book(self, times: int) -> None:
        """Give the Trainer the figures of the step, as often as it has batches. Collective."""
        rows = [row for of_rank in everyone(self._rows) for row in of_rank]
        for key in sorted({key for _, _, figures in rows for key in figures}):
            weighed = [(count, figures[key]) for count, _, figures in rows if key in figures]
            self._lists[key] += [_merged(key, weighed)] * times
        if hasattr(self._trainer, _TOTAL):
            total = self._total + sum(tokens for _, tokens, _ in rows)
            setattr(self._trainer, _TOTAL, total)
            self._lists[_OF_TOTAL] = [total]


def _merged(name: str, weighed: list[tuple[int, float]]) -> float:
    """A figure of the whole step, of those of its micro-batches and their units."""
    if name.startswith("min_"):
        return min(value for _, value in weighed)
    if name.startswith("max_"):
        return max(value for _, value in weighed)
    return sum(count * value for count, value in weighed) / sum(count for count, _ in weighed)


def _as_it_is(value: Any, *_: Any, **__: Any) -> Any:
    """What is gathered stays on its rank."""
    return torch.as_tensor(value) if isinstance(value, (int, float)) else value
