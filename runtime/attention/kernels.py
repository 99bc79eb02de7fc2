"""The kernels that can run packed causal attention, as a table: which are there, what they take, how they are called.

Shape legend: T = slots of the pack, H = query heads, G = key/value heads (H is a multiple of G), D = head dimension.

All rows compute the same thing; `choose_kernel` takes the first that is installed and takes the dtype, and says so once
in the log of "evenload". The last row, torch's scaled_dot_product_attention called once per segment, takes everything.
"""

from __future__ import annotations

import importlib
import inspect
import logging
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar

import torch
from torch.nn.functional import scaled_dot_product_attention

log = logging.getLogger("evenload")

_HALF = (torch.float16, torch.bfloat16)
_TE = "transformer_engine.pytorch"
_WINDOW, _ALL = frozenset({"window"}), frozenset({"window", "dropout"})
_ROWS = 512
"""Queries that one call of torch's attention takes at least where there is a window."""


class KernelCall(NamedTuple):
    """One attention call: softmax(scale * q k^T) v over the earlier tokens of the same segment; differentiable."""

    q_THD: torch.Tensor
    k_TGD: torch.Tensor
    """Of key/value head h // (H / G) for query head h."""
    v_TGD: torch.Tensor
    cu_seqlens: torch.Tensor
    """int32 [S + 1]; borders of the segments, on the device of q."""
    segments: tuple[int, ...]
    """`cu_seqlens` as Python integers, which no device has to be waited for."""
    max_seqlen: int
    """Slots of the longest segment."""
    scale: float
    window: int | None = None
    """Tokens before its own that a query sees; None: all."""
    dropout: float = 0.0
    """Of the attention weights."""


@dataclass(frozen=True)
class KernelRow:
    """What every row of a table of kernels says."""

    name: str
    available: Callable[[], bool]
    """Whether this installation has it."""
    supports: Callable[[torch.dtype, torch.device, int], bool]
    """Whether it takes this dtype, device and head dimension."""


Row = TypeVar("Row", bound=KernelRow)


@dataclass(frozen=True)
class Kernel(KernelRow):
    """One row of `KERNELS`, which runs whole segments."""

    run: Callable[[KernelCall], torch.Tensor]
    """Gives out_THD."""
    options: frozenset[str] = frozenset()
    """Of "window" and "dropout", what it can do."""


def on_gpu(dtype: torch.dtype, device: torch.device, head_dim: int) -> bool:
    """Whether FlashAttention 2 and its descendants take these inputs: half precision, Ampere or newer, head dimension a
    multiple of 8 up to 256."""
    if device.type != "cuda" or dtype not in _HALF or head_dim % 8 or head_dim > 256:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0)


def has(module: str, attribute: str) -> bool:
    """Whether a module can be imported and has the attribute; never raises."""
    if find_spec(module.partition(".")[0]) is None:
        return False
    try:
        return hasattr(importlib.import_module(module), attribute)
    except Exception as error:  # a wheel built for another torch fails in its own ways
        log.warning("%s is installed but cannot be imported, so it is not used: %s", module, error)
        return False


def _flash_attn(call: KernelCall) -> torch.Tensor:
    function = importlib.import_module("flash_attn").flash_attn_varlen_func
    borders, longest = call.cu_seqlens, call.max_seqlen
    window = (-1, -1) if call.window is None else (call.window, 0)
    more: dict[str, Any] = {"softmax_scale": call.scale, "causal": True, "window_size": window}
    out: torch.Tensor = function(*call[:3], borders, borders, longest, longest, dropout_p=call.dropout, **more)
    return out


@cache
def _te_module(heads: int, groups: int, head_dim: int, scale: float, window: int | None) -> Any:
    return importlib.import_module(_TE).DotProductAttention(
        heads,
        head_dim,
        num_gqa_groups=groups,
        attention_dropout=0.0,
        qkv_format="thd",
        attn_mask_type="padding_causal",
        softmax_scale=scale,
        window_size=None if window is None else (window, 0),
    )


def _transformer_engine(call: KernelCall) -> torch.Tensor:
    (_, heads, head_dim), groups = call.q_THD.shape, call.k_TGD.shape[1]
    out_TX = _te_module(heads, groups, head_dim, call.scale, call.window)(
        call.q_THD,
        call.k_TGD,
        call.v_TGD,
        cu_seqlens_q=call.cu_seqlens,
        cu_seqlens_kv=call.cu_seqlens,
        max_seqlen_q=call.max_seqlen,
        max_seqlen_kv=call.max_seqlen,
    )
    out: torch.Tensor = out_TX.view(-1, heads, head_dim)
    return out


@cache
def _varlen_parameters() -> frozenset[str]:
    """The parameters of torch's varlen_attn, which gained some with every release since torch 2.10; empty if absent."""
    if not has("torch.nn.attention.varlen", "varlen_attn"):
        return frozenset()
    return frozenset(inspect.signature(importlib.import_module("torch.nn.attention.varlen").varlen_attn).parameters)


