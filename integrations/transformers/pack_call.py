"""The calls of a Trainer's models on padded rows, run as packs: what they give goes back to its rows.

    rows [R, T] and attention_mask  ->  one row [1, N] of what is no padding  ->  outputs [R, T, ...], 0 on padding

With ``trees``, what rows begin with in common is in the pack once (`core.plan.trie`): its outputs go to all rows that
have it, and the gradients of these add up. A token is the same in two rows where it and all before it have equal ids,
positions and targets. A planned pack of whole samples is shortened alike.

So a loss sees the shapes that it always saw, whatever it does with them, and no layer computes padding. The call that
is packed is that of the model inside (`base_model`), so heads, poolers and losses stay the script's own; and that of
TRL's fused head, whose log-probabilities are those of a slot each. Positions are the slots of the stock rows. A call
that is none of these (a step of `generate`, other tensors, rows beyond a window) runs as it is. A graph may recompute
its layers, under the attention that they ran with: so this stays until the next call that has a graph.

Shape legend: R = rows, T = slots of a row, M = slots that are no padding, N = tokens of the pack.
"""

from __future__ import annotations

import inspect
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from itertools import accumulate
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from transformers import PreTrainedModel

from ...core.errors import EvenloadError
from ...core.plan.trie import Trie, trie_of
from ...runtime.attention.pack import IGNORE, Pack, TokensOf
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
    slots_M: Tensor
    """int64; of R * T, those that are no padding."""
    shifted: bool
    """Outputs have no slot for the last token of a row."""
    trie: Trie | None = None
    """Where rows share what they begin with; None: no token is in two rows."""

    @property
    def num_tokens(self) -> int:
        """How many tokens the pack has."""
        return len(self.slots_M) if self.trie is None else self.trie.num_tokens

    @property
    def tokens_M(self) -> Tensor:
        """int64; of the pack's tokens, the one of each slot."""
        assert self.trie is not None
        return torch.from_numpy(np.concatenate(self.trie.slots)).to(self.slots_M.device)

    def rows_of(self, value: Any) -> Any:
        """Outputs [1, N, ...] or [N, ...] in their rows; numbers of a whole batch as they are."""
        if isinstance(value, (tuple, list)):
            return type(value)(map(self.rows_of, value))
        if not isinstance(value, Tensor) or not value.dim():
            return value
        count, is_flat = self.num_tokens, value.shape[0] != 1
        if value.shape[0 if is_flat else 1 :][:1] != (count,):
            raise EvenloadError(
                "outputs of a packed call have a slot for each of its tokens",
                f"{tuple(value.shape)} of {count} tokens",
                "nothing needs to be done: the script runs as it is",
            )
        own_M = value if is_flat else value[0]
        if self.trie is not None:
            own_M = _GatheredTokens.apply(own_M, self.tokens_M)  # type: ignore[no-untyped-call]
        flat = own_M.new_zeros((self.shape.numel(), *own_M.shape[1:])).index_copy(0, self.slots_M, own_M)
        if is_flat:
            return flat
        rows_RT = flat.view(*self.shape, *own_M.shape[1:])
        return rows_RT[:, :-1] if self.shifted else rows_RT

    def added_up(self, value_RT: Tensor) -> Tensor:
        """Values of rows [R, T, ...], each token's the sum of those of all rows that share it."""
        if self.trie is None:
            return value_RT
        own_M = value_RT.flatten(0, 1)[self.slots_M]
        sums = own_M.new_zeros(self.num_tokens, *own_M.shape[1:]).index_add_(0, self.tokens_M, own_M)[self.tokens_M]
        return value_RT.flatten(0, 1).index_copy(0, self.slots_M, sums).view_as(value_RT)


class _GatheredTokens(torch.autograd.Function):
    """Values of tokens, given to all slots that share them; their gradients are added up in float32 at least."""

    @staticmethod
    def forward(ctx: Any, value_N: Tensor, tokens_M: Tensor) -> Tensor:
        ctx.save_for_backward(tokens_M)
        ctx.shape = value_N.shape
        return value_N[tokens_M]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_M: Tensor) -> tuple[Tensor, None]:
        (tokens_M,) = ctx.saved_tensors
        wide = torch.promote_types(grad_M.dtype, torch.float32)
        sums_N = torch.zeros(ctx.shape, dtype=wide, device=grad_M.device).index_add_(0, tokens_M, grad_M.to(wide))
        return sums_N.to(grad_M.dtype), None


