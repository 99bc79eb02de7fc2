"""Activations of a forward pass wait for their backward in host memory (ByteScale, arXiv 2502.21231, section 4).

    with offloading(plan.offload[i], layers_of(model), device):
        loss = model(...)          # and nothing else; the backward runs whenever it comes

Of all that autograd saves in the inner layers, a share of the bytes goes to the host on a stream of its own; the first
and the last layer keep what they save. While layer k computes, what layer k - 1 saved may still be on its way; what
layer k - 2 saved is gone by then, also if computing has to wait for that. Backward, the first tensor that layer k asks
for starts the way back of layer k - 1, last saved first.

Whole storages travel, each once, however many tensors and views of it are saved. What stays:

    parameters, their views, all that shares memory with them, and buffers
    storages of less than a quarter of a block of the host memory, and what is no plain dense tensor of the device
    what was first saved outside the inner layers, for it stays alive there (rotary tables, masks)

Tensors that stay by ``share`` are those after which the moved bytes would be further from the share of the bytes seen,
so the moved bytes are never off by more than half the largest storage. If something else has kept a storage alive when
it is wanted again, it is used as it is and nothing travels back.

Several passes may wait for their backward at once, in any order; layers that are recomputed save their inputs, which
travel like all else. Each pass holds its own state, in its graph: a graph that is dropped gives its host memory back.
A storage that the trainer empties meanwhile, to fill it again before the backward (recomputation of single modules that
discards its output), stays the trainer's.
"""

from __future__ import annotations

import logging
import sys
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from ...core.errors import EvenloadError
from .copier import HostMemory, StreamCopier

log = logging.getLogger("evenload")


@dataclass
class Moved:
    """What one pass did so far; filled in by its forward and its backward."""

    seen_bytes: int = 0
    """Of storages that could travel."""
    out_bytes: int = 0
    back_bytes: int = 0
    """Less than ``out_bytes`` where storages were still there."""


@contextmanager
def offloading(
    share: float, layers: Sequence[nn.Module], device: torch.device, *, host: HostMemory | None = None
) -> Iterator[Moved]:
    """Let a share of what the inner layers save in the forward inside wait in host memory.

    Args:
        share: of the bytes, 0 to 1; EvenloadError for another number.
        layers: of the stage, in the order in which they run; see `layers_of`.
        host: where to; by default `host_memory_of` the device. Where there is none, nothing moves, which is said once.
    """
    if not 0 <= share <= 1:
        raise EvenloadError("a share of the activations to offload is not between 0 and 1", f"{share}", "plan again")
    moved = Moved()
    if share == 0 or len(layers) <= 2:
        yield moved
        return
    device = torch.empty(0, device=device).device  # with its number, as tensors have it
    host = host or host_memory_of(device)
    if host is None:
        _tell_of_cpu()
        yield moved
        return
    the_pass = _Pass(share, layers, device, host, moved)
    with ExitStack() as undo:
        undo.callback(the_pass.end)
        for number, layer in enumerate(layers):
            undo.callback(layer.register_forward_pre_hook(lambda *_, number=number: the_pass.enter(number)).remove)
        undo.callback(layers[-1].register_forward_hook(lambda *_: the_pass.enter(len(layers))).remove)
        undo.enter_context(saved_tensors_hooks(the_pass.pack, the_pass.unpack))
        yield moved


def layers_of(model: nn.Module) -> Sequence[nn.Module]:
    """The layers of a decoder: the longest list of modules that is in no other one; the first of equals. Raises
    EvenloadError: there is no list of modules."""
    layer_lists: list[Sequence[nn.Module]] = []

    def walk(module: nn.Module) -> None:
        if isinstance(module, nn.ModuleList):
            layer_lists.append(list(module))
        else:
            for child in module.children():
                walk(child)

    walk(model)
    if not layer_lists:
        raise EvenloadError(
            "the layers of the model cannot be told apart", type(model).__name__, "keep them in an nn.ModuleList"
        )
    return max(layer_lists, key=len)


@cache
def host_memory_of(device: torch.device) -> HostMemory | None:
    """What passes on a CUDA device share, None on a CPU; ``host_memory_of.cache_clear()`` gives it back to torch."""
    return HostMemory(StreamCopier(device)) if device.type == "cuda" else None


@cache
def _tell_of_cpu() -> None:
    log.warning("activations are offloaded on CUDA only: plans are run here without it, in the same memory")


class _Stored:
    """One storage: on its way out, in host memory, on its way back, or here."""

    def __init__(self, flat: Tensor, host: HostMemory, blocks: list[Tensor], after: list[Any], moved: Moved) -> None:
        self.num_bytes = len(flat)
        self._original = weakref.ref(flat.untyped_storage())
        self._device = flat.device
        self._host = host
        self._moved = moved
        self._flat: Tensor | None = flat
        self._blocks = blocks
        self._out: Any = None
        self._pending: Any = None
        """The copy that must have ended before the memory of ``_flat`` is reused or, on the way back, used; or None."""
        self._out = self._pending = host.copier.out(flat, blocks, after)

    @property
    def is_out(self) -> bool:
        """Whether the copy to the host has ended."""
        return self._out is None or self._host.copier.done(self._out)

    def let_go(self) -> None:
        """Free the device's memory once it is copied; what is computed from here on waits for that."""
        if self._flat is None or not self._blocks:
            return
        self._wait()
        if self._flat.untyped_storage().nbytes() < self.num_bytes:
            self._return_blocks(self._out)
        else:
            self._flat = None

    def fetch(self) -> None:
        """Start the way back, unless it is here or on its way."""
        if self._flat is not None:
            return
        original = self._original()
        if original is not None and original.nbytes() == self.num_bytes:
            self._flat = _flat(original, self._device)
            self._return_blocks(self._out)
        else:
            self._flat = torch.empty(self.num_bytes, dtype=torch.uint8, device=self._device)
            self._pending = self._host.copier.back(self._blocks, self._flat, [self._out])
            self._return_blocks(self._pending)
            self._moved.back_bytes += self.num_bytes

    def storage(self) -> torch.UntypedStorage:
        """On the device; what is computed from here on may read it."""
        self.fetch()
        assert self._flat is not None
        if not self._blocks:  # the way out only reads
            self._wait()
        return self._flat.untyped_storage()

    def _wait(self) -> None:
        if self._pending is not None:
            self._host.copier.wait(self._pending)
            self._pending = None

    def _return_blocks(self, moment: Any) -> None:
        self._host.give(self._blocks, moment)
        self._blocks = []

    def __del__(self) -> None:
        if not sys.is_finalizing():
            self._wait()
            self._return_blocks(self._out)


