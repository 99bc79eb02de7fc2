"""LAER-MoE (arXiv 2602.11686): layouts of experts from the step before; 1.48x over Megatron-LM, 1.42x over FSDP + EP.

    python benchmarks/published/laer.py [--quick] [--json] [--out FILE]

Mixtral 8x7B and 8x22B and a Qwen of 8x7B, each with 8 experts of which a token meets 2 and with 16 half as wide of
which it meets 4, on 4 nodes of 8 A100; 128 sequences of 8,192 tokens a step. Its shipped steps stand next to what
`core.experts.seconds` says of the layers' experts and exchanges, from its own profile: 6.1 ms forward for 4,096 routed
tokens of an 8x7B expert (237 TFLOP/s), 216 GB/s inside a node and 89 GB/s between nodes.

    static     FSDP + EP: its trace's busiest rank is 1.66 (8 experts) or 1.73 (16) over the mean
    LAER       1.41 or 1.29 in its trace; sending its weights, planning and counting is taken to be free
    rules      its layout's rules, as the moe plugin's baseline has them, on the very loads that then come, in the
               places and at the costs of clone
    clone      evenload's exact planner, ep 8 inside every node: as many experts a rank as LAER has, own ones and
               copies together; counts gathered, weights sent after tokens, gradients sent home, nothing else hidden

What is explained is static - LAER in these seconds over the same of the shipped steps. A step of evenload is predicted
as LAER's shipped one with its experts and exchanges replaced.

Guessed: that the 16 experts are half as wide (the shipped steps of 24 and 32 layers are as 24 to 32), Qwen's shape is
Mixtral's, one sequence a micro-batch, no recomputation, a backward of two forwards, latencies of 10 and 20 us.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from evenload.api import load_plugins
from evenload.benchmarks.frame import columns
from evenload.benchmarks.published.common import arguments, finish
from evenload.benchmarks.published.expert_loads import Drawn
from evenload.core.aliases import Ints
from evenload.core.experts.quotas import at_home, check_quotas, copies_of, imbalance_of
from evenload.core.experts.seconds import LayerCost, layer_seconds
from evenload.core.machine.cluster import Link
from evenload.core.plan.expert_policy import ExpertPolicy
from evenload.core.registry import layer_planner
from evenload.plugins.moe.baselines.placed import laer_copies

RANKS, TOKENS, MICRO_BATCHES = 8, 8192, 4
ROUTED_S = 6.1e-3 / 4096
"""Of an expert of 4,096 x 14,336 (laer_a100_mixtral_8x7b_compute_ms.json)."""
INTRA, INTER = Link(latency_s=1e-5, bytes_per_s=2.16269e11), Link(latency_s=2e-5, bytes_per_s=8.89539e10)


class Model(NamedTuple):
    """Sizes, and seconds of shipped steps (laer_e2e_analysis_backup.csv), means of two data sets with and without
    a balance loss."""

    name: str
    experts: int
    layers: int
    hidden: int
    ffn: int
    fsdp_s: float
    laer_s: float
    megatron_s: float

    @property
    def topk(self) -> int:
        return self.experts // 4

    @property
    def traced(self) -> tuple[float, float]:
        """Busiest rank over mean in LAER's trace: FSDP + EP, and itself."""
        return (1.66, 1.41) if self.experts == 8 else (1.73, 1.29)


MODELS: Sequence[Model] = (
    Model("mixtral-8x7b-e8k2", 8, 32, 4096, 14336, 36.169, 27.135, 43.672),
    Model("mixtral-8x7b-e16k4", 16, 24, 4096, 7168, 27.640, 19.094, 26.355),
    Model("mixtral-8x22b-e8k2", 8, 18, 6144, 16384, 36.042, 24.378, 40.836),
    Model("mixtral-8x22b-e16k4", 16, 14, 6144, 8192, 27.815, 19.223, 23.254),
    Model("qwen-8x7b-e8k2", 8, 32, 4096, 14336, 36.482, 26.780, 43.705),
    Model("qwen-8x7b-e16k4", 16, 24, 4096, 7168, 27.688, 19.135, 26.517),
)


def cost_of(model: Model) -> LayerCost:
    weights = 3 * model.hidden * model.ffn
    forward_s = ROUTED_S * weights / (3 * 4096 * 14336)
    weight_bytes = 2.0 * weights
    return LayerCost(forward_s, 2 * forward_s, 2.0 * model.hidden, weight_bytes, weight_bytes, INTRA, INTER)


