"""What two parts of a stage on each rank, in a V, would gain on ragged lengths at equal memory. Predicted.

    python benchmarks/peers/v_shape.py [--wikipedia FILE] [--mooncake FILE] [--quick] [--json] [--out FILE]

Rank r of P has parts r and 2P - 1 - r of the model (ZBV; Qi et al., arXiv 2405.15362), so that half forwards fill the
pipeline, and the last part is on the rank that has the first. evenload's own chunks, small ones first too, run in
orders that are found by playing all ranks against each other:

    each rank runs what has arrived, by a list of preferences and while memory holds it, and weight gradients (W) while
    it would wait otherwise

The fastest of 16 lists under three caps, for each chunking. Both sides may hold ``cap`` bytes, counted by the terms of
`evenload.core.costs.memory` (of the V without gradients of keys and values that are stored). A part has half a stage's
compute and TP traffic, and a launch of its own, a stage's or half of it. Links are taken to carry several tensors at
once, which favours the V slightly.
"""

from __future__ import annotations

import heapq
import math
import sys
from collections import deque
from pathlib import Path
from typing import Any, NamedTuple

from evenload.commands.tables.show import grid
from evenload.core.errors import EvenloadError
from evenload.core.input.format import GIB
from evenload.core.plan.step_plan import StepPlan
from evenload.core.planning.chain import PlanChain
from evenload.core.planning.judge import budget_bytes
from evenload.core.simulate.step import simulate
from evenload.plugins.pipeline.chunks import chunkings
from evenload.plugins.pipeline.elastic import Lines, lines_of_rounds
from evenload.plugins.pipeline.opening import opened
from evenload.plugins.pipeline.settings import limits_for

sys.path.append(str(Path(__file__).parent))
from games import Game, Rows, Table, game_of, played
from pipelines import TOKENS, Batch, batch_of, bodies_of, chain_of, ranks_of, run

ROWS = (("wiki", 8, 64), ("wiki", 4, 64), ("wiki", 16, 64), ("mooncake", 8, 32))
"""Lengths, stages, sequences."""
CAPS_GIB = (8, 16, 32, 0)
"""What passes may hold; 0: what the device leaves."""
SHARES = {"whole": 1.0, "half": 0.5}
CAP_SHARES = (1.0, 0.6, 0.35)
"""Of the cap: with less, ranks run less far ahead."""
LARGEST = 1 << 12
"""Chunks times stages up to which a chunking is played."""
Row = dict[str, Any]


class Rule(NamedTuple):
    """How a rank chooses among what has arrived."""

    first: tuple[tuple[str, int], ...]
    """Kinds and which part of the rank, first ones first."""
    alternates: bool = False
    """Forwards and backwards in turn where both have arrived."""
    patience: float = 0.0
    """A W starts while a rank waits if the wait is known to last so much of it."""


FIRST, SECOND = 0, 1
RULES = [
    Rule(first, alternates, patience)
    for first in (
        (("B", SECOND), ("B", FIRST), ("F", SECOND), ("F", FIRST)),
        (("B", FIRST), ("B", SECOND), ("F", SECOND), ("F", FIRST)),
        (("F", SECOND), ("B", SECOND), ("B", FIRST), ("F", FIRST)),
        (("F", SECOND), ("F", FIRST), ("B", SECOND), ("B", FIRST)),
    )
    for alternates in (False, True)
    for patience in (0.0, 1.0)
]


def by_rule(lines: Lines, game: Game, rule: Rule, cap_bytes: float) -> Rows | None:
    """The passes of every rank; None where they stop. A forward that the next backward needs runs whatever is held."""
    ranks = max(game.ranks) + 1
    own = [[p for p, r in enumerate(game.ranks) if r == rank] for rank in range(ranks)]
    last, count = len(game.ranks) - 1, len(lines.forward)
    rows: Rows = [[] for _ in range(ranks)]
    at: dict[str, list[int]] = {kind: [0] * (last + 1) for kind in "FB"}
    came: dict[str, Table] = {kind: [[math.inf] * count for _ in game.ranks] for kind in "FB"}
    came["F"][0], came["B"][last] = [0.0] * count, [0.0] * count
    free, held, owed = [0.0] * ranks, [0.0] * ranks, [0.0] * ranks
    """``owed``: what second parts will keep of micro-batches whose first part has run."""
    waiting: list[deque[tuple[int, int]]] = [deque() for _ in rows]
    before = ["B"] * ranks
    events = [(0.0, rank) for rank in range(ranks)]
    left = 2 * count * (last + 1)

    def next_of(rank: int, kind: str, part: int) -> tuple[float, int] | None:
        place = at[kind][part]
        if place == count:
            return None
        if kind == "B" and at["F"][part] < lines.need[place]:
            return None
        number = (lines.forward if kind == "F" else lines.backward)[place]
        arrival = came[kind][part][number]
        if kind == "F" and place >= lines.need[at["B"][part]]:
            later = [p for p in own[rank] if p > part]
            more = game.kept[part][number] + sum(game.kept[p][number] for p in later)
            paid = owed[rank] - (game.kept[part][number] if part != own[rank][0] else 0.0)
            if held[rank] + paid + more > cap_bytes:
                return None
        return arrival, number

    while events:
        now, rank = heapq.heappop(events)
        if now < free[rank]:
            continue
        options = {
            (kind, leg): arriving
            for leg, part in enumerate(own[rank])
            for kind in "FB"
            if (arriving := next_of(rank, kind, part)) is not None
        }
        ready = [key for key in rule.first if key in options and options[key][0] <= now]
        if rule.alternates:
            ready.sort(key=lambda key: key[0] == before[rank])
        if not ready:
            if waiting[rank]:
                part, number = waiting[rank][0]
                weights_s = game.weights[part][number]
                soonest = min((arrival for arrival, _ in options.values()), default=math.inf)
                if soonest - now >= rule.patience * weights_s:
                    waiting[rank].popleft()
                    rows[rank].append([("W", part, number)])
                    held[rank] -= game.deferred[part][number]
                    free[rank] = now + weights_s
                    heapq.heappush(events, (free[rank], rank))
            continue
        kind, leg = ready[0]
        part, number = own[rank][leg], options[ready[0]][1]
        splits = kind == "B" and held[rank] + owed[rank] + game.deferred[part][number] <= cap_bytes
        one = ("I" if splits else kind, part, number)
        if kind == "B" and not splits and waiting[rank]:
            # Make room for what this one would leave.
            part, number = waiting[rank].popleft()
            one, kind = ("W", part, number), "W"
        rows[rank].append([one])
        held[rank] += game.change(one)
        free[rank] = now = now + game.seconds(one)
        heapq.heappush(events, (now, rank))
        if kind == "W":
            continue
        before[rank] = kind
        at[kind][part] += 1
        left -= 1
        if splits:
            waiting[rank].append((part, number))
        if kind == "F" and len(own[rank]) > 1:
            owed[rank] += game.kept[own[rank][1]][number] * (1 if leg == 0 else -1)
        target = part + (1 if kind == "F" else -1)
        if 0 <= target <= last:
            arrival = now + (game.up[part] if kind == "F" else game.down[target])[number]
            came[kind][target][number] = arrival
            heapq.heappush(events, (arrival, game.ranks[target]))
    if left:
        return None
    for rank, rest in enumerate(waiting):
        rows[rank] += [[("W", part, number)] for part, number in rest]
    return rows


