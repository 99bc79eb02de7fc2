"""Every attention kernel that is there, by layout of the pack: error against float64, milliseconds, TFLOP/s.

    python benchmarks/gpu/attention.py [--json] [--device cuda] [--tokens 32768]

Error: output and gradients against dense attention with an explicit mask in float64, relative norms, on the same layout
shrunk to segments of at most 512 tokens. Time: median of runs after two to warm up, by CUDA events (wall time on the
CPU). TFLOP/s count two multiply-adds a hidden unit and causal (query, key) pair forward, and 2.5 times that backward.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from evenload.commands.tables.show import emit, grid
from evenload.runtime.attention.kernels import KERNELS, Kernel, KernelCall
from torch import Tensor

HEADS, GROUPS, HEAD_DIM = 32, 8, 64
"""Of recipes/gpu-node.yaml."""
RUNS = 10
ERROR_LENGTH = 512


def layouts(tokens: int) -> dict[str, list[int]]:
    """Segment lengths of packs of about ``tokens`` tokens."""
    tail = np.clip(np.random.default_rng(0).lognormal(6.5, 1.3, 4096).astype(int), 1, max(1, tokens // 2))
    fits = int(np.searchsorted(np.cumsum(tail), tokens))
    return {
        "one sequence": [tokens],
        "16 equal": [max(1, tokens // 16)] * 16,
        "heavy tail": tail[: max(1, fits)].tolist(),
        "many of 64": [64] * max(1, tokens // 64),
    }


def inputs(lengths: list[int], dtype: torch.dtype, device: torch.device) -> tuple[KernelCall, Tensor]:
    """A call on random data, and random weights for its output."""
    generator = torch.Generator().manual_seed(1)
    total = sum(lengths)
    q, k, v, weight = (
        torch.randn(total, heads, HEAD_DIM, generator=generator).to(device, dtype)
        for heads in (HEADS, GROUPS, GROUPS, HEADS)
    )
    borders = (0, *np.cumsum(lengths).tolist())
    cu_seqlens = torch.tensor(borders, dtype=torch.int32, device=device)
    return KernelCall(q, k, v, cu_seqlens, borders, max(lengths), HEAD_DIM**-0.5), weight


def dense(queries: Tensor, keys: Tensor, values: Tensor, borders: tuple[int, ...]) -> Tensor:
    """Attention by its definition, segment by segment. [T, H, D], [T, G, D], [T, G, D] -> [T, H, D]."""
    out = []
    for first, end in pairwise(borders):
        q, k, v = (x[first:end].transpose(0, 1) for x in (queries, keys, values))
        k, v = (x.repeat_interleave(HEADS // GROUPS, dim=0) for x in (k, v))
        later = torch.ones(end - first, end - first, dtype=torch.bool, device=q.device).triu(1)
        scores = (q @ k.transpose(1, 2) * HEAD_DIM**-0.5).masked_fill(later, -torch.inf)
        out.append((scores.softmax(-1) @ v).transpose(0, 1))
    return torch.cat(out)


def gradients(run: Callable[..., Tensor], tensors: tuple[Tensor, ...], weight: Tensor) -> list[Tensor]:
    """Output of ``run`` and gradients of its weighted sum."""
    leaves = tuple(x.detach().requires_grad_() for x in tensors)
    out = run(*leaves)
    return [out.detach(), *torch.autograd.grad((out * weight).sum(), leaves)]


def errors(kernel: Kernel, lengths: list[int], dtype: torch.dtype, device: torch.device) -> dict[str, float]:
    """Relative error of output and gradients in ``dtype``."""
    call, weight = inputs([min(n, ERROR_LENGTH) for n in lengths[:32]], dtype, device)
    borders = call.segments
    got = gradients(lambda q, k, v: kernel.run(call._replace(q_THD=q, k_TGD=k, v_TGD=v)), call[:3], weight)
    exact = tuple(x.double() for x in call[:3])
    want = gradients(lambda q, k, v: dense(q, k, v, borders), exact, weight.double())
    return {
        name: float((a.double() - b).norm() / b.norm())
        for name, a, b in zip(("out", "dq", "dk", "dv"), got, want, strict=True)
    }


def milliseconds(work: Callable[[], Any], device: torch.device) -> float:
    """Median of `RUNS` runs."""
    times = []
    for run in range(RUNS + 2):
        if device.type == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            start.record()
            work()
            end.record()
            end.synchronize()
            taken = float(start.elapsed_time(end))
        else:
            began = time.perf_counter()
            work()
            taken = 1e3 * (time.perf_counter() - began)
        if run >= 2:
            times.append(taken)
    return statistics.median(times)


def measure(kernel: Kernel, lengths: list[int], dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    """Error and speed of one kernel on one layout."""
    call, weight = inputs(lengths, dtype, device)
    leaves = tuple(x.requires_grad_() for x in call[:3])
    forward_ms = milliseconds(lambda: kernel.run(call), device)
    out = kernel.run(call)
    backward_ms = milliseconds(lambda: torch.autograd.grad(out, leaves, weight, retain_graph=True), device)
    flops = 4 * HEADS * HEAD_DIM * sum(0.5 * n * (n + 1) for n in lengths)
    return {
        "forward_ms": forward_ms,
        "backward_ms": backward_ms,
        "forward_tflops": flops / forward_ms / 1e9,
        "backward_tflops": 2.5 * flops / backward_ms / 1e9,
        "error": errors(kernel, lengths, dtype, device),
    }


def benchmark(device: torch.device, tokens: int) -> dict[str, Any]:
    """All kernels that take bf16 (float32 on the CPU) here, on all layouts. A kernel that fails is recorded."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    rows = []
    for kernel in KERNELS:
        if not (kernel.supports(dtype, device, HEAD_DIM) and kernel.available()):
            continue
        for name, lengths in layouts(tokens).items():
            row = {"kernel": kernel.name, "layout": name, "segments": len(lengths), "tokens": sum(lengths)}
            try:
                row |= measure(kernel, lengths, dtype, device)
            except Exception as error:
                row["failed"] = f"{type(error).__name__}: {error}"[:500]
            rows.append(row)
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "dtype": str(dtype).removeprefix("torch."),
        "heads": [HEADS, GROUPS, HEAD_DIM],
        "rows": rows,
    }


def table(result: dict[str, Any]) -> Any:
    head = ("kernel", "layout", "forward ms", "backward ms", "TFLOP/s", "backward", "largest error")
    rows = [
        (r["kernel"], r["layout"], r["failed"], "", "", "", "")
        if "failed" in r
        else (
            r["kernel"],
            f"{r['layout']} ({r['segments']})",
            r["forward_ms"],
            r["backward_ms"],
            r["forward_tflops"],
            r["backward_tflops"],
            f"{max(r['error'].values()):.1e}",
        )
        for r in result["rows"]
    ]
    return grid(f"packed attention on {result['device']}, {result['dtype']}, torch {result['torch']}", head, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tokens", type=int, default=32768)
    arguments = parser.parse_args()
    emit(benchmark(torch.device(arguments.device), arguments.tokens), arguments.json, table)


if __name__ == "__main__":
    main()
