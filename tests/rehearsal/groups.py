"""The rules of NCCL over gloo: which tensors a group carries, and the order in which its ranks ask.

A group is known by its backend's string, as `init_process_group` and `new_group` were given it: "nccl" carries tensors
on the device alone, "gloo" those on the host, "cpu:gloo,cuda:nccl" each by its own. A collective on a device's tensor
belongs to a communicator, which has a stream of its own: it comes behind what the current stream has been asked for,
and who does not wait for it reads too early. A single send or receive has a communicator of the two ranks.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import Tensor
from torch.utils._pytree import tree_iter

from . import clocks, nccl, streams
from .aborts import as_nccl
from .ledger import counts, refuse
from .storages import on_device

COLLECTIVES = (
    "all_reduce", "broadcast", "reduce", "all_gather", "all_gather_into_tensor", "reduce_scatter", "gather", "scatter",
    "reduce_scatter_tensor", "all_to_all", "all_to_all_single", "all_reduce_coalesced", "all_gather_coalesced",
    "_all_gather_base", "_reduce_scatter_base",
)  # fmt: skip
BETWEEN_TWO = {"send": "send", "isend": "send", "recv": "recv", "irecv": "recv"}
ALIKE = {"all_reduce", "broadcast", "reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "scatter", "gather"}
"""Collectives in which all ranks have as many elements."""
_backends: dict[int, str] = {}
_default: list[str] = []
_local = threading.local()


LONG = {"nccl": "cuda:nccl", "gloo": "cpu:gloo,cuda:gloo"}
"""What torch makes of a backend's name."""


def _given(group: Any) -> str:
    default = _default[-1] if _default else "gloo"
    return default if group is None or group is dist.group.WORLD else _backends.get(id(group), default)


def _backend(group: Any) -> str:
    given = _given(group)
    return LONG.get(given, given)


def carries(backend: str, on_gpu: bool) -> bool:
    """Whether a group of such a backend carries a tensor there."""
    parts = dict(part.split(":") for part in backend.split(","))
    return parts.get("cuda") == "nccl" if on_gpu else "cpu" in parts


def _check(name: str, group: Any, args: Any) -> bool:
    """Refuse what the group does not carry; whether tensors of the device travel."""
    backend = _backend(group)
    tensors = [t for t in tree_iter(args) if isinstance(t, Tensor)]
    sides = {on_device(t) for t in tensors}
    if len(sides) > 1:
        raise refuse(f"{name} of tensors on both sides")
    for gpu in sides:
        if not carries(backend, gpu):
            raise refuse(f"{name} of a tensor on the {'device' if gpu else 'host'} in a group of {backend}")
    return True in sides


def _ranks(group: Any) -> list[int]:
    return sorted(dist.get_process_group_ranks(group or dist.group.WORLD))


def _communicator(group: Any, ranks: list[int]) -> str:
    return f"{nccl.PREFIX}{ranks} of {(group or dist.group.WORLD).group_name}"


def _ask(group: Any, ranks: list[int], name: str, reads: Iterable[Any], writes: Iterable[Any], **unit: Any) -> str:
    """Ask a communicator for a unit; its name. It runs behind the current stream."""
    of, stream = _communicator(group, ranks), streams.current()
    stream.run_to(stream.asked)  # what it reads is there when it runs
    after = clocks.clock_of(stream.stream_id)
    clocks.join(of, after)
    clocks.asked(of)
    some = [[t for t in tree_iter(tensors) if isinstance(t, Tensor)] for tensors in (reads, writes)]
    nccl.check_layout(name, [*some[0], *some[1]], "between" in unit)
    clocks.touch(of, *some, name)
    nccl.ask(of, ranks, {k: v for k, v in clocks.clock_of(of).items() if k != of}, **unit)
    return of


def _unit(name: str, given: dict[str, Any]) -> tuple[list[int], list[Any], list[Any], dict[str, Any]]:
    """(Ranks of the communicator, tensors that are read, those that are written to, what `nccl.ask` notes) of a call,
    by its arguments' names."""
    group = given.get("group")
    values = [value for key, value in given.items() if key not in ("group", "op", "async_op")]
    first = next(iter(given.values()))
    if name in BETWEEN_TWO:
        kind = BETWEEN_TWO[name]
        peer = next((given[key] for key in ("dst", "src") if given.get(key) is not None), None)
        if peer is None:
            places = [given[key] for key in ("group_dst", "group_src") if given.get(key) is not None]
            if not places:
                raise refuse("a receive from whoever sends, which NCCL does not know")
            peer = dist.get_global_rank(group or dist.group.WORLD, places[0])
        between = [(kind, peer, first.numel())]
        reads, writes = ([first], []) if kind == "send" else ([], [first])
        return sorted({dist.get_rank(), peer}), reads, writes, {"between": between}
    tensors = [x for x in tree_iter(values) if isinstance(x, Tensor)]
    what = [name, str(tensors[0].dtype).removeprefix("torch.")]
    what += [str(given[key]) for key in ("op", "src", "dst", "group_src", "group_dst") if given.get(key) is not None]
    if name in ALIKE:
        what.append(str(max(x.numel() for x in tensors)))
    unit: dict[str, Any] = {"what": " ".join(what)}
    if name == "all_to_all_single":
        unit["counts"] = _counts(given, len(_ranks(group)))
    writes = [given.get("gather_list")] if name == "gather" else [first]
    return _ranks(group), values, writes, unit


