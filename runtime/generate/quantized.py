"""LinearLayer layers whose weights are rounded to 8 or 4 bits, for as long as a model drafts tokens by them.

    s = max |w| / m        of a group of an output's weights; m = 127 or 7
    q = round(w / s)       so that |w - s q| <= s / 2

A group is 128 inputs; with 8 bits it is all inputs, as torch's product has one scale an output. Scales are rounded up
to bfloat16 before weights are divided by them, since products read them so. Products are torch's own, over packed
weights; which of them a layer takes is measured, for as many rows as it will see: none that is not faster than the
layer's own, or whose result is not that of the rounded weights.

After TurboMind (arXiv 2508.15601), which packs weights for kernels of its own, and serves from them; here they draft.

Shape legend: R = rows, N = outputs, K = inputs, U = groups of an output.
"""

from __future__ import annotations

import logging
import operator
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from ..attributes import with_attributes

log = logging.getLogger("evenload")

Bits = Literal["int8", "int4"]
Product = Callable[[Tensor], Tensor]
"""x W^T of rows [R, K]."""
GROUP = 128
_MOST = {"int8": 127, "int4": 7}
_AGREES = 0.02
"""Relative error of a product in bfloat16 at most."""
_TRIED = 128
"""Outputs of a layer whose product is compared."""
_ops: Any = torch.ops.aten


class LinearLayer(NamedTuple):
    """A linear layer of the model, and which of its methods computes x W^T + b of ``input`` [..., K]; b is the module's
    own where no ``bias`` is given."""

    module: nn.Module
    method: str = "forward"

    @property
    def weight(self) -> Tensor:
        return self.module.get_parameter("weight")


def linears_of(layers: Sequence[nn.Module]) -> list[LinearLayer]:
    """The linear layers in modules of torch's own."""
    return [LinearLayer(module) for layer in layers for module in layer.modules() if isinstance(module, nn.Linear)]


class Rounded(NamedTuple):
    """Weights as integers and scales."""

    q_NK: Tensor
    """int8."""
    scales_NU: Tensor
    """bfloat16."""
    bits: Bits

    def restored(self, dtype: torch.dtype) -> Tensor:
        """The rounded weights [N, K]."""
        group = self.q_NK.shape[1] // self.scales_NU.shape[1]
        return self.q_NK.to(dtype) * self.scales_NU.to(dtype).repeat_interleave(group, 1)


def rounded(weight_NK: Tensor, bits: Bits) -> Rounded:
    """Weights of so many bits; 128 divides K where there are 4."""
    groups_NUG = weight_NK.detach().reshape(len(weight_NK), -1, GROUP if bits == "int4" else weight_NK.shape[1])
    groups_NUG = groups_NUG.to(torch.promote_types(groups_NUG.dtype, torch.float32))
    largest_NU = groups_NUG.abs().amax(-1).clamp_min(torch.finfo(torch.bfloat16).tiny)
    scales_NU = (largest_NU / _MOST[bits] * (1 + 2**-7)).bfloat16()
    return Rounded((groups_NUG / scales_NU[..., None]).round_().flatten(1).to(torch.int8), scales_NU, bits)


def restored(weights: Rounded) -> Product:
    """The product that runs anywhere, and is no faster than one with weights that are not rounded."""
    return lambda x_RK: linear(x_RK, weights.restored(x_RK.dtype))


def packed(weights: Rounded) -> Product:
    """torch's own. It reads weights of 4 bits as (q - 8) s + 0; on CUDA from pairs, whose first is in the higher bits.
    Raises RuntimeError for sizes, or on devices, that it has no kernel for."""
    q_NK, scales_NU, bits = weights
    if bits == "int8":
        scales_N = scales_NU[:, 0].contiguous()
        return lambda x_RK: _ops._weight_int8pack_mm(x_RK.bfloat16(), q_NK, scales_N)
    scales_UN2 = torch.stack([scales_NU.t(), torch.zeros_like(scales_NU.t())], -1).contiguous()
    above_NK = q_NK.int() + 8
    if q_NK.device.type == "cpu":
        own, product = _ops._convert_weight_to_int4pack_for_cpu(above_NK, 1), _ops._weight_int4pack_mm_for_cpu
    else:
        pairs = (above_NK[:, ::2] << 4 | above_NK[:, 1::2]).to(torch.uint8).contiguous()
        own, product = _ops._convert_weight_to_int4pack(pairs, 8), _ops._weight_int4pack_mm
    return lambda x_RK: product(x_RK.bfloat16(), own, GROUP, scales_UN2)


