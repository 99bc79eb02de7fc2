"""Which branches of the runtime a step takes, by name: what a proof on some batch has proved, and what it has not.

A plan shows most of them (`branches_of`); what a trainer decides beyond the plan it adds itself
(`StepResult.branches`). A plugin says which its settings open (`Needs.branches`).
"""

from __future__ import annotations

from collections.abc import Callable

from .order import one_forward_one_backward, orders_of_stage
from .step_plan import MicroBatch, StepPlan

PACKED = "several sequences in a micro-batch"
CUT = "cut sequences"
TRUNKS = "trunks computed once"
REPLAYED = "replayed forwards"
REGROUPED = "regrouped backward"
RECOMPUTED = "recomputed layers"
WEIGHT_PASSES = "weight gradients as passes"
OFFLOADED = "activations in host memory"
SEVERAL_GROUPS = "sequences on different ranks of a micro-batch"
REMAPPED = "remapped tokens"
ROUTED = "routed transfers"
IDLE_RANKS = "idle ranks"
RANKS_WITHOUT_PASS = "ranks without any pass"
UNEQUAL_COUNTS = "unequal numbers of micro-batches"
DUMMIES = "dummies"
PADDED = "padding"
OWN_ORDER = "an order of the plan's own"
COPIED = "copies of experts"
ONCE_A_NODE = "tokens once to a node"

REARRANGED = "micro-batches other than the trainer's own"
REORDERED = "order other than 1F1B"
SHARED = "shared micro-batches"
OF_TENANTS = "sequences of tenants"
"""These four are no branches of a proof, but signs that a plugin did something (`Shown.by`)."""

SUM_AFTER_PASSES = "gradient sum after the passes"
SUM_IN_LAST_BACKWARD = "gradient sum during the last backward"


def sharing(cp_comm: str) -> str:
    """The branch of micro-batches whose ranks share attention in this way."""
    return f"attention shared by {cp_comm or 'static context parallelism'}"


def branches_of(plan: StepPlan) -> dict[str, int]:
    """How often a plan takes each branch: micro-batches, sequences, ranks, layers, whichever is counted there."""
    counts = {name: count(plan) for name, count in _COUNTS.items()}
    for m in (*plan.micro_batches, *plan.backward):
        if len(m.ranks) > 1:
            name = sharing(m.cp_comm)
            counts[name] = counts.get(name, 0) + 1
    return {name: count for name, count in counts.items() if count}


def signs_of(plan: StepPlan, stock: StepPlan) -> set[str]:
    """What a plan shows that the trainer's own plan of the same batch does not."""
    own, theirs = ({m[:3] for m in each.micro_batches if m.slices} for each in (plan, stock))
    signs = {
        REARRANGED: own != theirs,
        REORDERED: bool(plan.order) and any(_is_reordered(plan, stage) for stage in range(plan.limits.num_stages)),
        SHARED: plan.shared and not stock.shared,
        OF_TENANTS: len(plan.tenants),
    }
    return {name for name, shown in signs.items() if shown} | branches_of(plan).keys()


def _is_reordered(plan: StepPlan, stage: int) -> bool:
    ahead, ranks = plan.limits.num_stages - 1 - stage, enumerate(orders_of_stage(plan, stage))
    return any(ops != one_forward_one_backward(plan.of_rank(rank), ahead) for rank, ops in ranks)


def _micro_batches(holds: Callable[[MicroBatch], object]) -> Callable[[StepPlan], int]:
    return lambda plan: sum(bool(holds(m)) for m in (*plan.micro_batches, *plan.backward))


_COUNTS: dict[str, Callable[[StepPlan], int]] = {
    PACKED: _micro_batches(lambda m: len({s.sequence for s in m.slices}) > 1),
    CUT: lambda plan: len(plan.cut),
    TRUNKS: lambda plan: int((plan.trunks > 0).sum()),
    REPLAYED: lambda plan: len(plan.replayed),
    REGROUPED: lambda plan: len(plan.backward),
    RECOMPUTED: lambda plan: sum(map(sum, plan.recompute)),
    WEIGHT_PASSES: lambda plan: sum(map(len, plan.split)),
    OFFLOADED: lambda plan: sum(share > 0 for share in plan.offload),
    SEVERAL_GROUPS: _micro_batches(lambda m: len(set(m.cp_groups)) > 1),
    REMAPPED: _micro_batches(lambda m: m.remap),
    ROUTED: _micro_batches(lambda m: m.routed),
    IDLE_RANKS: lambda plan: plan.limits.num_ranks - len({r for m in plan.micro_batches if m.slices for r in m.ranks}),
    RANKS_WITHOUT_PASS: lambda plan: sum(not plan.of_rank(rank) for rank in range(plan.limits.num_ranks)),
    UNEQUAL_COUNTS: lambda plan: len({len(plan.of_rank(rank)) for rank in range(plan.limits.num_ranks)}) - 1,
    DUMMIES: _micro_batches(lambda m: not m.slices),
    PADDED: lambda plan: plan.num_padded_tokens - plan.num_tokens,
    OWN_ORDER: lambda plan: len(plan.order),
    ONCE_A_NODE: lambda plan: plan.experts.once_topk,
}
"""PADDED counts tokens, dummies' included."""
