"""Weights of the samples of a global batch by what the model makes of them in that very step, of all ranks' samples.

A weight must be known before the first backward of its sample, so the model scores the batch before the step: a third
of a step more, and nothing to remember. A policy by likeness also sees, every so many steps, the vectors of what is
wanted: those of `data.validation`. Rank 0 asks the policy. What data or recipe weigh is multiplied by its answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from ...core.planning.planner import Planned, Planner
from ...core.policies import ChosenPolicy, SeenSamples, State, started, stepped
from ...runtime.world.agreement import from_first
from ...training.drawing import draws_of
from ...training.job import Job
from ...training.replicas import reweighed, whole_of
from ...training.step_hooks import StepHook
from .scoring import Scorer


class Weighing(StepHook):
    """The weights of one run's steps."""

    key = "weigh"
    anew = "weights of samples are learned anew"

    def __init__(self, job: Job, chosen: ChosenPolicy, scorer: Scorer) -> None:
        self._chosen, self._scorer = chosen, scorer
        self._by_likeness = "vectors" in chosen.policy.needs
        self._every, self._anchors = getattr(chosen.settings, "every", 1), None
        if self._by_likeness and job.held_out is not None:
            self._anchors = Scorer(replace(job, source=job.held_out))
            self._wanted = np.concatenate([draw.samples for draw in draws_of(job.held_out, job.recipe)])
        settings = chosen.settings.model_dump(mode="json")
        self._identity = {"policy": chosen.name, "settings": settings}
        self._policy: State | None = None
        self._steps = 0

    def planned(self, planned: Planned) -> Planned:
        """The step with weights of its samples. Collective."""
        draw = planned.draw
        scores = self._scorer.scores(whole_of(draw).samples, vectors=self._by_likeness)
        anchors = None
        if self._anchors and self._steps % self._every == 0:
            anchors = self._anchors.scores(self._wanted, vectors=True).vectors
        seen = SeenSamples(scores.losses, scores.targets, vectors=scores.vectors, anchors=anchors)
        weights = from_first(lambda: self._asked(seen), "job")
        self._steps += 1
        return replace(planned, draw=reweighed(draw, weights))

    def state(self, planner: Planner) -> dict[str, Any]:
        """What a checkpoint keeps of the weights; whole on rank 0."""
        return {"of": self._identity, "state": self._policy, "steps": self._steps}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Go on with the policy of a checkpoint. Raises ValueError for another policy or other settings."""
        if saved["of"] != self._identity:
            raise ValueError("the policy or its settings are others")
        self._policy, self._steps = saved["state"], saved.get("steps", 0)  # checkpoints of before have none

    def _asked(self, seen: SeenSamples) -> Any:
        if self._policy is None:
            self._policy, _ = started(self._chosen, seen)
        self._policy, weights = stepped(self._chosen, self._policy, seen, np.ones(len(seen.losses)))
        return weights
