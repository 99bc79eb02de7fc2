"""Whether packs are exact for a live model by a live loss: measured before the first update, with any class and script.

Two short samples of the script's own tokens run as the script runs them, each alone in a row, and once in one pack as a
planned step runs them. Compared are the logits of every token; the loss, which is to be the sum of both and to halve
where the number of targets doubles; and the gradient of the loss at the input embeddings, which passes backwards
through every layer, so that no weight can get another one unseen. Calls of packed attention are counted: one a layer.
Where the script's own rows hold several samples, both run side by side in such a row too, as the script runs it.

Four or five forwards and three or four backwards of at most 19 tokens; no gradient of a weight is computed, so neither
data parallelism nor an optimizer sees them. Every rank runs the same tokens and comes to the same verdict.

Shape legend: T = slots of a row, H = width of the embeddings.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...core.errors import EvenloadError
from ...core.plan.step_plan import MicroBatch, Slice
from ...runtime.attention.pack import IGNORE, Pack, build_pack
from ...runtime.world.agreement import everyone, rank_and_size
from ..huggingface import attention
from ..huggingface.inputs import inputs_of
from ..huggingface.mixers import Mixer, MixerSearch, apart
from ..huggingface.models import num_windows
from .conditions import UNREACHED, as_if_without_dropout, counted, drawn_outside_torch, embedded, moved, twin_of
from .pack_loss import PackLoss
from .supported import entered_module, inner_model

LENGTHS = (7, 12)
"""Tokens of the two samples at most: unlike, and short enough to cost little on any model."""

_TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}
"""Largest relative difference of a token's logits or gradient that is rounding: Transformers computes norms and losses
of float64 models in float32, and half precision differs by as much between two kernels of attention."""
_LINEAR = 1e-4
"""Of a loss that is computed twice from equal logits."""

UNSTEADY = "a loss that is another one each time: random numbers, or a count of its own"
STOCK = "nothing needs to be done: the script runs as it is, without plans"
_MEND = "have compute_loss take a batch of one short row, or leave evenload off for this script"


class Call(NamedTuple):
    """What one forward gave: its loss and its outputs."""

    loss: Tensor
    outputs: Any


Compute = Callable[[dict[str, Any], float], Call]
"""The loop's own loss and outputs of a batch, the batch's targets counted so many times."""


class Proof(NamedTuple):
    """What a proof of packs on the user's own model says."""

    fault: EvenloadError | None
    """Why packs are not exact; None: they are."""
    may_cut: bool = False
    """The loss goes by ``shift_labels``, so that a target may lie behind the end of a slice."""
    windows: bool = False
    """Attention is told of every window that the model's masks have."""
    mixers: tuple[Mixer, ...] = ()
    """What keeps the samples of a pack apart in a form of its own."""


def windows(samples: Sequence[Tensor], *, from_start: bool = False) -> list[list[list[int]]]:
    """Tokens and labels of two short samples with targets, out of those of all ranks. Collective.

    Args:
        samples: int64 [2, L] of this rank; of all ranks at least one has a target.
        from_start: they begin where the samples do.
    """
    samples = [one for one in samples if bool((one[1, 1:] != IGNORE).any())]
    # Of a single sample both its beginning and its end.
    pairs = zip((*samples[:2], *samples[:1]), LENGTHS, (0, -1), strict=False)
    own = [(sample[:, :most] if from_start else _window(sample, most, which)).tolist() for sample, most, which in pairs]
    of_all = sorted(everyone(own), key=len, reverse=True)
    return of_all[0]


