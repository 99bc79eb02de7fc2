"""Whether packs are exact for a live model by a live loss: measured before the first update, with any class and script.

Two short samples of the script's own tokens run as the script runs them, each alone in a row, and once in one pack as a
planned step runs them. Compared are the logits of every token; the loss, which is to be the sum of both and to halve
where the number of targets doubles; and the gradient of the loss at the input embeddings, which passes backwards
through every layer, so that no weight can get another one unseen. Calls of packed attention are counted: one a layer.

Four forwards and three backwards of at most 19 tokens; no gradient of a weight is computed, so neither data parallelism
nor an optimizer sees them. Every rank runs the same tokens and comes to the same verdict.

Shape legend: T = slots of a row, H = width of the embeddings.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers.modeling_utils import AttentionInterface

from ...core.errors import EvenloadError
from ...core.plan.step_plan import MicroBatch, Slice
from ...runtime.attention.pack import IGNORE, build_pack
from ...runtime.attributes import with_attributes
from ...runtime.world.agreement import everyone, rank_and_size
from ..huggingface import attention
from ..huggingface.inputs import inputs_of
from .pack_loss import PackLoss
from .supported import inner_model

LENGTHS = (7, 12)
"""Tokens of the two samples at most: unlike, and short enough to cost little on any model."""

_TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}
"""Largest relative difference of a token's logits or gradient that is rounding: Transformers computes norms and losses
of float64 models in float32, and half precision differs by as much between two kernels of attention."""
_LINEAR = 1e-4
"""Of a loss that is computed twice from equal logits."""

_SMALL = 1000
"""Entries of a container that is copied."""
_UNREACHED = "attention that packs do not reach: the model does not leave it to Transformers' AttentionInterface"
_STOCK = "nothing needs to be done: the script runs as it is, without plans"


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


def windows(samples: Sequence[Tensor]) -> list[list[list[int]]]:
    """Tokens and labels of two short samples with targets, out of those of all ranks. Collective.

    Args:
        samples: int64 [2, L] of this rank; of all ranks at least one has a target.
    """
    samples = [one for one in samples if bool((one[1, 1:] != IGNORE).any())]
    # Of a single sample both its beginning and its end.
    pairs = zip((*samples[:2], *samples[:1]), LENGTHS, (0, -1), strict=False)
    own = [_window(sample, most, which).tolist() for sample, most, which in pairs]
    of_all = sorted(everyone(own), key=len, reverse=True)
    return of_all[0]


def prove(model: Any, samples: list[list[list[int]]], row: Mapping[str, Any], compute: Compute, *, half: bool) -> Proof:
    """Measure packs of these samples against each of them alone. Collective where the model's forward is.

    Args:
        model: the Hugging Face model, no data parallelism around it.
        samples: two of `windows`.
        row: a batch of the script's own, whose keys the rows of single samples have.
        compute: the loop's own loss of a batch.
        half: passes run in half precision, whatever the weights are kept in.

    A model or a loss that raises cannot be measured, which is a fault as well. On every rank the same fault.
    """
    try:
        proof = _Measurement(model, samples, row, compute, half).proof()
    except Exception as error:  # of code that nobody here has seen
        if isinstance(error, EvenloadError):
            what, detail = error.what, error.found
        else:
            what, detail = "the model or its loss cannot run a pack", f"{type(error).__name__}: {error}"
        proof = Proof(EvenloadError(what, detail, _STOCK))
    faults = [one for one in everyone(proof.fault) if one is not None]
    return Proof(faults[0]) if faults else proof


def prove_trainer(
    trainer: Any, samples: list[list[list[int]]], row: Mapping[str, Any], num_items: Any, loss: PackLoss | None = None
) -> Proof:
    """Measure packs of a Trainer's model by its ``compute_loss``. Collective.

    The method runs on a copy of the Trainer that logs nothing, so that what it counts begins with the first step.

    Args:
        num_items: targets of the step as the Trainer counts them, of the type it does; None: it takes means of batches.
        loss: weighs tokens by the batch that they came in; None: one number divides all.
    """
    twin, model = _twin(trainer), trainer.accelerator.unwrap_model(trainer.model)
    inner, targets = inner_model(trainer), sum(map(num_targets, samples))

    def compute(batch: dict[str, Any], times: float) -> Call:
        counted = None if num_items is None else num_items * 0 + int(targets * times)
        is_pack = attention.PACK in batch
        if loss is not None and is_pack:
            loss.weights_1T = weights_of(samples, times, counted).to(batch["input_ids"].device)
        batch = batch if is_pack else twin._prepare_inputs(batch)
        with twin.compute_loss_context_manager():
            result = twin.compute_loss(model, batch, return_outputs=True, num_items_in_batch=counted)
        if loss is not None:
            loss.refuse_unused(inner)
        return Call(*result) if isinstance(result, tuple) else Call(result, None)

    half = trainer.args.bf16 or trainer.args.fp16
    with nullcontext() if loss is None else loss.within(inner):
        return prove(inner, samples, row, compute, half=half)


def weights_of(samples: list[list[list[int]]], times: float, divisor: Any = None) -> Tensor:
    """What the tokens of a pack of `windows` count [1, T], each sample a batch of its own whose targets are counted so
    many times; ``divisor`` divides both instead."""
    counts = [times * num_targets(one) if divisor is None else float(divisor) for one in samples]
    own = [torch.full((len(one[0]),), 1 / count) for one, count in zip(samples, counts, strict=True)]
    return torch.cat(own)[None]


class _Run(NamedTuple):
    loss: float
    logits: Tensor | None
    """[T, ...]; None where not every token has some."""
    gradient: Tensor
    """[T, H]"""
    attention_calls: int
    forwards: int


class _Measurement:
    def __init__(
        self, model: Any, samples: list[list[list[int]]], row: Mapping[str, Any], compute: Compute, half: bool
    ) -> None:
        self._model = model
        self._samples = samples
        self._row = row
        self._compute = compute
        # Weights may be offloaded.
        self._device = row["input_ids"].device
        dtypes = {p.dtype for p in model.parameters() if p.is_floating_point()}
        dtypes |= {torch.bfloat16} if half else set()
        dtypes |= {torch.float16} if torch.backends.cuda.matmul.allow_tf32 else set()
        self._tolerance = max(_TOLERANCE.get(dtype, _TOLERANCE[torch.bfloat16]) for dtype in dtypes)

    def proof(self) -> Proof:
        with ExitStack() as stack:
            stack.enter_context(_as_if_without_dropout(self._model, self._device))
            alone = [self._run(self._alone(i)) for i in range(2)]
            packed = self._run(self._packed(self._samples))
            self._refuse_other_attention(packed)
            self._refuse_other_tokens(alone, packed)
            may_cut = self._may_cut(packed)
            self._refuse_other_losses(alone, packed, is_divided=may_cut or self._halves(packed))
            return Proof(None, may_cut)

    def _alone(self, index: int) -> dict[str, Any]:
        """A sample as a row of the script's."""
        tokens, labels = (torch.tensor([one], device=self._device) for one in self._samples[index])
        extra = {
            "attention_mask": torch.ones_like(tokens),
            "position_ids": torch.arange(tokens.shape[1], device=self._device)[None],
        }
        return {"input_ids": tokens, "labels": labels, **{k: v for k, v in extra.items() if k in self._row}}

    def _packed(self, samples: list[list[list[int]]]) -> dict[str, Any]:
        of_token, of_label = ([torch.tensor(one[k]).numpy() for one in samples] for k in range(2))
        slices = tuple(Slice(i, 0, len(one[0])) for i, one in enumerate(samples))
        micro_batch = MicroBatch(slices, (rank_and_size()[0],))
        pack = build_pack(micro_batch, of_token.__getitem__, self._device, labels_of=of_label.__getitem__)
        return inputs_of(pack, with_mask="attention_mask" in self._row)

    def _run(self, batch: dict[str, Any], targets: float = 1.0, *, backward: bool = True) -> _Run:
        with ExitStack() as stack:
            leaves = stack.enter_context(_embedded(self._model))
            calls = stack.enter_context(_counted(self._model, planned=attention.PACK in batch))
            stack.enter_context(torch.set_grad_enabled(backward))
            loss, outputs = self._compute(batch, targets)
            gradients = torch.autograd.grad(loss, leaves) if backward else [torch.zeros(1, 1)]
        logits, num_tokens = getattr(outputs, "logits", None), batch["input_ids"].shape[1]
        return _Run(
            float(loss.detach()),
            logits[0].detach() if isinstance(logits, Tensor) and logits.shape[1:2] == (num_tokens,) else None,
            torch.cat([one.reshape(-1, one.shape[-1]) for one in gradients], dim=1),
            calls["attention"],
            calls["forwards"],
        )

    def _refuse_other_attention(self, packed: _Run) -> None:
        config = self._model.config.get_text_config()
        layers = getattr(config, "num_hidden_layers", None) or 1
        if packed.attention_calls != layers * packed.forwards:
            raise EvenloadError(
                _UNREACHED,
                f"{packed.attention_calls} calls in {packed.forwards} forward of a {type(self._model).__name__} with "
                f"{layers} layers",
            )

    def _refuse_other_tokens(self, alone: list[_Run], packed: _Run) -> None:
        if packed.logits is not None and all(one.logits is not None for one in alone):
            off = _difference(packed.logits, torch.cat([one.logits for one in alone if one.logits is not None]))
            if not off <= self._tolerance:
                raise self._other_tokens(packed, "logits", off)

    def _other_tokens(self, packed: _Run, what: str, off: float) -> EvenloadError:
        """Why tokens of a pack are computed otherwise than alone: whether the second sample feels the tokens of the
        first."""
        (tokens, labels), second = self._samples
        moved_TH = self._run(self._packed([[tokens[::-1], labels], second])).gradient[len(tokens) :]
        crosses = _difference(moved_TH, packed.gradient[len(tokens) :]) > self._tolerance
        return EvenloadError(
            "attention that looks across the samples of a pack"
            if crosses
            else "positions of its own: a sample in a pack is computed at other positions than alone",
            f"{what} of a {type(self._model).__name__} off by {off:.1e}, {self._tolerance:g} is rounding",
        )

    def _refuse_other_losses(self, alone: list[_Run], packed: _Run, *, is_divided: bool) -> None:
        name, total = type(self._model).__name__, sum(one.loss for one in alone)
        if not is_divided:
            raise EvenloadError(
                "a loss with another divisor than the number of targets of the whole batch",
                f"{packed.loss:.6g} of a {name} is not halved where the batch has twice as many targets",
            )
        if abs(packed.loss - total) > self._tolerance / 5 * abs(total):
            raise EvenloadError(
                "a loss that is not the sum of its samples'",
                f"{packed.loss:.6g} of a pack of two samples of a {name}, {total:.6g} of both alone",
            )
        off = _difference(packed.gradient, torch.cat([one.gradient for one in alone]))
        if not off <= self._tolerance:
            raise self._other_tokens(packed, "gradients at the embeddings", off)

    def _may_cut(self, packed: _Run) -> bool:
        """Whether samples may be cut: the target of a slice's last token stands in ``shift_labels`` alone, and only
        Transformers' own models are known to look at earlier tokens by attention alone."""
        if not type(self._model).forward.__module__.startswith("transformers."):
            return False
        try:
            return self._halves(packed, labels=IGNORE)
        except Exception:  # of code that nobody here has seen
            return False

    def _halves(self, packed: _Run, **others: int) -> bool:
        """Whether the loss of the pack halves where the batch has twice as many targets, other tensors of the batch
        overwritten."""
        batch = self._packed(self._samples)
        batch |= {name: torch.full_like(batch[name], value) for name, value in others.items()}
        halved = self._run(batch, 2.0, backward=False).loss
        return abs(2 * halved - packed.loss) <= _LINEAR * abs(packed.loss)


