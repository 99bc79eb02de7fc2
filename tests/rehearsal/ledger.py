"""What a rank did to its device, by the function that asked; written as JSON when the rank ends."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

HERE = str(Path(__file__).parent)
OURS = str(Path(HERE).parents[1])
PYTHON = str(Path(os.__file__).parent)
PASSED_OVER = ("/site-packages/torch/", "/typing_extensions.py", "/site-packages/numpy/")
KINDS = ("faults", "waits", "to_device", "ops")
"""Of each a count by function: what CUDA would refuse, the host's waits for the device, copies to the device, ops."""

counts: dict[str, Counter[str]] = {kind: Counter() for kind in KINDS}
bytes_to_device: Counter[str] = Counter()
units: list[dict[str, Any]] = []
"""What this rank asked of NCCL, in order; see `nccl.Unit`."""
_local = threading.local()


class RefusedError(RuntimeError):
    """What CUDA, NCCL or a kernel would have refused."""


def asker() -> str:
    """The innermost function outside of torch and of Python's own library, evenload's or a host's, as `path:name`."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename
        own = path.startswith((HERE, PYTHON)) or frame.f_code.co_qualname.startswith("ToHost.")
        if path[0] == "/" and not own and not any(name in path for name in PASSED_OVER):
            short = path.rpartition("site-packages/")[2].removeprefix(OURS + "/")
            return f"{short}:{frame.f_code.co_qualname.partition('.<locals>.<')[0]}"
        frame = frame.f_back
    return "?"


@contextmanager
def inside_a_kernel() -> Iterator[None]:
    """What a stand-in does in here to compute its result is not the program's doing; faults are."""
    before, _local.kernel = getattr(_local, "kernel", False), True
    try:
        yield
    finally:
        _local.kernel = before


def note(kind: str, what: str) -> None:
    if kind != "faults" and getattr(_local, "kernel", False):
        return
    counts[kind][f"{what} at {asker()}"] += 1


def refuse(what: str) -> RefusedError:
    """Note a fault; what is given is to be raised."""
    note("faults", f"{what} [{threading.current_thread().name}]")
    return RefusedError(what)


def write() -> None:
    """Write what was seen into the folder that REHEARSAL_OUT names."""
    folder = os.environ.get("REHEARSAL_OUT")
    if not folder:
        return
    seen = {kind: dict(count.most_common()) for kind, count in counts.items()}
    one_queue = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1"
    seen |= {"bytes_to_device": dict(bytes_to_device), "units": units, "one_queue": one_queue}
    path = Path(folder) / f"rank.{os.environ.get('RANK', 'x')}.{os.getpid()}.json"
    path.write_text(json.dumps(seen))
