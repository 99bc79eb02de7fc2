"""What a rank did to its device, by the function that asked; written as JSON when the rank ends."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections import Counter
from pathlib import Path
from types import FrameType

HERE = str(Path(__file__).parent)
OURS = str(Path(HERE).parents[1])
PYTHON = str(Path(os.__file__).parent)
PASSED_OVER = ("/site-packages/torch/", "/typing_extensions.py", "/site-packages/numpy/")
KINDS = ("faults", "waits", "to_device", "ops")
"""Of each a count by function: what CUDA would refuse, the host's waits for the device, copies to the device, ops."""

counts: dict[str, Counter[str]] = {kind: Counter() for kind in KINDS}
bytes_to_device: Counter[str] = Counter()
collectives: dict[str, list[str]] = {}
"""By communicator, in the order in which this rank asked for them."""


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


def note(kind: str, what: str) -> None:
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
    seen |= {"bytes_to_device": dict(bytes_to_device), "collectives": collectives}
    path = Path(folder) / f"rank.{os.environ.get('RANK', 'x')}.{os.getpid()}.json"
    path.write_text(json.dumps(seen))
