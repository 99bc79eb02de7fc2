"""The planner: one step ahead in a background thread, under a time budget, agreed on by all ranks.

Each step every rank tells the others whether its plan is ready, and its digest (17 bytes). If all are ready and equal,
the plan runs. If one is late, failed or broke a law, all ranks take the next simpler planner together, with a warning;
so a slow host never makes ranks diverge. If digests differ although all were ready, every rank raises the same error.

No simpler plan runs that breaks a cap or a setting of the recipe. Where none is left, a late plan is waited for, and a
planner that failed ends the job with one message.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..errors import EvenloadError, RankError
from ..plan.expert_policy import EXPERTS_AT_HOME
from ..plan.step_plan import Lengths, StepPlan, as_lengths
from .chain import PlanChain, warn_once

logger = logging.getLogger("evenload")

READY, LATE, FAILED = 0, 1, 2
FELL_BACK, FAILED_ON = "fallback: ", "failed on ranks "
"""A note of a plan that took over begins with the first; where a planner failed and was not only late, the second is in
it."""


class Draw(NamedTuple):
    """A global batch, by its samples' numbers and lengths, and the data's state after it."""

    samples: npt.NDArray[np.int64]
    lengths: npt.NDArray[np.int64]
    state: dict[str, Any]
    """The data order and what waits for a later step: what a checkpoint keeps."""
    delay_steps: float = 0.0
    """Steps by which its tokens were held back, in the mean."""
    targets: npt.NDArray[np.int64] | None = None
    """Tokens of each sequence that carry loss; None: each but its first one."""
    without_target: int = 0
    """Samples that were drawn and are left out, since none of their tokens carries loss."""
    tenants: npt.NDArray[np.int64] | None = None
    """Number of each sequence's tenant [S]; None: there are no tenants."""


Exchange = Callable[[bytes], list[bytes]]
"""Sends the same number of bytes to every rank and returns what each one sent, by rank. Collective."""


def alone(payload: bytes) -> list[bytes]:
    """The exchange of a single process."""
    return [payload]


@dataclass(frozen=True)
class Planned:
    """A plan that all ranks agreed on."""

    plan: StepPlan
    chain: PlanChain
    """What it was planned with; its situation is what the plan is to be judged by."""
    draw: Draw
    plan_s: float
    """Seconds the planning took, wherever it ran."""
    waited_s: float
    """Seconds the step waited for it, agreement included: what planning really cost."""


class _Begun(NamedTuple):
    draw: Draw
    chain: PlanChain
    future: Future[tuple[StepPlan, float]]


