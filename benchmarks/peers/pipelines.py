"""Pipelines next to other people's schedules: sequences of one length, and ragged ones. Predicted; planning measured.

    python benchmarks/peers/pipelines.py [--wikipedia FILE] [--mooncake FILE] [--quick] [--json] [--out FILE]

alike    N sequences of 8,192 tokens, LLaMA 13B (PP 4, 8) and 70B (PP 16) with TP 8 on H200s. Neither hand-overs nor an
         output layer take time, so that all play one game: a forward, a backward and weight gradients (W) apart, and a
         launch for each forward and backward of any part of a stage. Bubble: the share of a step beyond N sequences of
         one launch each. "held": the most bytes at any stage, over what one sequence keeps there from forward to
         backward; a backward without its weight gradients leaves inputs and output gradients of linear layers for W.
ragged   one step of each file on the layouts of `RAGGED`, with hand-overs, output layer and TP traffic; gradient sums
         left out. *wiki*: the first, *wiki, last*: the last 60,000 of the file; Mooncake: every length of the file.
         Without a file lengths are drawn from a stand-in, which the row says (``-like``). "over busiest": the step over
         compute and TP traffic of the busiest stage. Peers run balanced packs of whole sequences, as they cut none:
         the fastest number of packs of each that fits into the device; none where no number does.

    evenload          the pipeline plugin with the device's memory
    level             the same with the bytes that ZBV holds
    tight             the same with as many bytes as P sequences keep from forward to backward
    whole             the same with sequences that stay whole, the game of ZB-2p
    1F1B, ZB-1p, ZB-2p, interleaved (1F1B), interleaved ZB, ZBV, DualPipeV
                      `games`: the last four have two parts of a stage on each rank, every part a launch of its own
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from evenload.benchmarks.chains import batches, chain_of, plugins, with_launches, without_sums
from evenload.benchmarks.frame import Row, columns, main, options, timed
from evenload.benchmarks.peers.games import Rows, game_of, of_torch, one_forward_one_backward, played, zero_bubble
from evenload.benchmarks.published.common import MODELS, Batch
from evenload.benchmarks.published.lengths import corpus
from evenload.core.balance.partition import fill
from evenload.core.input.format import GIB
from evenload.core.plan.step_plan import MicroBatch, Slice, StepPlan, as_lengths
from evenload.core.planning.chain import PlanChain
from evenload.core.planning.judge import budget_bytes
from evenload.core.simulate.step import Simulation, after_passes_s, simulate
from evenload.data.lengths import read_lengths
from evenload.data.samples.cut import cut
from evenload.plugins.pipeline.chunks import dealt, price_of
from rich.console import Group

TOKENS = 8192
LAUNCHES_S = (0.0, 0.25e-3, 0.5e-3, 1e-3)
UNIFORM = ((4, 16), (8, 16), (16, 32))
"""Stages, sequences."""
RAGGED = {
    "wiki": ((8, 1, 64), (4, 2, 64), (16, 1, 64)),
    "wiki, last": ((8, 1, 64),),
    "mooncake": ((8, 1, 32), (4, 2, 64), (4, 2, 128), (16, 1, 64)),
}
"""Stages, data-parallel ranks, sequences of all ranks."""
PART = 60_000
"""Lengths at either end of Wikipedia's file."""
LONGEST = 1 << 17
MOONCAKE = ((0.0, 300), (0.25, 3500), (0.5, 7300), (0.75, 15500), (0.95, 44000), (0.99, 88000), (1.0, 126000))
"""Shares of sequences and tokens below which they are: a stand-in for input and output of Mooncake's conversations."""
PACKS = (1, 2, 3, 4, 6, 8)
"""Packs of a rank that peers try on ragged lengths, over the number of stages."""

Orders = Callable[[int, int], Rows]
"""Of so many stages and micro-batches."""


SCHEDULES: dict[str, tuple[Orders, int]] = {
    "1F1B": (one_forward_one_backward, 0),
    "ZB-1p": (lambda stages, count: zero_bubble(stages, count, 1), 0),
    "ZB-2p": (lambda stages, count: zero_bubble(stages, count, 2), 0),
    "interleaved": (partial(of_torch, "Interleaved1F1B"), 1),
    "interleaved ZB": (partial(of_torch, "InterleavedZeroBubble"), 1),
    "ZBV": (partial(of_torch, "ZBVZeroBubble"), -1),
    "DualPipeV": (partial(of_torch, "DualPipeV"), -1),
}
"""And where the second part of a rank is: 0 nowhere, 1 as many parts behind on all, -1 in a V."""


def ranks_of(stages: int, second: int) -> list[int]:
    """Of the parts of a schedule."""
    ranks = list(range(stages))
    return ranks + (ranks[::second] if second else [])


