"""Gradients of one adapter sample by sample, from the one backward of each pack: a row for every sequence of a batch.

Rows lie where the sequence runs, in the parts of the model that this rank has. What goes through a sum over elements (a
projection, a norm, a product with a direction) is computed of these parts, and one sum over ranks gives the whole; what
does not (Adam's direction) wants a row that no rank has a part of: `gather` sums the rows of sequences that several
ranks have run, and leaves them to the first of these.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ...core.plan.step_plan import StepPlan
from ...core.recipe.adapter import Adapter, TenantTrain
from .adapters import Adapters
from .places import A, AdapterState
from .projection import preconditioned, projection
from .tenant import Matrix, TenantAdapter


class SampleGradients(Adapters):
    """See the module. Besides what `Adapters` holds, it has one adapter, which all sequences have."""

    _num = 0

    def take(self, adapter: Adapter, train: TenantTrain, state: AdapterState | None) -> None:
        """Have this adapter from its start or from a state on. Raises EvenloadError as `check`."""
        self.check(adapter, state)
        self._own = TenantAdapter(
            adapter, train, self._sites, owner=0, owners=1, dtype=self._dtype, device=self._device, state=state
        )
        self._own.moves_b_alone = state is None
        self._own.lay(self._own.values.new_zeros(0, self._own.size))
        self._start = self._own.values.clone()

    def begin_rows(self, plan: StepPlan, rank: int) -> None:
        """Before the passes of a plan: every sequence of this rank of the plane has a row of zeros."""
        ranks: dict[int, set[int]] = {}
        for micro_batch in plan.micro_batches:
            for piece in micro_batch.slices:
                ranks.setdefault(piece.sequence, set()).update(micro_batch.ranks)
        self._num = len(plan.lengths)
        self._shared = sorted(sequence for sequence, own in ranks.items() if len(own) > 1)
        self._firsts = {sequence: min(own) == rank for sequence, own in ranks.items()}
        own = sorted(sequence for sequence in ranks if rank in ranks[sequence])
        self._own.rows = {sequence: row for row, sequence in enumerate(own)}
        self._own.lay(self._own.values.new_zeros(len(own), self._own.size))
        self._hooks.begin([self._own] * self._num)

    def end_rows(self) -> None:
        """After all that is wanted of a plan's rows."""
        self._hooks.forget()
        self._own.rows = {}
        self._own.lay(self._own.values.new_zeros(0, self._own.size))

    def divide(self, divisors_N: Tensor) -> None:
        """Divide the row of each sequence by its divisor, if that is not 0."""
        self._own.gradients.div_(
            torch.where(divisors_N == 0, 1, divisors_N)[self._sequences()].to(self._dtype)[:, None]
        )

    def gather(self) -> None:
        """Sum the rows of every sequence that several ranks have run; all but the first of these then have zeros.
        Collective."""
        rows = self._own.rows
        parts = [
            self._own.gradients[rows[sequence]] if sequence in rows else self._own.values.new_zeros(self._own.size)
            for sequence in self._shared
        ]
        self._peers.sum_over_owners(parts)
        for sequence, part in zip(self._shared, parts, strict=True):
            if sequence in rows and not self._firsts[sequence]:
                part.zero_()

    def precondition(self) -> None:
        """Put Adam's direction, by the moments of the adapter's state, in the place of every whole row."""
        own, moments = self._own, self._own.owned_moments()
        kept = [row for sequence, row in own.rows.items() if self._firsts[sequence]]
        for row in kept:
            gradient = own.gradients[row]
            gradient.copy_(preconditioned(gradient, *moments, own.train.betas, own.train.eps))

    def projected(self, columns: int, seed: int) -> Tensor:
        """float64 [N, columns] of all sequences, the same on every rank. Collective."""
        total = torch.zeros(self._num, columns, dtype=torch.float64, device=self._device)
        for matrix in (matrix for matrix in self._own.matrices if self._counts(matrix)):
            whole = matrix.place.whole_shape(matrix.kind, self._own.adapter.rank_of(matrix.place.name))
            places = torch.arange(whole[0] * whole[1], device=self._device).view(whole)
            places_E = matrix.place.part_of(places, matrix.kind).flatten()
            total[self._sequences()] += projection(matrix.name, matrix.gradient.flatten(1), places_E, columns, seed)
        return self._summed(total)

    def products(self, direction: Tensor) -> Tensor:
        """float64 [N], of each sequence's gradient with a direction that lies as values do. Collective."""
        return self._products(direction[None])

    def norms_of_rows(self) -> Tensor:
        """float64 [N], of rows that are whole. Collective."""
        return self._products(self._own.gradients).sqrt()

    def mean_direction(self, norms_N: Tensor, count: int) -> Tensor:
        """The mean of so many whole rows, each over its norm, as this rank's values lie. Collective."""
        factors = torch.where(norms_N > 0, 1 / norms_N, 0.0)[self._sequences()] / count
        direction = factors.to(self._dtype) @ self._own.gradients
        self._peers.sum_over_owners([direction])
        return direction

    def norm_of(self, direction: Tensor) -> float:
        """The norm of a direction over the whole model. Collective."""
        parts = zip(self._own.matrices, self._split(direction), strict=True)
        squares = [part.double().square().sum() for matrix, part in parts if self._counts(matrix)]
        total = torch.stack(squares or [torch.zeros((), dtype=torch.float64, device=self._device)]).sum()
        return float(self._peers.sum_over_model(total).sqrt())

    def move(self, step: float, direction: Tensor, num: int) -> None:
        """Stand at the start + step x direction, for ``num`` sequences that run next; a step of 0 is the start."""
        self._own.values.copy_(self._start)
        if step:
            self._own.values[: self._own.size].add_(direction, alpha=step)
        self._hooks.begin([self._own] * num)

    def _products(self, rows: Tensor) -> Tensor:
        total = torch.zeros(self._num, dtype=torch.float64, device=self._device)
        for matrix, others in zip(self._own.matrices, self._split(rows), strict=True):
            if self._counts(matrix):
                own = matrix.gradient.flatten(1)
                total[self._sequences()] += (own.double() * others.double()).sum(1)
        return self._summed(total)

    def _split(self, rows: Tensor) -> Sequence[Tensor]:
        return torch.split(rows, [matrix.value.numel() for matrix in self._own.matrices], dim=-1)

    def _counts(self, matrix: Matrix) -> bool:
        """Whether this rank counts a matrix: of what tensor-parallel ranks hold alike, one does, and zeros nobody."""
        if self._own.moves_b_alone and matrix.kind == A:
            return False
        return matrix.place.shares(matrix.kind) or self._peers.counts

    def _sequences(self) -> Tensor:
        return torch.tensor(list(self._own.rows), dtype=torch.int64, device=self._device)

    def _summed(self, values: Tensor) -> Tensor:
        if dist.is_initialized():
            dist.all_reduce(values)
        return values
