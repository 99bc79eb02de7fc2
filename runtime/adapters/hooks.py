"""The hooks by which adapters reach a model: one of each block takes the pack, one of each linear layer adds products.

A block's hook runs in every replay of its layer, with the pack of that replay: what a later micro-batch left behind is
never read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ...core.aliases import Ints
from ..attention.copy_rows import copy_rows
from ..attention.pack import Pack
from .dropout import kept
from .places import AdaptedBlock, Place, Site
from .product import Dropped, SampleSlots, TenantSpan, added
from .tenant import TenantAdapter


@dataclass
class _Running:
    """What the layers of a block know of the pack that runs through it."""

    spans: Sequence[TenantSpan] = ()
    dropped: Dropped | None = None


class Hooks:
    """On the modules of these blocks until `remove`."""

    def __init__(self, blocks: Sequence[AdaptedBlock]) -> None:
        self._owner_of: Callable[[int], TenantAdapter | None] = _nobody
        self._numbers: Sequence[int] = ()
        self._running: list[_Running] = []
        self._hooks = [hook for block in blocks for hook in self._on(block)]

    def begin(self, tenants: Sequence[TenantAdapter], places: Ints | None = None) -> None:
        """Take the adapter of the tenant of each sequence of the batch that runs next; none: the base alone runs.

        ``places``: of the sequences of the batch that run here; None: all do."""
        seen: dict[int, int] = {}
        numbers = []
        for tenant in tenants:
            numbers.append(seen.get(id(tenant), 0))
            seen[id(tenant)] = numbers[-1] + 1
        here = range(len(tenants)) if places is None else places.tolist()
        self._numbers = [numbers[place] for place in here]
        self._owner_of = _nobody
        if tenants:
            self._owner_of = [tenants[place] for place in here].__getitem__

    def follow(self, owner_of: Callable[[int], TenantAdapter | None]) -> None:
        """Take the adapter that this gives for each sequence; without dropout, as in evaluation."""
        self._owner_of, self._numbers = owner_of, ()

    def forget(self) -> None:
        """Hold no tenant any longer: after the last pass of a step."""
        self._owner_of, self._numbers = _nobody, ()
        for running in self._running:
            running.spans, running.dropped = (), None

    def remove(self) -> None:
        self.forget()
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _on(self, block: AdaptedBlock) -> list[Any]:
        running = _Running()
        self._running.append(running)

        def enter(module: nn.Module, arguments: tuple[Any, ...], words: dict[str, Any]) -> None:
            pack = block.pack_of(arguments, words)
            running.spans = self._spans(pack)
            running.dropped = self._dropping(pack, running.spans) if module.training else None

        hooks: list[Any] = [block.carrier.register_forward_pre_hook(enter, with_kwargs=True)]
        hooks += [site.module.register_forward_hook(_adding(site, running)) for site in block.sites]
        return hooks

    def _spans(self, pack: Pack) -> list[TenantSpan]:
        """The slots of a pack by tenant, padding with the slice that it follows."""
        owners: list[TenantAdapter | None] = [None] * (len(pack.segments) - 1)
        owners[: len(pack.slices)] = [self._owner_of(piece.sequence) for piece in pack.slices]
        sizes = [stop - first for first, stop in pairwise(pack.segments)]
        sequences = [piece.sequence for piece in pack.slices] + [-1] * (len(sizes) - len(pack.slices))
        runs = groupby(zip(owners, sizes, sequences, strict=True), key=lambda one: id(one[0]))
        return [_span(list(run)) for _, run in runs]

    def _dropping(self, pack: Pack, spans: Sequence[TenantSpan]) -> Dropped | None:
        """Dropout of the inputs of layers; None where no tenant of the pack has any."""
        if not any(span.tenant and span.tenant.adapter.lora_dropout for span in spans):
            return None
        sizes = [stop - first for first, stop in pairwise(pack.segments)]
        numbers = [self._numbers[piece.sequence] for piece in pack.slices]
        numbers += [0] * (len(sizes) - len(numbers))
        samples_T = copy_rows({"samples": np.repeat(numbers, sizes)}, pack.positions_T.device)["samples"]
        of_spans = [span.size for span in spans]
        samples, positions = torch.split(samples_T, of_spans), torch.split(pack.positions_T, of_spans)
        masks: dict[tuple[str, int], Tensor] = {}  # until the backward: a mask costs three times what it masks does

        def dropped(number: int, x_tC: Tensor, place: Place) -> Tensor:
            tenant = spans[number].tenant
            share = tenant.adapter.lora_dropout if tenant else 0.0
            if tenant is None or not share:
                return x_tC
            kept_tC = masks.get((place.name, number))
            if kept_tC is None:
                kept_tC = kept(tenant.key(place.name), samples[number], positions[number], place.columns, share)
                masks[place.name, number] = kept_tC
            return torch.where(kept_tC, x_tC / (1 - share), 0.0)

        return dropped


def _nobody(_: int) -> None:
    return None


def _span(run: Sequence[tuple[TenantAdapter | None, int, int]]) -> TenantSpan:
    """Neighbouring segments of one tenant: whose, slots and sequence of each."""
    tenant, samples, first = run[0][0], [], 0
    for _, size, sequence in run:
        if tenant and sequence in tenant.rows:
            samples.append(SampleSlots(slice(first, first + size), tenant.rows[sequence]))
        first += size
    return TenantSpan(first, tenant, samples)


def _adding(site: Site, running: _Running) -> Any:
    def add(_: nn.Module, arguments: tuple[Any, ...], output: Any) -> Any:
        y = output[0] if isinstance(output, tuple) else output
        x_TC, y_TD = arguments[0].flatten(0, -2), y.flatten(0, -2)
        adapted = added(y_TD, x_TC, site, running.spans, running.dropped).view_as(y)
        return (adapted, *output[1:]) if isinstance(output, tuple) else adapted

    return add
