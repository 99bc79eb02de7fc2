"""Gradients of the replicas of a job, summed over all of them, whatever shape each has (`core.machine.boxes`).

Inside a replica Megatron's own sum has run before: every rank has the sum of its part. Messages go from rank to rank
over the group across, through the host's memory, bundle by bundle, in one order on all ranks: what a rank holds besides
its gradients is one bundle's values, at most.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import reduce
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn

from ...core.machine.boxes import Box, HeldPart, HeldParts, boxes_of, bundles_of
from ...core.recipe.recipe import Recipe
from ...runtime.adapters.dropout import sum_of_bits
from ...runtime.world.agreement import everyone
from ...runtime.world.replicas import JobGroup, job_group
from .model.vocabulary import rows_with_tokens
from .model.weights import global_parameters, whole_shape
from .pretrained.pieces import OF_VOCABULARY

BUNDLE_BYTES = 16 << 20
"""What a bundle's values take, of all replicas' ranks together."""


class Exchange:
    """Sums of what the ranks of a job of replicas have of a model's parameters. Its plan is made anew for a new job."""

    def __init__(self, model: nn.Module, recipe: Recipe, tp_rank: int) -> None:
        self._model, self._recipe = model, recipe
        self._tp_rank = tp_rank
        self._planned_for: Callable[[], JobGroup | None] = lambda: None
        self._bundles: list[list[Box]] = []
        self._parts: HeldParts = {}

    def sum(self, tensor_of: Callable[[Any], Tensor]) -> None:
        """Sum in place what ``tensor_of`` gives for each trained parameter, over the replicas; all end with the same
        bits. Collective over the job; does nothing where it has no replicas. Raises EvenloadError where they hold
        different parameters."""
        if job := job_group():
            tensors = self._tensors(job, tensor_of)
            job.together(lambda: self._exchange_all(job, tensors))

    def _exchange_all(self, job: JobGroup, tensors: Mapping[str, list[Tensor]]) -> None:
        for bundle in self._bundles:
            exchanged(bundle, job, lambda box: [self._part_in(box, one) for one in tensors[box.name]])

    def digest(self, tensor_of: Callable[[Any], Tensor]) -> int:
        """A number of the bits of what ``tensor_of`` gives, each value of this replica once. Collective over the job; 0
        where it has no replicas."""
        if (job := job_group()) is None:
            return 0
        tensors, replica = self._tensors(job, tensor_of), job.place.replica
        own = [box for bundle in self._bundles for box in bundle if box.owners[replica] == job.rank]
        parts = [sum_of_bits(self._part_in(box, tensors[box.name][0])) for box in own]
        return sum(everyone(sum(parts))) % 2**64

    def _tensors(self, job: JobGroup, tensor_of: Callable[[Any], Tensor]) -> Mapping[str, list[Tensor]]:
        """What this rank has of each trained parameter, by name, once the job's plan is made."""
        tensors: dict[str, list[Tensor]] = defaultdict(list)
        for name, parameter in global_parameters(self._model):
            if parameter.requires_grad:
                tensors[name].append(tensor_of(parameter))
        if self._planned_for() is not job:
            self._plan(job, BUNDLE_BYTES // next(iter(tensors.values()))[0].element_size())
        return tensors

    def _plan(self, job: JobGroup, most: int) -> None:
        self._parts = {
            name: part
            for name, parameter in global_parameters(self._model)
            if parameter.requires_grad
            if (part := part_of(name, parameter, self._recipe, self._tp_rank)).ranges
        }
        held = dict(enumerate(everyone(self._parts, "job")))
        ends = [0, *accumulate(job.sizes)]
        replicas = [{rank: held[rank] for rank in range(*both)} for both in pairwise(ends)]
        self._bundles = bundles_of(boxes_of(replicas, most), most)
        self._planned_for = weakref.ref(job)

    def _part_in(self, box: Box, tensor: Tensor) -> Tensor:
        return tensor.narrow(box.dim, self._parts[box.name].place_of(box.start), box.stop - box.start)


def part_of(name: str, parameter: Any, recipe: Recipe, tp_rank: int) -> HeldPart:
    """What this tensor-parallel rank holds of a parameter, by its global name (`weights.shard`)."""
    tp, shape = recipe.parallel.tp, whole_shape(parameter, recipe.parallel.tp)
    if not getattr(parameter, "tensor_model_parallel", False):
        return HeldPart(tuple(shape), 0, ((0, shape[0]),))
    dim, stride = parameter.partition_dim, parameter.partition_stride
    width = shape[dim] // (tp * stride)
    starts = [(turn * tp + tp_rank) * width for turn in range(stride)]
    if name.endswith(OF_VOCABULARY):
        shape[dim] = rows_with_tokens(recipe, 0, shape[dim])
        own = rows_with_tokens(recipe, starts[0], width)
        return HeldPart(tuple(shape), dim, ((starts[0], starts[0] + own),) if own else ())
    if tp == 1:
        return HeldPart(tuple(shape), dim, ((0, shape[dim]),))
    return HeldPart(tuple(shape), dim, tuple((start, start + width) for start in starts))


@torch.no_grad()
def exchanged(bundle: Sequence[Box], job: JobGroup, parts_of: Callable[[Box], Sequence[Tensor]]) -> None:
    """Sum the boxes of a bundle over the replicas; ``parts_of``: where this rank has the values of one that it holds.
    Collective over the job."""
    rank, replica = job.rank, job.place.replica
    held = [box for box in bundle if rank in box.holders[replica]]
    own = [box for box in held if box.owners[replica] == rank]
    targets = {box: parts_of(box) for box in held}
    values = {box: targets[box][0].flatten().cpu() for box in own}
    counterparts = _by_rank((other, box) for box in own for other in box.owners if other != rank)
    arrived = _swapped(job, counterparts, counterparts, values, targets)
    for box in own:
        in_order = (values[box] if owner == rank else next(arrived[owner]) for owner in box.owners)
        values[box] = reduce(torch.add, in_order)
    leaving = _by_rank((other, box) for box in own for other in box.holders[replica] if other != rank)
    coming = _by_rank((box.owners[replica], box) for box in held if box not in values)
    arrived = _swapped(job, leaving, coming, values, targets)
    for box in held:
        value = values[box] if box in values else next(arrived[box.owners[replica]])
        for target in targets[box]:
            target.copy_(value.view_as(target))


def _by_rank(pairs: Iterable[tuple[int, Box]]) -> dict[int, list[Box]]:
    rows: dict[int, list[Box]] = defaultdict(list)
    for rank, box in pairs:
        rows[rank].append(box)
    return rows


def _swapped(
    job: JobGroup,
    leaving: Mapping[int, list[Box]],
    coming: Mapping[int, list[Box]],
    values: Mapping[Box, Tensor],
    targets: Mapping[Box, Sequence[Tensor]],
) -> dict[int, Iterator[Tensor]]:
    """The values of the boxes that come from each rank, in their order, when those that leave are gone."""
    sizes = {rank: [box.values for box in boxes] for rank, boxes in coming.items()}
    arriving = {rank: torch.empty(sum(sizes[rank]), dtype=targets[boxes[0]][0].dtype) for rank, boxes in coming.items()}
    job.swap({rank: torch.cat([values[box] for box in boxes]) for rank, boxes in leaving.items()}, arriving)
    return {rank: iter(torch.split(flat, sizes[rank])) for rank, flat in arriving.items()}
