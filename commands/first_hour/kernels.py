"""Holds every kernel of attention and of experts that is here against float64, on packs of a few hundred tokens.

    python -m evenload.commands.first_hour.kernels

A row a kernel and case: the largest relative error of its outputs and gradients, by norms, and ``exact`` if that is at
most `ROUNDINGS` roundings of its dtype; or why it did not run. The exit code is 1 where one is off or fails.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import grouped_mm

from ...runtime.attention.blocks import BLOCKS, BlockKernel, Inputs
from ...runtime.attention.kernels import KERNELS, Kernel, KernelCall, KernelRow

ROUNDINGS = 2
LENGTHS = (1, 129, 300, 64, 2, 200)
QUERIES, WINDOW = 130, 100
"""Queries after a prefix; keys before its own that a query sees in a window."""
HEADS, GROUPS = 8, 2
HEAD_DIMS = (64, 128)
DTYPES = (torch.bfloat16, torch.float16)
EXPERTS = (96, 0, 33, 255)
"""Tokens of each expert of a grouped product."""

PLAIN = BLOCKS[-1]
Case = Callable[[torch.dtype, torch.device, int], float]


def check(device: torch.device) -> dict[str, Any]:
    """Every kernel with every dtype and head dimension that it takes."""
    rows = [
        _row(row, case, run, (dtype, device, head_dim))
        for row, case, run in _cases()
        for dtype in DTYPES
        for head_dim in HEAD_DIMS
    ]
    grouped = KernelRow("grouped product", lambda: True, lambda *_: True)
    rows += [_row(grouped, "experts", _grouped, (torch.bfloat16, device, head_dim)) for head_dim in HEAD_DIMS]
    return {"rows": rows}


def _cases() -> Iterator[tuple[KernelRow, str, Case]]:
    for kernel in KERNELS:
        for window in (None, WINDOW) if "window" in kernel.options else (None,):
            yield kernel, "a pack" + _in(window), partial(_whole, kernel, window)
    for block in BLOCKS:
        yield block, "a prefix without mask", partial(_part, block, False, None)
        for window in (None, WINDOW) if "window" in block.options else (None,):
            yield block, "after a prefix" + _in(window), partial(_part, block, True, window)


def _in(window: int | None) -> str:
    return "" if window is None else ", in a window"


def _row(row: KernelRow, case: str, run: Case, inputs: tuple[torch.dtype, torch.device, int]) -> dict[str, Any]:
    dtype, _, head_dim = inputs
    about = {"kernel": row.name, "case": case, "dtype": str(dtype).removeprefix("torch."), "head_dim": head_dim}
    if not row.available():
        return {**about, "status": "not here"}
    if not row.supports(*inputs):
        return {**about, "status": "made for other inputs"}
    try:
        error = run(*inputs)
    except Exception as failure:
        return {**about, "status": "failed", "why": f"{type(failure).__name__}: {failure}"[:500]}
    bound = ROUNDINGS * torch.finfo(dtype).eps
    return {**about, "status": "exact" if error <= bound else "off", "error": error, "bound": bound}


def _whole(kernel: Kernel, window: int | None, dtype: torch.dtype, device: torch.device, head_dim: int) -> float:
    """A pack of whole segments."""
    borders = (0, *np.cumsum(LENGTHS).tolist())
    q, k, v, dout = _random((HEADS, GROUPS, GROUPS, HEADS), borders[-1], dtype, device, head_dim)
    cu_seqlens = torch.tensor(borders, dtype=torch.int32, device=device)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    scale = 0.9 * head_dim**-0.5
    out = kernel.run(KernelCall(q, k, v, cu_seqlens, borders, max(LENGTHS), scale, window))
    measured = [out.detach(), *torch.autograd.grad(out, leaves, dout)]
    exact = Inputs(_exact(q), _exact(k), _exact(v), True, scale, window)
    segments = [
        _both(PLAIN, _exact(dout[own]), Inputs(exact[0][own], exact[1][own], exact[2][own], *exact[3:]))
        for own in (slice(*pair) for pair in pairwise(borders))
    ]
    return _error(measured, [torch.cat([one[i] for one in segments]) for i in (0, 2, 3, 4)])


def _part(
    block: BlockKernel, causal: bool, window: int | None, dtype: torch.dtype, device: torch.device, head_dim: int
) -> float:
    """The last queries of a sequence over all of its keys."""
    q, k, v, dout = _random((HEADS, GROUPS, GROUPS, HEADS), sum(LENGTHS), dtype, device, head_dim)
    inputs = Inputs(q[-QUERIES:], k, v, causal, 0.9 * head_dim**-0.5, window)
    exact = inputs._replace(q_NHD=_exact(inputs.q_NHD), k_MGD=_exact(k), v_MGD=_exact(v))
    return _error(_both(block, dout[-QUERIES:], inputs), _both(PLAIN, _exact(dout[-QUERIES:]), exact))


def _both(block: BlockKernel, dout: Tensor, inputs: Inputs) -> tuple[Tensor, ...]:
    """(out, lse, dq, dk, dv)"""
    out, lse = block.forward(inputs)
    return out, lse, *block.backward(dout, inputs, out, lse)


def _grouped(dtype: torch.dtype, device: torch.device, width: int) -> float:
    """A product an expert, of which one has no token."""
    (x,) = _random((1,), sum(EXPERTS), dtype, device, width)
    (weights,) = _random((width,), len(EXPERTS), dtype, device, 2 * width)
    (dout,) = _random((1,), sum(EXPERTS), dtype, device, 2 * width)
    leaves = [x[:, 0].requires_grad_(), weights.requires_grad_()]
    ends = torch.tensor(np.cumsum(EXPERTS), dtype=torch.int32, device=device)
    exact = [_exact(x).requires_grad_() for x in leaves]
    each = torch.cat([part @ w for part, w in zip(torch.split(exact[0], list(EXPERTS)), exact[1], strict=True)])
    out = grouped_mm(*leaves, offs=ends)
    measured = [out.detach(), *torch.autograd.grad(out, leaves, dout[:, 0])]
    return _error(measured, [each.detach(), *torch.autograd.grad(each, exact, _exact(dout[:, 0]))])


def _random(
    heads: Sequence[int], tokens: int, dtype: torch.dtype, device: torch.device, dim: int
) -> tuple[Tensor, ...]:
    draw = torch.Generator().manual_seed(0)
    return tuple(torch.randn(tokens, count, dim, generator=draw).to(device, dtype) for count in heads)


def _exact(x: Tensor) -> Tensor:
    return x.detach().double()


def _error(measured: Sequence[Tensor], exact: Sequence[Tensor]) -> float:
    """The largest relative error; what is no number is infinitely off."""
    errors = [float((a.double() - b).norm() / b.norm()) for a, b in zip(measured, exact, strict=True)]
    return max(error if math.isfinite(error) else math.inf for error in errors)


if __name__ == "__main__":
    RESULT = check(torch.device("cuda", 0))
    print(json.dumps(RESULT))
    raise SystemExit(any(row["status"] in ("off", "failed") for row in RESULT["rows"]))