def _torch_varlen(call: KernelCall) -> torch.Tensor:
    function = importlib.import_module("torch.nn.attention.varlen").varlen_attn
    known, borders, longest = _varlen_parameters(), call.cu_seqlens, call.max_seqlen
    more: dict[str, Any] = {"window_size": (-1, 0)} if "window_size" in known else {"is_causal": True}
    if "enable_gqa" in known:  # before it was asked for, grouped heads were simply taken
        more["enable_gqa"] = call.q_THD.shape[1] != call.k_TGD.shape[1]
    q_THD, default = call.q_THD, call.q_THD.shape[-1] ** -0.5
    if "scale" in known:
        more["scale"] = call.scale
    elif not math.isclose(call.scale, default):
        q_THD = q_THD * (call.scale / default)
    out: torch.Tensor = function(q_THD, call.k_TGD, call.v_TGD, borders, borders, longest, longest, **more)
    return out


def _sdpa(call: KernelCall) -> torch.Tensor:
    gqa = call.q_THD.shape[1] != call.k_TGD.shape[1]
    # split, not a slice per segment: the backward of a slice fills all of [T, H, D] with zeros, so S of them cost S * T
    # (64 segments of 64 tokens, H 8, D 64, float32, one core: backward 161 ms by slices, 34 ms by split).
    lengths = [end - first for first, end in pairwise(call.segments)]
    parts = zip(*(torch.split(x.transpose(0, 1)[None], lengths, dim=2) for x in call[:3]), strict=True)
    options: dict[str, Any] = {"scale": call.scale, "enable_gqa": gqa, "dropout_p": call.dropout}
    out = []
    for q, k, v in parts:
        if call.window is None or call.window >= q.shape[2] - 1:
            out.append(scaled_dot_product_attention(q, k, v, is_causal=True, **options))
        else:
            out += _in_window(q, k, v, call.window, options)
    return torch.cat(out, dim=2)[0].transpose(0, 1)


def _in_window(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int, options: dict[str, Any]
) -> list[torch.Tensor]:
    """One segment [1, H, n, D]: queries block by block, each over the keys of its own block and the one before."""
    size = max(window, _ROWS)
    blocks = list(zip(*(torch.split(x, size, dim=2) for x in (q, k, v)), strict=True))
    out = []
    for number, (queries, keys, values) in enumerate(blocks):
        if number:
            keys, values = (torch.cat([blocks[number - 1][i], x], dim=2) for i, x in ((1, keys), (2, values)))
        behind = torch.arange(queries.shape[2], device=q.device)[:, None] + size * (number > 0)
        behind = behind - torch.arange(keys.shape[2], device=q.device)
        seen = (behind >= 0) & (behind <= window)
        out.append(scaled_dot_product_attention(queries, keys, values, attn_mask=seen, **options))
    return out


KERNELS = (
    Kernel("flash_attn", lambda: has("flash_attn", "flash_attn_varlen_func"), on_gpu, _flash_attn, _ALL),
    Kernel("transformer_engine", lambda: has(_TE, "DotProductAttention"), on_gpu, _transformer_engine, _WINDOW),
    Kernel("torch_varlen", lambda: bool(_varlen_parameters()), on_gpu, _torch_varlen),
    Kernel("sdpa", lambda: True, lambda *_: True, _sdpa, _ALL),
)


def explain(rows: Iterable[KernelRow], device: torch.device, dtype: torch.dtype, head_dim: int) -> tuple[str, str]:
    """The first row that is there and takes these inputs, and why none before it is taken; empty where it is first."""
    inputs = f"{str(dtype).removeprefix('torch.')} on {device.type}, head dimension {head_dim}"
    reasons: dict[str, list[str]] = {}
    for row in rows:
        if not row.supports(dtype, device, head_dim):
            reasons.setdefault(f"made for other inputs than {inputs}", []).append(row.name)
        elif not row.available():
            reasons.setdefault("not installed", []).append(row.name)
        else:
            return row.name, "; ".join(f"{', '.join(names)}: {why}" for why, names in reasons.items())
    raise AssertionError("the last row takes everything")


def first_of(rows: Iterable[Row], device: torch.device, dtype: torch.dtype, head_dim: int, what: str) -> Row:
    """The first row that is there and takes these inputs; logged as what runs ``what``."""
    row = next(row for row in rows if row.supports(dtype, device, head_dim) and row.available())
    log.info("%s on %s, %s, head dimension %d: %s", what, device, dtype, head_dim, row.name)
    return row


@cache
def choose_kernel(
    device: torch.device, dtype: torch.dtype, head_dim: int, options: frozenset[str] = frozenset()
) -> Kernel:
    """The first kernel of `KERNELS` that is installed, takes these inputs and can do what is asked for ("window",
    "dropout"); chosen, and logged, once for each."""
    what = " and ".join(["packed attention", *sorted(options)])
    return first_of((row for row in KERNELS if options <= row.options), device, dtype, head_dim, what)
