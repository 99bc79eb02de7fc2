"""What adapters add to the output of a module, tenant by tenant: each multiplies its own tokens and no others.

    y <- y + s (x A^T) B^T        dB += s dy^T z     dz = s dy B     dA += dz^T x     dx += dz A        z = x A^T

No product runs over tokens of another tenant with a mask: a value that is not finite would go through the mask's zeros.
Gradients of matrices are added straight into the tenant's buffer. The matrices A of all layers of a site are contiguous
there, so layers that share an input (queries, keys and values) share the products with x, too.

Shape legend: T = slots of a pack, t = those of one tenant, C = inputs, D = outputs, r = rank, R = all ranks of a site.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .peers import sum_over
from .places import Place, Site
from .tenant import Layer, OfSite, TenantAdapter

Dropped = Callable[[int, Tensor, Place], Tensor]
"""A tensor [t, C] with what dropout keeps of the inputs of a layer, scaled, and zeros; the number is that of the span.
It is linear in the tensor, so a gradient goes back through it as the inputs went forth."""


class SampleSlots(NamedTuple):
    """Neighbouring slots of one sample."""

    slots: slice
    """Counted from the first of the span."""
    row: int
    """Of the tenant's gradients."""


class TenantSpan(NamedTuple):
    """Neighbouring slots of one tenant."""

    size: int
    tenant: TenantAdapter | None
    """None: nothing is added."""
    samples: Sequence[SampleSlots] = ()
    """Where each sample has gradients of its own."""


class _Part(NamedTuple):
    slots: slice
    of_site: OfSite
    dropped: Callable[[Tensor, Place], Tensor] | None
    samples: Sequence[SampleSlots]
    samples_of_a: Sequence[SampleSlots]


def added(y_TD: Tensor, x_TC: Tensor, site: Site, spans: Sequence[TenantSpan], dropped: Dropped | None) -> Tensor:
    """The output of a site and what the tenants' adapters add to it; itself where nobody has an adapter there."""
    parts, first = [], 0
    for number, (size, tenant, samples) in enumerate(spans):
        if tenant and (of_site := tenant.sites.get(site.name)):
            of_span = partial(dropped, number) if dropped and tenant.adapter.lora_dropout else None
            of_a = () if tenant.moves_b_alone else samples
            parts.append(_Part(slice(first, first + size), of_site, of_span, samples, of_a))
        first += size
    if not parts:
        return y_TD
    # An input that needs a gradient: the output then has a backward also where nothing before it needs one.
    output: Tensor = _Added.apply(y_TD, x_TC, x_TC.new_zeros((), requires_grad=True), site, parts)  # type: ignore[no-untyped-call]
    return output


class _Added(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y_TD: Tensor, x_TC: Tensor, _: Tensor, site: Site, parts: Sequence[_Part]) -> Tensor:
        products = [_inner(x_TC[part.slots], part) for part in parts]
        if site.sums == "products":
            sum_over(site.group, products)
        output_TD = y_TD.clone()
        for part, z_tR in zip(parts, products, strict=True):
            for layer in part.of_site.layers:
                _add_outer(output_TD[part.slots], z_tR[:, layer.ranks], layer)
        ctx.save_for_backward(x_TC, *products)
        ctx.of_call = site, parts
        return output_TD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_TD: Tensor) -> tuple[Tensor | None, ...]:
        x_TC, *products = ctx.saved_tensors
        site, parts = ctx.of_call
        dy_TD = dy_TD.contiguous()
        gradients = [_through_b(dy_TD[part.slots], z_tR, part) for part, z_tR in zip(parts, products, strict=True)]
        if site.sums == "gradients":
            sum_over(site.group, gradients)
        dx_TC = torch.zeros_like(x_TC) if ctx.needs_input_grad[1] else None
        for part, dz_tR in zip(parts, gradients, strict=True):
            _through_a(x_TC[part.slots], dz_tR, None if dx_TC is None else dx_TC[part.slots], part)
        return dy_TD, dx_TC, None, None, None


def _inner(x_tC: Tensor, part: _Part) -> Tensor:
    """x A^T of all layers [t, R]."""
    if part.dropped is None:
        return x_tC @ part.of_site.a_RC.to(x_tC.dtype).t()
    layers = part.of_site.layers
    return torch.cat([part.dropped(x_tC, one.place) @ one.a_rC.to(x_tC.dtype).t() for one in layers], 1)


def _outputs(y_tD: Tensor, place: Place) -> Tensor:
    """The outputs of an adapted layer [t, groups, run]: a view."""
    return y_tD.view(len(y_tD), place.groups, -1)[:, :, place.first : place.first + place.run]


def _add_outer(y_tD: Tensor, z_tr: Tensor, layer: Layer) -> None:
    """Add s z B^T to the outputs of a layer."""
    place, b_rD = layer.place, layer.b_Dr.to(z_tr.dtype).t()
    if place.groups == 1:
        _outputs(y_tD, place)[:, 0].addmm_(z_tr, b_rD, alpha=layer.scaling)
    else:
        outputs = _outputs(y_tD, place)
        outputs.add_((z_tr @ b_rD).view(outputs.shape), alpha=layer.scaling)


def _through_b(dy_tD: Tensor, z_tR: Tensor, part: _Part) -> Tensor:
    """Add the gradients of all B; the gradient of x A^T [t, R]."""
    dz_tR = torch.empty_like(z_tR)
    for layer in part.of_site.layers:
        dy_tr = _outputs(dy_tD, layer.place).flatten(1)
        dz_tR[:, layer.ranks] = dy_tr @ layer.b_Dr.to(dy_tr.dtype) * layer.scaling
        _add_product(layer.db_Dr, dy_tr, z_tR[:, layer.ranks], part.samples, layer.scaling)
    return dz_tR


def _through_a(x_tC: Tensor, dz_tR: Tensor, dx_tC: Tensor | None, part: _Part) -> None:
    """Add the gradients of all A, and put that of x into ``dx_tC``, which is zero."""
    of_site = part.of_site
    if part.dropped is None:
        _add_product(of_site.da_RC, dz_tR, x_tC, part.samples_of_a)
        if dx_tC is not None:
            torch.mm(dz_tR, of_site.a_RC.to(dz_tR.dtype), out=dx_tC)
        return
    for layer in of_site.layers:
        dz_tr = dz_tR[:, layer.ranks]
        _add_product(layer.da_rC, dz_tr, part.dropped(x_tC, layer.place), part.samples_of_a)
        if dx_tC is not None:
            dx_tC += part.dropped(dz_tr @ layer.a_rC.to(dz_tr.dtype), layer.place)


def _add_product(
    gradient: Tensor, left: Tensor, right: Tensor, samples: Sequence[SampleSlots], factor: float = 1.0
) -> None:
    """gradient += factor left^T right, in the gradient's precision; sample by sample where it has rows of samples."""
    if gradient.dim() > 2:
        for slots, row in samples:
            _add_product(gradient[row], left[slots], right[slots], (), factor)
    elif gradient.dtype == left.dtype:
        gradient.addmm_(left.t(), right, alpha=factor)
    else:
        gradient.add_(left.t() @ right, alpha=factor)
