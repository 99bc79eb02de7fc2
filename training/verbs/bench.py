"""evenload against baselines, alternating on the same batches in one run of one model (`measuring`).

It adds to `measuring.compare` the ``quartiles`` of the steps' ratios and a baseline's ceiling: its own
measured imbalance, busiest rank over mean with steps summed, which is what balance alone can gain. ``of_ceiling``
compares it with ``of_totals``, which weighs steps alike.

Next to each measured step stands what `core.simulate.step` predicts for its plan with the recipe's costs:
``predicted_s`` and ``measured_s``, without the time a step waited for its plan. Experts that ranks divide are taken to
be as unevenly busy as in the variant's steps before. Where other programs use the cores, ``busiest_error`` still says
how good the costs are: compute of the busiest rank, predicted against measured.

``bubble_frac`` is what ranks and stages wait (`bubbles`), from the spans of the timed steps themselves: recording them
costs about 1 us a pass on a CPU. ``peak_activation_bytes`` is what the passes of a step hold at once above the level
before it, on the rank of the most, and by stage. It is of one more step each, of the batch of which most is predicted,
not timed, as counting slows it. Gradients that the trainer makes anew in every step are part of it, the update's own
needs are not.

Where ranks divide experts, ``critical_path`` has the seconds of every variant's (`experts.critical_path`), and a
baseline what even experts would allow: ``allowed``, and ``of_allowed`` what of that was reached.

``repeats`` trains every batch so many times with each variant, in turn; of every number the median of the runs counts.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

import numpy as np

from ...core.aliases import Floats
from ...core.costs.context import PlanningContext
from ...core.costs.memory import peaks_of_stage
from ...core.planning.planner import Planned
from ...core.recipe.recipe import Recipe
from ...core.simulate.step import simulate
from ...integrations.host.host import UPDATE
from ...runtime.measure.memory import Levels
from ..expert_loads import imbalance_of
from ..experts.critical_path import Path, critical_path
from ..job import Job, run_rank
from ..learning import LoadHistory
from ..measuring import OURS, BaselinePlanner, compare, in_turn, learning_rate, measure_step
from ..metrics import MeasuredStep
from ..pipelines import bubbles_of
from ..progress import Progress, silent

WARMUP_STEPS = 1


@dataclass
class Measured:
    """One variant's numbers, a list entry a step."""

    step_s: list[float] = field(default_factory=list)
    busy: list[Floats] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    padding_frac: list[float] = field(default_factory=list)
    plan_wait_s: list[float] = field(default_factory=list)
    predicted_s: list[float] = field(default_factory=list)
    predicted_busiest_s: list[float] = field(default_factory=list)
    bubbles: list[float] = field(default_factory=list)
    predicted_bubbles: list[float] = field(default_factory=list)
    peak_bytes: list[float] = field(default_factory=list)
    """Of each stage's rank of the most; of one step."""
    predicted_peak_bytes: list[float] = field(default_factory=list)
    digests: list[bytes] = field(default_factory=list)
    """Of its plans."""
    expert_imbalance: list[float] = field(default_factory=list)
    """Of divided experts (`expert_loads.imbalance_of`)."""
    paths: list[Path] = field(default_factory=list)
    """Where ranks divide experts."""
    loss: float = 0.0

    @property
    def imbalance(self) -> float:
        """Busiest over mean rank: seconds summed over steps, so that long steps count for more."""
        return self.busiest_s / float(np.mean(self.busy, axis=1).sum())

    @property
    def busiest_s(self) -> float:
        """Seconds of each step's busiest rank, summed: the time of compute where every rank has cores of its own."""
        return float(np.max(self.busy, axis=1).sum())

    def knowing(self, context: PlanningContext) -> PlanningContext:
        """The context of a step to come: its experts are as unevenly busy as those of the steps so far, on average."""
        known = float(np.mean(self.expert_imbalance or [1.0]))
        return replace(context, costs=context.costs.model_copy(update={"expert_imbalance": known}))

    def to_json(self) -> dict[str, Any]:
        """What ``bench --json`` says of a variant; ``busiest_error`` is of the compute of the steps' busiest ranks."""
        measured_s = np.array(self.step_s) - self.plan_wait_s
        return {
            "tokens_per_s": sum(self.tokens) / sum(self.step_s),
            "imbalance": self.imbalance,
            "padding_frac": float(np.mean(self.padding_frac)),
            "bubble_frac": float(np.average(self.bubbles, weights=measured_s)),
            "predicted_bubble_frac": float(np.average(self.predicted_bubbles, weights=self.predicted_s)),
            "peak_activation_bytes": max(self.peak_bytes),
            "peak_activation_bytes_of_stages": self.peak_bytes,
            "predicted_peak_activation_bytes_of_stages": self.predicted_peak_bytes,
            "loss": self.loss,
            "predicted_s": self.predicted_s,
            "measured_s": measured_s.tolist(),
            "busiest_error": (np.array(self.predicted_busiest_s) / np.max(self.busy, axis=1) - 1.0).tolist(),
            "prediction_error": float(np.mean(np.abs(np.array(self.predicted_s) / measured_s - 1.0))),
        }


