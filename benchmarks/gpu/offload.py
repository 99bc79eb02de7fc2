"""Activations that wait in host memory: how many bytes move, how much of that is hidden, what memory it spares.

    python benchmarks/gpu/offload.py [--json] [--tokens 65536] [--shares 0.25,0.5,0.75,1] [--limit seconds] [--tiny]

Layers of 60 million parameters in bf16 (grouped attention by `runtime.attention.attention`, a gated MLP), one sequence,
forward and backward. A row for each share of the inner layers' activations, and one for the share r* that hides by
`core.costs.offload` from what was measured here: seconds of a layer's forward, bytes it saves, bytes/s of the host
link.

    step         median of runs after one to warm up, which also makes the host memory; the plain step runs before and
                 after all others, the mean of the two is what the others are compared with
    hidden       1 - (step - plain step) / seconds that the bytes moved take on the link alone; 1 is free of charge
    peak         highest memory above the level before the step
    error        largest relative error of a gradient against the plain step; what kernels that add up in any order
                 differ by from run to run is the error of the second plain step

``--limit`` starts nothing new after so many seconds. ``--tiny`` tries all of it out without a GPU: copies are then made
on the spot, and nothing is hidden.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from evenload.benchmarks.frame import Row, options, show
from evenload.benchmarks.gpu.card import (
    about,
    asked_for,
    attempted,
    device_here,
    half_on,
    relative,
    wall_s,
    with_failures,
)
from evenload.core.costs.offload import offload_share
from evenload.runtime.attention.kernels import KernelCall, choose_kernel
from evenload.runtime.measure.memory import Levels
from evenload.runtime.stage.copier import Copier, HostMemory
from evenload.runtime.stage.offload import Moved, host_memory_of, offloading
from torch import Tensor, nn
from torch.nn.functional import rms_norm, silu

RUNS = 3
LINK_BYTES = 1 << 30


class Shape(NamedTuple):
    """Of the model and its one sequence."""

    tokens: int
    layers: int = 8
    hidden: int = 2048
    ffn: int = 5632
    heads: int = 32
    groups: int = 8

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads


class Layer(nn.Module):
    """A layer of a llama without positions."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self._shape = shape
        columns = (shape.heads + 2 * shape.groups) * shape.head_dim
        self.norm1, self.norm2 = (nn.Parameter(torch.ones(shape.hidden)) for _ in range(2))
        self.qkv, self.out = (nn.Linear(shape.hidden, n, bias=False) for n in (columns, shape.hidden))
        self.up, self.down = nn.Linear(shape.hidden, 2 * shape.ffn, bias=False), nn.Linear(shape.ffn, shape.hidden)

    def forward(self, x: Tensor, borders: Tensor) -> Tensor:
        shape = self._shape
        qkv = self.qkv(rms_norm(x, (shape.hidden,), self.norm1)).view(len(x), -1, shape.head_dim)
        q, k, v = qkv.split([shape.heads, shape.groups, shape.groups], dim=1)
        kernel = choose_kernel(q.device, q.dtype, shape.head_dim)
        out = kernel.run(KernelCall(q, k, v, borders, (0, len(x)), len(x), shape.head_dim**-0.5))
        x = x + self.out(out.flatten(1))
        gate, up = self.up(rms_norm(x, (shape.hidden,), self.norm2)).chunk(2, dim=1)
        mlp: Tensor = self.down(silu(gate) * up)
        return x + mlp


class Step:
    """Forward and backward of one sequence."""

    def __init__(self, shape: Shape, device: torch.device) -> None:
        self.device = device
        dtype = half_on(device)
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers)).to(device, dtype)
        self._input = torch.randn(shape.tokens, shape.hidden, device=device, dtype=dtype)
        self._borders = torch.tensor([0, shape.tokens], dtype=torch.int32, device=device)

    def forward(self, share: float, host: HostMemory) -> tuple[Tensor, Moved]:
        """The last layer's output."""
        x = self._input
        with offloading(share, list(self.layers), self.device, host=host) as moved:
            for layer in self.layers:
                x = layer(x, self._borders)
        return x, moved

    def run(self, share: float, host: HostMemory) -> Moved:
        """Gradients are left in the weights."""
        self.layers.zero_grad()
        out, moved = self.forward(share, host)
        torch.autograd.backward(out, self._input)  # any gradient will do
        return moved

    def gradients(self) -> list[Tensor]:
        return [p.grad.cpu() for p in self.layers.parameters() if p.grad is not None]


