"""Every attention kernel that is there, by layout of the pack: error against float64, milliseconds, TFLOP/s.

    python benchmarks/gpu/attention.py [--json] [--device cuda] [--tokens 32768]

Error: output and gradients against dense attention with an explicit mask in float64, relative norms, on the same layout
shrunk to segments of at most 512 tokens. Time: median of runs after two to warm up, by CUDA events (wall time on the
CPU). TFLOP/s count two multiply-adds a hidden unit and causal (query, key) pair forward, and 2.5 times that backward.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from evenload.benchmarks.frame import Row, main, options
from evenload.benchmarks.gpu.card import (
    GROUPS,
    HEAD_DIM,
    HEADS,
    about,
    attempted,
    device_here,
    half_on,
    milliseconds,
    named,
    relative_by_name,
    with_failures,
)
from evenload.runtime.attention.kernels import KERNELS, Kernel, KernelCall
from torch import Tensor

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
    return relative_by_name(("out", "dq", "dk", "dv"), got, want)


def measure(kernel: Kernel, lengths: list[int], dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    """Error and speed of one kernel on one layout."""
    call, weight = inputs(lengths, dtype, device)
    leaves = tuple(x.requires_grad_() for x in call[:3])
    forward_ms = milliseconds(lambda: kernel.run(call), device, RUNS)
    out = kernel.run(call)
    backward_ms = milliseconds(lambda: torch.autograd.grad(out, leaves, weight, retain_graph=True), device, RUNS)
    flops = 4 * HEADS * HEAD_DIM * sum(0.5 * n * (n + 1) for n in lengths)
    return {
        "forward_ms": forward_ms,
        "backward_ms": backward_ms,
        "forward_tflops": flops / forward_ms / 1e9,
        "backward_tflops": 2.5 * flops / backward_ms / 1e9,
        "error": errors(kernel, lengths, dtype, device),
    }


def benchmark(asked: argparse.Namespace) -> Row:
    """All kernels that take bf16 (float32 on the CPU) here, on all layouts. A kernel that fails is recorded."""
    device = torch.device(asked.device or device_here())
    dtype, rows = half_on(device), []
    for kernel in KERNELS:
        if kernel.supports(dtype, device, HEAD_DIM) and kernel.available():
            for name, lengths in layouts(asked.tokens).items():
                row = {"kernel": kernel.name, "layout": name, "segments": len(lengths), "tokens": sum(lengths)}
                rows.append(attempted(row, partial(measure, kernel, lengths, dtype, device)))
    return {**about(device), "dtype": named(dtype), "heads": [HEADS, GROUPS, HEAD_DIM], "rows": rows}


def table(result: Row) -> Any:
    cells = {
        "kernel": "{kernel}",
        "layout": "{layout} ({segments})",
        "forward ms": lambda row: row["forward_ms"],
        "backward ms": lambda row: row["backward_ms"],
        "TFLOP/s": lambda row: row["forward_tflops"],
        "backward": lambda row: row["backward_tflops"],
        "largest error": lambda row: f"{max(row['error'].values()):.1e}",
    }
    title = f"packed attention on {result['device']}, {result['dtype']}, torch {result['torch']}"
    return with_failures(title, result["rows"], cells, about=2)


if __name__ == "__main__":
    main(options(__doc__, device="", tokens=32768), benchmark, table)