def seconds_of(call: Callable[[], Any], device: torch.device) -> float:
    """The least of a few runs, after one that does not count."""
    seconds = []
    for _ in range(4):
        begin = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - begin)
    return min(seconds[1:])


class QuantizedView:
    """The linear layers of a model with rounded weights: those that are live when a layer is first computed so.

    Args:
        always: take products that are slower than the layers' own, too.
    """

    def __init__(self, linears: Sequence[LinearLayer], bits: Bits, *, always: bool = False) -> None:
        self._bits, self._always = bits, always
        self._linears = [one for one in linears if bits == "int8" or not one.weight.shape[1] % GROUP]
        if len(self._linears) < len(linears):
            of = f"{len(linears) - len(self._linears)} of {len(linears)} linear layers"
            log.warning("%s keep their weights while tokens are drafted: %d does not divide their inputs", of, GROUP)
        self._products: dict[int, Product] = {}
        """By the place of a layer."""
        self._kinds: dict[torch.Size, Callable[[Rounded], Product] | None] = {}
        """By the shape of a weight."""
        self._faster: dict[tuple[int, torch.Size], bool] = {}
        """By rows, and the shape of a weight."""

    @torch.no_grad()
    def products(self, rows: int) -> dict[LinearLayer, Product]:
        """What layers compute so many rows by that have a faster product than their own."""
        out = {}
        for place, one in enumerate(self._linears):
            weight_NK = one.weight
            if weight_NK.shape not in self._kinds:
                self._kinds[weight_NK.shape] = self._kind_of(weight_NK)
            kind, key = self._kinds[weight_NK.shape], (rows, weight_NK.shape)
            if kind is None or not self._faster.get(key, True):
                continue
            if place not in self._products:
                self._products[place] = kind(rounded(weight_NK, self._bits))
            if key not in self._faster:
                x_RK = weight_NK.new_ones(rows, weight_NK.shape[1])
                calls = partial(self._products[place], x_RK), partial(linear, x_RK, weight_NK)
                self._faster[key] = self._always or operator.lt(*(seconds_of(call, x_RK.device) for call in calls))
            if self._faster[key]:
                out[one] = self._products[place]
        return out

    @contextmanager
    def entered(self, rows: int) -> Iterator[None]:
        """Inside, these layers compute by rounded weights."""
        with ExitStack() as undo:
            for (module, method), product in self.products(rows).items():
                undo.enter_context(with_attributes(module, **{method: _by(product, module.bias)}))
            yield

    def _kind_of(self, weight_NK: Tensor) -> Callable[[Rounded], Product] | None:
        """What makes products of weights of a shape; None: they are not rounded."""
        weights = rounded(weight_NK[:_TRIED], self._bits)
        x_RK = torch.linspace(-1, 1, weight_NK.shape[1], dtype=weight_NK.dtype, device=weight_NK.device)[None]
        want_RN = restored(weights)(x_RK)
        try:
            if (packed(weights)(x_RK).to(x_RK.dtype) - want_RN).norm() <= _AGREES * want_RN.norm():
                return packed
        except RuntimeError as failed:
            log.debug("no packed product of %s: %s", tuple(weight_NK.shape), failed)
        return restored if self._always else None


def _by(product: Product, own: Any) -> Callable[..., Tensor]:
    """The method of a linear layer with this bias of its own."""

    def method(input: Tensor, weight: Any = None, bias: Any = own, **_: Any) -> Tensor:
        out: Tensor = product(input.flatten(0, -2)).to(input.dtype).view(*input.shape[:-1], -1)
        return out if bias is None else out + bias

    return method
