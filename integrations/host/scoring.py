"""What a host hands out of a plan that runs forward only: the losses of its sequences, vectors of what these say, or
their logits.

Shape legend: N = sequences of the global batch, T = slots of a pack, L = tokens of a sequence, V = vocabulary,
D = hidden size.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from ...core.aliases import Floats, Ints
from ...core.plan.step_plan import Lengths
from ...runtime.adapters.company import Company
from ...runtime.attention.copy_rows import ToHost, copy_rows
from ...runtime.attention.labels import Labels
from ...runtime.attention.pack import IGNORE, Pack, of_targets, slice_losses
from ...runtime.world.agreement import everyone
from ...runtime.world.replicas import job_group


class Scores(NamedTuple):
    """The losses of a global batch, the same on every rank."""

    losses: Floats
    """float64 [N]: sum of the token losses of each sequence, in nats, each times its weight."""
    targets: Ints
    """int64 [N]: target tokens of each sequence."""
    weights: Floats | None = None
    """float64 [N]: what the weights of these add up to; None: each is 1."""
    excess: Floats | None = None
    """float64 [N]: sum over these of max(loss - loss of a reference, 0), each times its weight; None: there is none."""
    vectors: Floats | None = None
    """float64 [N, D]: sum over the tokens of place (from 1) x last hidden state; None: nobody asked."""
    divisor: float | None = None
    """What is given in place of the sum of weights (`TargetWeights.divisor`); None: nothing is."""

    @property
    def loss(self) -> float:
        """The mean loss of a target token by their weights, or over the given divisor; not a number without either."""
        count = self.divisor or float((self.targets if self.weights is None else self.weights).sum())
        return float(self.losses.sum()) / count if count else math.nan


class Collector(ABC):
    """Takes down what the last stage gives for each pack."""

    wants_logits: bool

    @abstractmethod
    def add(self, values: Tensor, pack: Pack) -> None:
        """Take down a pack's logits [T, V], or the loss of each of its tokens [T], whatever its label."""


class LossCollector(Collector):
    """The losses of the sequences of a batch, and by how much they exceed those of another model."""

    wants_logits = False

    def __init__(self, num_sequences: int, device: torch.device, labels: Labels | None = None) -> None:
        self._reference_of = labels.reference if labels else None
        rows = 2 if self._reference_of is None else 3
        self._sums_RN = torch.zeros(rows, num_sequences, dtype=torch.float64, device=device)

    def add(self, values: Tensor, pack: Pack) -> None:
        losses_T = values.double()
        sums, counts = slice_losses(losses_T, pack)
        rows = [sums, counts.double()]
        arrays: dict[str, npt.NDArray[Any]] = {"sequences": np.array([s.sequence for s in pack.slices], dtype=np.int64)}
        if self._reference_of is not None:
            arrays["reference"] = of_targets(pack.slices, pack.segments, self._reference_of)
        there = copy_rows(arrays, values.device)
        if self._reference_of is not None:
            rows.append(slice_losses((losses_T - there["reference"]).clamp(min=0), pack)[0])
        self._sums_RN.index_add_(1, there["sequences"], torch.stack(rows))

    def watching(self, output_layer: nn.Module | None) -> AbstractContextManager[None]:
        """Inside, this may see what the output layer gets; None: another rank has it."""
        return nullcontext()

    def scores(self) -> Scores:
        """The scores of all ranks. Collective."""
        return scores_of(self.summed())

    def summed(self) -> ToHost:
        """What `scores_of` makes the scores of all ranks of, on its way. Collective."""
        if dist.is_initialized():
            dist.all_reduce(self._sums_RN)
        return ToHost(self._sums_RN)


