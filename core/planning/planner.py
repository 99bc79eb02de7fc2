"""The planner: some steps ahead in background threads, under a time budget, agreed on by all ranks.

A batch is planned in numbered stages (`stages`), each with the best lawful plan so far. Each step every rank tells the
others whether its plan is ready, the stage it has reached, and its digest (18 bytes), which is also that of the weights
in the loss where the batch has any. If all are ready and equal, the plan runs. If one is late, failed or broke a law,
all ranks take the best plan of the least stage that all have, compare its digest, and say so in a warning; so a slow
host makes the step less good and never makes ranks diverge. If digests differ although all have the stage, every rank
raises the same error.

Of large batches the ranks of a node take turns to plan (`turns`); a rank that has not received a plan is one whose own
is late. A rank makes one plan at a time: the next begins when the one before is there or its step has run.

No plan runs that breaks a cap or a setting of the recipe. Where no stage has a lawful one yet, all wait for the first;
where there is none and a planner failed, the job ends with one message.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..aliases import Divisor, Floats, Ints
from ..errors import EvenloadError, RankError
from ..plan.expert_policy import EXPERTS_AT_HOME
from ..plan.step_plan import StepPlan, as_lengths
from .chain import PlanChain
from .forward_only import computing
from .judge import outcome_of, wanted_no_more
from .notes import warn_once
from .stages import SHARE, PlanStages
from .trees import branches_of
from .turns import WORTH_S, PlannerRotation, Received, Sender

logger = logging.getLogger("evenload")

READY, LATE, FAILED = 0, 1, 2
MOST_SAVED_S = 0.5
"""What steps did not wait of their share they leave to later ones, up to so many seconds, with which a run begins."""
POLL_S = 0.01
FELL_BACK, FAILED_ON = "fallback: ", "failed on ranks "
"""A note of a plan that took over begins with the first; where a planner failed and was not only late, the second is in
it."""


class BatchPart(NamedTuple):
    """What a replica has of a batch that several share."""

    whole: Draw
    places: npt.NDArray[np.int64]
    """Of its sequences in the whole batch."""
    replica_of: Ints
    """To which replica each sequence of the whole batch was dealt."""
    counts: bool = True
    """They are its to train; otherwise nothing was dealt to it, and it runs a copy without targets."""


class Draw(NamedTuple):
    """A global batch, by its samples' numbers and lengths, and the data's state after it."""

    samples: npt.NDArray[np.int64]
    lengths: npt.NDArray[np.int64]
    state: dict[str, Any]
    """The data order and what waits for a later step: what a checkpoint keeps."""
    delay_steps: float = 0.0
    """Steps by which its tokens were held back, on average."""
    targets: npt.NDArray[np.int64] | None = None
    """Tokens of each sequence that carry loss; None: each but its first one."""
    without_target: int = 0
    """Samples that were drawn and are left out, since none of their tokens carries loss."""
    tenants: npt.NDArray[np.int64] | None = None
    """Number of each sequence's tenant [S]; None: there are no tenants."""
    groups: npt.NDArray[np.int64] | None = None
    """Number of each sequence's group [S]; None: as the recipe's settings say."""
    trunks: npt.NDArray[np.int64] | None = None
    """Tokens that each sequence begins with as all of its group do, and may share with them [S]; None: none. Groups are
    then those of trunks alone, and a plan may divide them."""
    domain: npt.NDArray[np.int64] | None = None
    """Place of each sequence's domain [S] among their names, which ascend; None: there are no domains."""
    weight: float | Floats = 1.0
    """By which the weights of all targets are multiplied, or those of each sequence [S]."""
    own_sums: Floats | None = None
    """What the weights that the data give each sequence's targets add up to [S]; None: each of these is 1."""
    divisor: Divisor = None
    """What is given to divide the weighted losses by; no ``weight`` changes it."""
    twins: npt.NDArray[np.int64] | None = None
    """Places of the sequences that its last ones repeat, to be scored densely as well; None: attention is dense."""
    computes: Floats | None = None
    """The share of its pairs of query and key that the attention of each sequence is expected to compute [S]; None: all
    of them."""
    part: BatchPart | None = None
    """Of which batch these are the sequences of one replica; None: they are all there are."""

    def at(self, places: Ints) -> Draw:
        """The sequences at these places of the batch."""
        of_sequences = ("samples", "lengths", "targets", "tenants", "groups", "trunks", "domain", "own_sums")
        own: dict[str, Any] = {
            key: None if (value := getattr(self, key)) is None else value[places] for key in of_sequences
        }
        weight = self.weight if np.ndim(self.weight) == 0 else np.asarray(self.weight)[places]
        return self._replace(**own, weight=weight)

    @property
    def own(self) -> Draw:
        """The batch without its twins."""
        if self.twins is None:
            return self
        return self.at(np.arange(len(self.samples) - len(self.twins)))._replace(twins=None, computes=None)

    @property
    def num_targets(self) -> npt.NDArray[np.int64]:
        """Tokens of each sequence that carry loss [S]."""
        return np.maximum(self.lengths - 1, 0) if self.targets is None else self.targets

    @property
    def weight_sums(self) -> Floats | None:
        """What the weights of each sequence's targets add up to [S]; None: each is 1, and no divisor is given."""
        if self.own_sums is None and self.divisor is None and np.all(np.equal(self.weight, 1.0)):
            return None
        return np.asarray((self.num_targets if self.own_sums is None else self.own_sums) * self.weight, np.float64)


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
    stages: PlanStages | Received
    result: Callable[[float | None], tuple[StepPlan, float]]
    """The plan, and the seconds of planning; waits so long for it."""
    over: threading.Event
    """Set where the plan is there, or its step has run or never will: its thread then ends."""
    sender: Sender | None = None
    """Where other ranks of the node read how far it has come."""


