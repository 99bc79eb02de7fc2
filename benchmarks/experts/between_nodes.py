"""Experts between nodes: quotas that know where tokens come from, against those that do not. Predicted.

    python benchmarks/experts/between_nodes.py [--draws 4] [--slots 0 2 4 8 12] [--json] [--out FILE]

The layers, loads and links of benchmarks/published/ultraep.py, on nodes of 8 ranks with 400 Gbit/s each, EP 64 and 128:
forward and backward, as a share of the speed of even routing with every expert at home. Rows:

    static     every expert at home
    near       exact loads, copies from the own node first
    blind      exact loads, nodes not known
    even       even routing, every expert at home
    N more     the plugin's `clone` with N slots more than own experts, for copies where tokens come from

*kept*: copies stay until their backward; *again*: they are fetched again for it. *once*: a token goes once to each node
that has any of its experts, else once to each expert, as in the layer that shares are of. Milliseconds of a planner
are measured on this machine, the least of 30 runs; everything else follows from `core.experts.seconds`.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from evenload.api import load_plugins
from evenload.benchmarks.frame import columns, main, options
from evenload.benchmarks.published import ultraep
from evenload.benchmarks.published.expert_loads import Drawn
from evenload.core.aliases import Ints
from evenload.core.experts.quotas import check_quotas, copies_of, imbalance_of
from evenload.core.experts.seconds import LayerCost, copy_tokens, layer_seconds, paying_tokens
from evenload.core.plan.expert_policy import ExpertPolicy
from evenload.core.registry import layer_planner

NODE_RANKS, REPEATS = 8, 30


class Answer(NamedTuple):
    """What one planner makes of one layer's counts."""

    share: float
    """Of the speed of even routing."""
    slots: int
    """Copies of the rank that has most."""
    copied_gib: float
    """Weights of these copies."""
    plan_ms: float


def policies(cost: LayerCost, own: int, more: list[int]) -> dict[str, ExpertPolicy]:
    blind = ExpertPolicy("clone", own, 1.0, int(paying_tokens(cost)), keep=cost.keep)
    near = blind._replace(node_ranks=NODE_RANKS)
    known = near._replace(copy_tokens=round(copy_tokens(cost)), once_topk=cost.once_topk)
    static = ExpertPolicy("static")
    return {"static": static, "near": near, "blind": blind} | {
        f"{slots} more": known._replace(slots=own + slots) for slots in more
    }


def answer(policy: ExpertPolicy, counts: Ints, cost: LayerCost, even_s: float, other_s: float) -> Answer:
    planner = layer_planner(policy.planner)
    seconds = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        quotas = planner(counts, policy, ())
        seconds.append(time.perf_counter() - start)
    slots = max(map(len, copies_of(check_quotas(quotas, counts, policy, ()))))
    layer_s = layer_seconds(counts, quotas, cost).total + other_s
    return Answer(even_s / layer_s, slots, slots * cost.weight_bytes / 2**30, 1e3 * min(seconds))


def rows_of(ranks: int, draws: int, more: list[int]) -> Iterator[dict[str, Any]]:
    """A row a model, way to hold copies and way to send tokens."""
    ultraep.RANKS = ranks
    for model in ultraep.MODELS:
        setting = ultraep.Setting(model, NODE_RANKS)
        even = ultraep.even_of(model)

        def even_s(topk: int, of: ultraep.Setting = setting, even: Ints = even) -> float:
            cost = of.cost._replace(plan_s=0.0, once_topk=topk)
            passes = layer_seconds(even, ultraep.at_homes(even), cost)
            return passes.total - passes.forward.counts + of.other_s

        drawn = Drawn(ranks, model.experts, ultraep.TOPK, ultraep.TOKENS)
        loads = drawn.like(model.imbalance, lambda each: imbalance_of(ultraep.at_homes(each)), draws)
        for keep, topk in itertools.product((True, False), (0, ultraep.TOPK)):
            cost = setting.cost._replace(keep=keep, once_topk=topk)
            answers = {"even": [Answer(even_s(0) / even_s(topk), 0, 0.0, 0.0)]}
            answers |= {
                name: [answer(policy, counts, cost, even_s(0), setting.other_s) for counts in loads]
                for name, policy in policies(cost, model.experts // ranks, more).items()
            }
            yield {
                "model": model.name,
                "ranks": ranks,
                "keep": keep,
                "once": bool(topk),
                "answers": {name: Answer(*np.mean(of, axis=0).tolist())._asdict() for name, of in answers.items()},
                "least_share": {name: min(one.share for one in of) for name, of in answers.items()},
            }


def table(result: dict[str, Any]) -> Any:
    def how(row: dict[str, Any]) -> str:
        return ("kept" if row["keep"] else "again") + (", once" if row["once"] else "")

    cells: dict[str, Any] = {"": lambda row: f"{row['model']}, EP {row['ranks']}, {how(row)}"}
    for name in result["rows"][0]["answers"]:
        one = f"answers[{name}]"
        cells[name] = f"{{{one}[share]:percent}} ({{{one}[slots]:.1f}}; {{{one}[plan_ms]:.2f}} ms)"
    about = "share of even routing (most copies on a rank; planning), means of the draws"
    return columns("a layer between nodes of 8, predicted", result["rows"], cells, about)


def benchmark(asked: Any) -> dict[str, Any]:
    load_plugins()
    rows = [row for ranks in asked.ranks for row in rows_of(ranks, asked.draws, asked.slots)]
    return {"predicted": True, "draws": asked.draws, "rows": rows}


if __name__ == "__main__":
    main(options(__doc__, draws=4, ranks=[64, 128], slots=[0, 2, 4, 8, 12]), benchmark, table)
