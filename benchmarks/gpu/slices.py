"""Slices on one GPU: attention over a prefix against float64, then long sequences whole and in slices.

    python benchmarks/gpu/slices.py [--json] [--tokens 65536,262144] [--slices 16] [--limit seconds] [--tiny]

Part 1: every row of `runtime.attention.blocks` that takes bf16 on this device, slices of several sizes after prefixes
of several sizes: relative error of output and gradients against dense attention with an explicit mask in float64.

Part 2: a GPT of about a billion parameters in bf16 through Megatron-Core, one sequence of each length: peak memory,
tokens/s, and loss and gradients of slices against the whole sequence (`benchmarks/memory/memory.py` says what is
compared; two runs up to 100,000 tokens, the faster counts). bf16 rounds at 2^-8, so gradients agree to about a percent.
What does not fit into memory is recorded as such. ``--limit`` starts nothing new after so many seconds. ``--tiny``
tries all of it out without a GPU.
"""

from __future__ import annotations

import argparse
import time
import warnings
from functools import partial
from typing import Any

import torch
from evenload.benchmarks.frame import Row, options, show
from evenload.benchmarks.gpu.card import GROUPS, HEAD_DIM, HEADS, asked_for, attempted, half_on, named, relative_by_name
from evenload.benchmarks.memory import memory
from evenload.commands.tables.show import grid
from evenload.patches import bridge_cpu
from evenload.runtime.attention.blocks import BLOCKS, BlockKernel, Inputs
from evenload.runtime.world.world import close_world, init_world
from torch import Tensor

PREFIXES = ((512, 0), (512, 1536), (64, 1984), (1, 2047), (333, 1000))
"""(tokens of the slice, tokens before it)."""
TINY_PREFIXES = ((64, 0), (64, 192), (8, 248), (1, 255), (41, 125))
ONCE_FROM = 100_000
"""Tokens of a sequence that is run once: attention over more takes long enough to drown what a first run pays."""

Outputs = tuple[Tensor, Tensor, Tensor, Tensor]


def prefix_errors(
    block: BlockKernel, length: int, prefix: int, dtype: torch.dtype, device: torch.device
) -> dict[str, float]:
    """Relative errors of out, dq, dk and dv."""
    generator = torch.Generator().manual_seed(length + prefix)
    queries, keys, values, dout = (
        torch.randn(tokens, heads, HEAD_DIM, generator=generator).to(device, dtype)
        for tokens, heads in ((length, HEADS), (prefix + length, GROUPS), (prefix + length, GROUPS), (length, HEADS))
    )
    inputs = Inputs(queries, keys, values, True, HEAD_DIM**-0.5)
    out, lse = block.forward(inputs)
    got = (out, *block.backward(dout, inputs, out, lse))
    return relative_by_name(("out", "dq", "dk", "dv"), got, dense(*(x.double() for x in (*inputs[:3], dout))))


def dense(queries: Tensor, keys: Tensor, values: Tensor, dout: Tensor) -> Outputs:
    """By its definition: query n sees keys 0 .. M - N + n. [N, H, D], [M, G, D], [M, G, D], [N, H, D]."""
    leaves = tuple(x.detach().requires_grad_() for x in (queries, keys, values))
    q, k, v = (x.transpose(0, 1) for x in leaves)
    k, v = (x.repeat_interleave(HEADS // GROUPS, dim=0) for x in (k, v))
    unseen = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool, device=q.device).triu(k.shape[1] - q.shape[1] + 1)
    scores = (q @ k.transpose(1, 2) * HEAD_DIM**-0.5).masked_fill(unseen, -torch.inf)
    out = (scores.softmax(-1) @ v).transpose(0, 1)
    dq, dk, dv = torch.autograd.grad(out, leaves, dout)
    return out.detach(), dq, dk, dv


def attention(dtype: torch.dtype, device: torch.device, tiny: bool) -> list[Row]:
    """A row for each kernel and prefix; kernels that cannot run here say why."""
    rows: list[Row] = []
    for block in BLOCKS:
        if not block.supports(dtype, device, HEAD_DIM) or not block.available():
            why = "not installed" if block.supports(dtype, device, HEAD_DIM) else f"not for {dtype} on {device.type}"
            rows.append({"kernel": block.name, "unavailable": why})
            continue
        for case in TINY_PREFIXES if tiny else PREFIXES:
            row = {"kernel": block.name, **dict(zip(("slice", "prefix"), case, strict=True))}
            run = partial(prefix_errors, block, *case, dtype, device)
            rows.append(attempted(row, lambda run=run: {"error": run()}))
    return rows


def benchmark(asked: argparse.Namespace) -> Row:
    """Both parts."""
    warnings.filterwarnings("ignore", category=UserWarning, module=r"(megatron|deepspeed|torch)\.")
    bridge_cpu()
    until, tiny = time.monotonic() + asked.limit, asked.tiny
    sizes = {"layers": 20, "hidden": 2048, "heads": HEADS, "groups": GROUPS, "vocabulary": 32768, "dtype": "bf16"}
    if tiny:
        sizes = {"layers": 2, "hidden": 64, "heads": 4, "groups": 2, "vocabulary": 256, "dtype": "fp32"}
    world = init_world()
    dtype, sequences = half_on(world.device), []
    rows = attention(dtype, world.device, tiny)
    for tokens in asked.tokens:
        runs = 1 if tiny or tokens > ONCE_FROM else 2
        shape = memory.Shape(tokens, asked.slices, **sizes)  # type: ignore[arg-type]
        sequences.append(memory.benchmark(shape, world, runs, until))
    close_world(world)
    return {"dtype": named(dtype), "attention": rows, "sequences": sequences}


def table(result: dict[str, Any]) -> Any:
    """Both parts below each other."""
    rows: list[tuple[Any, ...]] = []
    for r in result["attention"]:
        if "unavailable" in r:
            rows.append((r["kernel"], "", r["unavailable"], "", "", ""))
        else:
            error = r.get("failed") or f"{max(r['error'].values()):.1e}"
            rows.append((r["kernel"], f"{r['slice']} after {r['prefix']}", "", "", "", error))
    for run in result["sequences"]:
        for r in run["rows"]:
            tokens = f"{run['shape']['tokens']:,} tokens"
            if "failed" in r:
                rows.append((r["variant"], tokens, r["failed"], "", "", ""))
            else:
                peak, error = f"{r['peak_bytes'] / 2**30:.2f} GiB", f"{r['grad_rel_err']:.1e}"
                rows.append((r["variant"], tokens, peak, r["tokens_per_s"], f"{r['loss_rel_err']:.1e}", error))
    head = ("", "", "peak", "tokens/s", "loss error", "largest error")
    device = result["sequences"][0]["device"] if result["sequences"] else ""
    return grid(f"slices on {device}, {result['dtype']}, torch {torch.__version__}", head, rows)


if __name__ == "__main__":
    asked = asked_for(options(__doc__, tokens=[65536, 262144], slices=16, limit=float("inf"), tiny=False))
    show(benchmark(asked), asked, table)
