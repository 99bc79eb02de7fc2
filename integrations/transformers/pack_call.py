"""The calls of a Trainer's models on padded rows, run as packs: what they give goes back to its rows.

    rows [R, T] and attention_mask  ->  one row [1, N] of what is no padding  ->  outputs [R, T, ...], 0 on padding

So a loss sees the shapes that it always saw, whatever it does with them, and no layer computes padding. The call that
is packed is that of the model inside (`base_model`), so heads, poolers and losses stay the script's own; and that of
TRL's fused head, whose log-probabilities are those of a slot each. Positions are the slots of the stock rows. A call
that is none of these (a step of `generate`, other tensors, rows beyond a window) runs as it is. A graph may recompute
its layers, under the attention that they ran with: so this stays until the next call that has a graph.

Shape legend: R = rows, T = slots of a row, N = slots that are no padding.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ...core.errors import EvenloadError
from ...runtime.attention.pack import IGNORE, Pack
from ..huggingface import attention
from ..huggingface.models import refuse_lengths
from .planning import LENGTHS
from .supported import entered_module, packs_fault, unwrapped

_ROWS = ("input_ids", "attention_mask", "position_ids", "labels")
_FUSED = "fused_lm_head"
"""The argument by which TRL's head gives log-probabilities instead of logits."""
_DROPPED = ("cache_position", "use_cache")


class PackedRows(NamedTuple):
    """Rows of a call that runs as a pack."""

    shape: torch.Size
    """[R, T]"""
    slots_N: Tensor
    """int64; of R * T, those that are no padding."""
    shifted: bool
    """Outputs have no slot for the last token of a row."""

    def rows_of(self, value: Any) -> Any:
        """Outputs [1, N, ...] or [N, ...] in their rows; numbers of a whole batch as they are."""
        if isinstance(value, (tuple, list)):
            return type(value)(map(self.rows_of, value))
        if not isinstance(value, Tensor) or not value.dim():
            return value
        count, is_flat = len(self.slots_N), value.shape[0] != 1
        if value.shape[0 if is_flat else 1 :][:1] != (count,):
            raise EvenloadError(
                "outputs of a packed call have a slot for each of its tokens",
                f"{tuple(value.shape)} of {count} tokens",
                "nothing needs to be done: the script runs as it is",
            )
        own_N = value if is_flat else value[0]
        flat = own_N.new_zeros((self.shape.numel(), *own_N.shape[1:])).index_copy(0, self.slots_N, own_N)
        if is_flat:
            return flat
        rows_RT = flat.view(*self.shape, *own_N.shape[1:])
        return rows_RT[:, :-1] if self.shifted else rows_RT


class _Call(NamedTuple):
    """A forward that has begun."""

    rows: PackedRows | None
    """None: it runs as it is."""
    before: str
    """The attention that the model had."""