def _window(sample: Tensor, most: int, which: int) -> Tensor:
    """At most so many tokens of a sample [2, L] around one of its targets."""
    target = int((sample[1, 1:] != IGNORE).nonzero().flatten()[which]) + 1
    first = max(0, target - most // 2)
    return sample[:, first : first + most]


def num_targets(sample: Sequence[Sequence[int]]) -> int:
    """Targets of a sample of `windows`."""
    return sum(label != IGNORE for label in sample[1][1:])


def _difference(own: Tensor, wanted: Tensor) -> float:
    """Largest ||a - b|| / ||b|| over tokens; a token with next to nothing counts as a tenth of the largest. Infinities
    that both have are equal; NaN where there are others."""
    if own.shape != wanted.shape:
        return float("inf")
    norms_T = wanted.double().where(wanted.isfinite(), 0.0).flatten(1).norm(dim=1)
    off_T = (own.double() - wanted.double()).where(own != wanted, 0.0).flatten(1).norm(dim=1)
    return float((off_T / norms_T.clamp(min=float(norms_T.max()) / 10).clamp(min=1e-300)).max())


def _twin(trainer: Any) -> Any:
    """A copy of a Trainer with counters of its own."""
    twin = copy.copy(trainer)
    for name, value in vars(trainer).items():
        if _is_plain(value):
            setattr(twin, name, copy.deepcopy(value))
    twin.log = lambda *_, **__: None
    return twin


def _is_plain(value: Any) -> bool:
    """Whether it is a number, a text, or a small container of such: metrics, not data."""
    if isinstance(value, (dict, list, tuple, set, deque)):
        inner = value.values() if isinstance(value, dict) else value
        return len(value) <= _SMALL and all(map(_is_plain, inner))
    return value is None or isinstance(value, (bool, int, float, str))


@contextmanager
def _embedded(model: Any) -> Iterator[list[Tensor]]:
    """Inside, the embeddings of the tokens are leaves of the graph; gives them as they come into being. Forwards that
    have no graph, which metrics take, have none."""
    leaves: list[Tensor] = []

    def cut(module: Any, args: Any, output: Tensor) -> Tensor | None:
        if not torch.is_grad_enabled():
            return None
        leaves.append(output.detach().requires_grad_())
        return leaves[-1]

    hook = model.get_input_embeddings().register_forward_hook(cut)
    try:
        yield leaves
    finally:
        hook.remove()


@contextmanager
def _counted(model: Any, planned: bool) -> Iterator[dict[str, int]]:
    """Inside, a planned model attends inside packs; counts its forwards and its calls of packed attention."""
    calls = {"attention": 0, "forwards": 0}

    def counting(*args: Any, **kwargs: Any) -> Any:
        calls["attention"] += 1
        if attention.PACK not in kwargs:
            raise EvenloadError(
                _UNREACHED, f"{type(args[0]).__name__} hands no keyword arguments of the model's call on"
            )
        return attention.attention(*args, **kwargs)

    def forward(*_: Any) -> None:
        calls["forwards"] += 1

    hook, stock = model.register_forward_pre_hook(forward), model.config._attn_implementation
    # What stands there is the session's own, or nothing where no session is on.
    before = AttentionInterface._global_mapping.get(attention.NAME)
    try:
        if planned:
            AttentionInterface.register(attention.NAME, counting)
            model.set_attn_implementation(attention.NAME)
        yield calls
    finally:
        hook.remove()
        if planned:
            model.set_attn_implementation(stock)
            attention.unregister()
            if before is not None:
                AttentionInterface.register(attention.NAME, before)


class _WithoutDropout(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.nn.functional.dropout, torch.dropout, torch.dropout_):
            return args[0] if args else (kwargs or {})["input"]
        return func(*args, **(kwargs or {}))


@contextmanager
def _as_if_without_dropout(model: Any, device: torch.device) -> Iterator[None]:
    """Inside, the model trains, drops nothing, and recomputes no layer: PyTorch's older checkpoints give no gradient at
    an activation. Afterwards it is in the mode it was in, and random numbers go on as if nothing had been drawn."""
    checkpointed = [m for m in model.modules() if getattr(m, "gradient_checkpointing", False)]
    modes = [(module, module.training) for module in model.modules()]
    with ExitStack() as stack:
        for module in checkpointed:
            stack.enter_context(with_attributes(module, gradient_checkpointing=False))
        stack.enter_context(torch.random.fork_rng([device] if device.type == "cuda" else []))
        stack.enter_context(_WithoutDropout())
        model.train()
        try:
            yield
        finally:
            for module, mode in modes:
                module.training = mode