def prove(
    model: Any,
    samples: list[list[list[int]]],
    row: Mapping[str, Any],
    compute: Compute,
    *,
    half: bool,
    entered: Any = None,
    kind: type[Measurement] | None = None,
) -> Proof:
    """Measure packs of these samples against each of them alone. Collective where the model's forward is.

    Args:
        model: the Hugging Face model, no data parallelism around it.
        samples: two of `windows`.
        row: a batch of the script's own, whose keys the rows of single samples have.
        compute: the loop's own loss of a batch.
        half: passes run in half precision, whatever the weights are kept in.
        entered: the module whose call is the model's forward; None: the model.
        kind: what is measured instead of packs.

    A model or a loss that raises cannot be measured, which is a fault as well. On every rank the same fault.
    """
    measurement = (kind or Measurement)(model, samples, row, compute, half, entered)
    proof, of_loss = Proof(None), False
    try:
        proof = measurement.proof()
    except EvenloadError as error:
        error = measurement.unsteady() or error
        proof = Proof(EvenloadError(error.what, error.found, error.do or STOCK))
    except Exception as error:  # of code that nobody here has seen
        of_loss = not measurement.is_in_model
        detail = f"{type(error).__name__}: {error}"
        proof = Proof(EvenloadError(f"the model or its loss cannot run {measurement.noun}", detail, STOCK))
    of_ranks = [(fault, raised) for fault, raised in everyone((proof.fault, of_loss)) if fault is not None]
    raised = next((fault for fault, raised in of_ranks if raised), None)
    if raised is not None and not any(everyone(measurement.raises_on_row())):
        return Proof(EvenloadError("the script's loss raises on two short samples of its data", raised.found, _MEND))
    return Proof(of_ranks[0][0]) if of_ranks else proof


def prove_trainer(
    trainer: Any,
    samples: list[list[list[int]]],
    row: Mapping[str, Any],
    num_items: Any,
    *,
    kind: type[Measurement] | None = None,
    loss: PackLoss | None = None,
) -> Proof:
    """Measure packs of a Trainer's model by its ``compute_loss``. Collective.

    The method runs on a copy of the Trainer that logs nothing, so that what it counts begins with the first step; once
    as it does now, and once as in the run's last step.

    Args:
        num_items: targets of the step as the Trainer counts them, of the type it does; None: it takes means of batches.
        kind: what is measured instead of packs.
        loss: weighs tokens by the batch that they came in; None: one number divides all.
    """
    twin, model = twin_of(trainer), trainer.accelerator.unwrap_model(trainer.model)
    inner, targets = inner_model(trainer), sum(map(num_targets, samples))

    def compute(batch: dict[str, Any], times: float) -> Call:
        counted = None if num_items is None else num_items * 0 + int(targets * times)
        is_pack = attention.PACK in batch
        if loss is not None and is_pack:
            loss.weights_1T = weights_of(samples, times, counted).to(batch["input_ids"].device)
        batch = batch if is_pack else twin._prepare_inputs(batch)
        with twin.compute_loss_context_manager(), warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # of an argument that is ours and not the script's
            result = twin.compute_loss(model, batch, return_outputs=True, num_items_in_batch=counted)
        if loss is not None:
            loss.refuse_unused()
        return Call(*result) if isinstance(result, tuple) else Call(result, None)

    half = trainer.args.bf16 or trainer.args.fp16
    with nullcontext() if loss is None else loss.in_place(inner):
        entered = entered_module(trainer.accelerator, trainer.model)
        proof = prove(inner, samples, row, compute, half=half, entered=entered, kind=kind)
        if proof.fault is not None:
            return proof
        # A loss may go by the step: a curriculum, a penalty that begins later.
        twin.state.global_step, twin.state.epoch = max(trainer.state.max_steps - 1, 0), trainer.args.num_train_epochs
        late = prove(inner, samples, row, compute, half=half, entered=entered, kind=kind).fault
    if late is None:
        return proof
    return Proof(EvenloadError(f"at the last step, {late.what}", late.found, late.do))


def weights_of(samples: list[list[list[int]]], times: float, divisor: Any = None) -> Tensor:
    """What the tokens of a pack of `windows` count [1, T], each sample a batch of its own whose targets are counted so
    many times; ``divisor`` divides both instead."""
    counts = [times * num_targets(one) if divisor is None else float(divisor) for one in samples]
    own = [torch.full((len(one[0]),), 1 / count) for one, count in zip(samples, counts, strict=True)]
    return torch.cat(own)[None]


class ProofRun(NamedTuple):
    """What one forward and its backward gave."""

    loss: float
    logits: Tensor | None
    """[B, T, ...]; None where not every label has some."""
    gradients: list[Tensor]
    """[B, T, H], of each call of the embeddings."""
    calls: dict[str, int]
    """See `counted`."""