def imbalance_of_ep4(counts: Ints) -> float:
    """FSDP + EP divides experts among 4 ranks: the mean over both halves of a node."""
    halves = counts.reshape(2, 4, -1).sum(axis=1)
    loads = halves.reshape(2, 4, -1).sum(axis=2)
    return float((loads.max(axis=1) / loads.mean(axis=1)).mean())


def by_rules(counts: Ints, policy: ExpertPolicy) -> Ints:
    """Quotas [experts, ranks] of LAER's layout for these loads; it names the experts at home that a rank keeps too."""
    loads, slots = tuple(map(float, counts.sum(axis=0))), policy.slots + counts.shape[1] // RANKS
    copies, policy = laer_copies(loads, RANKS, policy), policy._replace(planner="laer", slots=slots)
    return check_quotas(layer_planner("laer")(counts, policy, copies), counts, policy, copies)


def row_of(model: Model, draws: int) -> dict[str, Any]:
    cost, (static, theirs) = cost_of(model), model.traced
    times = model.layers * MICRO_BATCHES
    policy = ExpertPolicy("clone", model.experts // RANKS)
    even = np.full((RANKS, model.experts), TOKENS * model.topk // model.experts)
    level = layer_seconds(even, at_home(even, policy, ()), cost)
    experts_s, tokens_s = (times * sum(getattr(one, name) for one in level) for name in ("experts", "tokens"))
    ours, theirs_s, imbalance, copies = [], [], [], []
    for counts in Drawn(RANKS, model.experts, model.topk, TOKENS).like(static, imbalance_of_ep4, draws):
        quotas = check_quotas(layer_planner("clone")(counts, policy, ()), counts, policy, ())
        ours.append(times * layer_seconds(counts, quotas, cost).total)
        theirs_s.append(times * layer_seconds(counts, by_rules(counts, policy), cost).total)
        imbalance.append(imbalance_of(quotas))
        copies.append(sum(map(len, copies_of(quotas))))
    seconds = {name: (experts_s + tokens_s) * over for name, over in (("static", static), ("LAER", theirs))}
    seconds |= {"rules": float(np.mean(theirs_s)), "clone": float(np.mean(ours))}
    return {
        "setting": model.name,
        "paper": {"Megatron": model.megatron_s, "static": model.fsdp_s, "LAER": model.laer_s},
        "seconds": seconds,
        "even_s": experts_s + tokens_s,
        "imbalance": {"static": static, "LAER": theirs, "clone": float(np.mean(imbalance))},
        "copies": float(np.mean(copies)),
        "explained": (seconds["static"] - seconds["LAER"]) / (model.fsdp_s - model.laer_s),
        "step_s": model.laer_s - seconds["LAER"] + seconds["clone"],
    }


def table(result: dict[str, Any]) -> Any:
    def listed(row: dict[str, Any], *names: str) -> str:
        return ", ".join(f"{row[name]:.1f}" for name in names) + " s"

    def over(row: dict[str, Any]) -> str:
        return ", ".join(f"{row['paper']['Megatron'] / each:.2f}x" for each in (row["paper"]["LAER"], row["step_s"]))

    parts = ("static", "LAER", "rules", "clone")
    cells = {
        "setting": "{setting}",
        "shipped: Megatron, FSDP + EP, LAER": lambda row: listed(row["paper"], "Megatron", "static", "LAER"),
        "experts and exchanges: static, LAER, its rules, clone": lambda row: listed(row["seconds"], *parts),
        "explained": lambda row: f"{100 * row['explained']:.0f} %",
        "a step with clone": "{step_s:.1f} s",
        "over Megatron: LAER, clone": over,
    }
    notes = [
        f"{r['setting']}: clone {r['imbalance']['clone']:.4f} of the mean, {r['copies']:.1f} copies a layer of a "
        f"node; {r['even_s']:.1f} s if even"
        for r in result["rows"]
    ]
    return columns(f"{result['title']} (predicted, but for shipped steps)", result["rows"], cells, "\n".join(notes))


if __name__ == "__main__":
    asked = arguments(__doc__)
    load_plugins()
    rows = [row_of(model, 2 if asked.quick else 16) for model in MODELS]
    finish({"title": "LAER-MoE: steps on 32 A100", "rows": rows}, asked, table)
