"""The adapters of all tenants on this rank: who is here, what a step adds, sums and updates.

They stand next to the model. A hook of each block reads the pack that the block's own call carries, and a hook of each
linear layer adds its products; names, checkpoints and replays of the model stay as they are, and `close` takes all
hooks off again. A tenant that joins allocates, one that leaves frees; nobody else's tensors change.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from ...core.aliases import Ints
from ...core.errors import EvenloadError, nearest
from ...core.recipe.adapter import Adapter, TenantTrain
from ..world.agreement import everyone
from ..world.replicas import JobGroup, job_group
from .dropout import sum_of_bits
from .hooks import Hooks
from .peers import AdapterPeers
from .places import A, AdaptedBlock, AdapterState, B
from .tenant import Matrix, TenantAdapter


class Adapters:
    """See the module.

    Args:
        blocks: of this rank's stage.
        linears: names of all linear layers of the model, those of other stages too.
        dtype: of matrices, gradients and moments.
    """

    def __init__(
        self,
        blocks: Sequence[AdaptedBlock],
        linears: Sequence[str],
        peers: AdapterPeers,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.linears = tuple(linears)
        self._peers = peers
        self._dtype = dtype
        self._device = device
        self._sites = [site for block in blocks for site in block.sites]
        self._places = [place for site in self._sites for place in site.places]
        sizes = {place.name: (place.outputs, place.inputs) for place in self._places}
        stages = everyone(sizes, peers.model) if peers.model is not None else [sizes]
        self.sizes = {name: size for stage in stages for name, size in stage.items()}
        """Outputs and inputs of every linear layer of the model."""
        self._tenants: dict[int, TenantAdapter] = {}
        self._hooks = Hooks(blocks)

    def close(self) -> None:
        """Take the hooks off and drop all adapters."""
        self._hooks.remove()
        self._tenants = {}

    @property
    def numbers(self) -> tuple[int, ...]:
        """The tenants that are here."""
        return tuple(sorted(self._tenants))

    def check(self, adapter: Adapter, state: AdapterState | None = None) -> None:
        """Raise EvenloadError for an adapter that does not fit the model, or whose state does not."""
        kinds = sorted({name.rsplit(".", 1)[-1] for name in self.linears})
        if unknown := adapter.without_effect(self.linears):
            what = "adapter.target_modules names no linear layer of the model"
            raise EvenloadError(what, ", ".join(unknown), nearest(unknown[0], kinds))
        targets = adapter.targets(self.linears)
        for name in targets:  # patterns that have no end are found here, and by no rank later
            adapter.scaling_of(name)
        if state is None:
            return
        if differ := sorted({f"{name}.{kind}" for name in targets for kind in (A, B)} ^ set(state.weights)):
            what = "the adapter to go on with has other layers than the tenant's file"
            raise EvenloadError(what, ", ".join(differ[:4]), "give target_modules as the adapter has them")
        for name in targets:
            (outputs, inputs), rank = self.sizes[name], adapter.rank_of(name)
            for kind, wanted in ((A, (rank, inputs)), (B, (outputs, rank))):
                shape = tuple(state.weights[f"{name}.{kind}"].shape)
                if shape != wanted:
                    what = "the adapter to go on with is of another base, or another rank"
                    detail = f"{name}.{kind} {shape}, wanted {wanted}"
                    raise EvenloadError(what, detail, "give the rank that the adapter has, and the base it was made on")

    def bytes_of(self, adapter: Adapter) -> int:
        """What a tenant takes on this rank: matrices, gradients, and moments of the run that it owns."""
        targets = set(adapter.targets(self.linears))
        own = [place for place in self._places if place.name in targets]
        shapes = [place.shape_of(kind, adapter.rank_of(place.name)) for place in own for kind in (A, B)]
        values = sum(math.prod(shape) for shape in shapes)
        return math.ceil(values * (2 + 2 / self._peers.num_owners)) * self._dtype.itemsize

    def join(self, number: int, adapter: Adapter, train: TenantTrain, state: AdapterState | None = None) -> None:
        """Take a tenant in, between steps, on every rank alike. Raises EvenloadError as `check`."""
        self.check(adapter, state)
        assert number not in self._tenants, f"tenant {number} is here already"
        self._tenants[number] = TenantAdapter(
            adapter,
            train,
            self._sites,
            owner=self._peers.owner,
            owners=self._peers.num_owners,
            dtype=self._dtype,
            device=self._device,
            state=state,
        )

    def leave(self, number: int) -> None:
        """Drop a tenant's adapter, between steps, on every rank alike."""
        self._hooks.forget()
        del self._tenants[number]

    def begin(self, tenants: Ints, places: Ints | None = None) -> None:
        """Before the passes of a step or of an evaluation: whose each sequence is [N]; gradients begin at zero.

        ``places``: of the sequences that run here; None: all do."""
        seen = set(tenants.tolist())
        if strangers := sorted(seen - set(self._tenants)):
            what = "the plan has sequences of tenants that have no adapter here"
            raise EvenloadError(what, f"tenants {strangers}", "let them join before the step")
        self._hooks.begin([self._tenants[number] for number in tenants.tolist()], places)
        for number in seen:
            self._tenants[number].gradients.zero_()

    @contextmanager
    def serving(self) -> Iterator[Callable[[Mapping[int, int | None]], None]]:
        """Inside, what is given is told whose each sequence of a pack is, None: the model's alone. Nothing trains."""

        def tell(tenants: Mapping[int, int | None]) -> None:
            self._hooks.follow(lambda key: None if (tenant := tenants[key]) is None else self._tenants[tenant])

        try:
            yield tell
        finally:
            self._hooks.forget()

    def sum_gradients(self, divisors: Mapping[int, float]) -> None:
        """Sum the gradients of tenants over all ranks, and divide each by its tenant's divisor, if that is not 0.
        Collective."""
        numbers = sorted(divisors)
        job = job_group()
        if job is None:
            self._peers.sum_over_owners([self._tenants[number].gradients for number in numbers])
        elif numbers:
            self._add_up([self._tenants[number] for number in numbers], job)
        for number in numbers:
            self._tenants[number].gradients.div_(divisors[number] or 1)

    def _add_up(self, tenants: Sequence[TenantAdapter], job: JobGroup) -> None:
        """Sum gradients over the ranks of all replicas, whatever part of the model each has: every rank lays its parts
        into whole matrices of zeros, which are summed and taken apart again. Collective over the job."""
        wholes = [torch.zeros(self._size_of(tenant), dtype=self._dtype, device=self._device) for tenant in tenants]
        parts = [part for one, flat in zip(tenants, wholes, strict=True) for part in self._parts_in(flat, one)]
        for matrix, whole in parts:
            if matrix.place.shares(matrix.kind) or self._peers.counts:
                whole.copy_(matrix.gradient)
        flat = torch.cat(wholes)
        job.add_up(flat)
        for summed, whole in zip(torch.split(flat, [len(one) for one in wholes]), wholes, strict=True):
            whole.copy_(summed)
        for matrix, whole in parts:
            matrix.gradient.copy_(whole)

    def _shapes(self, tenant: TenantAdapter) -> Iterator[tuple[str, tuple[int, int]]]:
        """The matrices of a tenant in the whole model, by name."""
        for name in sorted(tenant.adapter.targets(self.linears)):
            (outputs, inputs), rank = self.sizes[name], tenant.adapter.rank_of(name)
            yield f"{name}.{A}", (rank, inputs)
            yield f"{name}.{B}", (outputs, rank)

    def _size_of(self, tenant: TenantAdapter) -> int:
        return sum(math.prod(shape) for _, shape in self._shapes(tenant))

    def _parts_in(self, flat: Tensor, tenant: TenantAdapter) -> list[tuple[Matrix, Tensor]]:
        """This rank's matrices of a tenant, each with its place in a whole buffer: a view."""
        names, shapes = zip(*self._shapes(tenant), strict=True)
        wholes = {
            name: one.view(shape)
            for name, shape, one in zip(names, shapes, torch.split(flat, [*map(math.prod, shapes)]), strict=True)
        }
        return [(one, one.place.part_of(wholes[one.name], one.kind)) for one in tenant.matrices]

    def norms(self, numbers: Sequence[int]) -> dict[int, float]:
        """Norm of each tenant's summed gradient over the whole model, by number. Collective over the model."""
        if not numbers:
            return {}
        squares = torch.stack([self._tenants[number].squares(counts=self._peers.counts) for number in numbers])
        return dict(zip(numbers, self._peers.sum_over_model(squares).sqrt().tolist(), strict=True))

    @torch.no_grad()
    def update(self, rates: Mapping[int, float], norms: Mapping[int, float]) -> None:
        """One update of the tenants that have a rate. Collective."""
        moved = [self._tenants[number] for number in sorted(rates)]
        for number in sorted(rates):
            self._tenants[number].update(rates[number], norms[number])
        buffers = self._peers.gather_runs([tenant.values[tenant.run] for tenant in moved])
        if self._peers.num_owners > 1:
            for tenant, values in zip(moved, buffers, strict=True):
                tenant.values.copy_(values)

    def digest(self) -> int:
        """A number of the bits of all adapters, the same wherever they are equal. Collective over the model."""
        parts = [
            sum_of_bits(matrix.value)
            for number in self.numbers
            for matrix in self._tenants[number].matrices
            if matrix.place.shares(matrix.kind) or self._peers.counts
        ]
        return sum(everyone(sum(parts), self._peers.model) if self._peers.model is not None else parts) % 2**64

    def gradients(self, number: int) -> Mapping[str, Tensor]:
        """A tenant's gradient, whole, on every rank's CPU. Collective over the model."""
        tenant = self._tenants[number]
        return self._whole(tenant, [tenant.gradients])[0]

    def state(self, number: int) -> AdapterState:
        """A tenant's adapter, whole, on every rank's CPU. Collective."""
        tenant = self._tenants[number]
        moments = self._peers.gather_runs([moment.detach() for moment in tenant.owned_moments()])
        weights, first, second = self._whole(tenant, [tenant.values.detach(), *moments])
        return AdapterState(weights, first, second, tenant.steps)

    def _whole(self, tenant: TenantAdapter, buffers: Sequence[Tensor]) -> list[dict[str, Tensor]]:
        """Whole tensors of buffers that lie as the tenant's does. Collective over the model."""
        by_name = [tenant.unpacked(flat.cpu()) for flat in buffers]
        parts = [
            (matrix.name, matrix.kind, matrix.place, [views[matrix.name].clone() for views in by_name])
            for matrix in tenant.matrices
        ]
        whole: list[dict[str, Tensor]] = [{} for _ in buffers]
        for of_rank in everyone(parts, self._peers.model) if self._peers.model is not None else [parts]:
            for name, kind, place, tensors in of_rank:
                shape = place.whole_shape(kind, tenant.adapter.rank_of(place.name))
                for into, tensor in zip(whole, tensors, strict=True):
                    place.part_of(into.setdefault(name, tensor.new_empty(shape)), kind).copy_(tensor)
        return whole
