"""The critical path of a step with experts: what it would take where no rank waits for a core, only for other ranks.

Ranks that divide experts meet in every layer. Between two meetings a layer waits for its busiest rank, so that a rank
which is busy in one layer and idle in the next is no help to another that is the other way round: summed over a step
both look even. The path is the sum over all stretches between meetings of the busiest rank's seconds of compute. Every
second stretch lies inside a layer with experts: with the mean rank's seconds there, it is the path that quotas can
reach; with the mean's everywhere it is even. Where ranks share cores, as four do on two, the wall clock hides the
waiting, and the path does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ...core.aliases import Floats
from ...integrations.host.trained import StepResult
from ...runtime.world.agreement import everyone
from ..job import Job

Group = tuple[int, int]
"""Its stage, and its place there."""


class Path(NamedTuple):
    """Seconds of one step, of the group of ranks that takes longest."""

    critical_s: float
    evened_experts_s: float
    evened_s: float


def critical_path(job: Job, result: StepResult) -> Path | None:
    """The critical path of a step that has run. Collective; None where ranks do not divide experts, or their seconds
    are not told."""
    ep = job.host.layout.ep
    rows = everyone(((job.host.pipeline_stage, job.host.dp_cp_rank // ep), result.stretches_s))
    return longest(rows) if ep > 1 and rows[0][1] else None


def longest(rows: Sequence[tuple[Group, Sequence[float]]]) -> Path:
    """The longest path of the groups of ranks, from what each rank has taken: its group and its stretches [s], which
    correspond."""
    groups: dict[Group, list[Sequence[float]]] = {}
    for group, stretches_s in rows:
        groups.setdefault(group, []).append(stretches_s)
    return max(_path(np.array(of_ranks)) for of_ranks in groups.values())


def _path(seconds: Floats) -> Path:
    busiest, mean = seconds.max(axis=0), seconds.mean(axis=0)
    evened_experts_s = float(busiest[::2].sum() + mean[1::2].sum())
    return Path(float(busiest.sum()), evened_experts_s, float(mean.sum()))
