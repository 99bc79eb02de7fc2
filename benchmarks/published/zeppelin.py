"""Zeppelin (EuroSys'26, arXiv 2509.21841): sequences across nodes, inside one or on one rank; 2.80x on average.

    python benchmarks/published/zeppelin.py [--quick] [--json] [--out FILE]

LLaMA on A800 (four 200 Gbit/s NICs a node of eight), H800 (eight) and H200 (eight of 400 Gbit/s), data and context
parallelism alone. Seconds of a step of 4K tokens a rank, up to 8K on any one:

    TE CP      the paper's baseline: the whole step in one ring over all ranks (zig-zag inside each sequence)
    routed     that ring, with what crosses nodes over the NICs of all ranks of both: its routing layer alone
    gather     the same with keys and values gathered by all: its "LLaMA CP"
    hybrid     degree by memory, the least loaded first (`memory_degree` of the mesh plugin), nearest to its "Hybrid DP"
    engine     evenload's mesh plugin with rings alone, nothing routed or moved: Zeppelin's partition and its queues
    + routing  and routed where that is predicted to pay
    + remap    and tokens moved for all modules but attention, where that is predicted to pay
    mesh       and all other cp_comm types

Guessed: 4K tokens a rank (its ring step of 2.18 ms is that of a 3B model's keys and values of 4K tokens on one 200
Gbit/s NIC), sizes of clusters, NVLink at 200 GB/s a direction, 400 Gbit/s NICs on H800. On A800 a node's border rank
has a NIC by itself; what is routed over four is timed as over eight, of which NVLink's part is most: 27 % too fast at
most. ArXiv, GitHub and CommonCrawl are stand-ins (lengths.py), those longer than a step left out. Memory is not asked.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from evenload.benchmarks.frame import columns
from evenload.benchmarks.published.common import Batch, arguments, finish, mean_columns
from evenload.benchmarks.published.lengths import K, corpus
from evenload.benchmarks.published.planes import Plane, described, shared_by, theirs
from evenload.core.plan.step_plan import as_lengths

TOKENS = 4 * K
ROOM = 2 * TOKENS
A800 = Plane("llama-3b", 64, "a100", ROOM, 2e11, 2.5e10, memory_bytes=1e12)
H800 = replace(A800, cluster="h100", inter_bytes_per_s=5e10)
H200 = replace(A800, cluster="h200", intra_bytes_per_s=0.0, inter_bytes_per_s=0.0)
COLUMNS = ("TE CP", "routed", "gather", "hybrid", "engine", "+ routing", "+ remap", "mesh")
RING: dict[str, Any] = {"engines": ("ring",), "routed": "off", "remap": "off"}


@dataclass(frozen=True)
class Setting:
    lengths: str
    machines: str
    plane: Plane
    paper: str = ""

    @property
    def name(self) -> str:
        return f"{self.plane.model.removeprefix('llama-').upper()} {self.lengths}, {self.plane.ranks} {self.machines}"


def settings() -> Iterator[Setting]:
    large = {"model": "llama-7b"}
    yield Setting("arxiv-like", "A800", A800, "routed 1.6x, + engine 3.2x, both 3.51x, + remap 3.64x")
    for ranks in (16, 32, 128):
        yield Setting("arxiv-like", "A800", replace(A800, ranks=ranks), "")
    for name in ("github-like", "commoncrawl-like"):
        yield Setting(name, "A800", A800)
    for machines, plane in (("A800", A800), ("H800", H800), ("H200", H200)):
        for name in ("arxiv-like", "github-like"):
            yield Setting(name, machines, replace(plane, **large))


def batches_of(setting: Setting, count: int) -> Iterator[Batch]:
    """As many whole sequences as fill a step."""
    tokens = setting.plane.ranks * TOKENS
    _, lengths = corpus(setting.lengths, 400 * setting.plane.ranks, tokens)
    rest = iter(lengths.tolist())
    held = next(rest)
    for _ in range(count):
        own: list[int] = []
        while sum(own) + held <= tokens:
            own.append(held)
            held = next(rest)
        yield as_lengths(own)


def step_of(plane: Plane, batch: Batch) -> dict[str, dict[str, float]]:
    """Every column of one batch."""
    static = theirs(plane.static(plane.ranks))
    one = static.plan(batch)
    figures = {
        "TE CP": described(shared_by(one, "ring"), static),
        "routed": described(shared_by(one, "ring", routed=True), static),
        "gather": described(shared_by(one, "all_gather"), static),
    }
    chains = {
        "hybrid": theirs(plane.mesh("memory_degree", **RING)),
        "engine": plane.mesh(**RING),
        "+ routing": plane.mesh(**(RING | {"routed": "auto"})),
        "+ remap": plane.mesh(engines=("ring",)),
        "mesh": plane.mesh(),
    }
    return figures | {name: described(chain.plan(batch), chain) for name, chain in chains.items()}


def row_of(setting: Setting, count: int) -> dict[str, Any]:
    columns_of = mean_columns([step_of(setting.plane, batch) for batch in batches_of(setting, count)])
    return {
        "setting": setting.name,
        "paper": setting.paper,
        "lengths": setting.lengths,
        "definition": "TE CP: a ring over all ranks",
        "columns": columns_of,
        "gain": {name: columns_of["TE CP"]["step_s"] / one["step_s"] for name, one in columns_of.items()},
    }


def hop_ms(plane: Plane, *, routed: bool) -> float:
    """Milliseconds of a hop of a ring over nodes in one layer."""
    at = plane.static(plane.ranks).context
    num_bytes = TOKENS * at.traffic.kv_bytes_per_token / at.traffic.layers
    intra, inter, members = at.cluster.intra, at.cluster.inter, at.cluster.ranks_per_node
    if not routed:
        return 1e3 * inter.send_s(num_bytes)
    inside = 2 * num_bytes * (members - 1) / members / intra.bytes_per_s
    return 1e3 * (inter.send_s(num_bytes / members) + 2 * intra.latency_s + inside)


def table(result: dict[str, Any]) -> Any:
    cells = {
        "setting": "{setting}",
        "paper": "{paper}",
        "TE CP": "{columns[TE CP][step_s]:.2f} s",
        **{name: f"{{gain[{name}]:.2f}}x" for name in COLUMNS[1:]},
        "busiest / mean rank: hybrid, mesh": "{columns[hybrid][imbalance]:.2f}, {columns[mesh][imbalance]:.2f}",
    }
    gains, hops = [r["gain"]["mesh"] for r in result["rows"]], result["hop_ms"]
    about = (
        f"gains over TE CP; mesh: {np.mean(gains):.2f}x on average, {max(gains):.2f}x at most; a hop between nodes, "
        f"3B: {hops['plain']:.2f} ms, routed {hops['routed']:.2f} ms (paper: 2.18 and 0.411)"
    )
    return columns(f"{result['title']} (predicted)", result["rows"], cells, about)


def benchmark(quick: bool) -> dict[str, Any]:
    small = Setting("arxiv-like", "A800", replace(A800, ranks=16))
    rows = [row_of(small, 2)] if quick else [row_of(setting, 8) for setting in settings()]
    hops = {"plain": hop_ms(A800, routed=False), "routed": hop_ms(A800, routed=True)}
    return {"title": "Zeppelin: 4K tokens a rank", "hop_ms": hops, "rows": rows}


if __name__ == "__main__":
    asked = arguments(__doc__)
    finish(benchmark(asked.quick), asked, table)
