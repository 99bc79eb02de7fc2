"""Planners of layers next to other people's: how even experts get, with how many copies, in what time.

    python benchmarks/experts/moe.py [--loads FILE | --record FILE] [--slots 1] [--draws 12] [--only zipf] [--json]

Cases: loads whose popularity falls as a power (zipf), the workloads W0 to W7 of Megatron-LM's pull request 7488, and
with ``--loads`` those that `evenload train RECIPE log.loads=FILE` recorded, regrouped for 2, 4 and 8 ranks.
``--record`` trains recipes/moe.yaml for 24 steps to record such a file first.

Planners that read a layer's counts see those that they are judged by. Those that choose copies from loads see these
sums ("now"), which no run can know, and the sums of the step before ("late"). All have the same slots; EPLB and
LAER-MoE may place any expert anywhere in as many places as experts at home and slots. Every answer is held to the laws
of quotas. Least copies are certified: no division has fewer. Milliseconds are measured on this machine, the least of
several runs; baselines are Python after their descriptions and say nothing about their authors' kernels.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from evenload.api import load_plugins
from evenload.benchmarks.frame import columns, command, main, options
from evenload.core.aliases import Floats, Ints
from evenload.core.experts.exact import most_tokens
from evenload.core.experts.quotas import check_quotas, copies_of, imbalance_of
from evenload.core.plan.expert_policy import ExpertPolicy, LayerCopies
from evenload.core.registry import layer_planner
from evenload.data.expert_loads import read_loads
from evenload.plugins.moe.baselines.placed import eplb_copies, laer_copies
from evenload.plugins.moe.history import choose_copies

TOPK = 8
SIZES = ((64, 128), (256, 256))
WORKLOADS = (
    *("W0 balanced", "W1 hot experts", "W2 hot rank", "W3 same heat spread", "W4 ragged sources"),
    *("W5 idle experts and ranks", "W6 rotating hot spot", "W7 burst"),
)
HEAT = 16
"""How much more popular a hot expert is."""
MOST_LAYERS = 100
"""Of a recorded run."""


class Case(NamedTuple):
    """Counts [R, E] of layers, and loads [E] of the same layers one step before."""

    name: str
    pairs: list[tuple[Ints, Ints]]


class Contender(NamedTuple):
    """A planner of layers with its policy, and how it chooses copies from loads, if it does."""

    name: str
    planner: str
    policy: ExpertPolicy
    choose: Callable[[Sequence[float], int, ExpertPolicy], LayerCopies] | None = None


def zipf_shares(rng: np.random.Generator, exponent: float, num_experts: int) -> Floats:
    """Popularity of experts, in drawn order; none may have more tokens than there are."""
    shares_E = np.arange(1, num_experts + 1) ** -exponent
    for _ in range(50):
        shares_E = np.minimum(shares_E / shares_E.sum(), 1 / TOPK)
    return rng.permutation(shares_E / shares_E.sum())


def zipf_counts(rng: np.random.Generator, shares_E: Floats, num_ranks: int, tokens: int = 8192) -> Ints:
    """Counts [R, E]: each rank draws its own popularity around the common one."""
    return np.stack([rng.multinomial(tokens * TOPK, rng.dirichlet(200 * shares_E + 1e-9)) for _ in range(num_ranks)])


def zipf_cases(draws: int) -> Iterator[Case]:
    """One step later a tenth of the popularity has moved to other experts."""
    for num_ranks, num_experts in SIZES:
        for exponent in (0.3, 0.6, 0.9, 1.2):
            rng = np.random.default_rng(17)
            pairs = []
            for _ in range(draws if num_ranks < 100 else max(1, draws // 3)):
                before_E = zipf_shares(rng, exponent, num_experts)
                now_E = 0.9 * before_E + 0.1 * rng.permutation(before_E)
                loads_E = zipf_counts(rng, before_E, num_ranks).sum(axis=0)
                pairs.append((zipf_counts(rng, now_E, num_ranks), loads_E))
            yield Case(f"zipf {exponent}, {num_ranks} x {num_experts}", pairs)


def workload_counts(number: int, seed: int, step: int, num_ranks: int = 64, num_experts: int = 128) -> Ints:
    """Counts [R, E] of a workload, from its number, a seed and the step alone; a token meets topk distinct experts."""
    fixed, rng = np.random.default_rng((number, seed)), np.random.default_rng((number, seed, step))
    own, heat_E, tokens_R = num_experts // num_ranks, np.ones(num_experts), np.full(num_ranks, 1024)
    hot_rank = int(fixed.integers(num_ranks))
    if number == 1:
        heat_E[fixed.permutation(num_experts)[: max(1, num_experts // 32)]] = HEAT
    elif number == 3:
        heat_E[fixed.permutation(num_ranks)[:own] * own] = HEAT
    elif number == 4:
        tokens_R = rng.integers(1024 // 4, 7 * 1024 // 4, num_ranks)
    elif number == 5:
        heat_E[fixed.random(num_experts) < 0.25] = 0
        heat_E[np.repeat(fixed.random(num_ranks) < 0.25, own)] = 0
        tokens_R[fixed.random(num_ranks) < 0.125] = 0
    elif number in (2, 6) or (number == 7 and step % 4 == 3):
        rank = (hot_rank + step) % num_ranks if number == 6 else hot_rank
        heat_E[rank * own : rank * own + own] = HEAT
    counts_RE = np.zeros((num_ranks, num_experts), dtype=np.int64)
    with np.errstate(divide="ignore"):
        log_heat_E = np.log(heat_E)
    for rank, tokens in enumerate(tokens_R.tolist()):
        keys = log_heat_E + rng.gumbel(size=(tokens, num_experts))
        chosen = np.argpartition(-keys, TOPK - 1, axis=1)[:, :TOPK]
        counts_RE[rank] = np.bincount(chosen.ravel(), minlength=num_experts)
    return counts_RE


def workload_cases(draws: int) -> Iterator[Case]:
    """Steps of each workload one after the other, four at least, so that a burst is among them."""
    for number, name in enumerate(WORKLOADS):
        steps = [workload_counts(number, 17, step) for step in range(max(draws, 4) + 1)]
        yield Case(name, [(now, before.sum(axis=0)) for before, now in pairwise(steps)])


def recorded_cases(path: Path) -> Iterator[Case]:
    """Layers of groups of a recorded run from its second step on, evenly spaced where there are many."""
    loads = read_loads(path)
    for ep in (2, 4, 8):
        groups = list(loads.in_groups(ep).values())
        pairs = []
        for before, now in pairwise(groups):
            before_LE = before.sum(axis=(0, 2))
            pairs += [(counts_RE, before_LE[layer]) for group in now for layer, counts_RE in enumerate(group)]
        yield Case(f"recorded, EP {ep}", pairs[:: -(-len(pairs) // MOST_LAYERS)])


def contenders(slots: int, num_ranks: int, own: int) -> list[Contender]:
    """evenload's planners, then the others. LAER-MoE alone asks for nodes: they have 8 ranks."""
    few, placed = ExpertPolicy("clone", slots), ExpertPolicy("placed", slots)
    in_nodes = placed._replace(node_ranks=8 if num_ranks > 8 else 0)
    return [
        Contender("clone", "clone", ExpertPolicy("clone", own)),
        Contender(f"clone, {slots} a rank", "clone", few),
        Contender(f"clone, {slots} a rank, 1 %", "clone", few._replace(tolerance=1.01)),
        Contender("reroute", "reroute", few, choose_copies),
        Contender("layout", "layout", few, choose_copies),
        Contender("static", "static", few),
        Contender("eplb", "eplb", placed, eplb_copies),
        Contender("laer", "laer", in_nodes, laer_copies),
        Contender("lp", "lp", placed, eplb_copies),
        Contender("ultraep", "ultraep", few),
        Contender("moonep", "moonep", few),
    ]


