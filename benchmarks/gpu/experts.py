"""What the moe plugin costs on a card: products with copies, and a fetch alongside compute.

    python benchmarks/gpu/experts.py [--json]
    torchrun --nproc-per-node 2 benchmarks/gpu/experts.py [--json]     # the fetch, too

    products   the experts of a rank and its copies as one grouped product, against one product an expert, bfloat16
               (float32 on a CPU, which has no grouped one of bfloat16 worth timing); the error is against float64
    fetch      the weights of copies on their way alone, products alone, and both at once, on the slowest rank

Times are medians of runs after two to warm up, by CUDA events (wall time on the CPU).
"""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from evenload.benchmarks.frame import Row, options, show
from evenload.benchmarks.gpu.card import about, asked_for, device_here, half_on, milliseconds, relative
from evenload.commands.tables.show import grid
from evenload.core.experts.messages import hops_of
from evenload.runtime.experts.copies import Fetch, Journey
from torch import Tensor


def products(device: torch.device, hidden: int, ffn: int, own: int, copies: int, tokens: int) -> dict[str, Any]:
    """One product of the experts at home and of copies, whose weights lie elsewhere until they are joined."""
    dtype = half_on(device)
    draw = torch.Generator().manual_seed(0)
    home, away = (torch.randn(n, hidden, ffn, generator=draw).to(device, dtype) for n in (own, copies))
    sizes = torch.full((own + copies,), tokens // (own + copies), dtype=torch.int32)
    x = torch.randn(int(sizes.sum()), hidden, generator=draw).to(device, dtype)
    ends = sizes.cumsum(0).to(device, torch.int32)

    def each() -> Tensor:
        return torch.cat([part @ w for part, w in zip(x.split(sizes.tolist()), [*home, *away], strict=True)])

    def grouped() -> Tensor:
        return torch._grouped_mm(x, torch.cat([home, away]), offs=ends)

    exact = torch.cat(
        [part.double() @ w.double() for part, w in zip(x.split(sizes.tolist()), [*home, *away], strict=True)]
    )
    row: dict[str, Any] = {"own": own, "copies": copies, "tokens": len(x), "dtype": str(dtype)}
    for name, work in (("each", each), ("grouped", grouped)):
        row[f"{name}_ms"] = milliseconds(work, device)
        row[f"{name}_error"] = relative(work(), exact)
    return row


def fetch(device: torch.device, hidden: int, ffn: int, own: int, tokens: int) -> dict[str, Any]:
    """Every rank has a copy of the next rank's first expert."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    dtype = half_on(device)
    experts = [[torch.randn(3, hidden, ffn).to(device, dtype).requires_grad_()] for _ in range(own)]
    copies = tuple(((r + 1) % ranks * own,) for r in range(ranks))
    journey = Journey(hops_of(copies, own), copies[rank], rank * own, own, rank, dist.group.WORLD)
    x, w = torch.randn(tokens, hidden).to(device, dtype), torch.randn(hidden, ffn).to(device, dtype)

    def both() -> None:
        started = Fetch(journey, experts)
        x @ w
        started.fetch()

    times = {
        "fetch_ms": milliseconds(lambda: Fetch(journey, experts).fetch(), device),
        "products_ms": milliseconds(lambda: x @ w, device),
        "both_ms": milliseconds(both, device),
    }
    slowest = torch.tensor(list(times.values()), device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return {
        "ranks": ranks,
        "bytes": 3 * hidden * ffn * x.element_size(),
        **dict(zip(times, slowest.tolist(), strict=True)),
    }


def benchmark(device: torch.device, tiny: bool) -> Row:
    hidden, ffn, tokens = (64, 96, 512) if tiny else (4096, 1536, 65536)
    result: Row = {
        **about(device),
        "products": [products(device, hidden, ffn, own, copies, tokens) for own, copies in ((16, 0), (16, 2), (2, 1))],
    }
    if dist.is_initialized():
        result["fetch"] = [fetch(device, hidden, ffn, 2, tokens)]
    return result


def table(result: dict[str, Any]) -> Any:
    head = ("part", "size", "milliseconds")
    rows = []
    for part in ("products", "fetch"):
        for row in result.get(part, []):
            sizes = [f"{k} {v:.1e}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items() if k[-3:] != "_ms"]
            times = [f"{k[:-3]} {v:.3f}" for k, v in row.items() if k[-3:] == "_ms"]
            rows.append((part, ", ".join(sizes), ", ".join(times)))
    return grid(f"experts and copies on {result['device']}, torch {result['torch']}", head, rows)


def main() -> None:
    asked, local = asked_for(options(__doc__, tiny=False)), int(os.environ.get("LOCAL_RANK", 0))
    device = device_here(local)
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    result = benchmark(device, asked.tiny)
    if local == 0:
        show(result, asked, table)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
