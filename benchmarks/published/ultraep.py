"""UltraEP (arXiv 2606.04101): experts copied after the gate on racks of 64 GPUs; 96.4, 91.1 and 96.1 % of even routing.

    python benchmarks/published/ultraep.py [--quick] [--json] [--out FILE]

Its published layer, forward, with even routing: 1.89 ms of experts, 1.68 ms of all-to-all, 2.83 ms of other. 8,192
tokens a rank make these 1.3 PFLOP/s and 640 GB/s, plausible for racks with NVLink 5; links of that rate carry weights
here too. From it `core.experts.seconds` says what the layer takes under quotas, forward and backward:

    static     every expert at home: Megatron-LM in the paper
    even       all ranks have equally many tokens: its force-balanced ideal
    clone      evenload's exact planner: counts gathered, planned, weights sent, fetched again in backward, float32
               gradients sent home, nothing of it hidden behind compute
    exact      the same at tolerance 1
    ultraep    the baseline of that name on the same costs, where tokens and slots are divided by its rules

Loads are drawn: Zipf over shuffled experts, so steep that the busiest rank is 2.23, 2.86 or 1.30 over the mean, as
published, each rank a Dirichlet sample of them. Between nodes: the same ranks in nodes of 8 with 400 Gbit/s each.

Guessed: tokens a rank; that the layer is Qwen3-235B's, from which the other models' experts scale by hidden x ffn and
the rest by hidden; latencies of 10 and 20 us; a backward of 2 forwards but for all-to-alls; planning at UltraEP's own
0.111 ms. Pipelines, optimizer and gradient sums are left out: they are the same for all.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from common import arguments, finish
from evenload.api import load_plugins
from evenload.commands._shared.show import grid
from evenload.core.aliases import Ints
from evenload.core.experts.quotas import at_home, check_quotas, copies_of, imbalance_of
from evenload.core.experts.seconds import LayerCost, layer_seconds, paying_tokens
from evenload.core.machine.cluster import Link
from evenload.core.plan.expert_policy import ExpertPolicy
from evenload.core.registry import layer_planner

RANKS, TOPK, TOKENS = 64, 8, 8192
EXPERTS_S, ALL_TO_ALL_S, OTHER_S, PLAN_S = 1.89e-3, 1.68e-3, 2.83e-3, 1.11e-4
BACKWARD = 2.0
ROUTED = TOKENS * TOPK
LATENCY_S, NETWORK = 1e-5, Link(latency_s=2e-5, bytes_per_s=5e10)


class Model(NamedTuple):
    """Shape and published figures."""

    name: str
    experts: int
    hidden: int
    ffn: int
    imbalance: float
    megatron: float
    """TFLOP/s a GPU over those of even routing."""
    ultraep: float


MODELS = (
    Model("GLM4.5-106B", 128, 4096, 1408, 2.23, 545 / 785, 757 / 785),
    Model("Qwen3-235B", 128, 4096, 1536, 2.86, 315 / 575, 524 / 575),
    Model("DeepSeek-V3-671B", 256, 7168, 2048, 1.30, 509 / 638, 613 / 638),
)
MEASURED = MODELS[1]
"""The model of the published layer."""


@dataclass(frozen=True)
class Setting:
    """A model on links."""

    model: Model
    node_ranks: int = 0
    draws: int = 4

    @property
    def cost(self) -> LayerCost:
        """Of a layer in bfloat16, by the published one."""
        hidden, ffn = self.model.hidden, self.model.ffn
        experts_s = EXPERTS_S * hidden * ffn / (MEASURED.hidden * MEASURED.ffn)
        rate = 2 * ROUTED * (RANKS - 1) / RANKS * 2 * MEASURED.hidden / (ALL_TO_ALL_S - 2 * LATENCY_S)
        weight_bytes = 2.0 * 3 * hidden * ffn
        return LayerCost(
            forward_s=experts_s / ROUTED,
            backward_s=BACKWARD * experts_s / ROUTED,
            token_bytes=2.0 * hidden,
            weight_bytes=weight_bytes,
            gradient_bytes=2 * weight_bytes,
            intra=Link(latency_s=LATENCY_S, bytes_per_s=rate),
            inter=NETWORK,
            node_ranks=self.node_ranks,
            plan_s=PLAN_S,
            keep=False,
        )

    @property
    def other_s(self) -> float:
        """Beside experts and exchanges, forward and backward."""
        return (1 + BACKWARD) * OTHER_S * self.model.hidden / MEASURED.hidden

    def policies(self) -> dict[str, ExpertPolicy]:
        least = int(paying_tokens(self.cost))
        own = self.model.experts // RANKS
        clone = ExpertPolicy("clone", own, min(1.01, 1 + least / ROUTED), least, self.node_ranks)
        return {"clone": clone, "exact": clone._replace(tolerance=1.0, least_tokens=0)}


def counts_of(experts: int, steepness: float, seed: int) -> Ints:
    """Tokens of each rank for each expert [R, E]: an expert takes at most every token of a rank."""
    rng = np.random.default_rng(seed)
    share = np.arange(1, experts + 1) ** -steepness
    share = np.minimum(share / share.sum(), 1 / TOPK)
    share = rng.permutation(share / share.sum())
    return np.stack([rng.multinomial(ROUTED, rng.dirichlet(200 * share)) for _ in range(RANKS)])


def drawn(model: Model, count: int) -> list[Ints]:
    """Loads whose busiest rank is over the mean as published, by bisection of the steepness."""
    low, high = 0.0, 1.5
    for _ in range(30):
        middle = (low + high) / 2
        loads = [counts_of(model.experts, middle, seed) for seed in range(count)]
        reached = float(np.mean([imbalance_of(at_home(each, ExpertPolicy(), ())) for each in loads]))
        low, high = (middle, high) if reached < model.imbalance else (low, middle)
    return loads


def even_of(model: Model) -> Ints:
    """All ranks have equally many tokens for all experts."""
    return np.full((RANKS, model.experts), ROUTED // model.experts)


def layer_of(setting: Setting, counts: Ints, quotas: Ints, *, plans: bool) -> dict[str, float]:
    """Milliseconds of a layer by part, and the whole of it; nothing is gathered or planned where nothing is decided."""
    cost = setting.cost
    forward, backward = layer_seconds(counts, quotas, cost)
    parts = {name: getattr(forward, name) + getattr(backward, name) for name in forward._fields}
    parts["counts"] *= plans
    return {name: 1e3 * seconds for name, seconds in (parts | {"layer": sum(parts.values()) + setting.other_s}).items()}


def row_of(setting: Setting) -> dict[str, Any]:
    model = setting.model
    even = layer_of(setting, even_of(model), at_home(even_of(model), ExpertPolicy(), ()), plans=False)
    rows: dict[str, list[dict[str, float]]] = {}
    for counts in drawn(model, setting.draws):
        for name, policy in {"static": ExpertPolicy(), **setting.policies()}.items():
            planner = layer_planner(policy.planner)
            quotas = check_quotas(planner(counts, policy, ()), counts, policy, ())
            layer = layer_of(setting, counts, quotas, plans=name != "static")
            copies = copies_of(quotas)
            layer |= {"imbalance": imbalance_of(quotas), "num_copies": sum(map(len, copies))}
            rows.setdefault(name, []).append(layer | {"slots": max(map(len, copies))})
    columns = {name: {key: float(np.mean([one[key] for one in of])) for key in of[0]} for name, of in rows.items()}
    return {
        "setting": f"{model.name}, " + (f"nodes of {setting.node_ranks}" if setting.node_ranks else "one rack"),
        "paper": {"static": model.megatron, "ultraep": model.ultraep} if not setting.node_ranks else {},
        "even": even,
        "columns": columns,
        "share": {name: even["layer"] / one["layer"] for name, one in columns.items()},
        "least_tokens": paying_tokens(setting.cost),
    }


def table(result: dict[str, Any]) -> Any:
    head = ("setting", "even", "static", "paper", "clone", "exact", "UltraEP's paper", "parts of clone over even")
    rows = []
    for r in result["rows"]:
        clone, even = r["columns"]["clone"], r["even"]
        more = ", ".join(
            f"{name} {clone[name] - even[name]:+.2f}" for name in ("counts", "tokens", "experts", "copies", "gradients")
        )
        of_paper = [f"{100 * r['paper'][name]:.1f} %" if r["paper"] else "" for name in ("static", "ultraep")]
        static, *ours = (f"{100 * r['share'][name]:.1f} %" for name in ("static", "clone", "exact"))
        rows.append((r["setting"], f"{even['layer']:.1f} ms", static, of_paper[0], *ours, of_paper[1], f"{more} ms"))
    notes = []
    for r in result["rows"]:
        notes.append(f"{r['setting']}: a copy pays from {r['least_tokens']:.0f} tokens up")
        for name, one in r["columns"].items():
            copied = f"{one['num_copies']:.0f} copies, {one['slots']:.1f} on a rank"
            notes.append(f"    {name}: busiest rank {one['imbalance']:.4f} of the mean, {copied}")
    return grid(f"{result['title']} (predicted)", head, rows, "\n".join(notes))


def settings() -> Iterator[Setting]:
    for node_ranks in (0, 8):
        yield from (Setting(model, node_ranks) for model in MODELS)


def main() -> None:
    options = arguments(__doc__)
    load_plugins()
    chosen = [Setting(MEASURED, draws=1), Setting(MEASURED, 8, draws=1)] if options.quick else list(settings())
    title = "UltraEP: a layer forward and backward, share of even routing"
    finish({"predicted": True, "title": title, "rows": [row_of(one) for one in chosen]}, options, table)


if __name__ == "__main__":
    main()
