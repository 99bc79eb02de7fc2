"""LobRA (arXiv 2509.01193): adapters of six tenants on one frozen base, on replicas of one shape or of unlike ones.

    python benchmarks/published/lobra.py [--wikipedia FILE] [--quick] [--json] [--out FILE]

16 A800s in two nodes, or 8 of them and 8 with half the memory and half the rate; 1,024 Wikipedia lengths up to 16K a
step, a sixth of them of each tenant, adapters of rank 16 on all linear layers, no recomputation but replays. Links
inside a node are of 200, 25 and 12 GB/s, between nodes 6.25 GB/s. The paper's machines are not known to us; it saves
45 % to 61 % of GPU seconds. Seconds of a step:

    padded       one tenant after another on all ranks, the best one shape, in micro-batches of 1 or 4 neighbours padded
                 to the longest of them
    buckets      all tenants at once in LobRA's 16 buckets (least padding), on the best one shape that holds the longest
    GROUP        buckets on LobRA's replicas, each bucket on the least shape that holds it
    LobRA        buckets on unlike replicas, dealt by cost: its BALANCE, with our dealing in place of its MILP, and the
                 best of all deployments in place of its pruned ones
    one shape    packing with mesh, or with pipeline, on the best one shape: what `evenload search` finds
    by speed     the best replicas of one shape, each dealt to by its own costs; the same where all cards are alike
    ours         replicas as `core.balance.deployment` finds them

A shape is TP 1 to 8, or TP 1 to 4 x PP 2, ours also 2, 4 or 8 ranks that share long samples by mesh, under caps of 4K
and 8K. The last three are planned and simulated, replica by replica; LobRA's are counted by the same costs, launches
and pipeline fill included. On unlike cards a job of one kind of rank is as slow as its slowest card and has the least
memory; only the last two know which card is which. Adapters are summed over replicas at the end, whole, between nodes.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import yaml
from evenload.benchmarks.chains import K, plugins, recipe_of
from evenload.benchmarks.frame import Row, columns
from evenload.benchmarks.published.common import MODELS, arguments, batches_of, finish
from evenload.benchmarks.published.lengths import into_buckets
from evenload.core.aliases import Ints
from evenload.core.balance.deployment import ReplicaKind, deploy
from evenload.core.balance.replicas import Dealt
from evenload.core.balance.step_bound import stage_costs
from evenload.core.errors import EvenloadError
from evenload.core.machine import cluster as clusters
from evenload.core.plan.step_plan import as_lengths
from evenload.core.planning.chain import PlanChain
from evenload.core.planning.judge import budget_bytes, judge
from evenload.core.planning.replicas import ReplicaCost
from evenload.core.recipe.adapter import Adapter
from evenload.core.recipe.recipe import RECIPES
from evenload.core.recipe.sizes import shape_of
from evenload.plugins.lora.costs import TenantLoad, with_tenants

RANKS, TENANTS, BUCKETS, LONGEST = 16, 6, 16, 16 * K
CAPS = (4 * K, 8 * K)
"""Tokens of a micro-batch on a rank that are tried."""


class Cards(NamedTuple):
    """Devices of one kind, in nodes of eight."""

    link: float
    """Inside a node [GB/s]."""
    rate: float = 1.0
    """Of an A800's."""
    memory_gb: float = 80.0


@cache
def cluster_of(cards: Cards) -> str:
    """The file of a cluster of these cards."""
    a800 = clusters.load("a800", RECIPES / "clusters")
    intra = a800.intra.model_copy(update={"bytes_per_s": cards.link * 1e9})
    changes = {"flops_per_s": cards.rate * a800.flops_per_s, "memory_bytes": cards.memory_gb * 1e9, "intra": intra}
    fields = a800.model_copy(update={**changes, "all_to_all_bytes_per_s": {}}).model_dump()
    path = Path(tempfile.mkdtemp()) / "cards.yaml"
    path.write_text(yaml.safe_dump(fields))
    return str(path)


