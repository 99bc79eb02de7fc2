"""The best settings of a search, trained a few steps each on this machine: what costs say of them is refitted.

Every setting trains in ranks of its own, started as `evenload train` does; settings take turns, so that a machine that
slows down does so for all. A run fits the coefficients of its stage to its own steps (`core.costs.refit`): seconds of a
launch, a token and a pair in each direction, and of the update. What they come to over those that predicted, the median
of all runs, holds for every setting of the space. Where passes hold the waiting for other ranks, so that nothing can be
fitted, all coefficients have the ratio of the steps.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import yaml

from ...core.aliases import Floats
from ...core.costs.costs import Costs
from ...core.costs.refit import FEWEST_STEPS, AnyCosts, coefficients, with_coefficients
from ...core.errors import refuse_first
from ...core.input.bounds import LOCAL_RANKS
from ...core.machine.layout import Layout
from ...core.planning.chain import PlanChain
from ...core.planning.judge import judge
from ...core.recipe.recipe import Recipe
from ...core.recipe.traits import trainer_called
from ...training.launching.launch import on_ranks
from ...training.progress import Progress, silent
from ...training.verbs import TRAIN
from .best_first import Played

STEPS = 2 + FEWEST_STEPS
"""Of a run: the first warms up, and plans are made one ahead."""
ROUNDS = 2
"""Runs of every setting."""
Train = Callable[[Recipe, int, int], dict[str, Any]]
"""What ``train --json`` says of a recipe on so many ranks after so many steps."""


class Correction(NamedTuple):
    """What steps say of costs, by coefficient [7], as `core.costs.refit` has them."""

    scale: Floats
    added: Floats
    """Of the whole model, where costs say nothing."""

    def of_costs(self, costs: Costs, shares: Floats | float = 1.0) -> Costs:
        """Costs that steps bear out, of every setting that was measured; ``shares``: of the whole model's, by
        coefficient."""
        others = costs.of_settings(lambda one: self._of_one(one, shares))
        return self._of_one(costs, shares).model_copy(update=others)

    def _of_one(self, costs: AnyCosts, shares: Floats | float) -> AnyCosts:
        return with_coefficients(costs, coefficients(costs) * self.scale + self.added * shares)

    def of(self, chain: PlanChain) -> PlanChain:
        """The chain with the costs that steps bear out."""
        context = chain.context
        costs = self.of_costs(context.costs, _shares(context.layout))
        return replace(chain, context=replace(context, costs=costs))


def _shares(layout: Layout) -> Floats:
    """What a stage has of each coefficient of the whole model (`Costs.of_stage`) [7]."""
    launch, compute = 1.0 / layout.num_stages, 1.0 / (layout.tp * layout.num_stages)
    return np.array([*(launch, compute, compute) * 2, 1.0 / (layout.tp * layout.pp)])


class TrainedSetting(NamedTuple):
    """A setting that was trained here."""

    one: Played
    predicted_s: float
    """Of the steps that were measured, by the costs before."""
    step_s: float
    """Of these, measured, waiting for plans left out; the median of its runs."""


def refuse_unmeasurable(recipe: Recipe, ranks: Sequence[int]) -> None:
    """Raise EvenloadError where settings of a recipe cannot be trained here."""
    loop = f"trainer {recipe.trainer}", "measure with evenload run and a script, or leave --measure out"
    refuse_first(
        (not trainer_called(recipe.trainer).host, "--measure trains in evenload's own loop", *loop),
        (recipe.adapts, "--measure trains one model", "plugins.lora.enabled true", "leave --measure out"),
        (
            len(ranks) > 1 or ranks[0] > LOCAL_RANKS,
            "--measure trains on the devices of this machine",
            f"--nproc {','.join(map(str, ranks))}",
            f"give one number, of at most {LOCAL_RANKS} ranks",
        ),
    )


def trained(recipe: Recipe, num_ranks: int, steps: int) -> dict[str, Any]:
    """What ``train --json`` says of so many steps, costs fitted to them. Raises EvenloadError, and SystemExit where
    ranks have said what is wrong."""
    ends = {"train.steps": steps, "train.epochs": None, "train.max_tokens": None, "train.export": None}
    apart: dict[str, Any] = {"checkpoint": {}, "log": {}, "data.validation": None}
    few = recipe.changed({**ends, **apart, "planner.refit": True})
    with tempfile.TemporaryDirectory(prefix="evenload-") as folder:
        path = Path(folder) / "recipe.yaml"
        path.write_text(yaml.safe_dump(few.model_dump(mode="json", exclude_unset=True)), encoding="utf-8")
        result = on_ranks(TRAIN, few, ["train", str(path)], num_ranks, silent)
    assert result is not None
    return result


def measured(
    settings: Sequence[Played], train: Train, progress: Progress = silent
) -> tuple[list[TrainedSetting], Correction]:
    """Train the settings, in turn; what each took, and what that says of costs."""
    runs: dict[int, list[tuple[float, float]]] = {number: [] for number in range(len(settings))}
    scales, added = list[Floats](), list[Floats]()
    for turn in range(ROUNDS):
        for number in sorted(runs, reverse=turn % 2 > 0):
            progress("measure", sum(map(len, runs.values())), ROUNDS * len(runs), "")
            layout = settings[number].choice.chain.context.layout
            result = train(settings[number].choice.recipe, layout.world_size, STEPS)
            # These were predicted by the costs before: until there are so many steps, nothing is fitted.
            timed = result["steps"][1 : 1 + FEWEST_STEPS]
            predicted_s, step_s = (sum(each) / len(timed) for each in zip(*map(_seconds, timed), strict=True))
            runs[number].append((predicted_s, step_s))
            if result["refit"] is None:
                scales.append(np.full(7, step_s / predicted_s))
                continue
            prior, newest = (np.array(result["refit"][name]) for name in ("prior", "newest"))
            scales.append(np.divide(newest, prior, out=np.ones(7), where=prior > 0))
            added.append(np.where(prior > 0, 0.0, newest) / _shares(layout))
    rows = [TrainedSetting(one, *np.median(runs[number], axis=0).tolist()) for number, one in enumerate(settings)]
    return rows, Correction(np.median(scales, axis=0), np.median(added or [np.zeros(7)], axis=0))


def rows_of(taken: Sequence[TrainedSetting], correction: Correction) -> list[dict[str, Any]]:
    """``measured`` of ``search --json``, the fastest first; the last number is that of the same plans by the costs that
    steps bear out."""
    rows = []
    for row in sorted(taken, key=lambda row: row.step_s):
        context = correction.of(row.one.choice.chain).context
        grown = sum(judge(step.plan, context).step_s for step in row.one.steps) / sum(row.one.floors_s)
        seconds = {"measured_s": row.step_s, "predicted_s": row.predicted_s, "refitted_s": row.predicted_s * grown}
        rows.append({"settings": dict(row.one.choice.values), **seconds})
    return rows


def _seconds(row: dict[str, Any]) -> tuple[float, float]:
    """What a step was predicted to take, and what it took without waiting for its plan."""
    return row["predicted_s"], row["step_s"] - row["plan_wait_s"]
