"""Whether padded groups are exact for a live model by a live loss: measured as packs are (`proof`).

Two samples of unlike length stand as rows of one batch, the shorter one padded as the script's collator pads, and are
compared with each alone. A model in which one row feels another (batch norm, a loss of experts' load) or its own
padding, and a loss that is no sum over rows, stay as they are.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...core.errors import EvenloadError
from ...runtime.attention.pack import Pack
from ..huggingface.rows import PaddedForm, rows_of
from .proof import Measurement, ProofRun

_PADDING = 3
"""Slots beyond the longer sample, so that both have padding."""


def rows_like(form: PaddedForm) -> type[Measurement]:
    """What measures padded rows of a form."""

    class OfRows(Measurement):
        """Two samples as rows of one batch against each alone."""

        noun = "padded rows"
        of_rows = True

        def __init__(self, model: Any, samples: list[list[list[int]]], *others: Any) -> None:
            first, second = samples
            if len(first[0]) == len(second[0]) > 2:  # rows of one length would hide what padding and means do
                second = [of_kind[:-1] for of_kind in second]
            super().__init__(model, [first, second], *others)

        def _alone(self, index: int) -> dict[str, Any]:
            if form.start is None:  # with the label of its first token, which some losses read
                return super()._alone(index)
            return rows_of(self._pack([self._samples[index]]), form)

        def _together(self, samples: list[list[list[int]]]) -> dict[str, Any]:
            return self._inputs(self._pack(samples, _PADDING + max(len(tokens) for tokens, _ in samples)))

        def _inputs(self, pack: Pack) -> dict[str, Any]:
            return rows_of(pack, form)

        def _parts(self, together: Tensor, alone: list[Tensor]) -> Tensor:
            rows = zip(together, (one.shape[1] for one in alone), strict=True)
            return torch.cat([row[len(row) - length :] if form.left else row[:length] for row, length in rows])

        def _refuse_other_attention(self, packed: ProofRun) -> None:
            """Rows attend as the model does."""

        def _may_cut(self, packed: ProofRun) -> bool:
            return False

        def _other_tokens(self, packed: ProofRun, what: str, off: float) -> EvenloadError:
            return EvenloadError(
                "a sample is computed otherwise beside other rows and padding than alone",
                f"{what} of a {type(self._model).__name__} off by {off:.1e}, {self._tolerance:g} is rounding",
            )

    return OfRows