class VectorCollector(LossCollector):
    """The losses of the sequences of a batch, and vectors of their last hidden states: what the output layer gets."""

    def __init__(self, num_sequences: int, device: torch.device, hidden_size: int) -> None:
        super().__init__(num_sequences, device)
        self._vectors_ND = torch.zeros(num_sequences, hidden_size, dtype=torch.float64, device=device)
        self._last_TD = torch.zeros(0, hidden_size, device=device)

    @contextmanager
    def watching(self, output_layer: nn.Module | None) -> Iterator[None]:
        """Inside, this sees what the output layer gets; None: another rank has it."""
        hook = output_layer.register_forward_pre_hook(self._see) if output_layer else None
        try:
            yield
        finally:
            if hook:
                hook.remove()

    def _see(self, _: nn.Module, arguments: tuple[Any, ...]) -> None:
        hidden = arguments[0].detach()
        self._last_TD = hidden.reshape(-1, hidden.shape[-1])

    def add(self, values: Tensor, pack: Pack) -> None:
        """As of losses; whatever is masked, all tokens of a sequence are in its vector."""
        super().add(values, pack)
        for piece, first in zip(pack.slices, pack.segments, strict=False):
            places_L = torch.arange(piece.start + 1, piece.start + piece.length + 1, device=values.device)
            rows_LD = self._last_TD[first : first + piece.length].double()
            self._vectors_ND[piece.sequence] += places_L.double() @ rows_LD

    def scores(self) -> Scores:
        """The scores of all ranks. Collective."""
        if dist.is_initialized():
            dist.all_reduce(self._vectors_ND)
        return super().scores()._replace(vectors=self._vectors_ND.cpu().numpy())


def scores_of(summed: ToHost, company: Company | None = None) -> Scores:
    """Waits for the device if the sums have not come so far. ``company``: of replicas, whose sequences all of them
    have; then collective over the job."""
    losses, targets, *excess = summed.read().numpy()
    own = Scores(losses, targets.astype("int64"), excess=excess[0] if excess else None)
    return of_all_replicas(own, company)


def of_all_replicas(own: Scores, company: Company | None) -> Scores:
    """Losses of a plan's sequences as those of all replicas; as they are where the plan has all. Collective over the
    job."""
    if company is None or job_group() is None:
        return own
    values = {key: value for key, value in own._asdict().items() if isinstance(value, np.ndarray)}
    return own._replace(**company.gathered(values))


class LogitCollector(Collector):
    """The logits of every token of a batch."""

    wants_logits = True

    def __init__(self) -> None:
        self._pieces: list[tuple[int, int, Tensor]] = []

    def add(self, values: Tensor, pack: Pack) -> None:
        for piece, first in zip(pack.slices, pack.segments, strict=False):
            rows = values[first : first + piece.length].cpu()
            self._pieces.append((piece.sequence, piece.start, rows.clone()))

    def whole(self, lengths: Lengths) -> Mapping[int, Tensor]:
        """By sequence, [L, V], or what else the tokens have, on rank 0; nothing on other ranks. Collective."""
        pieces = [piece for of_rank in everyone(self._pieces) for piece in of_rank]
        if dist.is_initialized() and dist.get_rank():
            return {}
        whole = {i: pieces[0][2].new_empty(n, *pieces[0][2].shape[1:]) for i, n in enumerate(lengths.tolist())}
        for sequence, start, rows in pieces:
            whole[sequence][start : start + len(rows)] = rows
        return whole


class TokenLossCollector(LogitCollector):
    """The loss of every token of a batch [L], at the place of the token before it; 0 where that predicts no target."""

    wants_logits = False

    def add(self, values: Tensor, pack: Pack) -> None:
        super().add(torch.where(pack.labels_T != IGNORE, values, 0.0), pack)


def token_losses(logits_TV: Tensor, pack: Pack, *, reduction: str = "none") -> Tensor:
    """The loss of each token of a pack from its logits [T], in float32 at least; 0 where it is no target. As torch has
    it, reduction "sum" gives their sum."""
    wide = torch.promote_types(logits_TV.dtype, torch.float32)
    return cross_entropy(logits_TV.to(wide), pack.labels_T, ignore_index=IGNORE, reduction=reduction)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Inside, the modules of a model do what they do when nothing is trained: no dropout, nothing recomputed."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
