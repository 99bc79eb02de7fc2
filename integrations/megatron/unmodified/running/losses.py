"""What becomes of the losses of a training call: they are weighed, checked and recorded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..reading.samples import UserPack
from ..refusals.supported import refuse_loss
from .mtp import NextTokens
from .objective import MeanOfMeans
from .reports import Reports


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
