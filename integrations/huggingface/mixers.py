"""Parts of a model that mix tokens by other means than packed attention, held to the samples of a pack.

Recurrences, convolutions and attention of a model's own know nothing of a pack: a state would run over the border of
two samples. Which parts these are is measured, whatever their names: the children of decoder layers in which no packed
attention is called, and whose output at the second sample of a pack moves with the first one. Each is then called in
one of two forms, the first of which gives a sample what it gets alone:

    borders     once, the borders of the pack in its arguments: Transformers' ``cu_seq_lens_q`` and ``seq_idx``, which
                the kernels of flash-linear-attention, mamba-ssm and causal-conv1d take, and their stand-ins refuse
    rows        once for samples of like length, which stand as rows of a batch, padded on the right: no row is less
                than half of the longest, so at most half of what a mixer computes is padding

Shape legend: T = slots of the pack, S = rows, L = slots of a row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.nn.utils.rnn import pad_sequence

from ...core.errors import EvenloadError
from ...runtime.attention.pack import Pack
from ...runtime.attributes import with_attributes
from .attention import PACK

_LOUD = 1e3
"""Times which the first sample is multiplied, so that what the second one feels of it is more than rounding."""


_CHECKPOINT = "_gradient_checkpointing_func"
"""Where Transformers keeps what recomputes a layer. It runs the layer's forward again, without the layer's hooks."""

Form = Callable[..., Any]
"""Gives the output of a mixer by (forward, pack, arguments, keyword arguments)."""


class Mixer(NamedTuple):
    """A part of a model that is called in a form of its own where a pack runs."""

    holder: torch.nn.Module
    """Whose call has the pack among its arguments: the part's decoder layer, or, where the model hands its layers no
    arguments on, all of them."""
    module: torch.nn.Module
    form: Form

    def refuse_divided(self) -> None:
        """Raise EvenloadError where calls of this form have other numbers of collectives on other ranks."""
        divided = any(hasattr(parameter, "ds_id") for parameter in self.module.parameters())
        divided |= any(isinstance(module, FSDPModule) for module in self.module.modules())
        if divided and self.form is in_rows:
            raise EvenloadError(
                "layers that mix tokens are called once for each length, and each call gathers their weights",
                f"{type(self.module).__name__}, whose weights are divided by themselves",
            )


Packs = dict[torch.nn.Module, Pack | None]
"""What holders that run were called with; None: without a pack."""


@contextmanager
def apart(mixers: Sequence[Mixer]) -> Iterator[None]:
    """Inside, mixers keep the samples of packs apart, also where a layer is recomputed."""
    with ExitStack() as stack:
        packs: Packs = {}
        holders = {mixer.holder for mixer in mixers}
        for holder in holders:
            stack.enter_context(_noting(packs, holder))
        for module in {module for holder in holders for module in holder.modules()}:
            if hasattr(module, _CHECKPOINT):
                again = partial(_checkpointed, packs, getattr(module, _CHECKPOINT))
                stack.enter_context(with_attributes(module, **{_CHECKPOINT: again}))
        for module in {mixer.module for mixer in mixers}:
            forms = {mixer.holder: mixer.form for mixer in mixers if mixer.module is module}
            own = partial(_run, packs, forms, module.forward)
            stack.enter_context(with_attributes(module, forward=own))
        yield


@contextmanager
def _noting(packs: Packs, holder: torch.nn.Module) -> Iterator[None]:
    def enter(module: Any, args: Any, kwargs: Any) -> None:
        packs[holder] = kwargs.get(PACK)

    def leave(*_: Any) -> None:
        packs.pop(holder, None)  # a part may belong to several layers

    hooks = (
        holder.register_forward_pre_hook(enter, with_kwargs=True),
        holder.register_forward_hook(leave, always_call=True),
    )
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _checkpointed(packs: Packs, checkpoint: Any, function: Any, /, *args: Any, **kwargs: Any) -> Any:
    """A checkpoint whose function has its packs again when it is recomputed, where hooks of its layer do not run."""
    own = dict(packs)

    def run(*args: Any, **kwargs: Any) -> Any:
        others = dict(packs)
        packs.update(own)
        try:
            return function(*args, **kwargs)
        finally:
            packs.clear()
            packs.update(others)

    return checkpoint(run, *args, **kwargs)


def _run(packs: Packs, forms: dict[torch.nn.Module, Form], forward: Any, /, *args: Any, **kwargs: Any) -> Any:
    holder = next((holder for holder in forms if holder in packs), None)
    if holder is None:
        raise EvenloadError(
            "a layer is recomputed without its pack",
            f"a part of a {type(next(iter(forms))).__name__} by other means than Transformers' gradient checkpointing",
            "use gradient_checkpointing=True, or leave evenload off for this model",
        )
    pack = packs[holder]
    return forward(*args, **kwargs) if pack is None else forms[holder](forward, pack, args, kwargs)


def with_borders(forward: Any, pack: Pack, args: Any, kwargs: Any) -> Any:
    """The output of one call that is told where samples end."""
    borders = pack.cu_seqlens_padded
    numbers = torch.arange(len(borders) - 1, dtype=torch.int32, device=borders.device)
    numbers = torch.repeat_interleave(numbers, borders.diff().long(), output_size=pack.num_padded_tokens)
    longest = max(_sizes(pack))
    words = {"cu_seq_lens_q": borders, "cu_seq_lens_k": borders, "seq_idx": numbers[None]}
    return forward(*args, **kwargs | words | {"max_length_q": longest, "max_length_k": longest})


def in_rows(forward: Any, pack: Pack, args: Any, kwargs: Any) -> Any:
    """The output of calls with samples of like length as rows."""
    sizes = _sizes(pack)
    if len(sizes) == 1:
        return forward(*args, **kwargs)
    # split, not a slice per sample: see `kernels`.
    parts = _map((args, {k: v for k, v in kwargs.items() if k != PACK}), partial(_split, sizes))
    outs: list[Any] = [None] * len(sizes)
    for row in like_lengths(sizes):
        own_args, own_kwargs = _map(parts, partial(_rows, row))
        out = forward(*own_args, **own_kwargs)
        for number, place in enumerate(row):
            outs[place] = _map(out, partial(_sample, number, sizes[place], (len(row), sizes[row[0]])))
    return _joined(outs)


def like_lengths(sizes: Sequence[int]) -> list[list[int]]:
    """Places of sizes, longest first, in rows of which no size is less than half of the largest."""
    rows: list[list[int]] = []
    for place in sorted(range(len(sizes)), key=lambda place: -sizes[place]):
        if rows and 2 * sizes[place] >= sizes[rows[-1][0]]:
            rows[-1].append(place)
        else:
            rows.append([place])
    return rows


def _sizes(pack: Pack) -> list[int]:
    """Slots of each sample, the padding after it included, which nothing before it feels."""
    return [end - first for first, end in pairwise(pack.segments)]


class _Parts(list[Tensor]):
    """A tensor of a pack in samples [1, L, ...]."""


def _split(sizes: list[int], value: Any) -> Any:
    if isinstance(value, Tensor) and value.dim() > 1 and value.shape[:2] == (1, sum(sizes)):
        return _Parts(torch.split(value, sizes, dim=1))
    return value


def _rows(places: list[int], value: Any) -> Any:
    """Samples at these places as rows [S, L, ...]."""
    return pad_sequence([value[i][0] for i in places], batch_first=True) if isinstance(value, _Parts) else value


def _sample(number: int, size: int, shape: tuple[int, int], value: Any) -> Any:
    """The part of one row in an output; None for what is no output of tokens."""
    is_of_tokens = isinstance(value, Tensor) and value.dim() > 1 and value.shape[:2] == shape
    return value[number : number + 1, :size] if is_of_tokens else None


def _joined(outs: list[Any]) -> Any:
    first = outs[0]
    if isinstance(first, Tensor):
        return torch.cat(outs, dim=1)
    return type(first)(_joined([out[i] for out in outs]) for i in range(len(first))) if first is not None else None


def _map(value: Any, change: Callable[[Any], Any]) -> Any:
    """A value with what is inside its tuples, lists and dictionaries changed."""
    if isinstance(value, _Parts):
        return change(value)
    if isinstance(value, (tuple, list)):
        return type(value)(_map(one, change) for one in value)
    if isinstance(value, dict):
        return {key: _map(one, change) for key, one in value.items()}
    return change(value)


class MixerSearch:
    """Finds the mixers of a model in a planned forward.

    Args:
        model: looked at are the children of the modules in its lists, which are decoder layers.
        num_calls: gives how often packed attention has been called.
        tolerance: largest difference that is rounding.
        difference: of two outputs [T, ...].
    """

    def __init__(
        self,
        model: torch.nn.Module,
        num_calls: Callable[[], int],
        tolerance: float,
        difference: Callable[[Tensor, Tensor], float],
    ) -> None:
        self.mixers: list[Mixer] = []
        self._num_calls = num_calls
        self._tolerance = tolerance
        self._difference = difference
        self._body = model
        lists = [module for module in model.modules() if isinstance(module, torch.nn.ModuleList)]
        self._layers = [layer for each in lists for layer in each]

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Inside, a part that mixes the samples of a pack is noted and gives each what it gets alone."""
        with ExitStack() as stack:
            packs: Packs = {}
            for holder in {self._body, *self._layers}:
                stack.enter_context(_noting(packs, holder))
            for layer in self._layers:
                for module in layer.children():
                    look = partial(self._look, packs, layer, module, module.forward)
                    stack.enter_context(with_attributes(module, forward=look))
            yield

    def _look(self, packs: Packs, layer: Any, module: Any, forward: Any, /, *args: Any, **kwargs: Any) -> Any:
        has_pack = packs.get(layer) is not None
        before, pack = self._num_calls(), packs.get(layer if has_pack else self._body)
        out = forward(*args, **kwargs)
        if pack is None or layer not in packs or self._num_calls() > before:
            return out
        first, *_ = sizes = _sizes(pack)
        moved = _map((args, kwargs), partial(_loud, sizes))
        try:
            with torch.no_grad():
                own, other = (_tokens(one, sum(sizes)) for one in (out, forward(*moved[0], **moved[1])))
        except Exception:  # of code that nobody here has seen
            return out
        if own is None or other is None or not self._difference(other[first:], own[first:]) > self._tolerance:
            return out
        mixer = Mixer(layer if has_pack else self._body, module, in_rows)
        return self._kept_apart(mixer, forward, pack, args, kwargs)

    def _kept_apart(self, mixer: Mixer, forward: Any, pack: Pack, args: Any, kwargs: Any) -> Any:
        with torch.no_grad():
            try:
                bordered, wanted = (
                    _tokens(form(forward, pack, args, kwargs), pack.num_padded_tokens)
                    for form in (with_borders, in_rows)
                )
            except Exception:  # a stand-in without its kernel refuses borders
                bordered = wanted = None
        knows = bordered is not None and wanted is not None and self._difference(bordered, wanted) <= self._tolerance
        self.mixers.append(mixer._replace(form=with_borders) if knows else mixer)
        return self.mixers[-1].form(forward, pack, args, kwargs)


def _loud(sizes: list[int], value: Any) -> Any:
    parts = _split(sizes, value)
    if not isinstance(parts, _Parts) or not value.is_floating_point():
        return value
    return torch.cat([_LOUD * parts[0], *parts[1:]], dim=1)


def _tokens(out: Any, size: int) -> Tensor | None:
    """The first output [T, ...] of a part that gives one for each token."""
    first = out[0] if isinstance(out, (tuple, list)) and out else out
    return first[0].detach() if isinstance(first, Tensor) and first.shape[:2] == (1, size) else None