def bench(
    recipe: Recipe, against: tuple[str, ...], repeats: int = 1, progress: Progress = silent
) -> dict[str, Any] | None:
    """Compare planners on this rank, and give what the verb shows; None on ranks that do not report."""
    return run_rank(recipe, lambda job: _bench(job, against, repeats, progress))


def _bench(job: Job, against: tuple[str, ...], repeats: int, progress: Progress = silent) -> dict[str, Any]:
    job.say_unused("bench")
    recipe = job.recipe
    names = [*against, OURS]
    most_bytes, hardest = -1.0, dict[str, Planned]()
    planner = job.planner(job.drawing())
    chains = {name: replace(job.chain, instead=name) for name in against}
    followers = {name: BaselinePlanner(chain) for name, chain in chains.items()}
    planners = {OURS: planner, **{name: follower.planner for name, follower in followers.items()}}
    histories = {name: LoadHistory(chain) for name, chain in {OURS: job.chain, **chains}.items()}
    measured = {name: Measured() for name in names}
    steps = recipe.train.steps + WARMUP_STEPS
    done, most = count(1), (steps * repeats + 1) * len(names)
    progress("bench", 0, most, "")
    for step in range(steps):
        job.watchdog.at("waiting for the plan", step)
        ours = planner.next()
        plans = {**{name: follower.plan(ours.draw) for name, follower in followers.items()}, OURS: ours}
        runs: dict[str, list[MeasuredStep]] = {name: [] for name in names}
        for turn in range(step, step + repeats):
            for name in in_turn(names, turn):
                runs[name].append(measure_step(job, plans[name], step, record=True))
                progress("bench", next(done), most, name)
        for name, history in histories.items():
            history.learn(planners[name], runs[name][-1].result)
        for name in names if step >= WARMUP_STEPS else ():
            _count(job, plans[name], runs[name], measured[name])
        peak_bytes = max(max(_predicted_peaks(planned)) for planned in plans.values())
        if peak_bytes > most_bytes:
            most_bytes, hardest = peak_bytes, plans
    for name, planned in hardest.items():
        measured[name].peak_bytes = _peaks(job, planned, steps)
        measured[name].predicted_peak_bytes = _predicted_peaks(planned)
        progress("bench", next(done), most, f"memory of {name}")
    return _result(job, measured, repeats)


