"""What `evenload audit` sees of a script: its training forwards as they are, up to its first update.

Every Hugging Face model is watched, whoever trains it and however it is wrapped: the tokens, masks and positions that
its decoder was given, the hidden state of each token that came out, and, in the script's own backward, the gradients of
the script's own loss at these and at the embeddings. Batches are remembered with the samples that they were collated
of. Nothing is planned or changed, but that dropout drops nothing and loaders work in their own process.

Shape legend: B = rows, T = slots of a row, H = width of the hidden state.
"""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Mapping
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor

from ...integrations.huggingface.models import ATTENTION_DROPOUT
from ...integrations.huggingface.refusals import KEYS

_MOST_BATCHES = 512
_IN_THIS_PROCESS = {"num_workers": 0, "prefetch_factor": None, "persistent_workers": False, "timeout": 0}
"""Arguments of a loader whose collator is to be seen at work."""


class Seen:
    """One training forward of a decoder and its backward."""

    def __init__(self, decoder: Any, arguments: Mapping[str, Any]) -> None:
        self.decoder = decoder
        self.arguments = arguments
        """The arguments of the call that are not None."""
        self.autocast: Any = None
        self.hidden_BTH: Tensor | None = None
        self.slopes_BTH: Tensor | None = None
        """Of the script's loss at the hidden states."""
        self.embedded_BTH: Tensor | None = None
        """Its gradient at the embeddings; None where they need none."""

    def of_tokens(self, key: str) -> Tensor | None:
        """An argument [B, T]; None where it has another form or is not there."""
        value, tokens_BT = self.arguments.get(key), self.arguments.get("input_ids")
        same = isinstance(value, Tensor) and tokens_BT is not None and value.shape == tokens_BT.shape
        return value if same else None

    def add_slopes(self, gradient: Tensor) -> None:
        self.slopes_BTH = gradient.detach() if self.slopes_BTH is None else self.slopes_BTH + gradient.detach()

    def add_embedded(self, gradient: Tensor) -> None:
        self.embedded_BTH = gradient.detach() if self.embedded_BTH is None else self.embedded_BTH + gradient.detach()


seen: list[Seen] = []
"""Of the step that runs, in order."""
_models: WeakSet[Any] = WeakSet()
_batches: deque[tuple[Tensor, list[int]]] = deque(maxlen=_MOST_BATCHES)
"""Collated tokens [B, T], and the lengths of the samples that they were collated of."""
_paused: list[None] = []


def start_model(wrapped: Any, model: Any, args: Any, kwargs: Any) -> None:
    """`PreTrainedModel.__init__`, after which the model is watched."""
    wrapped(*args, **kwargs)
    model.register_forward_pre_hook(_before, with_kwargs=True)
    model.register_forward_hook(_after, with_kwargs=True)
    _models.add(model)


def start_loader(wrapped: Any, _: Any, args: Any, kwargs: Any) -> None:
    """`DataLoader.__init__`, whose collator is seen at work."""
    chosen = dict(zip(inspect.signature(wrapped).parameters, args, strict=False)) | kwargs
    collate = chosen.get("collate_fn")
    if collate is None or isinstance(collate, RememberingCollator):
        wrapped(*args, **kwargs)
    else:
        wrapped(
            **chosen | _IN_THIS_PROCESS | {"multiprocessing_context": None, "collate_fn": RememberingCollator(collate)}
        )


class RememberingCollator:
    """A script's collator, whose samples are remembered."""

    def __init__(self, collate: Any) -> None:
        self._collate = collate

    def __call__(self, samples: Any) -> Any:
        lengths = [length for sample in samples for length in _lengths(sample)]
        batch = self._collate(samples)
        tokens_BT = batch.get("input_ids") if isinstance(batch, Mapping) else None
        if isinstance(tokens_BT, Tensor) and lengths:
            _batches.append((tokens_BT.detach().cpu().clone(), lengths))
        return batch

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_collate"], name)


def lengths_of(tokens_BT: Tensor) -> list[int]:
    """Tokens of each sample that a batch was collated of; empty where that is not known."""
    here_BT = tokens_BT.cpu()
    return next((lengths for other_BT, lengths in reversed(_batches) if torch.equal(other_BT, here_BT)), [])


def causal_model_of(decoder: Any) -> Any:
    """The model with an output layer around a decoder; None where there is none."""
    around = (one for one in _models if one is not decoder and getattr(one, "base_model", None) is decoder)
    return next((one for one in around if one.get_output_embeddings() is not None), None)


@contextmanager
def paused() -> Any:
    """Inside, no forward of a model is seen."""
    _paused.append(None)
    try:
        yield
    finally:
        _paused.pop()


def forget() -> None:
    """Forget all that was seen."""
    seen.clear()
    _batches.clear()


def _lengths(sample: Any) -> list[int]:
    if not isinstance(sample, Mapping) or "input_ids" not in sample:
        return []
    parts = sample.get("seq_lengths")  # as TRL's packing leaves them
    return [int(part) for part in parts] if parts is not None else [len(sample["input_ids"])]


def _before(model: Any, args: Any, kwargs: Any) -> None:
    _models.add(model)  # copies of a model do not come to its __init__
    if _paused or not (torch.is_grad_enabled() and model.training) or causal_model_of(model) is None:
        return
    names = list(inspect.signature(type(model).forward).parameters)[1:]
    call = dict(zip(names, args, strict=False)) | kwargs
    one = Seen(model, {key: value for key, value in call.items() if value is not None})
    device = one.arguments["input_ids"].device.type if "input_ids" in one.arguments else "cpu"
    one.autocast = (device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device))
    _drop_nothing(model)

    def embedded(_: Any, __: Any, output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(one.add_embedded)  # type: ignore[no-untyped-call]

    hook = model.get_input_embeddings().register_forward_hook(embedded)
    model.__dict__.setdefault("_evenload_open", []).append((one, hook))


def _after(model: Any, args: Any, kwargs: Any, output: Any) -> None:
    if _paused or not model.__dict__.get("_evenload_open"):
        return
    one, hook = model.__dict__["_evenload_open"].pop()
    hook.remove()
    hidden_BTH = output[0]
    if isinstance(hidden_BTH, Tensor) and hidden_BTH.requires_grad:
        one.hidden_BTH = hidden_BTH.detach()
        hidden_BTH.register_hook(one.add_slopes)  # type: ignore[no-untyped-call]
        seen.append(one)


def _drop_nothing(model: Any) -> None:
    for module in model.modules():
        names = ("p",) if type(module).__name__.startswith("Dropout") else ATTENTION_DROPOUT
        for name in names:
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)


def unread_tensors(one: Seen) -> list[str]:
    """Arguments of a call that a sample alone cannot be given."""
    return sorted(
        key for key, value in one.arguments.items() if isinstance(value, Tensor) and value.dim() and key not in KEYS
    )