class Degrees(NamedTuple):
    """Parallelism inside of one replica."""

    tp: int
    pp: int = 1
    mesh: int = 1
    """Ranks that share long sequences."""

    @property
    def ranks(self) -> int:
        return self.tp * self.pp * self.mesh

    def __str__(self) -> str:
        more = f" PP{self.pp}" if self.pp > 1 else f" mesh{self.mesh}" if self.mesh > 1 else ""
        return f"TP{self.tp}{more}"


@cache
def chain_of(model: str, cards: Cards, degrees: Degrees, cap: int, tenants: int = TENANTS, micro: int = 1) -> PlanChain:
    """The planners of a replica, which know the adapters. Raises EvenloadError for a layout that is none."""
    names = ["packing", *(["mesh"] if degrees.mesh > 1 else []), *(["pipeline"] if degrees.pp > 1 else [])]
    recipe = recipe_of(
        {
            "model": {"vocab_size": 32000, **MODELS[model]},
            "parallel": {"tp": degrees.tp, "pp": degrees.pp, "dp": degrees.mesh},
            "megatron": {"sequence_parallel": degrees.tp > 1},
            "train": {"dtype": "bf16", "global_batch_size": 1 << 20, "micro_batch_size": micro},
            "cluster": cluster_of(cards),
            "plugins": {**plugins(cap, *names), "lora": {"enabled": True}},
        }
    )
    chain = PlanChain.of_recipe(recipe, recipe.layout(degrees.ranks))
    return with_tenants(chain, shape_of(recipe.model), [TenantLoad(Adapter(r=16), 1)] * tenants)


@dataclass(frozen=True)
class Timed:
    """A step and what ran it."""

    step_s: float
    replicas: str


def named(kinds: Sequence[ReplicaKind], counts: Sequence[int] | Ints) -> str:
    rows = [(int(count), kind) for count, kind in zip(counts, kinds, strict=True) if count]
    cards = len({kind.cards for kind in kinds}) > 1
    return " + ".join(f"{count} x {kind.shape}" + f" on {'AB'[kind.cards]}" * cards for count, kind in rows)


def crossing_s(model: str, cards: Cards, replicas: int) -> float:
    """Seconds of the sum of all adapters' gradients over replicas."""
    context = chain_of(model, cards, Degrees(1), CAPS[0]).context
    return context.cluster.inter.all_reduce_s(context.traffic.adapter_bytes, replicas) if replicas > 1 else 0.0


LAYOUTS = (*(Degrees(tp) for tp in (1, 2, 4, 8)), *(Degrees(tp, 2) for tp in (1, 2, 4)))
MESH = (Degrees(1, 1, 2), Degrees(1, 1, 8), Degrees(2, 1, 4))


