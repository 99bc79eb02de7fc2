"""Samples of many tenants in the same forwards are those of models with each adapter in their weights."""

import copy
from dataclasses import replace

import torch
from evenload.core.recipe.adapter import Adapter, TenantTrain
from evenload.runtime.adapters.adapters import Adapters
from evenload.runtime.adapters.peers import AdapterPeers
from evenload.runtime.adapters.places import AdaptedBlock, AdapterState, Place, Site
from evenload.runtime.generate.engine import generate
from evenload.runtime.generate.request import Generation, Request
from torch import nn

from . import tiny

WIDTH = tiny.HEADS * tiny.DIM
SETTINGS = Generation(seed=3, end_tokens=frozenset({5}))
TENANTS = (2, None, 7, 2, 7)
REQUESTS = [
    Request(number, tuple((3 * number + 5 * place) % tiny.VOCABULARY for place in range(length)), 20, (0, 1), tenant)
    for number, (length, tenant) in enumerate(zip((20, 9, 33, 1, 14), TENANTS, strict=True))
]


class Head(nn.Module):
    """What a linear layer makes of the last hidden states, beside the tiny model's own; the pack is in its call."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.float64)

    def forward(self, x_TC, *, pack):
        return self.linear(x_TC)


class Adapted(tiny.Tiny):
    """The tiny model with such a layer between embedding and attention."""

    def __init__(self):
        super().__init__(4)
        torch.manual_seed(1)
        self.first = Head()

    def embedded(self, pack):
        return self.first(super().embedded(pack), pack=pack).detach()


def state(rank, seed):
    draw = torch.Generator().manual_seed(seed)
    shapes = {"first.lora_A": (rank, WIDTH), "first.lora_B": (WIDTH, rank)}
    return AdapterState(
        {name: torch.randn(shape, generator=draw, dtype=torch.float64) / 6 for name, shape in shapes.items()}, {}, {}, 0
    )


ADAPTERS = {
    2: (Adapter(r=4, target_modules=("first",)), state(4, 1)),
    7: (Adapter(r=3, target_modules=("first",)), state(3, 2)),
}


def joined(model):
    place = Place("first", WIDTH, WIDTH, (0, WIDTH), (0, WIDTH))
    block = AdaptedBlock(model.first, lambda _, words: words["pack"], (Site(model.first.linear, (place,)),))
    adapters = Adapters([block], ["first"], AdapterPeers(), torch.float64, torch.device("cpu"))
    for number, (adapter, own) in ADAPTERS.items():
        adapters.join(number, adapter, TenantTrain(), own)
    return adapters


def merged(model, number):
    out = copy.deepcopy(model)
    if number is not None:
        adapter, own = ADAPTERS[number]
        with torch.no_grad():
            product = own.weights["first.lora_B"] @ own.weights["first.lora_A"]
            out.first.linear.weight += adapter.scaling_of("first") * product
    return out


def made(model, requests, **how):
    adapters = joined(model)
    model.first.eval()
    with adapters.serving() as serves:
        decoder = replace(model.decoder(), serves=serves)
        samples = {one[:2]: one for one in generate(requests, replace(SETTINGS, **how), decoder)}
    adapters.close()
    return samples


def test_each_sample_goes_through_its_own_adapter():
    model = Adapted()
    want = {}
    for request in REQUESTS:
        want |= tiny.one_by_one(merged(model, request.tenant).whole, [request], SETTINGS)
    base = tiny.one_by_one(model.whole, REQUESTS, SETTINGS)
    assert sum(base[key].tokens != sample.tokens for key, sample in want.items()) >= 6
    for how in ({}, {"slots": 1}, {"slots": 4, "step_tokens": 3}, {"cache_tokens": 80, "step_tokens": 7}):
        tiny.refuse_other(made(model, REQUESTS, **how), want)


def test_rows_of_a_tenant_lie_together_and_nothing_is_held_afterwards():
    model = Adapted()
    model.packs.clear()
    adapters = joined(model)
    known = []
    with adapters.serving() as serves:
        decoder = replace(model.decoder(), serves=lambda tenants: (known.append(tenants), serves(tenants)))
        assert len(list(generate(REQUESTS, SETTINGS, decoder))) == 10
        assert adapters._hooks._owner_of(1) is adapters._tenants[2]
    assert adapters._hooks._owner_of(1) is None
    order = {None: -1, 2: 2, 7: 7}
    rows = [[order[known[0][piece.sequence]] for piece in pack.slices if piece.length == 1] for pack in model.packs]
    assert all(row == sorted(row) for row in rows)
    assert max(len(set(row)) for row in rows) == 3