class _Call(NamedTuple):
    """A forward that has begun."""

    rows: PackedRows | None
    """None: it runs as it is."""
    before: str
    """The attention that the model had."""


class PackCalls:
    """The models of a Trainer: the one that trains, and others that score (references, teachers)."""

    trees = False
    """Rows share what they begin with."""
    rows = True
    """Calls on padded rows run as packs; else those of planned packs alone are changed."""

    def __init__(self, trainer: Any) -> None:
        held = [value for value in vars(trainer).values() if isinstance(value, torch.nn.Module)]
        self._models: dict[Any, set[Any]] = {}
        """What is called, by model."""
        for module in held:
            model = unwrapped(trainer.accelerator, module)
            if isinstance(model, PreTrainedModel) and packs_fault(model) is None:
                self._models[model] = {model.base_model, entered_module(trainer.accelerator, module)}
        self._tries: WeakKeyDictionary[Pack, Trie] = WeakKeyDictionary()
        """Of planned packs whose samples share what they begin with."""
        self.num_saved = 0
        """Tokens of planned packs that were not computed again."""

    @property
    def is_any(self) -> bool:
        """Whether some model computes packs."""
        return bool(self._models)

    def share(self, pack: Pack, tokens_of: TokensOf) -> None:
        """Have calls of a planned pack compute once what its samples, all of them whole, begin with in common."""
        cut = pack.prefix is not None and any(s.sequence in pack.prefix for s in pack.slices)
        if len(pack.slices) < 2 or pack.padding or pack.shared or pack.branching or cut:
            return
        trie = trie_of([tokens_of(s.sequence)[: s.stop] for s in pack.slices])
        if trie.is_shared:
            self._tries[pack] = trie
            self.num_saved += sum(s.length for s in pack.slices) - trie.num_tokens

    @contextmanager
    def running(self, seen: list[PackedRows] | None = None) -> Iterator[None]:
        """Inside, calls on padded rows run as packs; those with a graph add their rows to ``seen``."""
        stock = {model: model.config._attn_implementation for model in self._models}
        hooks = []
        for model, entries in self._models.items():
            for entry in entries:
                calls: list[_Call] = []
                before = partial(self._before, model, stock[model], calls, seen)
                hooks.append(entry.register_forward_pre_hook(before, with_kwargs=True))
                hooks.append(entry.register_forward_hook(partial(self._after, model, calls)))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
            for model, name in stock.items():
                model.config._attn_implementation = name

    def _before(
        self,
        model: Any,
        stock: str,
        calls: list[_Call],
        seen: list[PackedRows] | None,
        entry: Any,
        args: Any,
        kwargs: dict[str, Any],
    ) -> Any:
        call = _Call(None, model.config._attn_implementation)
        calls.append(call)
        words, outer = dict(zip(_ROWS[:1], args, strict=False)) | kwargs, entry is not model.base_model
        if attention.PACK in kwargs:  # of a call that is packed already
            trie = None if outer else self._tries.get(kwargs[attention.PACK])
            packed = trie and _shortened(words, trie)
            if packed is None:
                return None
        elif len(args) > 1 or (outer and not kwargs.get(_FUSED)) or not self.rows:
            packed = None
        else:
            packed = _pack(words, _named(entry.__class__), self.trees)
        if packed is not None and _sees_all(model, packed[1].longest):
            calls[-1] = call._replace(rows=packed[0])
            if seen is not None and torch.is_grad_enabled():
                seen.append(packed[0])
            model.config._attn_implementation = attention.NAME
            return (), {**packed[2], attention.PACK: packed[1]}
        if attention.PACK not in kwargs and self.rows:
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


@cache
def _named(cls: Hashable) -> frozenset[str]:
    """What the forward of a class takes by name."""
    return frozenset(inspect.signature(cls.forward).parameters)  # type: ignore[attr-defined]