class Planner:
    """Hands out one agreed plan per step.

    Args:
        chain: plans.
        draw: gives the next global batch; its order is the caller's.
        budget_s: how long a step may wait for its plan; None: a share of the predicted step (`SHARE`).
        first: plans the first batch instead, where a resumed run had begun it with other costs than its newest.
        steps_ahead: how many plans are begun before their steps, at least 1; more than 1 only where the chain stays.
        turns: of this rank among those of its node; None: it plans every step itself.
    """

    def __init__(
        self,
        chain: PlanChain,
        draw: Callable[[], Draw],
        *,
        budget_s: float | None = None,
        background: bool = True,
        exchange: Exchange = alone,
        first: PlanChain | None = None,
        steps_ahead: int = 1,
        turns: PlannerRotation | None = None,
    ) -> None:
        self.chain = chain
        """Plans the batches that are begun from now on. All ranks put another one in its place after the same step, one
        that plans alike."""
        self._draw = draw
        self._exchange = exchange
        self._budget_s, self._background = budget_s, background
        self._first = first or chain
        self._saved_s = MOST_SAVED_S
        """What this rank may wait beyond a step's share."""
        self._steps_ahead, self._turns = steps_ahead, turns
        self._ahead = deque[_Begun]()
        self._latest: _Begun | None = None
        """The plan that this rank itself began last."""
        self._before: _Begun | None = None
        """The plan of the last step."""
        self._number = 0
        """Plans that were begun."""
        self._warned: set[str] = set()
        self._policy = EXPERTS_AT_HOME
        """Of the last step: a simpler plan goes on with it."""
        self.step = 0

    def prepare(self, follow: int = sys.maxsize) -> None:
        """Begin to plan the next steps already, in the background; ``follow``: no more than so many come."""
        while self._background and len(self._ahead) < min(self._steps_ahead, follow):
            self._ahead.append(self._begin())

    def next(self, *, ahead: int = sys.maxsize) -> Planned:
        """The plan of the next step, the same on every rank. Collective. Raises RankError if ranks diverge.

        ``ahead``: so many more steps may follow; planning of the first of them begins now. Raises EvenloadError on
        every rank where nothing in the batch carries loss.
        """
        start = time.perf_counter()
        begun = self._ahead.popleft() if self._ahead else self._begin()
        draw, chain = begun.draw, begun.chain
        if not len(draw.samples):
            detail = f"step {self.step}: {draw.without_target} samples without a token that carries loss"
            do = "check the labels of the data, or raise train.global_batch_size"
            raise EvenloadError("no sequence of the batch has a target", detail, do)
        plan, plan_s = self._agreed(begun)
        begun.over.set()
        # All ranks have told of this step, so none reads of the one before any more.
        if self._before and self._before.sender:
            self._before.sender.drop()
        self._before = begun
        warn_once(plan, self._warned)
        waited_s = time.perf_counter() - start
        step_s = begun.stages.best_s or outcome_of(plan, chain.context).step_s
        self._saved_s = min(MOST_SAVED_S, max(0.0, self._saved_s + SHARE * step_s))
        self._policy = plan.experts
        self.step += 1
        self.prepare(ahead)
        return Planned(plan, chain, draw, plan_s, waited_s)

    def forget(self) -> None:
        """Drop the plans that were begun ahead: their batches will be drawn anew. On every rank alike."""
        for begun in self._ahead:
            begun.over.set()
        self._ahead.clear()

    @property
    def chain_of_next(self) -> PlanChain:
        """What the next plan is made with, or will be."""
        return self._ahead[0].chain if self._ahead else self.chain

    @property
    def draw_of_next(self) -> Draw | None:
        """The batch that is drawn ahead; None where there is none."""
        return self._ahead[0].draw if self._ahead else None

    def _begin(self) -> _Begun:
        """Draw the next batch, and start to plan it in a thread of its own where no other rank does.

        A late plan ends with its next candidate.
        """
        number, self._number = self._number, self._number + 1
        draw, turns = self._draw(), self._turns
        chain, batch = self.chain if number else self._first, as_lengths(draw.lengths)
        trees = branches_of(chain, batch, draw.groups, draw.trunks)
        chain = computing(chain.of_groups(None if draw.trunks is not None else draw.groups), batch, draw.computes)
        if draw.tenants is not None or trees or not chain.staged or chain.work_s(batch) < WORTH_S:
            turns = None
        if turns is not None and not turns.is_own(number):
            received = Received(chain, batch, turns.board, number)
            return _Begun(draw, chain, received, received.result, threading.Event())
        stages, future = PlanStages(chain, batch, trees), Future[tuple[StepPlan, float]]()
        sender = Sender(turns.board, number) if turns else None
        begun = _Begun(draw, chain, stages, future.result, threading.Event(), sender)
        before, self._latest = self._latest, begun

        def work() -> None:
            start = time.perf_counter()
            why = ""
            try:
                plan = None
                for plan in stages.run():  # noqa: B007
                    if sender:
                        sender.stage(stages.best[-1])
                assert plan is not None
                future.set_result((chain.with_tenants(plan, draw.tenants), time.perf_counter() - start))
            except BaseException as error:
                why = f"{type(error).__name__}: {error}"
                future.set_exception(error)
            if sender and not begun.over.is_set():
                sender.end(time.perf_counter() - start, why)

        def work_in_turn() -> None:
            if before:
                before.over.wait()
            wanted_no_more.set(begun.over.is_set)
            work()
            begun.over.set()

        if self._background:
            threading.Thread(target=work_in_turn, name=f"evenload-plan-{number}", daemon=True).start()
        else:
            work()
        return begun

    def _wait(self, begun: _Begun, budget_s: float | None) -> tuple[int, StepPlan | None, float, str]:
        """(status, plan, seconds of planning, why there is no plan); a budget of None waits for its end."""
        try:
            plan, plan_s = begun.result(budget_s)
        except TimeoutError:
            waited_s = budget_s or 0.0
            return LATE, None, waited_s, f"no plan within {1e3 * waited_s:.0f} ms (planner.budget_ms)"
        except Exception as error:
            return FAILED, None, 0.0, f"{type(error).__name__}: {error}"
        return READY, plan, plan_s, ""

    def _agreed(self, begun: _Begun) -> tuple[StepPlan, float]:
        """(plan, seconds of planning) of the least stage that all ranks have reached. Collective."""
        start = time.perf_counter()
        budget_s = self._saved_s + SHARE * begun.stages.best_s if self._budget_s is None else self._budget_s
        status, plan, plan_s, why = self._wait(begun, budget_s)
        # What this rank waits for others is no time of its planning.
        self._saved_s -= time.perf_counter() - start
        note = ""
        while True:
            answers = self._tell(status, begun, plan)
            if plan is not None and all(answer[0] == READY for answer in answers):
                _refuse_divergence([answer[2:] for answer in answers], self.step)
                return (replace(plan, notes=(*plan.notes, note)) if note else plan), plan_s
            failed = any(answer[0] == FAILED for answer in answers)
            if failed or begun.stages.at(_least(answers)) is not None:
                return self._less_good(begun, answers, why or "other ranks", "" if failed else note), plan_s
            text = "step %d: planning %s, and no simpler plan may run; the step waits"
            logger.warning(text, self.step, _cause(answers))
            note = f"waited for: {_cause(answers)}"
            status, plan, plan_s, why = self._wait_for_any(begun)

    def _tell(self, status: int, begun: _Begun, plan: StepPlan | None) -> list[bytes]:
        """What each rank says of its plan: status, number of the stage that it has reached, digest. Collective."""
        digest = _digest(plan, begun.draw) if plan else bytes(16)
        return self._exchange(bytes([status, begun.stages.reached]) + digest)

    def _wait_for_any(self, begun: _Begun) -> tuple[int, StepPlan | None, float, str]:
        """Wait, as `_wait` does, for the first lawful plan or the end."""
        while (answer := self._wait(begun, POLL_S))[0] == LATE and not begun.stages.best_s:
            pass
        return answer

    def _less_good(self, begun: _Begun, answers: list[bytes], why: str, note: str = "") -> StepPlan:
        """The best plan of the least stage of all ranks. Collective. Raises EvenloadError where there is none."""
        cause, stages = _cause(answers), begun.stages
        for name, error in stages.failed:
            logger.warning("step %d: the fallback '%s' failed too: %s", self.step, name, error)
        best = stages.at(_least(answers))
        if best is None:
            raise EvenloadError(
                "no planner could plan this step under the caps and settings of the recipe",
                f"step {self.step}: {cause}; {why}",
                "see the warnings above; raise the caps (max_tokens, activation_gib) or lower data.max_length",
            )
        plan = replace(begun.chain.with_tenants(best.plan, begun.draw.tenants), experts=self._policy)
        text = "step %d: planning %s (%s); the simpler plan '%s' runs"
        again = FAILED_ON not in cause and f"late, {plan.made_by}" in self._warned
        self._warned.add(f"late, {plan.made_by}")
        logger.log(logging.DEBUG if again else logging.WARNING, text, self.step, cause, why, plan.made_by)
        _refuse_divergence(self._exchange(_digest(plan, begun.draw)), self.step)
        return replace(plan, notes=(*plan.notes, note or f"{FELL_BACK}{cause}: {why}"))


def _least(answers: list[bytes]) -> int:
    """Number of the last stage that every rank has reached."""
    return min(answer[1] for answer in answers)


def _cause(answers: list[bytes]) -> str:
    """Which ranks have no plan, and why, in words."""
    ranks = {kind: [rank for rank, answer in enumerate(answers) if answer[0] == kind] for kind in (LATE, FAILED)}
    words = (LATE, "late on ranks "), (FAILED, FAILED_ON)
    return "; ".join(f"{word}{ranks[kind]}" for kind, word in words if ranks[kind])


def _digest(plan: StepPlan, draw: Draw) -> bytes:
    """What all ranks must hold alike: a plan, and the weights in the loss and their divisor, of which no plan knows."""
    sums, divisor = draw.weight_sums, repr(draw.divisor).encode()
    return plan.digest if sums is None else blake2b(plan.digest + sums.tobytes() + divisor, digest_size=16).digest()


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
