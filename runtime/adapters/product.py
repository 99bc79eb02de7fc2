"""What adapters add to the output of a module, tenant by tenant: each multiplies its own tokens and no others.

No product runs over tokens of another tenant with a mask: a value that is not finite would go through the mask's zeros.

Shape legend: T = slots of a pack, t = those of one tenant, C = inputs, D = outputs, r = rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear

from .places import Place, Site
from .tenant import Pair, TenantAdapter


class Span(NamedTuple):
    """Neighbouring slots of one tenant."""

    size: int
    tenant: TenantAdapter | None
    """None: nothing is added."""


Dropped = Callable[[Tensor, Place, int], Tensor]
"""The inputs of a layer, some dropped: of the inputs [t, C], the layer, and which span it is."""


def added(x_TC: Tensor, site: Site, spans: Sequence[Span], dropped: Dropped | None) -> Tensor | None:
    """What the tenants' adapters add to a site's output [T, D]; None where nobody has an adapter there."""
    products: list[Tensor] = []
    pairs: list[Pair] = []
    parts_TC = torch.split(x_TC, [span.size for span in spans])
    for number, (span, x_tC) in enumerate(zip(spans, parts_TC, strict=True)):
        for place, pair in _adapted(site, span):
            shown = x_tC if dropped is None else dropped(x_tC, place, number)
            products.append(linear(shown, pair.a.to(x_TC.dtype)) * pair.scaling)
            pairs.append(pair)
    if not products:
        return None
    sizes = [product.numel() for product in products]
    joined = site.across(torch.cat([product.flatten() for product in products]))
    summed = [part.view_as(product) for part, product in zip(torch.split(joined, sizes), products, strict=True)]
    outputs = iter([linear(z_tr, pair.b.to(x_TC.dtype)) for z_tr, pair in zip(summed, pairs, strict=True)])
    return torch.cat([_laid(site, span, outputs, x_TC) for span in spans])


def _adapted(site: Site, span: Span) -> list[tuple[Place, Pair]]:
    pairs = span.tenant.pairs if span.tenant else {}
    return [(place, pairs[place.name]) for place in site.places if place.name in pairs]


def _laid(site: Site, span: Span, outputs: Iterator[Tensor], like: Tensor) -> Tensor:
    """The outputs of a span's layers where the module has them [t, D], zeros where nothing is added."""
    adapted = {place.name for place, _ in _adapted(site, span)}
    if not adapted:
        return like.new_zeros(span.size, sum(place.run * place.groups for place in site.places))
    runs = [
        next(outputs).view(span.size, place.groups, place.run)
        if place.name in adapted
        else like.new_zeros(span.size, place.groups, place.run)
        for place in site.places
    ]
    return (torch.cat(runs, -1) if len(runs) > 1 else runs[0]).flatten(1)