def pipeline_chain(
    stages: int, ranks: int, samples: int, cap: int, model: dict[str, Any] | None = None, **pipeline: Any
) -> PlanChain:
    """The pipeline plugin on H200s with tensor parallelism of a node, gradient sums left out. ``samples``: of all;
    ``model``: what is other than in the model of so many stages."""
    return without_sums(
        chain_of(
            {
                "model": {"vocab_size": 32000, **MODELS["llama-70b" if stages == 16 else "llama-13b"], **(model or {})},
                "parallel": {"pp": stages, "dp": ranks, "tp": 8},
                "train": {"dtype": "bf16", "global_batch_size": samples},
                "cluster": "h200",
                "plugins": plugins(cap, "pipeline", **pipeline),
            }
        )
    )


def alone(chain: PlanChain, launch_s: float) -> PlanChain:
    """Without hand-overs, TP traffic and output layer, and with this launch: compute and waits are all there is."""
    limits, context = chain.limits, with_launches(chain.context, lambda *_: launch_s)
    link = context.cluster.intra.model_copy(update={"latency_s": 0.0, "bytes_per_s": 1e18})
    cluster = context.cluster.model_copy(update={"intra": link, "inter": link})
    traffic = replace(context.traffic, state_bytes_per_token=1e-9)
    headless = limits.memory.model_copy(update={"head_bytes_per_token": 0.0, "head_working_bytes_per_token": 0.0})
    limits = replace(limits, memory=headless, splits_backward=True)
    return replace(chain, context=replace(context, cluster=cluster, traffic=traffic, head_frac=0.0), limits=limits)


def planned(chain: PlanChain, batch: Batch) -> tuple[StepPlan, Simulation, float]:
    """A plan, what it comes to, and the seconds of one core that it takes."""
    plan, plan_s = timed(lambda: chain.plan(batch))
    return plan, simulate(plan, chain.context, record=False), plan_s


def of_packs(packs: list[list[int]], lengths: Batch, chain: PlanChain) -> StepPlan:
    """Whole sequences on one plane rank, whatever the token cap."""
    limits = replace(chain.limits, num_ranks=1, max_tokens=max(sum(int(lengths[i]) for i in pack) for pack in packs))
    slices = (tuple(Slice(i, 0, int(lengths[i])) for i in pack) for pack in packs)
    return StepPlan(lengths, tuple(MicroBatch(each, (0,)) for each in slices), limits)


def uniform_row(stages: int, count: int, launch_s: float) -> Row:
    """The bubble and what is held, by way."""
    batch = as_lengths(np.full(count, TOKENS))
    chain = alone(pipeline_chain(stages, 1, count, TOKENS), launch_s)
    costs, one_bytes = chain.context.costs, chain.limits.memory.activation_bytes_per_token * TOKENS
    ideal_s = count * sum(float(cost.seconds(TOKENS)) + cost.launch_s for cost in (costs.forward, costs.backward))
    peers: Row = {}
    alike = of_packs([[i] for i in range(count)], batch, chain)
    for name, (orders, second) in SCHEDULES.items():
        end_s, held_bytes = played(orders(stages, count), game_of(alike, chain.context, ranks_of(stages, second)))
        peers[name] = {"bubble": 1 - ideal_s / end_s, "held": held_bytes / one_bytes}
    bubbles: Row = {}
    settings: dict[str, Row] = {"evenload": {}}
    settings["level"] = {"activation_gib": peers["ZBV"]["held"] * one_bytes / GIB}
    settings |= {"tight": {"activation_gib": stages * one_bytes / GIB}, "whole": {"chunks": 1}}
    for name, words in settings.items():
        _, outcome, plan_s = planned(alone(pipeline_chain(stages, 1, count, TOKENS, **words), launch_s), batch)
        held = float(outcome.activation_bytes.max()) / one_bytes
        bubbles[name] = {"bubble": 1 - ideal_s / outcome.step_s, "held": held, "plan_s": plan_s}
    return {"stages": stages, "sequences": count, "launch_s": launch_s, "bubbles": bubbles | peers}


def ragged_row(label: str, lengths: Batch, stages: int, ranks: int) -> Row:
    chain = pipeline_chain(stages, ranks, len(lengths), 2 * TOKENS)
    plan, outcome, plan_s = planned(chain, lengths)
    busiest_s = float((outcome.busy_s + outcome.exposed_s).max())
    row = {"lengths": label, "stages": stages, "ranks": ranks, "sequences": len(lengths), "plan_s": plan_s}
    row |= {"step_s": outcome.step_s, "over_busiest": outcome.step_s / busiest_s, "bubble": outcome.bubble_frac}
    row |= {"peak_bytes": float(outcome.peak_bytes.max()), "micro_batches": len(plan.micro_batches)}
    return row | {"peers": {name: peer_s(name, lengths, chain) for name in SCHEDULES}}


