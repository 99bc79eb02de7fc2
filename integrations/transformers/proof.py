"""Whether what a planned step computes is exact for a live model by a live loss: measured before the first update, with
any class and script.

An `Experiment` runs something as the script runs it and once more as a planned step does, and compares the two: losses,
logits, and the gradient of the loss at the input embeddings, which passes backwards through every layer, so that no
weight can get another one unseen. Its rows of data are two short samples in a pack or in padded rows (`probe_samples`),
two short units in one batch, and a batch whose rows stay where they are (`units.proof`).

A few forwards and backwards of few tokens; no gradient of a weight is computed, so neither data parallelism nor an
optimizer sees them. Every rank runs the same tokens and comes to the same verdict.

Shape legend: T = slots of a row, H = width of the embeddings.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...core.errors import EvenloadError
from ...runtime.world.agreement import everyone
from ..huggingface import attention
from ..huggingface.mixers import Mixer, MixerSearch, apart
from .conditions import as_if_without_dropout, counted, drawn_outside_torch, embedded, moved
from .supported import entered_module, inner_model

_TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}
"""Largest relative difference of a token's logits or gradient that is rounding: Transformers computes norms and losses
of float64 models in float32, and half precision differs by as much between two kernels of attention."""

UNSTEADY = "a loss that is another one each time: random numbers, or a count of its own"
STOCK = "nothing needs to be done: the script runs as it is, without plans"
_MEND = "have compute_loss take a batch of one short row, or leave evenload off for this script"

Batch = dict[str, Any]


class Call(NamedTuple):
    """What one forward gave: its loss and its outputs."""

    loss: Tensor
    outputs: Any


Compute = Callable[[Batch, float], Call]
"""The loop's own loss and outputs of a batch, the batch's targets counted so many times."""


class Proof(NamedTuple):
    """What an experiment says of the user's own model."""

    fault: EvenloadError | None
    """Why plans are not exact; None: they are."""
    may_cut: bool = False
    """The loss goes by ``shift_labels``, so that a target may lie after the end of a slice."""
    sees_windows: bool = False
    """Attention is told of every window that the model's masks have."""
    mixers: tuple[Mixer, ...] = ()
    """What keeps the samples of a pack apart in a form of its own."""


class ProofRun(NamedTuple):
    """What one forward and its backward gave."""

    loss: float
    logits: Tensor | None
    """[B, T, ...]; None where not every label has some."""
    gradients: list[Tensor]
    """[B, T, H], of each call of the embeddings."""
    calls: dict[str, int]
    """See `counted`."""


class Experiment(NamedTuple):
    """Something that a script trains, as it runs it and as a planned step does, and how the two compare. All of it may
    raise EvenloadError: why plans are not exact."""

    noun: str
    """What a planned step has, in messages."""
    stock: Callable[[ProbeModel], list[ProofRun]]
    """Runs each part as the script does."""
    planned: Callable[[ProbeModel], Batch]
    """All parts as a planned step has them."""
    compare: Callable[[ProbeModel, list[ProofRun], ProofRun], Proof]
    """The verdict on one pair of runs."""
    sides: Sequence[float] = (1.0,)
    """How far the weights are moved in each pair of runs, see `moved`: where a run begins, a penalty may be 0, of a
    model that is its own reference."""
    conclude: Callable[[ProbeModel, Sequence[ProofRun]], None] = lambda probe, runs: None
    """Looks at the planned runs of all sides."""
    within: Callable[[], AbstractContextManager[Any]] = nullcontext
    """What the planned run runs in."""
    repeated: Callable[[ProbeModel], Batch] | None = None
    """A batch that has one loss however often it runs, unless the loss is to blame; None: it is not tried."""


