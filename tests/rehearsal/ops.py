"""What runs: every op of torch, forward and backward, with the device that CUDA would run it on."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from . import clocks, groups, streams
from .functions import asked, asking, copied, inside
from .kernels import check_grouped
from .ledger import counts, refuse
from .storages import CPU, is_pinned, key, on_device, put

BOTH = {"copy_", "_to_copy", "set_", "is_same_size", "_has_compatible_shallow_copy_type", "lift_fresh", "detach"}
"""Ops that take tensors of both sides."""
INDEXED = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put"}
"""Ops whose indices may lie on the host."""
WAITS = {"_local_scalar_dense", "nonzero", "masked_select", "unique_dim", "_unique2", "unique_consecutive", "equal"} | {
    "is_nonzero", "bincount", "repeat_interleave", "allclose",
}  # fmt: skip
"""Ops whose result, or its size, the host needs."""
MADE = {"empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "_to_copy"} | {
    "new_empty", "new_zeros", "new_ones", "new_full", "new_empty_strided", "scalar_tensor",
}  # fmt: skip
"""Ops that can be asked for a device."""
SHAPED = MADE - {"_to_copy"}
"""Ops that read of a tensor no more than its shape."""


class Ops(TorchDispatchMode):
    """Runs each op with its rules."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "c10d":
            groups.asked_by_torch(func._schema.name, args)
            return func(*args, **kwargs)
        name = func._schema.name.partition("::")[2]
        if getattr(kwargs.get("device"), "type", "") == "cuda":  # C++ asks without the function mode
            with asking(True):
                return self.__torch_dispatch__(func, types, args, {**kwargs, "device": CPU})
        tensors = [x for x in tree_iter((args, kwargs)) if isinstance(x, Tensor)]
        taker = streams.taker_of(tensors)
        if taker is not None and taker is not streams.current() and not streams.is_carried():
            with taker:
                return self.__torch_dispatch__(func, types, args, kwargs)
        there = [on_device(t) for t in tensors]
        any_there = any(there)
        if any_there and not all(there):
            _check_mixed(name, args, tensors, there)
        if name == "copy_":
            counts["ops"]["on the device"] += any_there
            return _copy(func, args, kwargs)
        if tensors and not streams.is_view(func) and name not in SHAPED:
            _touch(func, name, args, kwargs, any_there)
        if any_there:
            counts["ops"]["on the device"] += 1
            if name == "_grouped_mm":
                counts["ops"]["grouped product"] += 1
                if check_grouped(*args):
                    streams.host_waits("a product a group")
            if name in WAITS or (name == "index" and _by_mask(args)):
                streams.host_waits(name)
                streams.current().run_to(streams.current().asked)
                with streams.carried_out():
                    out = func(*args, **kwargs)
                return _on_device(out, tensors, name)
        if name == "histc" and any_there and not args[0].is_floating_point():  # CUDA counts integers, too
            func, args, kwargs = _histogram, (args[0], args[1:]), kwargs
        to = asked() if (name in MADE or not tensors) else None
        gpu = any_there if to is None else to
        if to is None and not tensors:
            # A gradient that nobody gave is filled with zeros where its output lies.
            gpu = inside() or torch._C._current_graph_task_id() != -1
        stream = streams.current()
        if gpu and stream is not streams.Stream.main:
            out = streams.keep(func, args, kwargs, stream)
            if out is streams.MUTATED:
                return _written(func, args, kwargs)
        else:
            out = func(*args, **kwargs)
        return _on_device(out, tensors, name) if gpu else out


def _touch(func: Any, name: str, args: Any, kwargs: Any, on_gpu: bool) -> None:
    """Say which bytes the op reads, and which it writes to."""
    reads: list[Tensor] = []
    writes: list[Tensor] = []
    for place, argument in enumerate(func._schema.arguments):
        value = args[place] if place < len(args) else kwargs.get(argument.name)
        into = writes if argument.alias_info is not None and argument.alias_info.is_write else reads
        if isinstance(value, Tensor):
            into.append(value)
        elif isinstance(value, list | tuple):
            into += [x for x in value if isinstance(x, Tensor)]
    if on_gpu:
        streams.asks(streams.current(), *([x for x in some if on_device(x)] for some in (reads, writes)), name)
    else:
        streams.host_touches(reads, writes, name)