def link(device: torch.device, num_bytes: int) -> dict[str, float]:
    """Bytes/s to page-locked host memory and back, one direction at a time."""
    here = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    there = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
    pairs = {"out": (there, here), "back": (here, there)}
    errors = {}
    for name, (target, source) in pairs.items():
        target.copy_(source)
        errors[name] = num_bytes / wall_s(lambda t=target, s=source: t.copy_(s, non_blocking=True), device)  # type: ignore[misc]
    return errors


def row_of(step: Step, share: float, host: HostMemory, want: Sequence[Tensor] = ()) -> Row:
    """One share, measured; without offload where it is 0."""
    device = step.device
    moved = step.run(share, host)
    gradients = step.gradients()
    with Levels(device) as levels:
        step.run(share, host)
    peak = levels.read()[1]
    return {
        "share": share,
        "step_s": wall_s(lambda: step.run(share, host), device, RUNS),
        "peak_bytes": peak,
        **{name: getattr(moved, name) for name in ("seen_bytes", "out_bytes", "back_bytes")},
        "host_bytes": host.num_bytes,
        "error": max(map(relative, gradients, want or gradients)),
    }


def benchmark(asked: argparse.Namespace) -> Row:
    """A row for each share, between two plain ones."""
    until, device = time.monotonic() + asked.limit, device_here()
    shape = Shape(asked.tokens, 5, 64, 128, 4, 2) if asked.tiny else Shape(asked.tokens)
    cuda = device.type == "cuda"
    host = host_memory_of(device) or HostMemory(Copier(), 1 << 14, 1 << 18)
    step = Step(shape, device)
    speed = link(device, LINK_BYTES if cuda else 1 << 22)
    plain = row_of(step, 0.0, host)
    want = step.gradients()
    layer_s = layer_seconds(step)
    layer_bytes = saved_bytes(step, host) / max(1, shape.layers - 2)
    best = offload_share(layer_s, layer_bytes, min(speed.values()))
    shares = sorted({*asked.shares, round(best, 3)})
    tried = [attempted({"share": share}, partial(row_of, step, share, host, want), until) for share in shares]
    rows = [plain, *tried, row_of(step, 0.0, host, want)]
    plain_s = statistics.mean([rows[0]["step_s"], rows[-1]["step_s"]])
    for row in rows:
        if row.get("out_bytes"):
            row["link_s"] = row["out_bytes"] / speed["out"] + row["back_bytes"] / speed["back"]
            if cuda:
                row["hidden"] = 1 - (row["step_s"] - plain_s) / row["link_s"]
    layer = {"layer_s": layer_s, "layer_bytes": layer_bytes, "best_share": best, "plain_s": plain_s}
    return {**about(device), "shape": shape._asdict(), "bytes_per_s": speed, **layer, "rows": rows}


def layer_seconds(step: Step) -> float:
    """Of one layer's forward."""
    host = HostMemory(Copier())
    return wall_s(lambda: step.forward(0.0, host), step.device) / len(step.layers)


def saved_bytes(step: Step, host: HostMemory) -> int:
    """That the inner layers save and that could travel; a share too small to move anything counts them."""
    _, moved = step.forward(1e-9, host)
    return moved.seen_bytes


def table(result: Row) -> Any:
    """A line for each share."""
    cells = {
        "share": "{share:.3f}",
        "step s": "{step_s:.3f}",
        "GiB out": lambda row: f"{row['out_bytes'] / 2**30:.2f}",
        "link alone s": lambda row: f"{row['link_s']:.3f}" if "link_s" in row else "",
        "hidden": lambda row: f"{row['hidden']:.0%}" if "hidden" in row else "",
        "peak GiB": lambda row: f"{row['peak_bytes'] / 2**30:.2f}",
        "largest error": "{error:.1e}",
    }
    shape, speed = Shape(**result["shape"]), result["bytes_per_s"]
    title = (
        f"offload on {result['device']}, torch {result['torch']}: {shape.layers} layers, {shape.tokens} tokens; "
        f"a layer saves {result['layer_bytes'] / 2**30:.2f} GiB and runs {1e3 * result['layer_s']:.1f} ms forward; "
        f"link {speed['out'] / 1e9:.1f} GB/s out, {speed['back'] / 1e9:.1f} GB/s back; r* = {result['best_share']:.3f}"
    )
    return with_failures(title, result["rows"], cells)


if __name__ == "__main__":
    own = options(__doc__, tokens=65536, shares=[0.25, 0.5, 0.75, 1.0], limit=float("inf"), tiny=False)
    asked = asked_for(own)
    show(benchmark(asked), asked, table)