def padded(model: str, cards: Cards, batch: Ints, layouts: Sequence[Degrees]) -> Timed:
    """One tenant after another, on all ranks."""
    best = Timed(float("inf"), "nothing fits")
    for d in layouts:
        for micro in (1, 4):
            try:
                chain = chain_of(model, cards, d._replace(mesh=RANKS // d.ranks), LONGEST, 1, micro)
                plans = [
                    judge(chain.stock(as_lengths(batch[tenant::TENANTS])), chain.context) for tenant in range(TENANTS)
                ]
            except EvenloadError:
                continue
            if all(one.fits for one in plans):
                own = Timed(sum(one.step_s for one in plans), f"{RANKS // d.ranks} x {d}, micro-batches of {micro}")
                best = min(best, own, key=lambda one: one.step_s)
    return best


def bucket_kind(model: str, cards: Cards, degrees: Degrees, buckets: Ints) -> ReplicaKind | None:
    """A replica that runs micro-batches of one bucket each, as many sequences as it holds; None: it holds none."""
    try:
        chain = chain_of(model, cards, degrees, LONGEST)
    except EvenloadError:
        return None
    memory, n = chain.limits.memory, buckets.astype(np.float64)
    per_token = memory.activation_bytes_per_token * degrees.pp + memory.head_bytes_per_token
    free_bytes = budget_bytes(chain.caps, chain.context) - memory.pass_bytes
    cap = int(free_bytes / (per_token + memory.head_working_bytes_per_token))
    if cap < buckets.min():
        return None
    both = max((stage.both for stage in stage_costs(chain.context)), key=lambda cost: float(cost.seconds(LONGEST)))
    each = np.maximum(1, cap // buckets)
    seconds = both.seconds(n) + both.launch_s / each
    held = seconds[buckets <= cap] * each[buckets <= cap]
    fill_s = (degrees.pp - 1) * float(held.max())
    return ReplicaKind(str(degrees), degrees.ranks, np.where(buckets <= cap, seconds, np.inf), fill_s)


def grouped(kinds: Sequence[ReplicaKind], counts: Ints) -> float:
    """The end of the last replica where each bucket goes to the least shape that holds it, evenly."""
    own = sorted(np.flatnonzero(counts), key=lambda kind: int(np.isfinite(kinds[kind].seconds).sum()))
    seconds = np.stack([kinds[kind].seconds for kind in own], axis=1)
    least = np.isfinite(seconds).argmax(axis=1)
    work_s = np.bincount(least, seconds[np.arange(len(seconds)), least], len(own))
    return float((work_s / counts[own] + [kinds[kind].fixed_s for kind in own]).max())


def in_buckets(model: str, cards: Cards, batch: Ints, layouts: Sequence[Degrees]) -> dict[str, Timed]:
    """LobRA's rows, as far as its replicas hold the longest bucket."""
    buckets = into_buckets(batch, BUCKETS)
    kinds = [kind for d in layouts if (kind := bucket_kind(model, cards, d, buckets))]
    try:
        deployed = deploy(kinds, [RANKS])
    except EvenloadError:
        return {}
    names, replicas = named(kinds, deployed.counts), int(deployed.counts.sum())
    crossing = crossing_s(model, cards, replicas)
    rows = {
        "GROUP": Timed(grouped(kinds, deployed.counts) + crossing, names),
        "LobRA": Timed(deployed.dealt.step_s + crossing, names),
    }
    if deployed.one_shape:
        counts, dealt = deployed.one_shape
        rows["buckets"] = Timed(dealt.step_s + crossing_s(model, cards, int(counts.sum())), named(kinds, counts))
    return rows


def one_shape(model: str, cards: Cards, batch: Ints, layouts: Sequence[Degrees]) -> Timed:
    """The best plan of all ranks in one shape."""
    best = Timed(float("inf"), "nothing fits")
    for d in layouts:
        for cap in CAPS:
            try:
                chain = chain_of(model, cards, d._replace(mesh=RANKS // d.ranks), cap)
                one = judge(chain.plan(as_lengths(batch)), chain.context)
            except EvenloadError:
                continue
            if one.fits:
                own = Timed(one.step_s, f"{RANKS // d.ranks} x {d}, micro-batches of {cap // K}K")
                best = min(best, own, key=lambda one: one.step_s)
    return best


@cache
def cost_of(model: str, cards: Cards, degrees: Degrees, cap: int) -> ReplicaCost | None:
    """What sequences take on a replica; None: it cannot run."""
    try:
        return ReplicaCost.of_chain(chain_of(model, cards, degrees, cap), LONGEST)
    except EvenloadError:
        return None


def ours(model: str, cards: Sequence[Cards], batch: Ints, shapes: Sequence[Degrees]) -> dict[str, Timed]:
    """Replicas of one shape and of unlike ones, each dealt to by its own costs, planned and simulated."""
    kinds, chains = list[ReplicaKind](), list[PlanChain]()
    for number, own in enumerate(cards):
        for d in shapes:
            for cap in CAPS:
                if cost := cost_of(model, own, d, cap):
                    kinds.append(ReplicaKind(str(d), d.ranks, cost.seconds(batch), cost.fixed_s, number))
                    chains.append(chain_of(model, own, d, cap))
    deployed = deploy(kinds, [RANKS // len(cards)] * len(cards))
    rows = {"ours": _simulated(model, cards[-1], batch, kinds, chains, deployed.counts, deployed.dealt)}
    if deployed.one_shape:
        rows["by speed"] = _simulated(model, cards[-1], batch, kinds, chains, *deployed.one_shape)
    return rows


def _simulated(
    model: str,
    cards: Cards,
    batch: Ints,
    kinds: Sequence[ReplicaKind],
    chains: Sequence[PlanChain],
    counts: Ints,
    dealt: Dealt,
) -> Timed:
    ends = [0.0]
    for replica, kind in enumerate(np.repeat(np.arange(len(kinds)), counts).tolist()):
        part = as_lengths(batch[dealt.replica_of == replica])
        if len(part):
            one = judge(chains[kind].plan(part), chains[kind].context)
            ends.append(one.step_s if one.fits else float("inf"))
    crossing = crossing_s(model, cards, int(counts.sum()))
    about = f"{named(kinds, counts)}; dealt by {dealt.step_s:.4g} s, bound {dealt.bound_s:.4g} s"
    return Timed(max(ends) + crossing, about)


COLUMNS = ("padded", "buckets", "GROUP", "LobRA", "one shape", "by speed", "ours")


def row_of(
    model: str,
    cards: Sequence[Cards],
    batch: Ints,
    layouts: Sequence[Degrees] = LAYOUTS,
    mesh: Sequence[Degrees] = MESH,
) -> Row:
    slowest = cards[-1]
    rows = {
        "padded": padded(model, slowest, batch, layouts),
        **in_buckets(model, slowest, batch, layouts),
        "one shape": one_shape(model, slowest, batch, layouts),
        **ours(model, cards, batch, (*layouts, *mesh)),
    }
    seconds = {name: rows[name].step_s for name in COLUMNS if name in rows and np.isfinite(rows[name].step_s)}
    half = ", half the cards at half the rate and memory" if len(cards) > 1 else ""
    return {
        "setting": f"{model.removeprefix('llama-').upper()}, {cards[0].link:g} GB/s{half}",
        "seconds": seconds,
        "over_ours": {name: each / seconds["ours"] for name, each in seconds.items() if "ours" in seconds},
        "replicas": {name: one.replicas for name, one in rows.items()},
    }


def table(result: Row) -> Any:
    def cell(name: str) -> Any:
        def shown(row: Row) -> str:
            if name not in row["seconds"]:
                return "-"
            return f"{row['seconds'][name]:.2f} ({row['over_ours'].get(name, float('nan')):.2f}x)"

        return shown

    notes = [f"lengths: {result['lengths']}; seconds (over ours)"]
    notes += [
        f"{row['setting']}: " + "; ".join(f"{n}: {r}" for n, r in row["replicas"].items()) for row in result["rows"]
    ]
    cells = {"setting": "{setting}", **{name: cell(name) for name in COLUMNS}}
    return columns(f"{result['title']} (predicted)", result["rows"], cells, "\n".join(notes))


if __name__ == "__main__":
    asked = arguments(__doc__)
    label, (lengths,) = batches_of("wikipedia-like", 128 if asked.quick else 1024, 1, LONGEST, asked.wikipedia)
    lengths = np.array(lengths)
    lengths[0] = LONGEST
    models = ("llama-7b",) if asked.quick else ("llama-7b", "llama-32b", "llama-70b")
    links = (25.0,) if asked.quick else (200.0, 25.0, 12.0)
    settings = [(model, [Cards(link)]) for model in models for link in links]
    settings += [(model, [Cards(links[0]), Cards(links[0], 0.5, 40.0)]) for model in models[:2]]
    title = f"LobRA, {TENANTS} tenants, {len(lengths):,} sequences a step on {RANKS} cards"
    few = (LAYOUTS[:2], ()) if asked.quick else ()
    rows = [row_of(model, cards, lengths, *few) for model, cards in settings]
    finish({"title": title, "lengths": label, "paper": "45 % to 61 % fewer GPU seconds", "rows": rows}, asked, table)
