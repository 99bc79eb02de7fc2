"""Evaluations of a run: plans that run forward only, made while the step before runs, and scored between two steps.

The batches are the same each time, so they are planned once: every plan is agreed on when it first runs, and kept.
Where attention leaves blocks out they are planned once more, by how many the first evaluation left out.
Plans are made with the costs of the recipe, whatever a run has learned since, so a run that is resumed scores the same
plans and comes to the same losses to the last bit. Nothing that training draws or plans is touched.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ...core.errors import RankError
from ...core.planning.planner import Planned, Planner
from ...core.recipe.generated import SAMPLED
from ...core.sparse_error import SparseError
from ...data.content import are_same
from ...data.mixed import MixedSource
from ...integrations.host.scoring import Scores, of_all_replicas
from ...runtime.attention.sparse import SparsePass
from ...runtime.world.agreement import everyone, from_first
from ..drawing import draws_of, scorable
from ..job import Job, logger
from ..metrics import DomainLoss, domain_losses, perplexity
from ..preflight import tokenizer_of
from ..replicas import whole_of
from ..sampling.figures import figures_of
from ..sampling.scored import SampleScores
from ..sparse_passes import SparsePasses, WholePass
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
    sparse: SparseError | None = None
    """What the loss is off by, whose attention left blocks of keys out; None: it is dense."""

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
        held_out = replace(job, source=job.held_out, reference=None)
        self._passes = SparsePasses(held_out, least=2)
        self._job = replace(held_out, chain=self._passes.chain)
        self._draws = [*map(job.replicas.part_of, draws_of(job.held_out, job.recipe))]
        self._waiting = deque(self._passes.draws(self._draws))
        self._anew = any(draw.twins is not None for draw in self._waiting)
        """What attention computes is not known yet: plan again when it is."""
        self._planner = job.planner(self._waiting.popleft, self._job.chain)
        self._planned: list[Planned] = []
        self.rows: list[Validated] = []
        self._sampled, tokenizer = None, tokenizer_of(job.recipe.data, job.recipe.model.weights)
        if config.generate is not None:
            self._sampled = SampleScores(job.recipe, tokenizer, config.generate)
        self._samples_every = config.generate.every * config.every if config.generate else 0
        wanted = job.recipe.checkpoint.best
        self._best, self._best_of = math.inf, wanted if isinstance(wanted, str) else None
        self._best_is_sparse: bool | None = None
        if self._sampled and self._best_of and self._best_of.startswith(SAMPLED):
            self._best_of += f" {self._sampled.identity}"
        self._identity = self._best_of
        if self._passes.is_on:
            self._identity = f"{self._best_of or 'loss'} sparse {job.recipe.sparse.model_dump_json()}"

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
        begin, waited_s, figures = time.perf_counter(), 0.0, None

        def plans() -> Iterator[Planned]:
            nonlocal waited_s
            for number in range(len(self._draws)):
                self._job.watchdog.at("waiting for the plan of a validation", done)
                waits = number == len(self._planned)
                planned = self._next(number)
                waited_s += planned.waited_s if waits else 0.0
                yield planned

        passed = self._passes.whole(plans, lambda planned, sparse: self._score(planned, sparse, done))
        seconds = time.perf_counter() - begin
        if self._anew and passed.error:
            self._anew = False
            self._planned.clear()
            self._waiting.extend(self._passes.draws(self._draws))
        if self._sampled and (done % self._samples_every == 0 or done == self._last):
            figures = everyone(self._sampled.run(self._job.host, self._job.watchdog, done), "job")[0]
        row = self._row(done, passed, (seconds, waited_s), figures)
        self.rows.append(row)
        self._say(row)
        return row

    def state(self, planner: Planner) -> dict[str, Any]:
        """The lowest loss so far, and of what."""
        best = self._best if math.isfinite(self._best) else None
        of: dict[str, Any] = {"of": self._identity} if self._identity else {}
        of |= {"sparse": self._best_is_sparse} if self._passes.is_on else {}
        return {"best": best, "data": self._job.source.fingerprint, **of}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Go on with the lowest loss of a checkpoint. Raises ValueError for that of other data. Collective."""
        data, same = self._job.source.fingerprint, saved.get("of") == self._identity
        if not from_first(lambda: same and are_same(saved["data"], data, "data.validation")):
            raise ValueError("data.validation or checkpoint.best is of other data, or sparse is another")
        self._best = math.inf if saved["best"] is None else float(saved["best"])
        self._best_is_sparse = saved.get("sparse")

    def _next(self, number: int) -> Planned:
        if number == len(self._planned):
            self._planned.append(self._planner.next(ahead=len(self._draws) - 1 - number))
        return self._planned[number]

    def _score(self, planned: Planned, sparse: SparsePass | None, done: int) -> Scores:
        job = self._job
        scores = job.host.score(
            planned.plan,
            job.tokens_of(planned.draw),
            labels=job.labels_of(planned.draw),
            mark=lambda where: job.watchdog.at(f"validation, {where}", done),
            sparse=sparse,
        )
        return of_all_replicas(scores, job.company_of(planned.draw))

    def _row(
        self, done: int, passed: WholePass, took_s: tuple[float, float], figures: dict[str, float] | None
    ) -> Validated:
        whole = [*map(whole_of, self._draws)]
        targets, source = int(np.concatenate([one.targets for one in passed.scores]).sum()), self._job.source
        loss, domains = self._losses(passed.scores)
        if not math.isfinite(loss):
            what, do = "the loss of the validation is not finite", "lower train.lr, or look at the data"
            raise RankError(what, f"loss {loss} after {done} steps", do)
        best = done > 0 and self._takes(self._compared(*self._losses(passed.first), figures), passed.error is not None)
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
            sparse=passed.error,
        )

    def _losses(self, parts: Sequence[Scores]) -> tuple[float, dict[str, DomainLoss] | None]:
        """The loss of all, and of domains."""
        source = self._job.source
        loss_sum = float(np.concatenate([one.losses for one in parts]).sum())
        loss = loss_sum / int(np.concatenate([one.targets for one in parts]).sum())
        if not isinstance(source, MixedSource):
            return loss, None
        return loss, domain_losses(source.domains, zip(map(whole_of, self._draws), parts, strict=True))

    def _takes(self, compared: float, sparse: bool) -> bool:
        """Whether this is the lowest so far; a sparse loss and a dense one are not compared."""
        of_samples = self._best_of is not None and self._best_of.startswith(SAMPLED)
        if not of_samples and self._best_is_sparse not in (None, sparse):
            own, other = ("sparse", "dense") if sparse else ("dense", "sparse")
            logger.info("this loss is %s and the lowest so far %s: they are not compared", own, other)
            return False
        if not compared < self._best:
            return False
        self._best, self._best_is_sparse = compared, sparse
        return True

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
        if row.sparse:
            logger.info("  %s", row.sparse.text)
        if row.generate:
            figures, took_s = figures_of(row.generate), row.generate["generate_s"] + row.generate["score_s"]
            logger.info("  its samples: %s (%d tokens, %.3g s)", figures, row.generate["tokens"], took_s)
        if row.without_target and len(self.rows) == 1:
            logger.info("%d samples of data.validation have no target and are left out", row.without_target)