def fastest(chain: PlanChain, lengths: Batch, cap_bytes: float, share: float) -> Row | None:
    """The fastest V of evenload's chunkings that holds no more than the cap."""
    config: Any = chain.links[0][1]
    unplanned = StepPlan(lengths, (), chain.limits)
    stages, best = chain.limits.num_stages, None
    plain = list(chunkings(unplanned, limits_for(unplanned, config), chain.context, config))
    small_first = [opened(one, chain.context, config) for one in plain]
    for plan in (one for one in (*plain, *small_first) if one and len(one.micro_batches) * stages <= LARGEST):
        game = game_of(plan, chain.context, ranks_of(stages, -1), share)
        if best and busiest_s(game) >= best["step_s"]:
            continue
        lines = lines_of_rounds(plan, [(number,) for number in range(len(plan.micro_batches))])
        for rule in RULES:
            for part in CAP_SHARES:
                rows = by_rule(lines, game, rule, part * cap_bytes)
                if rows is None:
                    continue
                end_s, held_bytes = played(rows, game)
                if held_bytes <= cap_bytes and (best is None or end_s < best["step_s"]):
                    best = {"step_s": end_s, "held_bytes": held_bytes, "chunks": len(plan.micro_batches)}
    return best


def busiest_s(game: Game) -> float:
    """Seconds of the passes of the rank that has most."""
    parts = [sum(f) + sum(i) + sum(w) for f, i, w in zip(game.forward, game.inputs, game.weights, strict=True)]
    return max(own + other for own, other in zip(parts, reversed(parts), strict=True))


def row_of(label: str, lengths: Batch, stages: int, cap_gib: float) -> Row:
    chain = chain_of(stages, 1, len(lengths), 2 * TOKENS)
    cap_bytes = cap_gib * GIB or budget_bytes(chain.limits, chain.context)
    row: Row = {"lengths": label, "stages": stages, "sequences": len(lengths), "cap_bytes": cap_bytes, "evenload": None}
    try:
        words = {"activation_gib": cap_gib} if cap_gib else {}
        plan = chain_of(stages, 1, len(lengths), 2 * TOKENS, **words).plan(lengths)
        outcome = simulate(plan, chain.context, record=False)
        held_bytes = float(outcome.activation_bytes.max())
        row["evenload"] = {"step_s": outcome.step_s, "held_bytes": held_bytes, "chunks": len(plan.micro_batches)}
    except EvenloadError as error:
        row["refused"] = str(error).splitlines()[0]
    return row | {name: fastest(chain, lengths, cap_bytes, share) for name, share in SHARES.items()}


def benchmark(wikipedia: Path | None, mooncake: Path | None, quick: bool) -> Row:
    bodies = bodies_of(wikipedia, mooncake)
    rows = [
        row_of(bodies[name][0], batch_of(bodies[name][1], count), stages, cap_gib)
        for name, stages, count in (ROWS[:1] if quick else ROWS)
        for cap_gib in (CAPS_GIB[1:2] if quick else CAPS_GIB)
    ]
    return {"predicted": True, "rows": rows}


def table(result: Row) -> Any:
    def shown(row: Row, name: str) -> str:
        one, own = row[name], row["evenload"]
        if one is None:
            return "none fits"
        gain = f" ({one['step_s'] / own['step_s'] - 1:+.1%})" if own and one is not own else ""
        return f"{one['step_s']:.4f} s{gain}, {one['held_bytes'] / 1e9:.0f} GB, {one['chunks']} chunks"

    rows = [
        (
            r["lengths"],
            f"PP {r['stages']}, {r['sequences']}",
            f"{r['cap_bytes'] / 1e9:.0f}",
            *(shown(r, name) for name in ("evenload", *SHARES)),
        )
        for r in result["rows"]
    ]
    head = ("lengths", "stages, sequences", "cap GB", "evenload", "V, a launch a part", "V, half a launch a part")
    return grid("Two parts of a stage on each rank (predicted)", head, rows, "H200, TP 8")


if __name__ == "__main__":
    run(__doc__, "One row.", benchmark, table)