def least_copies(counts_RE: Ints, tolerance: float) -> int:
    """Copies that no division does without: ranks whose room holds what others have too much, or the copies that
    experts above a share need."""
    loads_E, num_ranks = counts_RE.sum(axis=0), len(counts_RE)
    share = int(most_tokens(loads_E.sum(), num_ranks, ExpertPolicy("any", tolerance=tolerance)))
    over_R = loads_E.reshape(num_ranks, -1).sum(axis=1) - share
    excess, space = over_R[over_R > 0].sum(), np.sort(np.maximum(-over_R, 0))[::-1].cumsum()
    by_room = int(np.searchsorted(space, excess)) + 1 if excess else 0
    return max(by_room, int(np.maximum(-(-loads_E // max(share, 1)) - 1, 0).sum()))


def timed(plan: Callable[[], Ints], repeats: int) -> tuple[Ints, float]:
    """Quotas, and the least of so many runs [ms]; of three where they take long."""
    taken: list[float] = []
    while len(taken) < repeats and (len(taken) < 3 or min(taken) < 5):
        start = time.perf_counter()
        quotas_ER = plan()
        taken.append(1e3 * (time.perf_counter() - start))
    return quotas_ER, min(taken)


def judged(contender: Contender, counts_RE: Ints, loads_E: Ints, repeats: int) -> tuple[float, ...]:
    """Busiest over mean rank, copies, most slots, most copies sent by a rank, milliseconds."""
    num_ranks, num_experts = counts_RE.shape
    policy, copies, own = contender.policy, (), num_experts // num_ranks
    if contender.choose:
        copies = contender.choose(loads_E.tolist(), num_ranks, policy)
        if policy.planner == "placed":
            policy = policy._replace(slots=policy.slots + own)
    planner = layer_planner(contender.planner)
    quotas_ER, plan_ms = timed(lambda: planner(counts_RE, policy, copies), repeats)
    away = copies_of(check_quotas(quotas_ER, counts_RE, policy, copies))
    sends = np.bincount([expert // own for experts in away for expert in experts], minlength=1)
    return imbalance_of(quotas_ER), sum(map(len, away)), max(map(len, away)), int(sends.max()), plan_ms


def rows_of(case: Case, slots: int, repeats: int = 1) -> Iterator[dict[str, Any]]:
    """A row a planner, and one more where copies come from the loads of the step before."""
    num_ranks, num_experts = case.pairs[0][0].shape
    for contender in contenders(slots, num_ranks, num_experts // num_ranks):
        for when in ("now", "late") if contender.choose else ("",):
            loads = [before_E if when == "late" else counts_RE.sum(axis=0) for counts_RE, before_E in case.pairs]
            layers = [(counts_RE, of) for (counts_RE, _), of in zip(case.pairs, loads, strict=True)]
            judgements = np.array([judged(contender, counts_RE, of, repeats) for counts_RE, of in layers])
            ratios, copies, most_slots, sends, plan_ms = judgements.T
            yield {
                "case": case.name,
                "planner": f"{contender.name}, {when}" if when else contender.name,
                "layers": len(case.pairs),
                "ratio": float(ratios.mean()),
                "worst_ratio": float(ratios.max()),
                "copies": float(copies.mean()),
                "least_copies": float(np.mean([least_copies(c, contender.policy.tolerance) for c, _ in case.pairs])),
                "slots": int(most_slots.max()),
                "sends": float(sends.mean()),
                "plan_ms": float(np.median(plan_ms)),
            }


def table(result: dict[str, Any]) -> Any:
    cells = {
        "loads": "{case}",
        "planner": "{planner}",
        "busiest/mean": "{ratio:.5f}",
        "worst": "{worst_ratio:.4f}",
        "copies": "{copies:.1f}",
        "at least": "{least_copies:.1f}",
        "slots": "{slots}",
        "sends": "{sends:.1f}",
        "ms": "{plan_ms:.3f}",
    }
    caption = f"slots {result['slots']}; ms measured, the least of several runs"
    return columns("planners of layers", result["rows"], cells, caption)


def benchmark(asked: Any) -> dict[str, Any]:
    load_plugins()
    path = asked.record or asked.loads
    if asked.record:
        command("train", "moe", f"log.loads={path.resolve()}", "train.steps=24")
    cases = [*zipf_cases(asked.draws), *workload_cases(asked.draws), *(recorded_cases(path) if path else ())]
    chosen = [case for case in cases if case.name.startswith(asked.only)]
    rows = [row for case in chosen for row in rows_of(case, asked.slots, asked.repeats)]
    return {"slots": asked.slots, "draws": asked.draws, "rows": rows}


if __name__ == "__main__":
    main(options(__doc__, loads=Path, record=Path, slots=1, draws=12, repeats=7, only=""), benchmark, table)
