"""What the scripts for one GPU share: the device, clocks, errors, and rows that record what failed."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from evenload.benchmarks.frame import Row, columns
from torch import Tensor

HEADS, GROUPS, HEAD_DIM = 32, 8, 64
"""Of recipes/gpu-node.yaml."""


def asked_for(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """The words of a script that needs a GPU, but for --tiny. Raises SystemExit where there is none."""
    asked = parser.parse_args()
    if not (torch.cuda.is_available() or asked.tiny):
        raise SystemExit("there is no CUDA device here; --tiny (with --tokens 256) tries the script out on a CPU")
    return asked


def device_here(index: int = 0) -> torch.device:
    return torch.device("cuda", index) if torch.cuda.is_available() else torch.device("cpu")


def half_on(device: torch.device) -> torch.dtype:
    """bfloat16, on a CPU float32."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def named(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def about(device: torch.device) -> Row:
    """Where a result is from."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    return {"device": name, "torch": torch.__version__}


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def wall_s(work: Callable[[], Any], device: torch.device, runs: int = 3) -> float:
    """Median seconds by the wall, the device's end waited for."""
    times = []
    for _ in range(runs):
        wait(device)
        began = time.perf_counter()
        work()
        wait(device)
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def milliseconds(work: Callable[[], Any], device: torch.device, runs: int = 20) -> float:
    """Median of runs after two to warm up, by CUDA events; wall time on a CPU."""
    if device.type != "cuda":
        work(), work()
        return 1e3 * wall_s(work, device, runs)
    times = []
    for _ in range(runs + 2):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        work()
        end.record()
        end.synchronize()
        times.append(float(start.elapsed_time(end)))
    return statistics.median(times[2:])


def relative(value: Tensor, want: Tensor) -> float:
    """||value - want|| / ||want||, in float64."""
    return float((value.double() - want.double()).norm() / want.double().norm())


def relative_by_name(names: Iterable[str], values: Iterable[Tensor], want: Iterable[Tensor]) -> dict[str, float]:
    return {name: relative(a, b) for name, a, b in zip(names, values, want, strict=True)}


def attempted(row: Row, work: Callable[[], Mapping[str, Any]], until: float = float("inf")) -> Row:
    """The row with what work gives; ``failed`` says why it gave nothing: an error, or no time left."""
    if time.monotonic() > until:
        return {**row, "failed": "no time left"}
    try:
        return {**row, **work()}
    except Exception as error:
        torch.cuda.empty_cache()
        return {**row, "failed": f"{type(error).__name__}: {error}"[:500]}


def with_failures(title: str, rows: Iterable[Row], cells: Mapping[str, Any], caption: str = "", about: int = 1) -> Any:
    """A table whose rows may have failed: these have their first cells and the reason."""
    heads = list(cells)

    def cell(place: int, show: Any) -> Any:
        template = show if callable(show) else lambda row: show.format(**row)
        if place < about:
            return template
        return lambda row: template(row) if "failed" not in row else row["failed"] if place == about else ""

    return columns(title, rows, {head: cell(place, cells[head]) for place, head in enumerate(heads)}, caption)
