"""The losses of a loop, weighed and checked: their sum, or Megatron's default, the mean of its micro-batches' means.

    per token           every token counts alike: ``calculate_per_token_loss=True``, and Megatron divides once by all
                        tokens of the step
    mean of means       a token of micro-batch m counts 1 / (n_m M R): n_m tokens with loss in m, M micro-batches of a
                        rank, R data x context ranks; each context-parallel rank has tokens and means of its own

Under the second, tokens of one sample keep that weight wherever a plan computes them. Megatron's schedule divides the
loss of a pack by its tokens and by the number of packs, and averages over the ranks, so the gradient that reaches a
token's output is multiplied by what is missing: the output goes through an identity whose backward does that. The loss
function sees the same numbers as before, and its reports stay those of the tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .....core.aliases import Floats
from .....core.errors import EvenloadError
from ..reading.context_parallel import CpShards
from ..reading.samples import UserPack, one_batch
from .mtp import NextTokens
from .reports import Reports


@dataclass(frozen=True, eq=False)
class MeanOfMeans:
    """The weights of one training call."""

    weights: Floats
    """Of a token of each shard, without the number of ranks (`weights_of`)."""
    divisor: int
    """By which the schedule divides the loss of each pack, besides its tokens."""
    cp_shards: CpShards
    """Of the sequences of the step."""

    @property
    def takes_means(self) -> bool:
        """Whether loss functions may return means. With context-parallel ranks these are means over parts of samples,
        which each function forms in a way of its own."""
        return self.cp_shards.ranks == 1

    def weigh(self, output: Tensor, packed: UserPack) -> Tensor:
        """The model's output [1, T] or [1, T, ...] with weighed gradients; none where no token of the pack has loss,
        since a mean over no tokens is 0 / 0. Raises EvenloadError for other shapes."""
        loss_mask = packed.fields["loss_mask"]
        if output.shape[:2] != loss_mask.shape:
            raise EvenloadError(
                "the model's output has no place for each token, so that token losses cannot be weighed",
                f"output {tuple(output.shape)}, loss_mask {tuple(loss_mask.shape)}",
                "set calculate_per_token_loss=True, and return (sum of token losses, number of tokens, report)",
            )
        scale = self.divisor * max(1.0, float(packed.num_counted))
        weights = torch.zeros(loss_mask.shape[1], dtype=torch.float64)
        pieces = zip(packed.pack.slices, packed.pack.segments, strict=False)
        for piece, start in pieces if packed.num_counted else ():
            for shard, part in self.cp_shards.of(piece):
                first = start + part.start - piece.start
                weights[first : first + part.length] = float(self.weights[shard]) * scale
        weights = weights.to(device=output.device, dtype=output.dtype)
        places = weights.view(1, -1, *(1 for _ in output.shape[2:]))
        weighed: Tensor = _Weighed.apply(output, places)  # type: ignore[no-untyped-call]
        return weighed


def weights_of(targets: Sequence[Sequence[Sequence[float]]], order: Sequence[tuple[int, int, int]]) -> Floats:
    """1 / (n_m M) for each shard of each sequence.

    Args:
        targets: n_m by data rank, micro-batch and context-parallel rank.
        order: (data rank, micro-batch, row) of each sequence.
    """
    cp_shards = [(number, len(targets[rank])) for rank, place, _ in order for number in targets[rank][place]]
    return np.array([1.0 / (max(1.0, number) * num_micro_batches) for number, num_micro_batches in cp_shards])


class _Weighed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: Tensor, weights: Tensor) -> Tensor:
        ctx.save_for_backward(weights)
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (weights,) = ctx.saved_tensors
        return torch.where(weights == 0, 0.0, gradients[0] * weights), None


@dataclass(frozen=True, eq=False)
class Losses:
    """The losses of one training call."""

    checks: bool
    """Compare what the loss function returns with the token losses."""
    objective: MeanOfMeans | None
    """The weights of tokens, where micro-batches are averaged."""
    reports: Reports
    further: NextTokens | None
    """The losses of multi-token prediction, in a model that has it."""

    def around(self, loss_func: Callable[..., Any], packed: UserPack) -> Callable[..., Any]:
        """The loss function of a pack, weighed, checked and recorded."""

        def recorded(output: Tensor, *args: Any, **kwargs: Any) -> Any:
            losses = output.detach().clone()
            weighed = output if self.objective is None else self.objective.weigh(output, packed)
            answer = loss_func(weighed, *args, **kwargs)
            means = self.objective is not None and self.objective.takes_means
            refuse_loss(answer, losses if self.checks else None, packed.fields["loss_mask"], means=means)
            self.reports.add(packed, losses, answer)
            return answer

        return recorded


class RowStep:
    """A user's ``forward_step_func`` on batches of planned rows, one after the other.

    Args:
        batches: what it is given; those that are not ``real`` have a loss of zero.
        own: micro-batches of the loop, by whose number it means its losses to be divided.
        per_token: the schedule divides by tokens instead.
    """

    def __init__(
        self, function: Callable[..., Any], batches: Sequence[Any], real: Sequence[bool], *, own: int, per_token: bool
    ) -> None:
        self._function, self._coming = function, iter(zip(batches, real, strict=True))
        self._scale, self._per_token = 1.0 if per_token else len(batches) / own, per_token
        self.losses: list[Tensor] = []
        """Of the micro-batches so far, as the loss function returned them."""

    def __call__(self, _: Any, chunk: Any, *more: Any) -> tuple[Any, Callable[..., Any] | None]:
        batch, real = next(self._coming)
        output, loss_func = self._function(one_batch(batch), chunk, *more)

        def weighed(output: Any, *args: Any, **kwargs: Any) -> Any:
            assert loss_func is not None
            answer = loss_func(output, *args, **kwargs)
            if not isinstance(answer, tuple) or len(answer) != (3 if self._per_token else 2):
                raise EvenloadError(
                    "the loss function returns what Megatron divides by the tokens of a micro-batch, or not at all",
                    f"{len(answer) if isinstance(answer, tuple) else type(answer).__name__} values, "
                    f"calculate_per_token_loss {self._per_token}",
                    "return (loss, report), or (sum, number of tokens, report) with calculate_per_token_loss=True",
                )
            loss, *count, report = answer
            self.losses.append(loss.detach())
            return (loss * (float(real) * self._scale), *(number * int(real) for number in count), report)

        return output, None if loss_func is None else weighed


def refuse_loss(answer: Any, losses: Tensor | None, loss_mask: Tensor, *, means: bool = False) -> None:
    """Raise EvenloadError unless a loss function returned what its loop's objective needs.

    Args:
        losses: what it was given, to recompute sum and count under ``loss_mask`` [1, T]; None leaves that out, for it
            waits for the device.
        means: the loop averages over micro-batches: then two values, the mean and a report, are an answer too.
    """
    if not isinstance(answer, tuple) or len(answer) not in ((2, 3) if means else (3,)):
        raise EvenloadError(
            "the loss function does not return (sum of token losses, number of tokens, report)",
            f"{len(answer)} values" if isinstance(answer, tuple) else type(answer).__name__,
            "return these three" if means else "return these three; with two, Megatron averages over micro-batches",
        )
    if losses is None or losses.shape != loss_mask.shape:
        return
    mask = loss_mask.to(losses.device)
    count, total = float(mask.sum()), float((losses.double() * mask).sum())
    returned = float(answer[0].detach())
    mean = total / max(1.0, count)
    if len(answer) == 2:
        if abs(returned - mean) > 1e-3 * abs(mean):
            raise EvenloadError(
                "the loss function returns something else than the mean of the token losses",
                f"{returned:g}, the mean is {mean:g}",
                "return (sum of token losses, number of tokens, report)",
            )
        return
    if float(answer[1]) != count:
        raise EvenloadError(
            "the loss function counts other tokens than those with loss: packs have no padding to count",
            f"{float(answer[1]):g} tokens, loss_mask sums to {count:g}",
            "return loss_mask.sum() as the number of tokens",
        )
    if count > 1 and abs(returned * count - total) < 1e-3 * abs(total):
        raise EvenloadError(
            "the loss function returns the mean of the token losses",
            f"{returned:g}, the sum is {total:g}",
            "return the sum; Megatron divides by the number of tokens",
        )