class Measurement:
    """Two samples in one pack against each alone."""

    noun = "a pack"
    of_rows = False
    flattened = False
    """Rows of the script hold several samples, on some rank: such a row is measured, too."""

    def __init__(
        self,
        model: Any,
        samples: list[list[list[int]]],
        row: Mapping[str, Any],
        compute: Compute,
        half: bool,
        entered: Any = None,
    ) -> None:
        self._model = model
        self._entered = model if entered is None else entered
        self.is_in_model = False
        """A forward of the model has begun, and not come to its end."""
        self._samples = samples
        self._mixers: list[Mixer] | None = None
        """None until a pack has run."""
        self._row = row
        self._compute = compute
        # Weights may be offloaded.
        self._device = next(value.device for value in row.values() if isinstance(value, Tensor))
        self._tolerance = tolerance_of(model, {torch.bfloat16} if half else set())

    def proof(self) -> Proof:
        with ExitStack() as stack:
            changed = stack.enter_context(as_if_without_dropout(self._model, self._device))
            # Where a run begins, a penalty may be 0: a model that is its own reference.
            stack.enter_context(moved(self._model, 1.0))
            drawn = drawn_outside_torch()
            alone = [self._run(self._alone(i)) for i in range(2)]
            self._refuse_state(changed)
            if self.flattened:
                self._refuse_own_rows(alone)
            packed = self._run(self._together(self._samples))
            if drawn_outside_torch() != drawn:
                what = "random numbers of Python's or numpy's in a forward, of which packs draw others"
                raise EvenloadError(what, f"in a call of the loss of a {type(self._model).__name__}")
            self._refuse_other_attention(packed)
            self._refuse_other_tokens(alone, packed)
            may_cut = self._may_cut(packed)
            self._refuse_other_losses(alone, packed, is_divided=may_cut or self._halves(packed))
            sees_windows = packed.calls["windows"] >= num_windows(self._model.config) and not packed.calls["untold"]
            return Proof(None, may_cut and not self._mixers, sees_windows, tuple(self._mixers or ()))

    def _alone(self, index: int) -> dict[str, Any]:
        """A sample as a row of the script's."""
        tokens, labels = (torch.tensor([one], device=self._device) for one in self._samples[index])
        extra = {
            "attention_mask": torch.ones_like(tokens),
            "token_type_ids": torch.zeros_like(tokens),
            "position_ids": torch.arange(tokens.shape[1], device=self._device)[None],
        }
        return {"input_ids": tokens, "labels": labels, **{k: v for k, v in extra.items() if k in self._row}}

    def _side_by_side(self) -> dict[str, Any]:
        """Both samples in one row of the script's."""
        lengths = [len(tokens) for tokens, _ in self._samples]
        ends = [0, lengths[0], sum(lengths)]
        values = {
            "input_ids": [[token for tokens, _ in self._samples for token in tokens]],
            # The first label of a sample would be a target of the last token before it.
            "labels": [[label for _, labels in self._samples for label in (IGNORE, *labels[1:])]],
            "position_ids": [[place for length in lengths for place in range(length)]],
            "token_type_ids": [[0] * sum(lengths)],
            "seq_idx": [[number for number, length in enumerate(lengths) for _ in range(length)]],
            "cu_seq_lens_q": ends,
            "cu_seq_lens_k": ends,
        }
        most = dict.fromkeys(("max_length_q", "max_length_k"), max(lengths))
        row = {"labels": torch.tensor(0), **self._row}
        side_by_side = {k: row[k].new_tensor(v) for k, v in values.items() if isinstance(row.get(k), Tensor)}
        return side_by_side | {k: v for k, v in most.items() if k in self._row}

    def _together(self, samples: list[list[list[int]]]) -> dict[str, Any]:
        """Samples as a planned step has them."""
        return self._inputs(self._pack(samples))

    def _inputs(self, pack: Pack) -> dict[str, Any]:
        return inputs_of(pack, with_mask="attention_mask" in self._row)

    def _pack(self, samples: list[list[list[int]]], pad_to: int = 0) -> Pack:
        of_token, of_label = ([torch.tensor(one[k]).numpy() for one in samples] for k in range(2))
        slices = tuple(Slice(i, 0, len(one[0])) for i, one in enumerate(samples))
        micro_batch = MicroBatch(slices, (rank_and_size()[0],), pad_to)
        return build_pack(micro_batch, of_token.__getitem__, self._device, labels_of=of_label.__getitem__)

    def _run(self, batch: dict[str, Any], targets: float = 1.0, *, backward: bool = True) -> ProofRun:
        with ExitStack() as stack:
            leaves = stack.enter_context(embedded(self._model))
            calls = stack.enter_context(counted(self._model, self._entered, planned=attention.PACK in batch))
            if attention.PACK in batch:
                stack.enter_context(self._apart(calls))
            stack.enter_context(torch.set_grad_enabled(backward))
            labels = batch.get("labels")  # a loss may take them out
            try:
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

    @contextmanager
    def _apart(self, calls: dict[str, int]) -> Iterator[None]:
        """Inside, samples of a pack are kept apart; the first time, what mixes them is searched for."""
        if self._mixers is not None:
            with apart(self._mixers):
                yield
            return
        search = MixerSearch(self._model, lambda: calls["attention"], self._tolerance, difference)
        with search.watching():
            yield
        self._mixers = search.mixers
        for mixer in search.mixers:
            mixer.refuse_divided()

    def unsteady(self) -> EvenloadError | None:
        """What is wrong with a loss that is another one each time."""
        try:
            with as_if_without_dropout(self._model, self._device):
                one, other = (self._run(self._alone(0), backward=False).loss for _ in range(2))
        except Exception:  # of code that nobody here has seen
            return None
        if abs(one - other) <= self._tolerance * abs(one):
            return None
        return EvenloadError(UNSTEADY, f"{one:.6g} and {other:.6g} of one batch")

    def raises_on_row(self) -> bool:
        """Whether the loss raises on the script's own batch as well."""
        try:
            with as_if_without_dropout(self._model, self._device):
                self._run(dict(self._row), backward=False)
        except Exception:  # of code that nobody here has seen
            return True
        return False

    def _refuse_own_rows(self, alone: list[ProofRun]) -> None:
        """Raise EvenloadError where the script's rows compute their samples otherwise than each alone."""
        row = self._run(self._side_by_side())
        pairs = [("gradients at the embeddings", together, parts) for together, *parts in _each(row, alone)]
        logits = [one.logits for one in alone if one.logits is not None]
        if row.logits is not None and len(logits) == len(alone):
            pairs.insert(0, ("logits", row.logits, logits))
        for what, together, parts in pairs:
            of_row = torch.split(together.flatten(0, 1), [one.shape[1] for one in parts])
            # A loop may divide the loss by the targets of a row: of gradients the direction counts.
            off = max(difference(_unit(own), _unit(one.flatten(0, 1))) for own, one in zip(of_row, parts, strict=True))
            if not off <= self._tolerance:
                raise EvenloadError(
                    "the script's own rows let their samples see each other, and packs do not",
                    f"{what} of a {type(self._model).__name__} off by {off:.1e} from each sample alone, "
                    f"{self._tolerance:g} is rounding",
                    "pass use_cache=False to the model, or use an attention that keeps packed samples apart "
                    "(`evenload audit` shows which rows); then samples are trained alone, as under packs",
                )

    def _refuse_state(self, changed: Callable[[], str | None]) -> None:
        """Raise EvenloadError where a forward has changed a buffer."""
        if (name := changed()) is not None:
            what = "a buffer that a forward in training mode changes, and packs change otherwise"
            raise EvenloadError(what, f"{name} of a {type(self._model).__name__}")

    def _parts(self, together: Tensor, alone: list[Tensor]) -> Tensor:
        """What belongs to the samples, as it lies in both behind each other [T, ...]."""
        return together.flatten(0, 1)

    def _off(self, together: Tensor, alone: list[Tensor]) -> float:
        """How far tokens are from what they are alone."""
        return difference(self._parts(together, alone), torch.cat([one.flatten(0, 1) for one in alone]))

    def _refuse_other_attention(self, packed: ProofRun) -> None:
        config = self._model.config.get_text_config()
        layers = getattr(config, "num_hidden_layers", None) or 1
        calls, forwards = packed.calls["attention"], packed.calls["forwards"]
        if calls != layers * forwards and not self._mixers:
            raise EvenloadError(
                UNREACHED,
                f"{calls} calls in {forwards} forward of a {type(self._model).__name__} with {layers} layers",
            )
        longest = max(len(tokens) for tokens, _ in self._samples)
        if packed.calls["positions"] > longest:
            raise EvenloadError(
                "positions of its own, and rotary tables that depend on the largest of a batch",
                f"a {type(self._model).__name__} counts to {packed.calls['positions']} in a pack whose longest sample "
                f"has {longest} tokens",
            )

    def _refuse_other_tokens(self, alone: list[ProofRun], packed: ProofRun) -> None:
        logits = [one.logits for one in alone if one.logits is not None]
        if packed.logits is not None and len(logits) == len(alone):
            off = self._off(packed.logits, logits)
            if not off <= self._tolerance:
                raise self._other_tokens(packed, "logits", off)

    def _other_tokens(self, packed: ProofRun, what: str, off: float) -> EvenloadError:
        """Why tokens of a pack are computed otherwise than alone: whether the second sample feels the tokens of the
        first."""
        (tokens, labels), second = self._samples
        moved = self._run(self._together([[tokens[::-1], labels], second])).gradients
        both = (
            tuple(one.flatten(0, 1)[len(tokens) :] for one in pair)
            for pair in zip(moved, packed.gradients, strict=True)
        )
        crosses = any(difference(own, wanted) > self._tolerance for own, wanted in both)
        return EvenloadError(
            "attention that looks across the samples of a pack"
            if crosses
            else "positions of its own: a sample in a pack is computed at other positions than alone",
            f"{what} of a {type(self._model).__name__} off by {off:.1e}, {self._tolerance:g} is rounding",
        )

    def _refuse_other_losses(self, alone: list[ProofRun], packed: ProofRun, *, is_divided: bool) -> None:
        name, total = type(self._model).__name__, sum(one.loss for one in alone)
        if not is_divided:
            raise EvenloadError(
                "a loss with another divisor than the number of targets of the whole batch",
                f"{packed.loss:.6g} of a {name} is not halved where the batch has twice as many targets",
            )
        if abs(packed.loss - total) > self._tolerance / 5 * sum(abs(one.loss) for one in alone):
            raise EvenloadError(
                "a loss that is not the sum of its samples'",
                f"{packed.loss:.6g} of {self.noun} of two samples of a {name}, {total:.6g} of both alone",
            )
        off = max(self._off(together, parts) for together, *parts in _each(packed, alone))
        if not off <= self._tolerance:
            raise self._other_tokens(packed, "gradients at the embeddings", off)

    def _may_cut(self, packed: ProofRun) -> bool:
        """Whether samples may be cut: the target of a slice's last token stands in ``shift_labels`` alone, and only
        Transformers' own models are known to look at earlier tokens by attention alone."""
        if not type(self._model).forward.__module__.startswith("transformers."):
            return False
        try:
            return self._halves(packed, labels=IGNORE)
        except Exception:  # of code that nobody here has seen
            return False

    def _halves(self, packed: ProofRun, **others: int) -> bool:
        """Whether the loss of the pack halves where the batch has twice as many targets, other tensors of the batch
        overwritten."""
        batch = self._together(self._samples)
        batch |= {name: torch.full_like(batch[name], value) for name, value in others.items()}
        halved = self._run(batch, 2.0, backward=False).loss
        return abs(2 * halved - packed.loss) <= _LINEAR * abs(packed.loss)


