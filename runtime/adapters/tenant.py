"""The adapter of one tenant on one rank: matrices, gradients and Adam over the part that this rank owns.

All matrices lie in one buffer, all gradients in another; products add into views of it (`product`). The ranks that hold
equal parts of the model hold equal matrices, and each owns an equal run of the buffer, whose moments it has alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ...core.recipe.adapter import Adapter, TenantTrain
from .dropout import key_of
from .places import A, AdapterState, B, Place, Site, drawn


class Matrix(NamedTuple):
    """One matrix on this rank."""

    name: str
    """``<module>.lora_A`` or ``<module>.lora_B``."""
    kind: str
    place: Place
    value: Tensor
    """A view of the buffer."""
    gradient: Tensor
    """Likewise."""


class Layer(NamedTuple):
    """The matrices of one layer, and their gradients; C: inputs of this rank, D: outputs, r: rank."""

    place: Place
    a_rC: Tensor
    da_rC: Tensor
    b_Dr: Tensor
    db_Dr: Tensor
    scaling: float
    ranks: slice
    """Where its ranks are among those of the site."""


class OfSite(NamedTuple):
    """The layers of a site that the tenant adapts."""

    a_RC: Tensor
    """Their matrices A, one after the other."""
    da_RC: Tensor
    layers: tuple[Layer, ...]


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
        sites: Sequence[Site],
        *,
        owner: int,
        owners: int,
        dtype: torch.dtype,
        device: torch.device,
        state: AdapterState | None = None,
    ) -> None:
        self.adapter, self.train = adapter, train
        self.rows: Mapping[int, int] = {}
        """Of sequences of the batch, the rows of their gradients, where each has its own."""
        self.moves_b_alone = False
        """B is zero, so A has no gradient and no row of it is added to."""
        names = set(adapter.targets([place.name for site in sites for place in site.places]))
        own = {site.name: [place for place in site.places if place.name in names] for site in sites}
        cuts = [(place, kind) for places in own.values() for kind in (A, B) for place in places]
        shapes = [place.shape_of(kind, adapter.rank_of(place.name)) for place, kind in cuts]
        self.size = sum(rows * columns for rows, columns in shapes)
        self._own = own
        self._cuts = cuts
        self._shapes = shapes
        run = -(-self.size // owners)
        self.values = torch.zeros(run * owners, dtype=dtype, device=device)
        self.lay(torch.zeros_like(self.values))
        self.run = slice(owner * run, (owner + 1) * run)
        self._owned = torch.nn.Parameter(self.values[self.run])
        self._owned.grad = self.gradients[self.run]
        self.optimizer = torch.optim.AdamW(
            [self._owned], lr=0.0, betas=train.betas, eps=train.eps, weight_decay=train.weight_decay
        )
        self.steps = 0
        self._begin(state)

    def lay(self, gradients: Tensor) -> None:
        """Let products add into these gradients: [values], or [N, values] where N samples have a row each."""
        self.gradients = gradients
        self.matrices = tuple(self._cut())
        self.sites = {name: self._of_site(places) for name, places in self._own.items() if places}

    def _cut(self) -> Iterator[Matrix]:
        sizes = [rows * columns for rows, columns in self._shapes]
        flat = self.values, self.gradients
        values, gradients = (torch.split(one[..., : self.size], sizes, dim=-1) for one in flat)
        for (place, kind), shape, value, gradient in zip(self._cuts, self._shapes, values, gradients, strict=True):
            yield Matrix(f"{place.name}.{kind}", kind, place, value.view(shape), _shaped(gradient, shape))

    def _of_site(self, places: Sequence[Place]) -> OfSite:
        by_name = {matrix.name: matrix for matrix in self.matrices}
        layers, first = [], 0
        for place in places:
            a, b = (by_name[f"{place.name}.{kind}"] for kind in (A, B))
            ranks = slice(first, first + len(a.value))
            scaling = self.adapter.scaling_of(place.name)
            layers.append(Layer(place, a.value, a.gradient, b.value, b.gradient, scaling, ranks))
            first = ranks.stop
        a, width = by_name[f"{places[0].name}.{A}"], layers[0].a_rC.shape[1]
        begin = a.value.storage_offset()
        run = slice(begin, begin + first * width)
        gradients = _shaped(self.gradients[..., run], (first, width))
        return OfSite(self.values[run].view(first, width), gradients, tuple(layers))

    @torch.no_grad()
    def _begin(self, state: AdapterState | None) -> None:
        weights = (
            state.weights
            if state is not None
            else {
                name: drawn(place, kind, self.adapter.rank_of(place.name), self.train.seed)
                for name, kind, place, *_ in self.matrices
            }
        )
        self.values.copy_(self._packed(weights))
        if state is not None and state.steps:
            first, second = (self._packed(whole)[self.run].clone() for whole in (state.first, state.second))
            step, self.steps = torch.tensor(float(state.steps)), state.steps
            self.optimizer.state[self._owned] = {"step": step, "exp_avg": first, "exp_avg_sq": second}

    def _packed(self, whole: Mapping[str, Tensor]) -> Tensor:
        """This rank's parts of whole tensors, laid out as the buffer is; zeros of no tensors."""
        flat = torch.zeros_like(self.values, device="cpu")
        parts = self.unpacked(flat)
        for name, kind, place, *_ in self.matrices if whole else ():
            parts[name].copy_(place.part_of(whole[name], kind))
        return flat.to(self.values.device)

    def unpacked(self, flat: Tensor) -> dict[str, Tensor]:
        """This rank's parts by name, of what lies as the buffer does: views."""
        parts = torch.split(flat[: self.size], [matrix.value.numel() for matrix in self.matrices])
        return {one.name: part.view(one.value.shape) for one, part in zip(self.matrices, parts, strict=True)}

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
            if matrix.place.shares(matrix.kind) or counts:
                total += matrix.gradient.double().square().sum()
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
        """The key of a layer's dropout in this step."""
        return key_of(self.train.seed, self.steps, name)


def _shaped(flat: Tensor, shape: tuple[int, int]) -> Tensor:
    """A matrix, or one for each row, of what lies flat: a view."""
    return flat.view(*flat.shape[:-1], *shape)