class PackCalls:
    """The models of a Trainer: the one that trains, and others that score (references, teachers)."""

    def __init__(self, trainer: Any) -> None:
        held = [value for value in vars(trainer).values() if isinstance(value, torch.nn.Module)]
        self._models: dict[Any, set[Any]] = {}
        """What is called, by model."""
        for module in held:
            model = unwrapped(trainer.accelerator, module)
            if isinstance(model, PreTrainedModel) and packs_fault(model) is None:
                self._models[model] = {model.base_model, entered_module(trainer.accelerator, module)}
        self.seen: list[PackedRows] | None = None
        """The rows of calls with a graph, while somebody looks."""

    @property
    def is_any(self) -> bool:
        """Whether some model computes packs."""
        return bool(self._models)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Inside, calls on padded rows run as packs."""
        stock = {model: model.config._attn_implementation for model in self._models}
        hooks = []
        for model, entries in self._models.items():
            for entry in entries:
                calls: list[_Call] = []
                before = partial(self._before, model, stock[model], calls)
                hooks.append(entry.register_forward_pre_hook(before, with_kwargs=True))
                hooks.append(entry.register_forward_hook(partial(self._after, model, calls)))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
            for model, name in stock.items():
                model.config._attn_implementation = name

    def _before(self, model: Any, stock: str, calls: list[_Call], entry: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        call = _Call(None, model.config._attn_implementation)
        calls.append(call)
        if attention.PACK in kwargs:  # of a call that is packed already
            return None
        words = dict(zip(_ROWS[:1], args, strict=False)) | kwargs
        outer = entry is not model.base_model
        packed = None if len(args) > 1 or (outer and not kwargs.get(_FUSED)) else _pack(words)
        if packed is not None and _sees_all(model, packed[1].max_seqlen):
            calls[-1] = call._replace(rows=packed[0])
            if self.seen is not None and torch.is_grad_enabled():
                self.seen.append(packed[0])
            model.config._attn_implementation = attention.NAME
            return (), {**packed[2], attention.PACK: packed[1]}
        model.config._attn_implementation = stock
        return None

    def _after(self, model: Any, calls: list[_Call], entry: Any, args: Any, output: Any) -> Any:
        rows, before = calls.pop()
        if not torch.is_grad_enabled():
            model.config._attn_implementation = before
        if rows is None or not isinstance(output, Mapping):
            return None if rows is None else rows.rows_of(output)
        return type(output)(**{key: rows.rows_of(value) for key, value in output.items()})


def _sees_all(model: Any, longest: int) -> bool:
    """Whether the model sees the whole of a sample so long."""
    try:
        refuse_lengths(model.config, longest, longest, LENGTHS, windows=False)
    except EvenloadError:
        return False
    return True


def _pack(kwargs: Mapping[str, Any]) -> tuple[PackedRows, Pack, dict[str, Any]] | None:
    """The rows of a call as a pack, and its arguments; None where they cannot be."""
    tokens_RT, mask_RT = kwargs.get("input_ids"), kwargs.get("attention_mask")
    others = {key: value for key, value in kwargs.items() if key not in (*_ROWS, *_DROPPED) and value is not None}
    if (
        not isinstance(tokens_RT, Tensor)
        or not isinstance(mask_RT, Tensor)
        or mask_RT.shape != tokens_RT.shape
        or kwargs.get("use_cache")
        or not all(isinstance(value, (bool, int, float, str)) for value in others.values())
        or (kwargs.get("labels") is not None and not kwargs.get(_FUSED))
    ):
        return None
    real_RT, shape = mask_RT.bool(), tokens_RT.shape
    lengths = [length for length in real_RT.sum(1).tolist() if length]
    if not lengths:
        return None
    slots_N = real_RT.flatten().nonzero().flatten()
    positions_RT = kwargs.get("position_ids")
    if positions_RT is None:
        positions_RT = torch.arange(shape[1], device=tokens_RT.device)[None]
    positions_N = positions_RT.expand(shape).flatten()[slots_N]
    packed = dict(others, input_ids=tokens_RT.flatten()[slots_N][None], position_ids=positions_N[None], use_cache=False)
    if kwargs.get(_FUSED):
        shifted_RT = torch.nn.functional.pad(kwargs["labels"][:, 1:], (0, 1), value=IGNORE)
        if bool((shifted_RT[~real_RT] != IGNORE).any()):  # targets that padding predicts
            return None
        packed["shift_labels"] = shifted_RT.flatten()[slots_N][None]
    borders = tuple(accumulate(lengths, initial=0))
    pack = Pack.of(
        lengths,
        borders,
        tokens_T=packed["input_ids"][0],
        labels_T=torch.full_like(slots_N, IGNORE),
        positions_T=positions_N,
        cu_seqlens=torch.tensor(borders, dtype=torch.int32, device=slots_N.device),
        num_targets=0,
        slices=(),
    )
    return PackedRows(shape, slots_N, bool(kwargs.get(_FUSED))), pack, packed