def _pack(
    kwargs: Mapping[str, Any], named: frozenset[str], trees: bool
) -> tuple[PackedRows, Pack, dict[str, Any]] | None:
    """The rows of a call as a pack, and its arguments; None where they cannot be. Tensors that the model does not name,
    such as a margin of pairs, go with it as they are."""
    tokens_RT, mask_RT = kwargs.get("input_ids"), kwargs.get("attention_mask")
    known = named if "input_ids" in named else kwargs.keys()
    others = {key: value for key, value in kwargs.items() if key not in (*_ROWS, *_DROPPED) and value is not None}
    if (
        not isinstance(tokens_RT, Tensor)
        or not isinstance(mask_RT, Tensor)
        or mask_RT.shape != tokens_RT.shape
        or kwargs.get("use_cache")
        or not all(isinstance(value, (bool, int, float, str)) for key, value in others.items() if key in known)
        or (kwargs.get("labels") is not None and not kwargs.get(_FUSED))
    ):
        return None
    real_RT, shape = mask_RT.bool(), tokens_RT.shape
    lengths = [length for length in real_RT.sum(1).tolist() if length]
    if not lengths:
        return None
    slots_M = real_RT.flatten().nonzero().flatten()
    positions_RT = kwargs.get("position_ids")
    if positions_RT is None:
        positions_RT = torch.arange(shape[1], device=tokens_RT.device)[None]
    of_tokens = {"input_ids": tokens_RT, "position_ids": positions_RT.expand(shape)}
    if kwargs.get(_FUSED):
        shifted_RT = torch.nn.functional.pad(kwargs["labels"][:, 1:], (0, 1), value=IGNORE)
        if bool((shifted_RT[~real_RT] != IGNORE).any()):  # targets that padding predicts
            return None
        of_tokens["shift_labels"] = shifted_RT
    of_tokens = {key: value_RT.flatten()[slots_M] for key, value_RT in of_tokens.items()}
    trie = None
    if trees and len(lengths) > 1:
        every_MK = torch.stack([*of_tokens.values()], dim=1).cpu().numpy()
        trie = trie_of(np.split(every_MK, [*accumulate(lengths)][:-1]))
        if trie.is_shared:
            sources_N = torch.from_numpy(trie.sources).to(slots_M.device)
            of_tokens, lengths = {key: own[sources_N] for key, own in of_tokens.items()}, [*trie.branching.lengths]
        else:
            trie = None
    packed = {key: own[None] for key, own in of_tokens.items()}
    rows = PackedRows(shape, slots_M, bool(kwargs.get(_FUSED)), trie)
    return rows, _pack_of(of_tokens, lengths, trie), {**others, **packed, "use_cache": False}


def _pack_of(of_tokens: Mapping[str, Tensor], lengths: Sequence[int], trie: Trie | None) -> Pack:
    borders, tokens_N = tuple(accumulate(lengths, initial=0)), of_tokens["input_ids"]
    return Pack.of(
        lengths,
        borders,
        tokens_T=tokens_N,
        labels_T=torch.full_like(tokens_N, IGNORE),
        positions_T=of_tokens["position_ids"],
        cu_seqlens=torch.tensor(borders, dtype=torch.int32, device=tokens_N.device),
        num_targets=0,
        slices=(),
        branching=trie and trie.branching,
    )


def _shortened(kwargs: Mapping[str, Any], trie: Trie) -> tuple[PackedRows, Pack, dict[str, Any]] | None:
    """The call of a planned pack whose samples have this trie; None where it computes a loss, or takes
    other tensors than those with a number for each token."""
    tensors = {key: value for key, value in kwargs.items() if isinstance(value, Tensor) and value.dim()}
    tokens_1T = tensors.get("input_ids")
    if tokens_1T is None or "labels" in tensors or any(value.shape != tokens_1T.shape for value in tensors.values()):
        return None
    slots_M = torch.arange(tokens_1T.shape[1], device=tokens_1T.device)
    sources_N = torch.from_numpy(trie.sources).to(slots_M.device)
    own = {key: value[:, sources_N] for key, value in tensors.items()}
    pack = _pack_of({key: value[0] for key, value in own.items()}, trie.branching.lengths, trie)
    others = {key: value for key, value in kwargs.items() if key != attention.PACK}
    return PackedRows(tokens_1T.shape, slots_M, shifted=False, trie=trie), pack, others | own
