"""What the GPUs of a machine are, and how fast bytes are copied between them and their host.

python -m evenload.commands.first_hour.devices
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

BYTES = 64 << 20
RUNS = 5


def describe() -> dict[str, Any]:
    """The GPUs, and the versions beneath evenload."""
    driver = Path("/proc/driver/nvidia/version")
    gpus = [torch.cuda.get_device_properties(number) for number in range(torch.cuda.device_count())]
    return {
        "gpus": [
            {"name": one.name, "memory_bytes": one.total_memory, "capability": f"{one.major}.{one.minor}"}
            for one in gpus
        ],
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),  # type: ignore[no-untyped-call]
        "driver": driver.read_text().partition("\n")[0] if driver.is_file() else None,
        "links": [*_with_host(len(gpus)), *_between(len(gpus))],
    }


def _with_host(gpus: int) -> list[dict[str, Any]]:
    rows = []
    for number in range(gpus):
        there = torch.zeros(BYTES, dtype=torch.uint8, device=f"cuda:{number}")
        for page_locked in (True, False):
            here = torch.zeros(BYTES, dtype=torch.uint8, pin_memory=page_locked)
            memory = "page-locked" if page_locked else "pageable"
            rows.append(_row("host", f"GPU {number}", memory, there, here))
            rows.append(_row(f"GPU {number}", "host", memory, here, there))
    return rows


def _between(gpus: int) -> list[dict[str, Any]]:
    rows = []
    for first in range(gpus):
        source = torch.zeros(BYTES, dtype=torch.uint8, device=f"cuda:{first}")
        for second in (other for other in range(gpus) if other != first):
            target = torch.zeros_like(source, device=f"cuda:{second}")
            how = "direct" if torch.cuda.can_device_access_peer(first, second) else "over the host"
            rows.append(_row(f"GPU {first}", f"GPU {second}", how, target, source))
    return rows


def _row(source: str, target: str, how: str, into: Tensor, of: Tensor) -> dict[str, Any]:
    seconds = min(_copy_s(into, of) for _ in range(RUNS))
    return {"from": source, "to": target, "how": how, "bytes_per_s": BYTES / seconds}


def _copy_s(into: Tensor, of: Tensor) -> float:
    """Seconds of one copy, from when the devices are idle until they are again."""
    devices = [x.device for x in (into, of) if x.is_cuda]
    for device in devices:
        torch.cuda.synchronize(device)
    began = time.perf_counter()
    into.copy_(of, non_blocking=True)
    for device in devices:
        torch.cuda.synchronize(device)
    return time.perf_counter() - began


if __name__ == "__main__":
    print(json.dumps(describe()))