class Planner:
    """Hands out one agreed plan per step.

    Args:
        chain: plans; `use` puts another in its place.
        draw: gives the next global batch; its order is the caller's.
        first: plans the first batch instead, where a resumed run had begun it with other costs than its newest.
    """

    def __init__(
        self,
        chain: PlanChain,
        draw: Callable[[], Draw],
        *,
        budget_s: float = 2.0,
        background: bool = True,
        exchange: Exchange = alone,
        first: PlanChain | None = None,
    ) -> None:
        self._chain = chain
        self._draw = draw
        self._exchange = exchange
        self._budget_s, self._background = budget_s, background
        self._first = first or chain
        self._ahead: _Begun | None = None
        self._warned: set[str] = set()
        self._policy = EXPERTS_AT_HOME
        """Of the last step: a simpler plan goes on with it."""
        self.step = 0

    def prepare(self) -> None:
        """Begin to plan the next step already, in the background."""
        if self._background and self._ahead is None:
            self._ahead = self._begin(self._chain if self.step else self._first)

    def next(self, *, ahead: bool = True) -> Planned:
        """The plan of the next step, the same on every rank. Collective. Raises RankError if ranks diverge.

        ``ahead``: another step will follow, whose planning begins now. Raises EvenloadError on every rank where nothing
        in the batch carries loss.
        """
        start = time.perf_counter()
        draw, chain, future = self._ahead or self._begin(self._chain if self.step else self._first)
        if not len(draw.samples):
            detail = f"step {self.step}: {draw.without_target} samples without a token that carries loss"
            do = "check the labels of the data, or raise train.global_batch_size"
            raise EvenloadError("no sequence of the batch has a target", detail, do)
        plan, plan_s, why, answers = self._agreed(future, self._budget_s)
        if plan is None:
            plan = self._fall_back(draw, chain, answers, why, future)
        warn_once(plan, self._warned)
        waited_s = time.perf_counter() - start
        self._policy = plan.experts
        self.step += 1
        self._ahead = self._begin(self._chain) if self._background and ahead else None
        return Planned(plan, chain, draw, plan_s, waited_s)

    def forget(self) -> None:
        """Drop the plan that was begun ahead: its batch will be drawn anew. On every rank alike."""
        self._ahead = None

    def use(self, chain: PlanChain) -> None:
        """Plan with another chain from the next plan on that is begun; one that is made ahead stays as it is.

        All ranks must do so after the same step, with chains that plan alike.
        """
        self._chain = chain

    @property
    def chain(self) -> PlanChain:
        """What plans that are begun from now on are made with."""
        return self._chain

    @property
    def chain_of_next(self) -> PlanChain:
        """What the next plan is made with, or will be."""
        return self._ahead.chain if self._ahead else self._chain

    def _begin(self, chain: PlanChain) -> _Begun:
        """Draw the next batch and start to plan it: in a thread of its own, since a late one cannot be stopped."""
        draw, future = self._draw(), Future[tuple[StepPlan, float]]()

        def work() -> None:
            start = time.perf_counter()
            try:
                plan = chain.plan(as_lengths(draw.lengths), _tenants(draw))
                future.set_result((plan, time.perf_counter() - start))
            except BaseException as error:
                future.set_exception(error)

        if self._background:
            threading.Thread(target=work, name=f"evenload-plan-{self.step}", daemon=True).start()
        else:
            work()
        return _Begun(draw, chain, future)

    def _wait(
        self, future: Future[tuple[StepPlan, float]], budget_s: float | None
    ) -> tuple[int, StepPlan | None, float, str]:
        """(status, plan, seconds of planning, why there is no plan); a budget of None waits for its end."""
        try:
            plan, plan_s = future.result(timeout=budget_s)
        except TimeoutError:
            return LATE, None, self._budget_s, f"no plan within {1e3 * self._budget_s:.0f} ms (planner.budget_ms)"
        except Exception as error:
            return FAILED, None, 0.0, f"{type(error).__name__}: {error}"
        return READY, plan, plan_s, ""

    def _agreed(
        self, future: Future[tuple[StepPlan, float]], budget_s: float | None
    ) -> tuple[StepPlan | None, float, str, list[bytes]]:
        """(plan, seconds of planning, why there is none, what each rank told); None where some rank lacks it."""
        status, plan, plan_s, why = self._wait(future, budget_s)
        answers = self._exchange(bytes([status]) + (plan.digest if plan else bytes(16)))
        if plan is None or any(message[0] != READY for message in answers):
            return None, plan_s, why, answers
        _refuse_divergence([message[1:] for message in answers], self.step)
        return plan, plan_s, why, answers

    def _fall_back(
        self, draw: Draw, chain: PlanChain, answers: list[bytes], why: str, future: Future[tuple[StepPlan, float]]
    ) -> StepPlan:
        """A plan that all ranks agreed on in place of the one that some of them lack. Collective."""
        ranks = {kind: [r for r, message in enumerate(answers) if message[0] == kind] for kind in (LATE, FAILED)}
        cause = "; ".join(
            f"{word}{ranks[kind]}" for kind, word in ((LATE, "late on ranks "), (FAILED, FAILED_ON)) if ranks[kind]
        )
        for name, make in chain.simpler(as_lengths(draw.lengths), _tenants(draw)):
            try:
                plan = make()
            except Exception as error:
                logger.warning("step %d: the fallback '%s' failed too: %s", self.step, name, error)
                continue
            plan = replace(plan, experts=self._policy)
            logger.warning(
                "step %d: planning %s (%s); the simpler plan '%s' runs", self.step, cause, why or "other ranks", name
            )
            _refuse_divergence(self._exchange(bytes([READY]) + plan.digest), self.step)
            return replace(plan, notes=(*plan.notes, f"{FELL_BACK}{cause}: {why or 'other ranks'}"))
        if not ranks[FAILED]:
            logger.warning("step %d: planning %s, and no simpler plan may run; the step waits", self.step, cause)
            late, _, why, _ = self._agreed(future, budget_s=None)
            if late is not None:
                return replace(late, notes=(*late.notes, f"waited for: {cause}"))
        raise EvenloadError(
            "no planner could plan this step under the caps and settings of the recipe",
            f"step {self.step}: {cause}; {why or 'other ranks'}",
            "see the warnings above; raise the caps (max_tokens, activation_gib) or lower data.max_length",
        )


def _tenants(draw: Draw) -> Lengths | None:
    return None if draw.tenants is None else as_lengths(draw.tenants)


def _refuse_divergence(digests: list[bytes], step: int) -> None:
    """Raise the same RankError on every rank if the digests differ, naming those that disagree with the majority."""
    common = max(sorted(set(digests)), key=digests.count)
    odd = [rank for rank, digest in enumerate(digests) if digest != common]
    if odd:
        raise RankError(
            f"step {step}: ranks planned different steps",
            f"ranks {odd} differ from the other {len(digests) - len(odd)}",
            "check that all ranks run the same recipe, data, and versions of evenload, numpy, PuLP and HiGHS",
        )