def peer_s(name: str, lengths: Batch, chain: PlanChain) -> float | None:
    """The step of a schedule over balanced packs of whole sequences [s]; None where none of them fits."""
    orders, second = SCHEDULES[name]
    price, limits = price_of(chain.context), chain.limits
    budget, worst_s = budget_bytes(limits, chain.context), 0.0
    for items in dealt(lengths, price, limits.num_ranks):
        ends = []
        for count in (times * limits.num_stages for times in PACKS if times * limits.num_stages <= len(items)):
            longest_first = sorted(items, key=lambda i: (-int(lengths[i]), i))
            weights = {i: float(price.seconds(int(lengths[i]))) for i in items}
            bins = fill(longest_first, weights, lengths.tolist(), [1 << 40] * count, [0.0] * count)  # type: ignore[arg-type]
            packs: list[list[int]] = [[] for _ in range(count)]
            for item, place in zip(longest_first, bins or (), strict=True):
                packs[place].append(item)
            game = game_of(of_packs(packs, lengths, chain), chain.context, ranks_of(limits.num_stages, second))
            with suppress(ValueError):  # too few for it, says torch
                end_s, held_bytes = played(orders(limits.num_stages, count), game)
                ends += [end_s] if held_bytes <= budget else []
        if not ends:
            return None
        worst_s = max(worst_s, min(ends))
    return worst_s + after_passes_s(chain.context)


def batch_of(body: Batch, count: int) -> Batch:
    """The first step of ``count`` samples, drawn as training draws them."""
    return next(batches(cut(body, LONGEST, "split", 2).length, count, 1))


def bodies_of(wikipedia: Path | None, mooncake: Path | None) -> dict[str, tuple[str, Batch]]:
    """What each name of `RAGGED` is drawn from, with its label."""
    pages = read_lengths(wikipedia) if wikipedia else corpus("wikipedia-like", 2 * PART, LONGEST)[1]
    like = "" if wikipedia else "-like"
    bodies = {"wiki": (f"wiki{like}", pages[:PART]), "wiki, last": (f"wiki{like}, last", pages[-PART:])}
    shares, tokens = zip(*MOONCAKE, strict=True)
    stand_in = np.exp(np.interp(np.random.default_rng(1234).random(12_000), shares, np.log(tokens))).astype(np.int64)
    talks = read_lengths(mooncake) if mooncake else stand_in
    return bodies | {"mooncake": (f"mooncake{'' if mooncake else '-like'}", talks)}


def benchmark(asked: Any) -> Row:
    quick = asked.quick
    sizes, launches_s = UNIFORM[: 1 if quick else 3], LAUNCHES_S[2 if quick else 0 :]
    uniform = [uniform_row(*size, launch_s) for size in sizes for launch_s in launches_s]
    ragged = [
        ragged_row(label, batch_of(body, count), stages, ranks)
        for name, (label, body) in bodies_of(asked.wikipedia, asked.mooncake).items()
        for stages, ranks, count in RAGGED[name][: 1 if quick else None]
    ]
    return {"predicted": True, "uniform": uniform, "ragged": ragged[:1] if quick else ragged}


def table(result: Row) -> Any:
    names = list(result["uniform"][0]["bubbles"])
    cells = {
        "stages, sequences": "PP {stages}, {sequences}",
        "launch": lambda row: f"{1e3 * row['launch_s']:g} ms",
        **{n: f"{{bubbles[{n}][bubble]:.1%}} ({{bubbles[{n}][held]:.1f}})" for n in names},
        "planning": "{bubbles[evenload][plan_s]:seconds}",
    }
    about = "bubble (sequences held); planning measured"
    first = columns("One length, H200 (predicted)", result["uniform"], cells, about)
    cells = {
        "lengths": "{lengths}",
        "layout, sequences": "PP {stages} x DP {ranks}, {sequences}",
        "s a step": "{step_s:.4f}",
        "over busiest": "{over_busiest:.3f}",
        "peak GB": lambda row: f"{row['peak_bytes'] / 1e9:.0f}",
        "chunks": "{micro_batches}",
        **{name: f"{{peers[{name}]:.4f}}" for name in SCHEDULES},
        "planning": "{plan_s:seconds}",
    }
    return Group(first, columns("Ragged lengths, TP 8, H200 (predicted)", result["ragged"], cells, "planning measured"))


if __name__ == "__main__":
    main(options(__doc__, wikipedia=Path, mooncake=Path, quick=False), benchmark, table)
