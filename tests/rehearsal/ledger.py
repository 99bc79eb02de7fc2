"""What a rank did to its device, by the line that asked; written as JSON when the rank ends."""

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
KINDS = ("faults", "waits", "to_device", "ops")
"""Of each a count by line: what CUDA would refuse, the host's waits for the device, copies to the device, ops."""

counts: dict[str, Counter[str]] = {kind: Counter() for kind in KINDS}
bytes_to_device: Counter[str] = Counter()
collectives: dict[str, list[str]] = {}
"""By communicator, in the order in which this rank asked for them."""


class RefusedError(RuntimeError):
    """What CUDA, NCCL or a kernel would have refused."""


def line_of(frame: FrameType | None) -> str:
    """The innermost line outside of torch and of the rehearsal, as `path:number`."""
    first = None
    while frame is not None:
        path = frame.f_code.co_filename
        if not path.startswith(HERE) and "/torch/" not in path and "/threading.py" not in path and path[0] == "/":
            place = f"{path.rpartition('site-packages/')[2].removeprefix(OURS + '/')}:{frame.f_lineno}"
            if "site-packages" not in path and "/lib/python3" not in path:
                return place
            first = first or place
        frame = frame.f_back
    return first or "?"


def asked() -> str:
    """The line of evenload, or else of the host, that is running."""
    return line_of(sys._getframe(1))


def host_line() -> str:
    """The innermost line outside of torch, be it evenload's or the host's."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename
        if not path.startswith(HERE) and "/torch/" not in path and path[0] == "/":
            return f"{path.rpartition('site-packages/')[2].removeprefix(OURS + '/')}:{frame.f_lineno}"
        frame = frame.f_back
    return "?"


def note(kind: str, what: str) -> None:
    counts[kind][f"{what} at {host_line()}"] += 1


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
