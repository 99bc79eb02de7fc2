"""A fault in one rank, at one place: planted from outside, so that the product has no hook for it.

`Watchdog.at` and torch's collectives are wrapped. A fault is a JSON object, in the environment as ``EVENLOAD_FAULT``:

    rank         the victim; replica: of which, where replicas come and go
    how          kill | stop | raise | hang | slow | nan | disk, terminate: SIGTERM to the launcher, as of a scheduler;
                 or trace: nothing but a list of the collectives called
    at, where    "mark": when the victim marks a place that begins so; "call": when it is about to call this function of
                 torch.distributed, or "Plane.post", "Source.tokens"; "start": at its first line
    step         not before this optimizer step
    delay_s      so much later, while the rank goes on; 0: right there
    stamp        the file that takes the time of the fault and the rank's last mark; for trace, the names
    disk, left   the folder whose file system is filled, but for so many bytes
"""

from __future__ import annotations

import gc
import json
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

VARIABLE = "EVENLOAD_FAULT"
SLOW_S = 3.0
NEVER_S = 1000.0
COLLECTIVES = (
    *("all_reduce", "all_gather", "all_gather_object", "all_gather_into_tensor", "all_gather_single", "barrier"),
    *("reduce_scatter", "reduce_scatter_tensor", "reduce_scatter_single", "reduce", "broadcast", "all_to_all"),
    *("all_to_all_single", "isend", "irecv", "send", "recv", "batch_isend_irecv", "all_reduce_coalesced"),
    *("all_gather_coalesced", "broadcast_object_list", "gather_object", "gather", "scatter"),
)


class Planted:
    """The fault of this process; it happens once."""

    def __init__(self, fault: dict[str, Any]) -> None:
        self._fault = fault
        self._step = 0
        self._where = ""
        self._done = False
        self._names: dict[str, None] = {}

    def marked(self, where: str, step: int | None) -> None:
        self._where, self._step = where, self._step if step is None else step
        if self._fault["at"] == "mark" and where.startswith(self._fault["where"]):
            self.happen()

    def called(self, name: str) -> None:
        if self._fault["how"] == "trace" and self._step >= self._fault["step"] and name not in self._names:
            self._names[name] = None
            Path(self._fault["stamp"]).write_text(json.dumps(list(self._names)))
        elif self._fault["at"] == "call" and name == self._fault["where"]:
            self.happen()

    def happen(self) -> None:
        if self._done or self._step < self._fault["step"]:
            return
        self._done = True
        if delay_s := self._fault["delay_s"]:
            threading.Timer(delay_s, self._act).start()
        else:
            self._act()

    def _act(self) -> None:
        Path(self._fault["stamp"]).write_text(json.dumps([time.time(), self._where]))
        ACTS[self._fault["how"]](self._fault)


def fail(_: dict[str, Any]) -> None:
    raise ValueError("planted")


def poison(_: dict[str, Any]) -> None:
    """A value of every parameter, and of its gradient where it has one, is no number any more."""
    import torch

    objects = gc.get_objects()
    tensors: list[Any] = []
    for parameter in [o for o in objects if type(o) is torch.nn.Parameter and o.requires_grad]:
        # Under ZeRO 3 a rank has a shard, and the whole while it is gathered, which is then what a pass reads.
        shard = getattr(parameter, "ds_tensor", None)
        tensors += [parameter, shard, parameter.grad, getattr(parameter, "main_grad", None)]
    for optimizer in [o for o in objects if type(o).__name__.startswith("DeepSpeedZeroOptimizer")]:
        for gradient in optimizer.averaged_gradients.values():
            tensors += gradient if isinstance(gradient, list) else [gradient]
    for tensor in tensors:
        if tensor is not None and tensor.numel():
            tensor.data.view(-1)[0] = float("nan")


def fill(fault: dict[str, Any]) -> None:
    """The disk is full but for a little; where there is no small disk, no file may grow beyond that."""
    folder = Path(fault["disk"])
    if not folder.is_mount():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (fault["left"], fault["left"]))
        return
    free = os.statvfs(folder)
    with (folder / "filler").open("wb") as file:
        file.write(bytes(max(0, free.f_bavail * free.f_frsize - fault["left"])))


ACTS: dict[str, Callable[[dict[str, Any]], None]] = {
    "kill": lambda _: os.kill(os.getpid(), signal.SIGKILL),
    "terminate": lambda _: os.kill(os.getppid(), signal.SIGTERM),
    "stop": lambda _: os.kill(os.getpid(), signal.SIGSTOP),
    "raise": fail,
    "hang": lambda _: time.sleep(NEVER_S),
    "slow": lambda _: time.sleep(SLOW_S),
    "nan": poison,
    "disk": fill,
}


def plant(fault: dict[str, Any]) -> None:
    """Wrap what the fault needs; to be called in the victim before it does anything."""
    planted = Planted(fault)
    if fault["at"] == "start":
        planted.happen()
    import evenload.data.sources as sources
    import torch.distributed as dist
    from evenload.runtime.watchdog.watchdog import Watchdog
    from evenload.runtime.world.plane import Plane

    at = Watchdog.at

    def marking(self: Any, where: str, step: int | None = None, waits: bool = False) -> None:
        at(self, where, step, waits)
        planted.marked(where, step)

    Watchdog.at = marking  # type: ignore[method-assign]
    _wrap(Plane, "post", "Plane.post", planted)
    _wrap(sources.Source, "tokens", "Source.tokens", planted)
    names = (*COLLECTIVES, "init_process_group") if fault["at"] == "call" or fault["how"] == "trace" else ()
    wrapped = {}
    for name in names:
        if real := getattr(dist, name, None):
            wrapped[id(real)] = _calling(real, name, planted)
    for module in list(sys.modules.values()) if wrapped else ():
        for name, value in list(vars(module).items()) if module else ():
            if id(value) in wrapped:
                setattr(module, name, wrapped[id(value)])


def _wrap(owner: Any, method: str, name: str, planted: Planted) -> None:
    setattr(owner, method, _calling(getattr(owner, method), name, planted))


def _calling(real: Callable[..., Any], name: str, planted: Planted) -> Callable[..., Any]:
    def calling(*arguments: Any, **named: Any) -> Any:
        planted.called(name)
        return real(*arguments, **named)

    return calling


def plant_from_environment() -> None:
    """In the victim, whichever process that is."""
    fault = json.loads(os.environ.get(VARIABLE, "null"))
    if fault and (os.environ.get("RANK"), os.environ.get("EVENLOAD_REPLICA")) == (
        str(fault["rank"]),
        fault.get("replica"),
    ):
        plant(fault)