class _Stays(NamedTuple):
    """What autograd keeps in place of a tensor that stays."""

    group: int
    tensor: Tensor


class _View(NamedTuple):
    """What autograd keeps in place of a tensor whose storage travels."""

    group: int
    stored: _Stored
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class _Known(NamedTuple):
    """What was decided about a storage when it was first met."""

    storage: weakref.ref[Any]
    version: int
    stored: _Stored | None


class _Pass:
    """One forward pass and its backward. Groups are what is saved from one layer's beginning to the next one's: group 0
    before the first layer, group k from the beginning of the k-th, the last one after the last layer."""

    def __init__(
        self, share: float, layers: Sequence[nn.Module], device: torch.device, host: HostMemory, moved: Moved
    ) -> None:
        self._share = share
        self._last = len(layers) - 1
        self._host = host
        self._device, self._moved = device, moved
        self._inner = False
        self._groups: list[list[weakref.ref[_Stored]]] = [[]]
        self._leaving: deque[tuple[int, _Stored]] = deque()
        self._known: dict[int, _Known] = {}
        self._fetched: set[int] = set()
        self._due = 0.0
        """Bytes by which the share of what was seen exceeds what was moved."""
        weights = (t for layer in layers for t in (*layer.parameters(), *layer.buffers()))
        self._weights = {id(storage): storage for storage in (t.untyped_storage() for t in weights)}

    def enter(self, layer: int) -> None:
        """A layer begins; one past the last: the last has ended."""
        self._inner = 0 < layer < self._last
        self._groups.append([])
        self._release(len(self._groups) - 2)

    def end(self) -> None:
        """End the forward: nothing more is saved."""
        self._known, self._weights = {}, {}
        self._release(len(self._groups) + 1)

    def pack(self, tensor: Tensor) -> _Stays | _View:
        """What autograd saves in place of a tensor."""
        group = len(self._groups) - 1
        stored = self._stored(tensor) if self._may_travel(tensor) else None
        while self._leaving and self._leaving[0][1].is_out:
            self._leaving.popleft()[1].let_go()
        if stored is None:
            # A result that its own node saved would keep the node alive, and so itself.
            return _Stays(group, tensor if tensor.is_leaf else tensor.detach())
        self._groups[group].append(weakref.ref(stored))
        return _View(group, stored, tensor.dtype, tensor.size(), tensor.stride(), int(tensor.storage_offset()))

    def unpack(self, saved: _Stays | _View) -> Tensor:
        """The tensor that was saved, fetched from host memory where it went there."""
        self._fetch(saved.group)
        self._fetch(saved.group - 1)
        if isinstance(saved, _Stays):
            return saved.tensor
        empty = torch.empty(0, dtype=saved.dtype, device=self._device)
        return empty.set_(saved.stored.storage(), saved.offset, saved.size, saved.stride)

    def _may_travel(self, tensor: Tensor) -> bool:
        if type(tensor) is not Tensor or tensor.device != self._device or tensor.layout != torch.strided:
            return False
        if tensor.is_conj() or tensor.is_neg() or tensor.is_quantized or tensor.is_inference():
            return False
        if isinstance(tensor._base, nn.Parameter):
            return False
        storage = tensor.untyped_storage()
        return storage.nbytes() >= self._host.least_bytes and id(storage) not in self._weights

    def _stored(self, tensor: Tensor) -> _Stored | None:
        """The storage of a tensor on its way; None if it stays."""
        storage = tensor.untyped_storage()
        known = self._known.get(id(storage))
        if known is not None and known.storage() is storage and known.version == tensor._version:
            return known.stored if self._inner else None
        stored = self._send(storage) if self._inner else None
        self._known[id(storage)] = _Known(weakref.ref(storage), tensor._version, stored)
        return stored

    def _send(self, storage: torch.UntypedStorage) -> _Stored | None:
        num_bytes = storage.nbytes()
        self._moved.seen_bytes += num_bytes
        self._due += self._share * num_bytes
        buffer = self._host.take(num_bytes) if self._due >= num_bytes / 2 else None
        if buffer is None:
            return None
        self._due -= num_bytes
        self._moved.out_bytes += num_bytes
        stored = _Stored(_flat(storage, self._device), self._host, *buffer, self._moved)
        self._leaving.append((len(self._groups) - 1, stored))
        return stored

    def _fetch(self, group: int) -> None:
        """Start the way back of what a group saved, last first, unless that has been done."""
        if group < 0 or group in self._fetched:
            return
        self._fetched.add(group)
        for reference in reversed(self._groups[group]):
            stored = reference()
            if stored is not None:
                stored.fetch()

    def _release(self, group: int) -> None:
        while self._leaving and self._leaving[0][0] < group:
            self._leaving.popleft()[1].let_go()


def _flat(storage: torch.UntypedStorage, device: torch.device) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