class ProbeModel:
    """A live model and its loss, run on short batches under the conditions of a measurement.

    Args:
        model: the Hugging Face model, no data parallelism around it.
        row: a batch of the script's own.
        compute: the loop's own loss of a batch.
        half: passes run in half precision, whatever the weights are kept in.
        entered: the module whose call is the model's forward.
        outer: what is trained, with everything that is around the model; None: the model.
    """

    def __init__(
        self, model: Any, row: Mapping[str, Any], compute: Compute, *, half: bool, entered: Any, outer: Any = None
    ) -> None:
        self.model = model
        self.mixers: list[Mixer] | None = None
        """None until a pack has run."""
        self.is_in_model = False
        """A forward of the model has begun, and not come to its end."""
        self.tolerance = tolerance_of(model, {torch.bfloat16} if half else set())
        # Weights may be offloaded.
        self.device: torch.device = next(value.device for value in row.values() if isinstance(value, Tensor))
        self._row = row
        self._compute = compute
        self._entered = entered
        self._outer = model if outer is None else outer

    @property
    def name(self) -> str:
        """The class of the model."""
        return type(self.model).__name__

    def run(
        self,
        batch: Batch,
        targets: float = 1.0,
        *,
        backward: bool = True,
        within: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> ProofRun:
        """One forward and its backward, the batch's targets counted so many times."""
        with ExitStack() as stack:
            leaves = stack.enter_context(embedded(self.model))
            calls = stack.enter_context(counted(self.model, self._entered, planned=attention.PACK in batch))
            if attention.PACK in batch:
                stack.enter_context(self._apart(calls))
            stack.enter_context(torch.set_grad_enabled(backward))
            labels = batch.get("labels")  # a loss may take them out
            try:
                with within():
                    loss, outputs = self._compute(batch, targets)
            finally:
                self.is_in_model = calls["ended"] < calls["forwards"]
            gradients = list(torch.autograd.grad(loss, leaves)) if backward else []
        logits = getattr(outputs, "logits", None)
        return ProofRun(
            float(loss.detach()),
            logits.detach() if isinstance(logits, Tensor) and _are_of(logits, labels) else None,
            gradients,
            calls,
        )

    def verdict(self, experiment: Experiment) -> Proof:
        """The outcome of an experiment, which raises EvenloadError where plans are not exact."""
        runs = []
        with as_if_without_dropout(self.model, self.device) as self._changed:
            for side in experiment.sides:
                with moved(self._outer, side):
                    self._drawn = drawn_outside_torch()
                    stock = experiment.stock(self)
                    runs.append(self.run(experiment.planned(self), within=experiment.within))
                    proof = experiment.compare(self, stock, runs[-1])
            experiment.conclude(self, runs)
        return proof

    def refuse_state(self) -> None:
        """Raise EvenloadError where a forward has changed a buffer."""
        if (name := self._changed()) is not None:
            what = "a buffer that a forward in training mode changes, and packs change otherwise"
            raise EvenloadError(what, f"{name} of a {self.name}")

    def refuse_draws(self) -> None:
        """Raise EvenloadError where a forward has drawn from other generators than PyTorch's."""
        if drawn_outside_torch() != self._drawn:
            what = "random numbers of Python's or numpy's in a forward, of which packs draw others"
            raise EvenloadError(what, f"in a call of the loss of a {self.name}")

    def refuse_other_sum(self, noun: str, stock: list[ProofRun], planned: ProofRun) -> None:
        """Raise EvenloadError unless the loss of the planned run is the sum of the stock runs'."""
        total = sum(one.loss for one in stock)
        if abs(planned.loss - total) > self.tolerance / 5 * sum(abs(one.loss) for one in stock):
            raise EvenloadError(
                "a loss that is not the sum of its samples'",
                f"{planned.loss:.6g} of {noun} of two samples of a {self.name}, {total:.6g} of both alone",
            )

    def refuse_far(self, why: str, what: str, off: float) -> None:
        """Raise EvenloadError where this relative difference of two runs is more than rounding."""
        if not off <= self.tolerance:
            raise EvenloadError(why, f"{what} of a {self.name} off by {off:.1e}, {self.tolerance:g} is rounding")

    def unsteady(self, batch_of: Callable[[ProbeModel], Batch]) -> EvenloadError | None:
        """What is wrong with a loss that is another one each time."""
        try:
            with as_if_without_dropout(self.model, self.device):
                one, other = (self.run(batch_of(self), backward=False).loss for _ in range(2))
        except Exception:  # of code that nobody here has seen
            return None
        if abs(one - other) <= self.tolerance * abs(one):
            return None
        return EvenloadError(UNSTEADY, f"{one:.6g} and {other:.6g} of one batch")

    def raises_on_row(self, within: Callable[[], AbstractContextManager[Any]]) -> bool:
        """Whether the loss raises on the script's own batch as well."""
        try:
            with as_if_without_dropout(self.model, self.device):
                self.run(dict(self._row), backward=False, within=within)
        except Exception:  # of code that nobody here has seen
            return True
        return False

    @contextmanager
    def _apart(self, calls: dict[str, int]) -> Iterator[None]:
        """Inside, samples of a pack are kept apart; the first time, what mixes them is searched for."""
        if self.mixers is not None:
            with apart(self.mixers):
                yield
            return
        search = MixerSearch(self.model, lambda: calls["attention"], self.tolerance, difference)
        with search.watching():
            yield
        self.mixers = search.mixers
        for mixer in search.mixers:
            mixer.refuse_divided()


def probe_of(trainer: Any, row: Mapping[str, Any], compute: Compute) -> ProbeModel:
    """The model of a Trainer for one experiment, by this loss."""
    half, entered = trainer.args.bf16 or trainer.args.fp16, entered_module(trainer.accelerator, trainer.model)
    return ProbeModel(inner_model(trainer), row, compute, half=half, entered=entered, outer=trainer.model)


def prove(experiment: Experiment, probe: ProbeModel) -> Proof:
    """Whether plans are exact by an experiment. Collective where the model's forward is.

    A model or a loss that raises cannot be measured, which is a fault as well. On every rank the same fault.
    """
    proof, of_loss = Proof(None), False
    try:
        proof = probe.verdict(experiment)
    except EvenloadError as error:
        error = (experiment.repeated and probe.unsteady(experiment.repeated)) or error
        proof = Proof(EvenloadError(error.what, error.found, error.do or STOCK))
    except Exception as error:  # of code that nobody here has seen
        of_loss = not probe.is_in_model
        detail = f"{type(error).__name__}: {error}"
        proof = Proof(EvenloadError(f"the model or its loss cannot run {experiment.noun}", detail, STOCK))
    of_ranks = [(fault, raised) for fault, raised in everyone((proof.fault, of_loss)) if fault is not None]
    raised = next((fault for fault, raised in of_ranks if raised), None)
    if raised is not None and not any(everyone(probe.raises_on_row(experiment.within))):
        return Proof(EvenloadError("the script's loss raises on two short samples of its data", raised.found, _MEND))
    return Proof(of_ranks[0][0]) if of_ranks else proof


def by_embedding(planned: ProofRun, stock: Iterable[ProofRun]) -> Iterator[tuple[Tensor, list[Tensor]]]:
    """The gradient at the embeddings in the planned run and in the stock runs, by call of the embeddings."""
    for own, *parts in zip(planned.gradients, *(one.gradients for one in stock), strict=True):
        yield own, parts


def difference(own: Tensor, wanted: Tensor) -> float:
    """Largest ||a - b|| / ||b|| over tokens; NaN where there are infinities that not both have."""
    return float("inf") if own.shape != wanted.shape else float(differences(own, wanted).max())


def differences(own: Tensor, wanted: Tensor) -> Tensor:
    """||a - b|| / ||b|| of each token [T]; one with next to nothing counts as a tenth of the largest. Infinities that
    both have are equal."""
    norms_T = wanted.double().where(wanted.isfinite(), 0.0).flatten(1).norm(dim=1)
    off_T = (own.double() - wanted.double()).where(own != wanted, 0.0).flatten(1).norm(dim=1)
    relative_T: Tensor = off_T / norms_T.clamp(min=float(norms_T.max()) / 10).clamp(min=1e-300)
    return relative_T


def tolerance_of(model: Any, others: set[torch.dtype]) -> float:
    """Largest difference that is rounding, where the model also computes in these other types."""
    dtypes = {p.dtype for p in model.parameters() if p.is_floating_point()} | others
    dtypes |= {torch.float16} if torch.backends.cuda.matmul.allow_tf32 else set()
    return max(_TOLERANCE.get(dtype, _TOLERANCE[torch.bfloat16]) for dtype in dtypes)


def _are_of(logits: Tensor, labels: Tensor | None) -> bool:
    """Whether each label has logits; rows of units have no labels."""
    return labels is not None and logits.shape[:2] == labels.shape
