"""Selections of a run: samples are drawn as usual, scored by the model as it is, and some of them are trained on.

At a step whose batch is not taken yet, ``pool`` times the samples of ``every`` steps are drawn in their order (null:
the pool are all samples), the model scores those with a target, and rank 0 asks the policy. What it takes are the
batches of the next steps. So scores are of the weights that the step begins with. No batch is drawn ahead past a
selection, and a checkpoint has what was taken and not yet trained: a run that is killed goes on with the samples that
it would have had, on other ranks too. What a pool has left comes again in the next epoch.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from ...core.aliases import Ints
from ...core.errors import EvenloadError
from ...core.planning.planner import Planner
from ...core.policies import ChosenPolicy, Pool, State, started, stepped
from ...core.recipe.shares import shares_of
from ...runtime.world.agreement import from_first
from ...training.drawing import Drawing, Selected, scorable
from ...training.job import Job, logger
from ...training.step_hooks import StepHook
from .files import open_files
from .scoring import GradientScorer, PoolGradients, Scorer

_NONE = np.zeros(0, dtype=np.int64)


class Selection(StepHook):
    """The selections of one run."""

    key = "select"
    kept_with_draw = True
    anew = "samples are selected anew"

    def __init__(self, job: Job, chosen: ChosenPolicy, scorer: Scorer, drawing: Drawing) -> None:
        self._job, self._chosen = job, chosen
        self._files, self._scorer = open_files(chosen, job.source), scorer
        self._gradients = GradientScorer(job) if "gradients" in chosen.policy.needs else None
        self._drawing = drawing
        self._update = 0
        self._policy: State | None = None
        self._take = chosen.every * job.recipe.train.global_batch_size
        self._report: dict[str, Any] = {
            "policy": chosen.name,
            "updates": 0,
            "candidates": 0,
            "taken": 0,
            "policy_s": 0.0,
        }
        self._queue(_NONE)

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Go on with what a checkpoint has taken. Raises ValueError for the selection of another policy or data."""
        if saved["of"] != self._identity:
            raise ValueError("the policy, its settings or the domains are others")
        taken = np.array(saved["samples"], dtype=np.int64)
        self._update, self._policy = saved["update"], saved["policy"]
        self._queue(taken)

    def before(self, planner: Planner) -> int:
        """Select for the next steps where nothing is left for the next one. Collective."""
        assert self._drawing.selected is not None
        if not len(self._drawing.selected.samples) and planner.draw_of_next is None:
            self._select()
        batches = -(-len(self._drawing.selected.samples) // self._job.recipe.train.global_batch_size)
        return batches - (planner.draw_of_next is None)

    def _select(self) -> None:
        """Make the next selection. Collective."""
        drawn = self._drawing.candidates((self._chosen.pool or 1) * self._chosen.every)
        numbers = drawn if self._chosen.pool else self._all()
        losses = self._scorer.means(numbers) if "losses" in self._chosen.policy.needs and len(numbers) else None
        gradients = self._gradients_of(numbers)
        begin = time.perf_counter()
        taken = from_first(lambda: self._asked(numbers, losses, gradients, drawn[: self._take]), "job")
        if not len(taken):
            detail = f"update {self._update} of the select policy '{self._chosen.name}'"
            raise EvenloadError("no sample that was drawn has a target", detail, "raise plugins.data.select.pool")
        self._report["policy_s"] += time.perf_counter() - begin
        for name, count in (("updates", 1), ("candidates", len(numbers)), ("taken", len(taken))):
            self._report[name] += count
        self._update += 1
        self._queue(taken)

    def report(self, train_s: float) -> dict[str, Any]:
        """What this run has selected, and the seconds that it took."""
        own = self._report
        text = "%d selections by %s: %d samples taken of %d candidates"
        logger.info(text, own["updates"], own["policy"], own["taken"], own["candidates"])
        if self._gradients:
            own = {**own, "gradients_s": self._gradients.seconds}
            logger.info("gradients of samples took %.1f s, the steps %.1f s", own["gradients_s"], train_s)
        return {"selection": own}

    def _gradients_of(self, numbers: Ints) -> PoolGradients | None:
        """Gradients of the samples of a pool that the policy wants them of. Collective."""
        if self._gradients is None:
            return None
        wanted: Ints = from_first(lambda: self._chosen.policy.gradients_of(self._policy, numbers), "job")
        return self._gradients.of(wanted)

    def _asked(self, numbers: Ints, losses: Any, gradients: PoolGradients | None, drawn: Ints) -> Ints:
        """What the policy takes; on rank 0, which keeps its state."""
        files = self._files
        of_samples: dict[str, Any] = {"losses": losses, **(gradients._asdict() if gradients else {})}
        if files.reference is not None:
            of_samples["reference"] = files.reference.means(numbers)
        if files.embeddings is not None:
            of_samples["embeddings"] = np.asarray(files.embeddings[numbers], dtype=np.float64)
        seed, queries = self._job.recipe.train.seed, files.queries
        wanted = None if queries is None else np.asarray(queries, dtype=np.float64)
        pool = Pool(numbers, min(self._take, len(numbers)), seed, self._update, queries=wanted, **of_samples)
        if self._policy is None:
            self._policy, taken = started(self._chosen, pool)
        else:
            self._policy, taken = stepped(self._chosen, self._policy, pool, drawn)
        return np.asarray(taken, dtype=np.int64)

    def _all(self) -> Ints:
        """All samples with a target, of domains that have a share."""
        numbers = scorable(self._job.source)
        if (domains := self._job.domains) is None:
            return numbers
        shares = np.array(shares_of(self._job.recipe.data)({}, self._update * self._chosen.every))
        return numbers[shares[domains.mixture.numbers.domain_of(numbers)] > 0]

    def _queue(self, taken: Ints) -> None:
        state = {"of": self._identity, "update": self._update, "policy": self._policy}
        self._drawing.selected = Selected(taken, state)

    @property
    def _identity(self) -> dict[str, Any]:
        chosen, domains = self._chosen, self._job.domains
        names = domains.mixture.names if domains else []
        asked = {"policy": chosen.name, "settings": chosen.settings.model_dump(mode="json")}
        return {**asked, "every": chosen.every, "pool": chosen.pool, "domains": names}