def of_flattened(kind: type[Measurement]) -> type[Measurement]:
    """A measurement for a script whose rows hold several samples."""

    class OfFlattened(kind):  # type: ignore[valid-type, misc]
        flattened = True

    return OfFlattened


def _window(sample: Tensor, most: int, which: int) -> Tensor:
    """At most so many tokens of a sample [2, L] around one of its targets."""
    target = int((sample[1, 1:] != IGNORE).nonzero().flatten()[which]) + 1
    first = max(0, min(target - most // 2, sample.shape[1] - most))
    return sample[:, first : first + most]


def num_targets(sample: Sequence[Sequence[int]]) -> int:
    """Targets of a sample of `windows`."""
    return sum(label != IGNORE for label in sample[1][1:])


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


def _unit(values: Tensor) -> Tensor:
    unit: Tensor = values.double() / values.double().norm().clamp(min=1e-300)
    return unit


def _each(together: ProofRun, alone: list[ProofRun]) -> Iterable[tuple[Tensor, ...]]:
    """The gradient at the embeddings in a run of both samples and in those of each, by call of the embeddings."""
    return zip(together.gradients, *(one.gradients for one in alone), strict=True)


def _are_of(logits: Tensor, labels: Tensor | None) -> bool:
    """Whether each label has logits; rows of units have no labels."""
    return labels is not None and logits.shape[:2] == labels.shape
