"""UltraEP (arXiv 2606.04101): experts copied after the gate on racks of 64 GPUs; 96.4, 91.1 and 96.1 % of even routing.

    python benchmarks/published/ultraep.py [--quick] [--json] [--out FILE]

Its published layer, forward, with even routing: 1.89 ms of experts, 1.68 ms of all-to-all, 2.83 ms of other. 8,192
tokens a rank make these 1.3 PFLOP/s and 640 GB/s, plausible for racks with NVLink 5; links of that rate carry weights
here too. From it `core.experts.seconds` says what the layer takes under quotas, forward and backward:

    static     every expert at home: Megatron-LM in the paper
    even       all ranks have equally many tokens: its force-balanced ideal
    clone      evenload's exact planner: counts gathered, planned, weights sent after tokens and kept until backward,
               gradients sent home in the type that is trained, as evenload's runtime does; hidden is nothing
    again      the same with weights fetched again in backward and gradients in float32, as UltraEP has them; its own
               gradients travel alongside other work

Loads are drawn: Zipf over shuffled experts, so steep that the busiest rank is 2.23, 2.86 or 1.30 over the mean, as
published, each rank a Dirichlet sample of them. Between nodes: the same ranks in nodes of 8 with 400 Gbit/s each.

Guessed: tokens a rank; that the layer is Qwen3-235B's, from which the other models' experts scale by hidden x ffn and
the rest by hidden; latencies of 10 and 20 us; a backward of 2 forwards but for all-to-alls; planning at UltraEP's own
0.111 ms. Pipelines, optimizer and gradient sums are left out: they are the same for all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from evenload.api import load_plugins
from evenload.benchmarks.frame import columns
from evenload.benchmarks.published.common import arguments, finish
from evenload.benchmarks.published.expert_loads import Drawn
from evenload.core.aliases import Ints
from evenload.core.experts.quotas import at_home, check_quotas, copies_of, imbalance_of
from evenload.core.experts.seconds import LayerCost, copy_tokens, layer_seconds, paying_tokens
from evenload.core.input.format import percent
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
    draws: int = 1

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
            gradient_bytes=weight_bytes,
            intra=Link(latency_s=LATENCY_S, bytes_per_s=rate),
            inter=NETWORK,
            node_ranks=self.node_ranks,
            plan_s=PLAN_S,
        )

    @property
    def other_s(self) -> float:
        """Besides experts and exchanges, forward and backward."""
        return (1 + BACKWARD) * OTHER_S * self.model.hidden / MEASURED.hidden

    @property
    def policy(self) -> ExpertPolicy:
        least, own = int(paying_tokens(self.cost)), self.model.experts // RANKS
        tokens = round(copy_tokens(self.cost)) if self.node_ranks else 0
        return ExpertPolicy("clone", own, 1.0, least, self.node_ranks, copy_tokens=tokens)


def at_homes(counts: Ints) -> Ints:
    return at_home(counts, ExpertPolicy(), ())


def even_of(model: Model) -> Ints:
    """All ranks have equally many tokens for all experts."""
    return np.full((RANKS, model.experts), ROUTED // model.experts)


def layer_of(setting: Setting, counts: Ints, quotas: Ints, cost: LayerCost) -> dict[str, float]:
    """Milliseconds of a layer by part, both passes, and the whole of it."""
    forward, backward = layer_seconds(counts, quotas, cost)
    parts = {name: getattr(forward, name) + getattr(backward, name) for name in forward._fields}
    return {name: 1e3 * seconds for name, seconds in (parts | {"layer": sum(parts.values()) + setting.other_s}).items()}


def row_of(setting: Setting) -> dict[str, Any]:
    model, kept = setting.model, setting.cost
    again = kept._replace(keep=False, gradient_bytes=2 * kept.gradient_bytes)
    free = kept._replace(plan_s=0.0)
    even = layer_of(setting, even_of(model), at_homes(even_of(model)), free)
    even["layer"] -= even.pop("counts")
    rows: dict[str, list[dict[str, float]]] = {}
    drawn = Drawn(RANKS, model.experts, TOPK, TOKENS)
    for counts in drawn.like(model.imbalance, lambda each: imbalance_of(at_homes(each)), setting.draws):
        quotas = check_quotas(layer_planner("clone")(counts, setting.policy, ()), counts, setting.policy, ())
        for name, cost, of in (("static", free, at_homes(counts)), ("clone", kept, quotas), ("again", again, quotas)):
            layer = layer_of(setting, counts, of, cost)
            copies = [len(experts) for experts in copies_of(of)]
            layer |= {"imbalance": imbalance_of(of), "num_copies": sum(copies), "slots": max(copies)}
            rows.setdefault(name, []).append(layer)
    columns = {name: {key: float(np.mean([one[key] for one in of])) for key in of[0]} for name, of in rows.items()}
    return {
        "setting": f"{model.name}, " + (f"nodes of {setting.node_ranks}" if setting.node_ranks else "one rack"),
        "paper": {"static": model.megatron, "ultraep": model.ultraep} if not setting.node_ranks else {},
        "even": even,
        "columns": columns,
        "share": {name: even["layer"] / one["layer"] for name, one in columns.items()},
        "least_tokens": setting.policy.least_tokens,
    }


def table(result: dict[str, Any]) -> Any:
    def beyond_even(row: dict[str, Any]) -> str:
        clone, even = row["columns"]["clone"], row["even"]
        parts = (f"{name} {clone[name] - even[name]:.2f}" for name in ("tokens", "experts", "copies", "gradients"))
        return ", ".join([f"counts {clone['counts']:.2f}", *parts]) + " ms"

    def of_paper(name: str) -> Any:
        return lambda row: percent(row["paper"][name]) if row["paper"] else "-"

    cells = {
        "setting": "{setting}",
        "even": "{even[layer]:.1f} ms",
        "static": "{share[static]:percent}",
        "paper": of_paper("static"),
        "clone": "{share[clone]:percent}",
        "again": "{share[again]:percent}",
        "UltraEP's paper": of_paper("ultraep"),
        "clone beyond even": beyond_even,
    }
    notes = []
    for r in result["rows"]:
        clone = r["columns"]["clone"]
        copied = f"{clone['num_copies']:.0f} copies, {clone['slots']:.1f} on a rank at most"
        busiest = f"busiest rank {r['columns']['static']['imbalance']:.2f}, {clone['imbalance']:.4f} of the mean"
        notes.append(f"{r['setting']}: {busiest}; {copied}; they pay from {r['least_tokens']} tokens up")
    return columns(f"{result['title']} (predicted)", result["rows"], cells, "\n".join(notes))


if __name__ == "__main__":
    asked = arguments(__doc__)
    load_plugins()
    draws = 1 if asked.quick else 8
    rows = [row_of(Setting(model, node_ranks, draws)) for node_ranks in (0, 8) for model in MODELS]
    finish({"title": "UltraEP: a layer forward and backward, share of even routing", "rows": rows}, asked, table)