def _counts(given: dict[str, Any], size: int) -> list[list[int]]:
    """Elements to and from each rank."""
    sides = []
    for tensor, splits in (("input", "input_split_sizes"), ("output", "output_split_sizes")):
        one = given[tensor]
        row = one[0].numel() if len(one) else 0
        parts = [len(one) // size] * size if given[splits] is None or len(given[splits]) == 0 else given[splits]
        sides.append([int(n) * row for n in parts])
    return sides


def _is_average(value: Any) -> bool:
    return isinstance(value, dist.ReduceOp | type(dist.ReduceOp.AVG)) and value == dist.ReduceOp.AVG


def _guarded(name: str) -> Any:
    original = getattr(c10d, name)
    signature = inspect.signature(original)

    @wraps(original)
    def collective(*args: Any, **kwargs: Any) -> Any:
        if getattr(_local, "inside", False):
            return original(*args, **kwargs)
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        given = bound.arguments
        group = given.get("group")
        on_gpu = _check(name, group, [value for key, value in given.items() if key != "group"])
        of = ""
        if on_gpu:
            ranks, reads, writes, unit = _unit(name, given)
            of = _ask(group, ranks, name, reads, writes, **unit)
        average = name in ("all_reduce", "reduce_scatter_tensor", "reduce_scatter", "reduce") and (
            any(map(_is_average, (*args, *kwargs.values())))
        )
        _local.inside = True
        try:
            with streams.carried_out(), as_nccl(on_gpu):
                if average:
                    # gloo has no mean: the sum of parts that are divided before.
                    tensor = args[name.startswith("reduce_scatter")] if len(args) > 1 else args[0]
                    tensor.div_(dist.get_world_size(group))
                    args = tuple(dist.ReduceOp.SUM if _is_average(x) else x for x in args)
                    kwargs = {k: dist.ReduceOp.SUM if _is_average(x) else x for k, x in kwargs.items()}
                work = original(*args, **kwargs)
        finally:
            _local.inside = False
            counts["ops"]["collectives on the device" if on_gpu else "collectives on the host"] += 1
        if not on_gpu:
            return work
        if given.get("async_op") or name in ("isend", "irecv"):
            return AsyncWork(work, clocks.clock_of(of)) if isinstance(work, dist.Work) else work
        if group not in c10d._world.pg_coalesce_state:
            clocks.join(streams.current().stream_id, clocks.clock_of(of))
        return work

    return collective


def asked_by_torch(name: str, args: Any) -> None:
    """A collective that C++ asks for itself, as DDP does for its buckets; DDP waits for it there."""
    tensors = [x for x in tree_iter(args) if isinstance(x, Tensor)]
    if getattr(_local, "inside", False) or not any(map(on_device, tensors)):
        return
    group = dist.ProcessGroup.unbox(next(x for x in args if isinstance(x, torch.ScriptObject)))
    _check(name, group, tensors)
    what = f"{name} {tensors[0].dtype} {tensors[0].numel()}"
    of = _ask(group, _ranks(group), name, tensors, tensors, what=what)
    clocks.join(streams.current().stream_id, clocks.clock_of(of))


def _barrier(group: Any = None, *args: Any, **kwargs: Any) -> Any:
    """With NCCL a collective, for which the host waits."""
    if "nccl" in _backend(group) and dist.get_rank(group) >= 0:
        of = _ask(group, _ranks(group), "barrier", (), (), what="barrier")
        clocks.join(streams.current().stream_id, clocks.clock_of(of))
        streams.host_waits("barrier")
    return _plain_barrier(group, *args, **kwargs)


@contextmanager
def _coalescing(group: Any = None, device: Any = None, async_ops: bool = False) -> Iterator[Any]:
    """Collectives that become one when the context ends, or when its manager waits."""
    with ExitStack() as stack:
        manager = stack.enter_context(_manager(group, device, async_ops))
        yield manager
        _local.inside = True
        try:
            with streams.carried_out(), as_nccl("nccl" in _backend(group)):
                stack.close()
        finally:
            _local.inside = False
    clock = clocks.clock_of(_communicator(group, _ranks(group)))
    if async_ops:
        manager.works = [AsyncWork(work, clock) for work in manager.works]
    else:
        clocks.join(streams.current().stream_id, clock)


class AsyncWork:
    """What runs on the communicator's stream until a stream waits for it."""

    def __init__(self, work: Any, clock: clocks.Clock) -> None:
        self._work, self._clock = work, clock

    def wait(self, *args: Any) -> Any:
        with streams.carried_out(), as_nccl(on_gpu=True):
            done = self._work.wait(*args)
        clocks.join(streams.current().stream_id, self._clock)
        return done

    def is_completed(self) -> bool:
        completed = bool(self._work.is_completed())
        if completed:
            streams.host_knows(self._clock)
        return completed

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


class LateWork(AsyncWork):
    """A receive that has come when a stream waits for it, in the order of that stream."""

    def __init__(self, work: Any, clock: clocks.Clock, target: Tensor, arrived: Tensor) -> None:
        super().__init__(work, clock)
        self._target, self._arrived = target, arrived

    def wait(self, *args: Any) -> bool:
        super().wait(*args)
        self._target.copy_(self._arrived)
        return True


def _batched(operations: list[Any]) -> Any:
    """batch_isend_irecv, checked; what it receives lies in the target once the stream that waits has got there."""
    late: dict[int, tuple[Tensor, Tensor]] = {}
    on_gpu = False
    for place, operation in enumerate(operations):
        on_gpu = _check("batched", operation.group, operation.tensor)
        if on_gpu and operation.op in (dist.irecv, _raw_irecv):
            late[place] = operation.tensor.detach(), torch.empty_like(operation.tensor)
    of = ""
    if on_gpu:
        group, kinds = operations[0].group, ["recv" if place in late else "send" for place in range(len(operations))]
        sides = (
            [one.tensor for place, one in enumerate(operations) if (place in late) is written]
            for written in (False, True)
        )
        between = [(kind, one.peer, one.tensor.numel()) for kind, one in zip(kinds, operations, strict=True)]
        of = _ask(group, _ranks(group), "a message", *sides, between=between)
    for place, (_, arrived) in late.items():
        operations[place].tensor = arrived
    _local.inside = True
    try:
        with as_nccl(on_gpu):
            works = _batch(operations)
    finally:
        _local.inside = False
    assert len(works) == len(operations), "gloo gives a work for each"
    if not on_gpu:
        return works
    clock = clocks.clock_of(of)
    return [
        LateWork(work, clock, *late[place]) if place in late else AsyncWork(work, clock)
        for place, work in enumerate(works)
    ]


_raw_irecv = c10d.irecv
_init, _new, _batch = c10d.init_process_group, c10d.new_group, c10d.batch_isend_irecv
_plain_barrier, _manager = c10d.barrier, c10d._coalescing_manager


def _init_group(backend: Any = None, *args: Any, **kwargs: Any) -> Any:
    kwargs.pop("device_id", None)
    kwargs.pop("pg_options", None)
    _default.append(str(backend or "cpu:gloo,cuda:nccl"))
    return _init("gloo", *args, **kwargs)


def _new_group(ranks: Any = None, timeout: Any = None, backend: Any = None, *args: Any, **kwargs: Any) -> Any:
    kwargs.pop("device_id", None)
    kwargs.pop("pg_options", None)
    group = _new(ranks, timeout, "gloo", None, **{k: v for k, v in kwargs.items() if k != "pg_options"})
    _backends[id(group)] = str(backend or (_default[-1] if _default else "gloo"))
    return group


def _config(group: Any = None) -> str:
    return _backend(group)


def _object_device(group: Any = None) -> str:
    """Where Python's objects travel: with NCCL alone they go by the device."""
    return "cpu" if carries(_backend(group), on_gpu=False) else f"cuda:{torch.cuda.current_device()}"


def _name(group: Any = None) -> str:
    """As it was given: a group of several backends has all of them for a name."""
    return _given(group)


class _Options:
    """Stands for ProcessGroupNCCL.Options: taken and not used."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.config = type("Config", (), {})()


class ProcessGroupNCCL:
    """Stands for torch's."""

    Options = _Options


def install() -> None:
    """Put the guards in place of torch's functions, wherever these are looked up."""
    put: dict[str, Any] = {name: _guarded(name) for name in (*COLLECTIVES, *BETWEEN_TWO) if hasattr(c10d, name)}
    put |= {"init_process_group": _init_group, "new_group": _new_group, "batch_isend_irecv": _batched}
    put |= {"get_backend_config": _config, "get_backend": _name, "is_nccl_available": lambda: True}
    c10d._get_object_coll_device = _object_device
    put |= {"ProcessGroupNCCL": ProcessGroupNCCL, "barrier": _barrier, "_coalescing_manager": _coalescing}
    for name, value in put.items():
        for module in (c10d, dist):
            setattr(module, name, value)
