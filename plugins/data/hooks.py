"""The hooks of a run for policies of data: shares of domains, and makers of the others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ...core.planning.planner import Planner
from ...core.policies import KINDS, ChosenPolicy, seen_domains
from ...runtime.world.agreement import from_first
from ...training.drawing import Drawing
from ...training.job import Job, logger
from ...training.step_hooks import RunContext, StepHook, TrainedStep
from .files import open_files
from .mixture import MixtureState
from .scoring import Scorer
from .selection import Selection
from .weighing import Weighing


def hooks(run: RunContext) -> Iterator[StepHook]:
    """Make the hooks that the policies of the recipe ask for."""
    job, drawing = run
    mix, select, weight = map(job.recipe.data_policy, KINDS)
    if mix:
        yield AdaptiveMixture(job, mix, drawing)
    if select or weight:
        yield (scorer := Scorer(job))
        if select:
            yield Selection(job, select, scorer, drawing)
        if weight:
            yield Weighing(job, weight, scorer)


class AdaptiveMixture(StepHook):
    """The shares of a run's domains: those of their policy, which rank 0 asks after every step."""

    key = "mix"
    anew = "shares of domains are learned anew"

    def __init__(self, job: Job, chosen: ChosenPolicy, drawing: Drawing) -> None:
        assert job.domains is not None
        sizes = job.domains.mixture.numbers.sizes
        self._drawing, self._state = drawing, MixtureState.begin(job.recipe, chosen, [*sizes], [*sizes.values()])
        drawing.use(self._state.share_record)
        losses = open_files(chosen, job.source).reference
        self.reference = losses.of if losses else None

    def after(self, planner: Planner, step: TrainedStep) -> None:
        """Learn from a step. Collective."""
        draw, scores = step.planned.draw, step.taken.result.scores
        assert scores is not None
        assert draw.domain is not None
        columns = scores.losses, scores.targets, scores.excess, scores.weights
        seen = seen_domains(self._state.num_domains, draw.domain, *columns)
        self._state = self._state._replace(**from_first(lambda: self._state.after(seen).progress, "job"))
        self._drawing.use(self._state.share_record)

    def state(self, planner: Planner) -> dict[str, Any]:
        """What a checkpoint keeps of the shares: how far the policy is, and by what the batch ahead was drawn."""
        ahead = planner.draw_of_next.state["policy"] if planner.draw_of_next else self._state.share_record
        return {**self._state.saved(), "ahead": ahead}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Go on with the policy of a checkpoint; the first batch is drawn as the one ahead of it was."""
        state = self._state.resumed(saved)
        self._drawing.use(state.share_record, saved["ahead"])
        self._state = state

    def report(self, train_s: float) -> dict[str, Any]:
        """Shares by domain that the policy has found for a later run."""
        if (outcome := self._state.outcome) is None:
            return {}
        words = " ".join(f"data.domains.{name}.share={share:.6g}" for name, share in outcome.items())
        logger.info("shares that the policy has found for a run of their own: %s", words)
        return {"learned_shares": outcome}
