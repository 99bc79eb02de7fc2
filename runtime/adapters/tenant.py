"""The adapter of one tenant on one rank: matrices, gradients and Adam over the part that this rank owns.

All matrices lie in one buffer, all gradients in another; autograd adds into views of it. The ranks that hold equal
parts of the model hold equal matrices, and each owns an equal run of the buffer, whose moments it has alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ...core.recipe.adapter import Adapter
from ...core.recipe.tenant import TenantTrain
from .dropout import key_of
from .places import Place
from .state import A, AdapterState, B, drawn, part_of, shape_of


class Matrix(NamedTuple):
    """One matrix on this rank."""

    name: str
    """``<module>.lora_A`` or ``<module>.lora_B``."""
    kind: str
    place: Place
    value: Tensor
    """A leaf, a view of the buffer; its gradient is a view of the other buffer."""

    @property
    def shared(self) -> bool:
        """Whether tensor-parallel ranks hold different parts of it."""
        return self.place.shares_columns if self.kind == A else self.place.shares_rows


class Pair(NamedTuple):
    """The two matrices of a layer."""

    a: Tensor
    """[r, inputs of this rank]"""
    b: Tensor
    """[outputs of this rank, r]"""
    scaling: float


class TenantAdapter:
    """See the module.

    Args:
        owner, owners: this rank's place among the ranks that hold equal parts, and their number.
        state: what to go on with; None: the adapter's start.
    """

    def __init__(
        self,
        adapter: Adapter,
        train: TenantTrain,
        places: Sequence[Place],
        *,
        owner: int,
        owners: int,
        dtype: torch.dtype,
        device: torch.device,
        state: AdapterState | None = None,
    ) -> None:
        self.adapter, self.train = adapter, train
        names = set(adapter.targets([place.name for place in places]))
        own = [place for place in places if place.name in names]
        sizes = [shape_of(place, kind, adapter.rank_of(place.name)) for place in own for kind in (A, B)]
        self.size = sum(rows * columns for rows, columns in sizes)
        run = -(-self.size // owners)
        self.values = torch.zeros(run * owners, dtype=dtype, device=device)
        self.gradients = torch.zeros_like(self.values)
        self.matrices = tuple(self._cut(own, sizes))
        self.pairs = self._paired()
        self.run = slice(owner * run, (owner + 1) * run)
        self._owned = torch.nn.Parameter(self.values[self.run])
        self._owned.grad = self.gradients[self.run]
        self.optimizer = torch.optim.AdamW(
            [self._owned], lr=0.0, betas=train.betas, eps=train.eps, weight_decay=train.weight_decay
        )
        self.steps = 0
        self._begin(state)

    def _cut(self, places: Sequence[Place], shapes: Sequence[tuple[int, int]]) -> Iterator[Matrix]:
        first = 0
        cuts = [(place, kind) for place in places for kind in (A, B)]
        for (place, kind), shape in zip(cuts, shapes, strict=True):
            stop = first + shape[0] * shape[1]
            value = self.values[first:stop].view(shape).requires_grad_()
            value.grad = self.gradients[first:stop].view(shape)
            yield Matrix(f"{place.name}.{kind}", kind, place, value)
            first = stop

    def _paired(self) -> dict[str, Pair]:
        values = {matrix.name: matrix.value for matrix in self.matrices}
        names = dict.fromkeys(matrix.place.name for matrix in self.matrices)
        return {
            name: Pair(values[f"{name}.{A}"], values[f"{name}.{B}"], self.adapter.scaling_of(name)) for name in names
        }

    @torch.no_grad()
    def _begin(self, state: AdapterState | None) -> None:
        for name, kind, place, value in self.matrices:
            if state is None:
                whole = drawn(place, kind, self.adapter.rank_of(place.name), self.train.seed)
            else:
                whole = state.weights[name]
            value.copy_(part_of(whole, place, kind))
        if state is not None and state.first:
            first, second = (self._packed(whole)[self.run].clone() for whole in (state.first, state.second))
            step, self.steps = torch.tensor(float(state.steps)), state.steps
            self.optimizer.state[self._owned] = {"step": step, "exp_avg": first, "exp_avg_sq": second}

    def _packed(self, whole: Mapping[str, Tensor]) -> Tensor:
        """This rank's parts of whole tensors, laid out as the buffer is."""
        flat = torch.zeros_like(self.values)
        first = 0
        for name, kind, place, value in self.matrices:
            stop = first + value.numel()
            flat[first:stop] = part_of(whole[name], place, kind).to(flat).flatten()
            first = stop
        return flat

    def unpacked(self, flat: Tensor) -> dict[str, Tensor]:
        """This rank's parts by name, of what lies as the buffer does: views."""
        parts, first = {}, 0
        for matrix in self.matrices:
            stop = first + matrix.value.numel()
            parts[matrix.name] = flat[first:stop].view(matrix.value.shape)
            first = stop
        return parts

    def owned_moments(self) -> tuple[Tensor, Tensor]:
        """Adam's two moments of the run that this rank owns."""
        state = self.optimizer.state.get(self._owned)
        if not state:
            zeros = torch.zeros_like(self.values[self.run])
            return zeros, zeros.clone()
        return state["exp_avg"], state["exp_avg_sq"]

    def squares(self, *, counts: bool) -> Tensor:
        """Sum of squares of the gradient of this rank's parts, float64; ``counts``: of equal parts, too."""
        total = self.values.new_zeros((), dtype=torch.float64)
        for matrix in self.matrices:
            if matrix.shared or counts:
                assert matrix.value.grad is not None
                total += matrix.value.grad.double().square().sum()
        return total

    def update(self, rate: float, norm: float) -> None:
        """Clip by the adapter's own norm and update the run that this rank owns."""
        limit = self.train.clip_grad
        if limit > 0 and norm > limit:
            self.gradients[self.run].mul_(limit / (norm + 1e-6))
        self.optimizer.param_groups[0]["lr"] = rate
        self.optimizer.step()
        self.steps += 1

    def key(self, name: str) -> int:
        """Of the dropout of a layer in this step."""
        return key_of(self.train.seed, self.steps, name)
