"""All policies of data of one run: shares, selections and weights, beside the loop that trains."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from ...core.planning.planner import Draw, Planned, Planner
from ...integrations.host.scoring import Scores
from ..drawing import Drawing
from ..job import Job, logger
from ..learning import LearnedShares
from .files import PolicyFiles
from .scoring import Scorer
from .selection import Selection
from .weighing import Weighing


class RunPolicies:
    """What policies say in a run; where the recipe names none nothing is changed. ``state``: a checkpoint's."""

    def __init__(self, job: Job, files: PolicyFiles, drawing: Drawing, state: Mapping[str, Any] | None) -> None:
        self._shares = LearnedShares(job, drawing, state)
        select, weight = job.recipe.data_policy("select"), job.recipe.data_policy("weight")
        self._scorer = Scorer(job) if select or weight else None
        self._selection: Selection | None = None
        self._weighing: Weighing | None = None
        if self._scorer and select:
            order = state and state["order"]
            self._selection = Selection(job, select, files, self._scorer, drawing, order)
        if self._scorer and weight:
            self._weighing = Weighing(job, weight, self._scorer, state)

    def planned(self, planner: Planner, ahead: int) -> Planned:
        """The next step, its samples selected and weighed; as many as ``ahead`` may be begun with it. Collective."""
        most = sys.maxsize
        if self._selection:
            self._selection.before(planner)
            most = self._selection.ahead(planner)
        planned = planner.next(ahead=min(ahead, most))
        return self._weighing.weighed(planned) if self._weighing else planned

    def after(self, draw: Draw, scores: Scores | None) -> None:
        """Learn from a step. Collective."""
        self._shares.after(draw, scores)

    def state(self, planner: Planner) -> dict[str, Any]:
        """What a checkpoint keeps of them beside the drawing, ready for JSON."""
        return {**self._shares.state(planner), **(self._weighing.state() if self._weighing else {})}

    def report(self, train_s: float) -> dict[str, Any]:
        """What they came to, for the result of the run, whose steps took ``train_s``; said too."""
        report: dict[str, Any] = {}
        if outcome := self._shares.outcome:
            report["learned_shares"] = outcome
            words = " ".join(f"data.domains.{name}.share={share:.6g}" for name, share in outcome.items())
            logger.info("shares that the policy has found for a run of their own: %s", words)
        if self._scorer:
            report["scoring_s"] = self._scorer.seconds
            if self._scorer.seconds:
                logger.info("scoring samples took %.1f s beside %.1f s of steps", self._scorer.seconds, train_s)
        if self._selection:
            report["selection"] = own = self._selection.report()
            text = "%d selections by %s: %d samples taken of %d candidates"
            logger.info(text, own["updates"], own["policy"], own["taken"], own["candidates"])
            if "gradients_s" in own:
                logger.info("gradients of samples took %.1f s beside %.1f s of steps", own["gradients_s"], train_s)
        return report
