"""In which order the ranks of a stage run their passes: the plan's own order, or the host's schedule."""

from __future__ import annotations

from collections.abc import Sequence as Row

from .workload import Op, StepPlan


def orders_of_stage(plan: StepPlan, stage: int) -> list[list[Op]]:
    """The passes of every plane rank at a stage: ``result[rank]``."""
    if not plan.order:
        ahead = plan.limits.num_stages - 1 - stage
        return [one_forward_one_backward(plan.of_rank(rank), ahead) for rank in range(plan.limits.num_ranks)]
    lists: list[list[Op]] = [[] for _ in range(plan.limits.num_ranks)]
    ranks = {kind: [m.ranks for m in plan.passes(kind)] for kind in ("F", "B")}
    for op in plan.order[stage]:
        for rank in ranks[op.kind][op.micro_batch]:
            lists[rank].append(op)
    return lists


def one_forward_one_backward(micro_batches: Row[int], ahead: int) -> list[Op]:
    """1F1B (Narayanan et al., arXiv 1806.03377): ``ahead`` forwards first, backwards in the order of the forwards."""
    return staggered(micro_batches, micro_batches, ahead)


def staggered(forward: Row[int], backward: Row[int], ahead: int) -> list[Op]:
    """Forwards ``ahead`` of backwards, then one of each in turn; the two orders may differ and have any lengths.

    The k-th backward follows forward number k + ahead (or the last one).
    """
    out: list[Op] = []
    done = 0
    for place, index in enumerate(backward):
        wanted = min(len(forward), place + ahead + 1)
        out += [Op("F", i) for i in forward[done:wanted]]
        done = max(done, wanted)
        out.append(Op("B", index))
    return out + [Op("F", i) for i in forward[done:]]
