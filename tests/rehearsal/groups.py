"""The rules of NCCL over gloo: which tensors a group carries, and the order in which its ranks ask.

A group is known by its backend's string, as `init_process_group` and `new_group` were given it: "nccl" carries tensors
on the device alone, "gloo" those on the host, "cpu:gloo,cuda:nccl" each by its own. A collective on a device's tensor
belongs to a communicator; what a rank asked of each is noted in order, and compared between ranks after the run.
"""

from __future__ import annotations

import threading
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import Tensor
from torch.utils._pytree import tree_iter

from . import streams
from .ledger import collectives, counts, note, refuse
from .storages import on_device

COLLECTIVES = (
    "all_reduce", "broadcast", "reduce", "all_gather", "all_gather_into_tensor", "reduce_scatter", "gather", "scatter",
    "reduce_scatter_tensor", "all_to_all", "all_to_all_single", "all_reduce_coalesced", "all_gather_coalesced",
    "_all_gather_base", "_reduce_scatter_base",
)  # fmt: skip
BETWEEN_TWO = ("send", "recv", "isend", "irecv")
_backends: dict[int, str] = {}
_default: list[str] = []
_local = threading.local()


LONG = {"nccl": "cuda:nccl", "gloo": "cpu:gloo,cuda:gloo"}
"""What torch makes of a backend's name."""


def _backend(group: Any) -> str:
    default = _default[-1] if _default else "gloo"
    given = default if group is None or group is dist.group.WORLD else _backends.get(id(group), default)
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
    if True in sides:
        ranks = sorted(dist.get_process_group_ranks(group)) if group is not None else list(range(dist.get_world_size()))
        sent = [t for t in tensors if t.dim() or True]
        shapes = f"{sent[0].dtype}".removeprefix("torch.")
        collectives.setdefault(f"{ranks} {getattr(group, 'group_name', '')}", []).append(f"{name} {shapes}")
        stream = streams.current()
        stream.run_to(stream.asked)  # what the collective reads is there when it runs
    return True in sides


def _is_average(value: Any) -> bool:
    return isinstance(value, dist.ReduceOp | type(dist.ReduceOp.AVG)) and value == dist.ReduceOp.AVG


def _guarded(name: str) -> Any:
    original = getattr(c10d, name)

    @wraps(original)
    def collective(*args: Any, **kwargs: Any) -> Any:
        if getattr(_local, "inside", False):
            return original(*args, **kwargs)
        group = kwargs.get("group") or next((x for x in args if isinstance(x, dist.ProcessGroup)), None)
        rest = {key: value for key, value in kwargs.items() if key != "group"}
        on_gpu = _check(name, group, (args, rest))
        average = name in ("all_reduce", "reduce_scatter_tensor", "reduce_scatter", "reduce") and (
            any(map(_is_average, (*args, *kwargs.values())))
        )
        _local.inside = True
        try:
            with streams.carried_out():
                if average:
                    # gloo has no mean: the sum of parts that are divided before.
                    tensor = args[name.startswith("reduce_scatter")] if len(args) > 1 else args[0]
                    tensor.div_(dist.get_world_size(group))
                    args = tuple(dist.ReduceOp.SUM if _is_average(x) else x for x in args)
                    kwargs = {k: dist.ReduceOp.SUM if _is_average(x) else x for k, x in kwargs.items()}
                return original(*args, **kwargs)
        finally:
            _local.inside = False
            counts["ops"]["collectives on the device" if on_gpu else "collectives on the host"] += 1

    return collective


class LateWork:
    """A receive that has come when a stream waits for it, in the order of that stream."""

    def __init__(self, work: Any, target: Tensor, arrived: Tensor) -> None:
        self._work, self._target, self._arrived = work, target, arrived

    def wait(self, *_: Any) -> bool:
        self._work.wait()
        self._target.copy_(self._arrived)
        return True

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


def _batched(operations: list[Any]) -> Any:
    """batch_isend_irecv, checked; what it receives lies in the target once the stream that waits has got there."""
    late: dict[int, tuple[Tensor, Tensor]] = {}
    for place, operation in enumerate(operations):
        on_gpu = _check("batched", operation.group, operation.tensor)
        if on_gpu and operation.op in (dist.irecv, _raw_irecv):
            late[place] = operation.tensor.detach(), torch.empty_like(operation.tensor)
            operation.tensor = late[place][1]
    _local.inside = True
    try:
        works = _batch(operations)
    finally:
        _local.inside = False
    assert len(works) == len(operations), "gloo gives a work for each"
    return [LateWork(work, *late[place]) if place in late else work for place, work in enumerate(works)]


_raw_irecv = c10d.irecv
_init, _new, _batch = c10d.init_process_group, c10d.new_group, c10d.batch_isend_irecv


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
    backend = _backend(group)
    return "nccl" if "nccl" in backend else backend


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
    put |= {"ProcessGroupNCCL": ProcessGroupNCCL}
    for name, value in put.items():
        for module in (c10d, dist):
            setattr(module, name, value)


def unlike(ranks: list[dict[str, list[str]]]) -> list[str]:
    """Communicators whose ranks asked for other collectives, or in another order: what hangs under NCCL."""
    names = sorted({name for rank in ranks for name in rank})
    out = []
    for name in names:
        members = [int(x) for x in name[1 : name.index("]")].split(",")]
        asked = [ranks[member].get(name, []) for member in members if member < len(ranks)]
        symmetric = [[x for x in one if x.split()[0] not in (*BETWEEN_TWO, "batched")] for one in asked]
        if any(one != symmetric[0] for one in symmetric):
            out.append(name)
    return out


__all__ = ["carries", "install", "note", "unlike"]
