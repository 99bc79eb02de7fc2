"""Multi-token prediction (``mtp_num_layers``) on packs: the losses that it adds are those of the loop's micro-batches.

Layer k of it predicts the label k tokens further on. Megatron rolls labels and loss mask k places to the left, inside
each sample of a pack, so no target crosses a border, and the last k tokens of a sample have none. What it then divides
by is a count of its micro-batch, and packs have others. For a token of a sample that the loop had in micro-batch m,
with n_m(k) tokens with loss after k rolls in m, M micro-batches of a rank and a schedule that divides by D:

    sum of tokens          1; from Megatron-Core 0.17 on n_m(0) / n_m(k)
    mean of means          D / (n_m(k) M)

So the loss of each token gets that factor in place of Megatron's own, and the tracker for what is printed the sum of
loss / n_m(k), which over the packs of all ranks is the sum of the means that it gets in the stock loop.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import count
from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.transformer import multi_token_prediction as upstream
from torch import Tensor

from .....core.aliases import Floats
from .....core.errors import EvenloadError
from .....runtime.attributes import with_attributes
from .....runtime.world.agreement import everyone
from ..reading.samples import Sample, UserPack

_RESCALES = hasattr(upstream, "process_mtp_loss")
"""Whether Megatron-Core scales the sum of tokens by n(0) / n(k): since it has this function, 0.17."""
_SAVES = ("save_loss_to_tracker", "save_metrics_to_tracker")


class NextTokens:
    """The losses of multi-token prediction in one training call.

    Args:
        config: of the model.
        weights_SK: of a token of each sequence, by layer.
        means_SK: 1 / n_m(k), likewise.
    """

    def __init__(self, config: Any, weights_SK: Floats, means_SK: Floats) -> None:
        self._weights_SK, self._means_SK = weights_SK, means_SK
        self._scale = config.mtp_loss_scaling_factor / config.mtp_num_layers
        self._packed: UserPack | None = None
        self._losses: list[Tensor] = []

    def begin(self, packed: UserPack) -> None:
        """The model's next forward is of this pack."""
        self._packed, self._losses = packed, []
        self._applied, self._saved = count(), count()

    @contextmanager
    def listening(self, gpts: Sequence[Any]) -> Iterator[None]:
        """Inside, the losses of the models' packs are weighed."""
        apply, helper = upstream.MTPLossAutoScaler.apply, upstream.MTPLossLoggingHelper
        save = next(name for name in reversed(_SAVES) if hasattr(helper, name))
        stock = getattr(helper, save)

        def weighed(hidden: Tensor, _: Tensor) -> Any:
            return apply(hidden, self._scale * self._of(next(self._applied), self._weights_SK))

        def saved(_: Tensor, *rest: Any, **named: Any) -> None:
            stock(self._of(next(self._saved), self._means_SK).detach().sum(), *rest, **named)

        with ExitStack() as undo:
            undo.enter_context(with_attributes(upstream.MTPLossAutoScaler, apply=weighed))
            undo.enter_context(with_attributes(helper, **{save: saved}))
            for gpt in gpts:
                undo.enter_context(with_attributes(gpt, compute_language_model_loss=self._kept(gpt)))
            yield

    def _kept(self, gpt: Any) -> Any:
        compute = gpt.compute_language_model_loss

        def kept(*args: Any, **named: Any) -> Any:
            losses = compute(*args, **named)
            self._losses.append(losses)
            return losses

        return kept

    def _of(self, layer: int, values_SK: Floats) -> Tensor:
        """The token losses of a layer [1, T], each times the value of its sequence; 0 where it has no target."""
        assert self._packed is not None
        if len(self._losses) <= layer:
            raise EvenloadError(
                "the losses of multi-token prediction are computed in a way that is not known",
                "no call of the model's compute_language_model_loss",
                "switch fused losses off, or disable evenload's plugins",
            )
        losses, pack = self._losses[layer], self._packed.pack
        mask_T = self._packed.fields["loss_mask"][0].to("cpu", torch.float64)
        values_T = torch.zeros_like(mask_T)
        for piece, start in zip(pack.slices, pack.segments, strict=False):
            end = start + piece.stop - piece.start
            rolled = mask_T[start:end][layer + 1 :]
            values_T[start : start + len(rolled)] = rolled * float(values_SK[piece.sequence, layer])
        return losses * values_T[None].to(device=losses.device, dtype=losses.dtype)


def next_tokens(
    samples: Sequence[Sequence[Sample]], order: Sequence[tuple[int, int, int]], config: Any, divisor: int
) -> NextTokens:
    """The losses of a training call. Collective over the data-parallel ranks.

    Args:
        samples: that this rank brings, by micro-batch.
        order: (data rank, micro-batch, row) of each sequence.
        divisor: by which the schedule divides, where micro-batches are averaged.
    """
    layers = config.mtp_num_layers
    own = [[sum(float(s["loss_mask"][k:].sum()) for s in one) for k in range(layers + 1)] for one in samples]
    counts = everyone(own, parallel_state.get_data_parallel_group())
    counts_SK = np.array([counts[rank][place] for rank, place, _ in order])
    means_SK = 1.0 / np.maximum(1.0, counts_SK[:, 1:])
    if config.calculate_per_token_loss:
        weights_SK = means_SK * counts_SK[:, :1] if _RESCALES else np.ones_like(means_SK)
    else:
        of_rank = np.array([len(counts[rank]) for rank, _, _ in order])
        weights_SK = means_SK * divisor / of_rank[:, None]
    return NextTokens(config, weights_SK, means_SK)


def refuse_missing_mask(gpt: Any, loss_mask: Any) -> None:
    """Raise EvenloadError where a model with multi-token prediction computes losses without a loss mask: Megatron then
    counts every token, padding too, which packs do not have."""
    if loss_mask is None and gpt.post_process and gpt.config.mtp_num_layers:
        raise EvenloadError(
            "multi-token prediction is given no loss mask, so it would predict padding, which packs do not have",
            "loss_mask None in the call of the model",
            "pass loss_mask=batch['loss_mask'] to the model, as Megatron-LM's pretrain_gpt.py does",
        )