def _peaks(job: Job, planned: Planned, step: int) -> list[float]:
    """Bytes that the passes of a step hold at once, by stage. Collective."""
    highest: list[int] = []

    def mark(where: str) -> None:
        job.watchdog.at(where, step)
        if where == UPDATE:
            highest.append(levels.read()[1])

    with Levels(job.world.device) as levels:
        lr = learning_rate(step, job.recipe.train)
        labels = job.labels_of(planned.draw)
        job.host.train_step(planned.plan, job.tokens_of(planned.draw), lr=lr, labels=labels, mark=mark)
        highest.append(levels.read()[1])
    job.watchdog.at("comparing peaks", step, waits=True)
    return job.most_of_stages(job.gather(highest[0])[:, 0]).tolist()  # type: ignore[no-any-return]


def _predicted_peaks(planned: Planned) -> list[float]:
    """The most that a rank of each device of a pipeline holds [bytes]."""
    plan, limits = planned.plan, planned.plan.limits
    devices = map(limits.stages_of_device, range(limits.num_devices))
    return [max(peak for stage in own for peak, _ in peaks_of_stage(plan, stage)) for own in devices]


def _count(job: Job, planned: Planned, runs: list[MeasuredStep], into: Measured) -> None:
    wait_s = runs[0].wait_s
    into.step_s.append(float(np.median([run.step_s - run.wait_s for run in runs])) + wait_s)
    into.busy.append(np.median([run.busy_s.sum(axis=0) for run in runs], axis=0))
    into.digests.append(planned.plan.digest)
    into.tokens.append(planned.plan.num_tokens)
    into.padding_frac.append(planned.plan.padding_frac)
    into.plan_wait_s.append(wait_s)
    simulated = simulate(planned.plan, into.knowing(job.chain.context), record=False)
    if job.host.layout.ep > 1:
        into.expert_imbalance.append(imbalance_of(runs[-1].result))
    into.predicted_s.append(simulated.step_s)
    into.bubbles.append(float(np.median([bubbles_of([run.spans]).frac for run in runs])))
    into.predicted_bubbles.append(simulated.bubble_frac)
    into.predicted_busiest_s.append(float(simulated.busy_s.sum(axis=0).max()))
    into.loss = runs[-1].result.loss
    if job.has_experts and (path := critical_path(job, runs[-1].result)):
        into.paths.append(path)


def _result(job: Job, measured: dict[str, Measured], repeats: int) -> dict[str, Any]:
    ours = measured[OURS]
    ratio = {}
    for name, baseline in measured.items():
        if name == OURS:
            continue
        compared = compare(baseline.step_s, ours.step_s)
        each = np.array(baseline.step_s) / np.array(ours.step_s)
        ratio[name] = {
            **compared,
            "quartiles": np.quantile(each, [0.25, 0.75]).tolist(),
            "of_busiest": baseline.busiest_s / ours.busiest_s,
            "ceiling": baseline.imbalance,
            "of_ceiling": compared["of_totals"] / baseline.imbalance,
            "same_plans": baseline.digests == ours.digests,
            **_of_paths(baseline, compared["of_totals"]),
        }
    rows = {name: one.to_json() for name, one in measured.items()}
    paths = {name: {key: sum(each) for key, each in _columns(one.paths).items()} for name, one in measured.items()}
    return {
        "host": job.host.describe(),
        "recipe": job.recipe.model_dump(mode="json", exclude_defaults=True),
        "steps": len(ours.step_s),
        **{key: {name: row[key] for name, row in rows.items()} for key in rows[OURS]},
        "repeats": repeats,
        "plan_share": sum(ours.plan_wait_s) / sum(ours.step_s),
        "ratio": ratio,
        **({"critical_path": paths} if ours.paths else {}),
    }


def _of_paths(baseline: Measured, ratio: float) -> dict[str, float]:
    """How much faster a baseline's critical path would be with even experts, and what of that was reached."""
    if not baseline.paths:
        return {}
    seconds = _columns(baseline.paths)
    allowed = sum(seconds["critical_s"]) / sum(seconds["evened_experts_s"])
    return {"allowed": allowed, "of_allowed": ratio / allowed}


def _columns(paths: list[Path]) -> dict[str, list[float]]:
    return {key: [getattr(path, key) for path in paths] for key in Path._fields}