def _written(func: Any, args: Any, kwargs: Any) -> Any:
    """What an op gives back that writes to its arguments."""
    written = [
        kwargs[one.name] if one.name in kwargs else args[place]
        for place, one in enumerate(func._schema.arguments)
        if one.alias_info is not None and one.alias_info.is_write
    ]
    number = len(func._schema.returns)
    return written[0] if number == 1 else tuple(written[:number]) or None


def _on_device(out: Any, tensors: list[Tensor], name: str) -> Any:
    """A result that lies on the device, but for what was there before."""
    known = {key(t) for t in tensors}
    fresh = [x for x in tree_iter(out) if isinstance(x, Tensor) and key(x) not in known]
    for tensor in fresh:
        put(tensor)
    if fresh and not streams.is_carried():
        clocks.made(streams.current().stream_id, fresh)
        if "empty" not in name:
            streams.asks(streams.current(), (), fresh, name)
    return out


def _copy(func: Any, args: Any, kwargs: Any) -> Any:
    """A copy between tensors, of which each may lie on either side."""
    target, source = args[0], args[1]
    beside = bool(kwargs.get("non_blocking", args[2] if len(args) > 2 else False))
    gpu, from_gpu = on_device(target), on_device(source)
    stream = streams.current()
    if gpu != from_gpu:
        page_locked = is_pinned(source if gpu else target)
        reads, writes = ([x] if on_device(x) or is_pinned(x) else [] for x in (source, target))
        streams.asks(stream, reads, writes, "a copy")
        streams.arrive_at(source if gpu else target)
        if gpu and not source.dim():
            pass  # x[0] = 1.0 is a fill on the device
        elif gpu:
            copied(source, waits=not (beside and page_locked))
            if beside and page_locked and stream is streams.Stream.main:
                streams.from_pinned(source)
        elif not (beside and page_locked):
            streams.host_waits("a copy to the host")
            stream.run_to(stream.asked)
        elif stream is streams.Stream.main and not streams.is_carried():
            streams.to_pinned(target, source)
            return target
        if not (beside and page_locked):
            stream = streams.Stream.main
    elif gpu:
        streams.asks(stream, [source], [target], "a copy")
    else:
        streams.host_touches([source], [target], "a copy")
    if (gpu or from_gpu) and stream is not streams.Stream.main:
        streams.keep(func, args, kwargs, stream)
        return target
    return func(*args, **kwargs)


def _histogram(values: Tensor, rest: Any, **kwargs: Any) -> Tensor:
    return torch.ops.aten.histc(values.double(), *rest, **kwargs).to(values.dtype)


def _by_mask(args: Any) -> bool:
    return any(isinstance(x, Tensor) and x.dtype in (torch.bool, torch.uint8) for x in args[1] or ())


def _check_mixed(name: str, args: Any, tensors: list[Tensor], there: list[bool]) -> None:
    """Refuse an op that CUDA refuses: tensors of both sides, but for numbers and for indices on the host."""
    if name in BOTH:
        return
    if name.startswith("_foreach_") or name.startswith("_fused_"):
        lists = [x for x in args if isinstance(x, list | tuple) and x and isinstance(x[0], Tensor)]
        rows = zip(*lists, strict=False)
        if all(len({on_device(t) for t in row if t.dim()}) <= 1 for row in rows):
            return
    if name in INDEXED:
        indices = {id(x) for x in args[1] if isinstance(x, Tensor)}
        if on_device(args[0]):
            tensors, there = zip(
                *((t, g) for t, g in zip(tensors, there, strict=True) if id(t) not in indices), strict=True
            )
    if any(not g and t.dim() for t, g in zip(tensors, there, strict=True)) or not any(there):
        shapes = ", ".join(f"{'cuda' if g else 'cpu'}{list(t.shape)}" for t, g in zip(tensors, there, strict=True))
        raise refuse(f"{name} of tensors on both sides: {shapes}")
    if len(tensors) > 0 and not there[0] and not tensors[0].dim() and name.endswith("_") and not name.startswith("_"):
        raise refuse(f"{name} writes to a number on the host")
