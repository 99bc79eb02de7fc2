"""ByteScale (SIGCOMM'25, arXiv 2502.21231): hybrid data parallelism, up to 7.89x (GitHub) and 4.26x (Byted) at 2M.

    python benchmarks/published/bytescale.py [--quick] [--json] [--out FILE]

LLaMA 7B, contexts of 256K to 2M, 32M tokens a step, 8K tokens a rank as in its examples. Lengths stand in by the
fractions that it publishes (lengths.py); longer ones are cut to the context (a guess: at 2M, leaving them out would
leave none of those that carry 12 % of Byted's tokens). Seconds of a step:

    static     the paper's baseline: packs in the order of the batch up to the context, each on context / 8K ranks in a
               ring (zig-zag inside each sequence)
    simple     static context parallelism of any degree that holds the context, whole sequences packed in any of the
               simple ways: the fastest
    naive      its algorithm 1: as many ranks as the tokens of a sequence fill, short ones best-fit in 8K packs; slot
               after slot of all ranks in the order of the batch, no offloading
    by memory  the same degrees, rounded up to powers of two, on the least loaded ranks (`memory_degree` of the mesh
               plugin): nearest to its own balance, which is not modelled
    ring       evenload's mesh plugin with rings alone, nothing routed or remapped
    mesh       the mesh plugin with all it has

Its machines are not named. Guessed: 256 ranks (1,024 in one row) without tensor or pipeline parallelism, A100's compute
and NVLink, 400 Gbit/s a GPU across nodes: with these the ring of a 312K sequence on 39 ranks is hidden, as it reports.
"sensitivity" rows change one of them. Whether 8K tokens fit into a device is not asked.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from evenload.benchmarks.chains import with_traffic
from evenload.benchmarks.frame import columns
from evenload.benchmarks.published.common import SIMPLE, Batch, arguments, finish, mean_columns
from evenload.benchmarks.published.lengths import K, drawn
from evenload.benchmarks.published.planes import Plane, described, seconds_of, shared_by, theirs
from evenload.core.balance.partition import best_fit_decreasing
from evenload.core.laws import check
from evenload.core.plan.step_plan import MicroBatch, Slice, StepPlan, as_lengths
from evenload.core.planning.chain import PlanChain
from evenload.plugins.mesh.emit.step import step

TOKENS = 8 * K
BATCH = 32 * K * K
COLUMNS = ("static", "simple", "naive", "by memory", "ring", "mesh")
RING: dict[str, Any] = {"engines": ("ring",), "routed": "off", "remap": "off"}
A100 = Plane("llama-7b", 256, "a100", TOKENS, inter_bytes_per_s=5e10, memory_bytes=1e12)


@dataclass(frozen=True)
class Setting:
    lengths: str
    context: int
    paper: str
    plane: Plane = A100
    note: str = ""

    @property
    def name(self) -> str:
        return f"{self.lengths} {self.context // K}K" + (f", {self.note}" if self.note else "")


SETTINGS = (
    *(Setting("github-like", n * K, "up to 7.89x" if n == 2048 else "") for n in (2048, 1024, 512, 256)),
    *(Setting("byted-like", n * K, "up to 4.26x" if n == 2048 else "") for n in (2048, 1024, 512, 256)),
    Setting("byted-like", 2048 * K, "3.69x", replace(A100, ranks=1024), "1,024 ranks"),
    Setting("byted-like", 2048 * K, "", replace(A100, inter_bytes_per_s=2.5e10), "200 Gbit/s"),
    Setting("byted-like", 2048 * K, "", replace(A100, cluster="h100"), "H100"),
    Setting("github-like", 2048 * K, "", replace(A100, cluster="h100"), "H100"),
)


def batches_of(setting: Setting, count: int, tokens: int) -> Iterator[Batch]:
    """Whole sequences up to so many tokens each."""
    lengths = np.minimum(drawn(setting.lengths, 20_000 * count), setting.context)
    ends = np.cumsum(lengths)
    for i in range(count):
        first, last = np.searchsorted(ends, [i * tokens, (i + 1) * tokens])
        yield as_lengths(lengths[first:last].tolist())


def naive(batch: Batch, chain: PlanChain) -> StepPlan:
    """Degrees by memory; slots of all ranks, of one micro-batch a rank each, in the order of the batch."""
    ranks, cap = chain.limits.num_ranks, chain.links[0][1].max_tokens
    whole = [Slice(i, 0, n) for i, n in enumerate(batch.tolist())]
    long = [s for s in whole if s.length >= cap]
    short = [s for s in whole if s.length < cap]
    packs = [[short[i] for i in sorted(one)] for one in best_fit_decreasing([s.length for s in short], cap)]
    packs.sort(key=lambda one: -one[0].sequence)
    micro_batches: list[MicroBatch] = []
    while long or packs:
        free = 0
        while long and free + -(-long[0].length // cap) <= ranks:
            s = long.pop(0)
            cp_group = tuple(range(free, free + -(-s.length // cap)))
            free += len(cp_group)
            micro_batches.append(MicroBatch((s,), cp_group, 0, "ring" if len(cp_group) > 1 else ""))
        for rank in range(free, ranks):
            if packs:
                micro_batches.append(MicroBatch(tuple(packs.pop()), (rank,)))
    # Uneven chunks may add two tokens on one of the ranks.
    return check(
        step(StepPlan(batch, (), chain.limits), replace(chain.limits, max_tokens=cap + 2), micro_batches, "naive")
    )


def step_of(setting: Setting, batch: Batch) -> dict[str, dict[str, float]]:
    """Every column of one batch."""
    plane, least = setting.plane, setting.context // TOKENS

    def static(packing: str, degree: int) -> dict[str, float]:
        chain = theirs(plane.static(degree, packing))
        return described(shared_by(chain.plan(batch), "ring"), chain)

    degrees = [d for d in (32, 64, 128, 256) if least <= d <= plane.ranks]
    simple = [static(packing, d) for packing in SIMPLE for d in degrees]
    others, by_memory = theirs(plane.mesh(**RING)), theirs(plane.mesh("memory_degree", **RING))
    ring, mesh = plane.mesh(**RING), plane.mesh()
    return {
        "static": static("in_order", least),
        "simple": min(simple, key=lambda one: one["step_s"]),
        "naive": described(naive(batch, others), others),
        "by memory": described(by_memory.plan(batch), by_memory),
        "ring": described(ring.plan(batch), ring),
        "mesh": described(mesh.plan(batch), mesh),
    }


def row_of(setting: Setting, count: int, tokens: int) -> dict[str, Any]:
    batches = list(batches_of(setting, count, tokens))
    columns_of = mean_columns([step_of(setting, batch) for batch in batches])
    return {
        "setting": setting.name,
        "paper": setting.paper,
        "lengths": setting.lengths,
        "ranks": setting.plane.ranks,
        "definition": f"static: {setting.context // TOKENS} ranks to a pack, in the order of the batch",
        "sequences": [len(batch) for batch in batches],
        "columns": columns_of,
        "gain": {name: columns_of["static"]["step_s"] / one["step_s"] for name, one in columns_of.items()},
        "over_naive": {name: columns_of["naive"]["step_s"] / one["step_s"] for name, one in columns_of.items()},
    }


def hides_its_ring(plane: Plane) -> float:
    """Seconds of a 312K sequence on 39 ranks over those of its compute alone: 1.00 where all of the ring is hidden."""
    chain = theirs(replace(plane, ranks=64).mesh(**RING))
    n = 312 * K
    plan = StepPlan(as_lengths([n]), (MicroBatch((Slice(0, 0, n),), tuple(range(39)), 0, "ring"),), chain.limits)
    return seconds_of(plan, chain) / seconds_of(plan, with_traffic(chain, kv_bytes_per_token=0.0))


def table(result: dict[str, Any]) -> Any:
    cells = {
        "setting": "{setting}",
        "paper": "{paper}",
        "static": "{columns[static][step_s]:.1f} s",
        **{name: f"{{gain[{name}]:.2f}}x" for name in COLUMNS[1:]},
        "mesh over naive": "{over_naive[mesh]:.2f}x",
        "busiest / mean rank: naive, mesh": "{columns[naive][imbalance]:.2f}, {columns[mesh][imbalance]:.2f}",
    }
    about = "gains over static; static's degree: context / 8K; a 312K sequence on 39 ranks takes "
    about += f"{result['ring_312K']:.2f} times its compute"
    return columns(f"{result['title']} (predicted)", result["rows"], cells, about)


def benchmark(quick: bool) -> dict[str, Any]:
    small = Setting("byted-like", 256 * K, "", replace(A100, ranks=64))
    rows = [row_of(small, 1, BATCH // 8)] if quick else [row_of(setting, 4, BATCH) for setting in SETTINGS]
    return {"title": "ByteScale: LLaMA 7B, 32M tokens a step", "ring_312K": hides_its_ring(A100), "rows": rows}


if __name__ == "__main__":
    asked = arguments(__doc__)
    finish(benchmark(asked.quick), asked, table)
