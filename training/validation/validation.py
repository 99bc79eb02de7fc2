"""Evaluations of a run: plans that run forward only, made while the step before runs, and scored between two steps.

The batches are the same each time, so they are planned once: every plan is agreed on when it first runs, and kept.
Plans are made with the costs of the recipe, whatever a run has learned since, so a run that is resumed scores the same
plans and comes to the same losses to the last bit. Nothing that training draws or plans is touched.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ...core.errors import RankError
from ...core.planning.forward_only import forward_only
from ...core.planning.planner import Planned, Planner
from ...core.recipe.generated import SAMPLED
from ...data.content import are_same
from ...data.mixed import MixedSource
from ...integrations.host.scoring import Scores, of_all_replicas
from ...runtime.world.agreement import everyone, from_first
from ..drawing import draws_of, scorable
from ..job import Job, logger
from ..metrics import DomainLoss, domain_losses, perplexity
from ..preflight import tokenizer_of
from ..replicas import whole_of
from ..sampling.figures import figures_of
from ..sampling.scored import SampleScores
from ..step_hooks import StepHook


@dataclass(frozen=True)
class Validated:
    """What one evaluation came to."""

    step: int
    """Steps that were trained before it."""
    loss: float
    """Sum of all token losses over the number of targets, in nats."""
    perplexity: float
    """exp(loss)."""
    best: bool
    """No evaluation after a step had a lower loss so far, or a higher figure where ``checkpoint.best`` names one."""
    sequences: int
    tokens: int
    targets: int
    without_target: int
    """Samples of the source that are left out, since they have no target."""
    validation_s: float
    """Seconds by the wall clock, waiting for plans included."""
    plan_wait_s: float
    domains: dict[str, DomainLoss] | None = None
    """Of each domain, where `data.validation` has any."""
    generate: dict[str, float] | None = None
    """What samples of prompts came to, where it has any: score, pass_at_K, maj_at_K, tokens, cut_frac (the share that
    ended by its limit), generate_s and score_s, seconds by the wall clock."""

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.validation_s


class ValidationRun(StepHook):
    """The evaluations of one run."""

    key = "validation"
    anew = "the lowest loss of the validation is found anew"

    def __init__(self, job: Job) -> None:
        config = job.recipe.data.validation
        assert config is not None
        assert job.held_out is not None
        self._every, self._last = config.every, job.recipe.train.steps
        self._job = replace(job, source=job.held_out, chain=forward_only(job.chain), reference=None)
        self._draws = [*map(job.replicas.part_of, draws_of(job.held_out, job.recipe))]
        self._planner = job.planner(iter(self._draws).__next__, self._job.chain)
        self._planned: list[Planned] = []
        self.rows: list[Validated] = []
        self._sampled, tokenizer = None, tokenizer_of(job.recipe.data, job.recipe.model.weights)
        if config.generate is not None:
            self._sampled = SampleScores(job.recipe, tokenizer, config.generate)
        self._samples_every = config.generate.every * config.every if config.generate else 0
        wanted = job.recipe.checkpoint.best
        self._best, self._best_of = math.inf, wanted if isinstance(wanted, str) else None
        if self._sampled and self._best_of and self._best_of.startswith(SAMPLED):
            self._best_of += f" {self._sampled.identity}"

    def due(self, done: int) -> bool:
        """Whether it is time for an evaluation when so many steps have been trained."""
        return done % self._every == 0 or done == self._last

    def is_best(self, done: int) -> bool:
        """Whether the evaluation after so many steps has run, and had the lowest loss so far."""
        return bool(self.rows) and self.rows[-1].step == done and self.rows[-1].best

    def prepare(self, done: int) -> None:
        """Begin to plan an evaluation that is due when so many steps have been trained."""
        if self.due(done) and not self._planned:
            self._planner.prepare(len(self._draws))

    def run(self, done: int) -> Validated:
        """Evaluate. Collective. Raises RankError for a loss that is not finite."""
        begin, waited_s = time.perf_counter(), 0.0
        parts: list[Scores] = []
        for number in range(len(self._draws)):
            self._job.watchdog.at("waiting for the plan of a validation", done)
            waits = number == len(self._planned)
            planned = self._next(number)
            waited_s += planned.waited_s if waits else 0.0
            parts.append(self._score(planned, done))
        seconds, figures = time.perf_counter() - begin, None
        if self._sampled and (done % self._samples_every == 0 or done == self._last):
            figures = everyone(self._sampled.run(self._job.host, self._job.watchdog, done), "job")[0]
        row = self._row(done, parts, (seconds, waited_s), figures)
        self.rows.append(row)
        self._say(row)
        return row

    def state(self, planner: Planner) -> dict[str, Any]:
        """The lowest loss so far, and of what."""
        best = self._best if math.isfinite(self._best) else None
        of = {"of": self._best_of} if self._best_of else {}
        return {"best": best, "data": self._job.source.fingerprint, **of}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Go on with the lowest loss of a checkpoint. Raises ValueError for that of other data. Collective."""
        data, same = self._job.source.fingerprint, saved.get("of") == self._best_of
        if not from_first(lambda: same and are_same(saved["data"], data, "data.validation")):
            raise ValueError("data.validation or checkpoint.best is of other data")
        self._best = math.inf if saved["best"] is None else float(saved["best"])

    def _next(self, number: int) -> Planned:
        if number == len(self._planned):
            self._planned.append(self._planner.next(ahead=len(self._draws) - 1 - number))
        return self._planned[number]

    def _score(self, planned: Planned, done: int) -> Scores:
        job = self._job
        scores = job.host.score(
            planned.plan,
            job.tokens_of(planned.draw),
            labels=job.labels_of(planned.draw),
            mark=lambda where: job.watchdog.at(f"validation, {where}", done),
        )
        return of_all_replicas(scores, job.company_of(planned.draw))

    def _row(
        self, done: int, parts: Sequence[Scores], took_s: tuple[float, float], figures: dict[str, float] | None
    ) -> Validated:
        whole = [*map(whole_of, self._draws)]
        loss_sum = float(np.concatenate([one.losses for one in parts]).sum())
        targets = int(np.concatenate([one.targets for one in parts]).sum())
        loss, source, domains = loss_sum / targets, self._job.source, None
        if isinstance(source, MixedSource):
            domains = domain_losses(source.domains, zip(whole, parts, strict=True))
        if not math.isfinite(loss):
            what, do = "the loss of the validation is not finite", "lower train.lr, or look at the data"
            raise RankError(what, f"loss {loss} after {done} steps", do)
        compared = self._compared(loss, domains, figures)
        best = done > 0 and compared < self._best
        self._best = compared if best else self._best
        return Validated(
            step=done,
            loss=loss,
            perplexity=perplexity(loss),
            best=best,
            sequences=sum(len(draw.samples) for draw in whole),
            tokens=sum(int(draw.lengths.sum()) for draw in whole),
            targets=targets,
            without_target=len(source.lengths) - len(scorable(source)),
            validation_s=took_s[0],
            plan_wait_s=took_s[1],
            domains=domains,
            generate=figures,
        )

    def _compared(self, loss: float, domains: dict[str, DomainLoss] | None, figures: dict[str, float] | None) -> float:
        """What is lowest at the best checkpoint: a loss, or a figure of samples that is turned round."""
        if self._best_of is None:
            return loss
        if self._best_of.startswith(SAMPLED):
            name, _, _ = self._best_of.removeprefix(SAMPLED).partition(" ")
            return -figures[name] if figures else math.inf
        return domains[self._best_of]["loss"] if domains else loss

    def _say(self, row: Validated) -> None:
        text = "validation after %d steps: loss %.4f, perplexity %.4g%s (%d sequences, %.0f tokens/s)"
        best = ", the best so far" if row.best else ""
        logger.info(text, row.step, row.loss, row.perplexity, best, row.sequences, row.tokens_per_s)
        if row.generate:
            figures, took_s = figures_of(row.generate), row.generate["generate_s"] + row.generate["score_s"]
            logger.info("  its samples: %s (%d tokens, %.3g s)", figures, row.generate["tokens"], took_s)
        if row.without_target and len(self.rows) == 1:
            logger.info("%d samples of data.validation have no target and are left out", row.without_target)
