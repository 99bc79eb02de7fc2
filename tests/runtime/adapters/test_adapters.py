"""Tenants on one rank and divided over several: what they hold, what is refused, and what is left behind."""

import gc
import weakref

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from evenload.core.errors import EvenloadError
from evenload.core.plan.step_plan import MicroBatch, Slice
from evenload.core.recipe.adapter import Adapter, TenantTrain
from evenload.runtime.adapters.adapters import Adapters
from evenload.runtime.adapters.peers import AdapterPeers
from evenload.runtime.adapters.places import AdaptedBlock, AdapterState, Place, Site
from evenload.runtime.adapters.tenant import TenantAdapter
from evenload.runtime.attention.pack import build_pack
from hypothesis import given
from torch import nn

CPU = torch.device("cpu")
TRAIN = TenantTrain(weight_decay=0.1, clip_grad=0.5)


class Layer(nn.Module):
    """A layer with two linear ones; the pack is an argument of its call."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 6, dtype=torch.float64), nn.Linear(6, 4, dtype=torch.float64)

    def forward(self, x_TC, *, pack):
        return x_TC + self.down(self.up(x_TC).tanh())


def site(module, name):
    return Site(
        module,
        (Place(name, module.out_features, module.in_features, (0, module.out_features), (0, module.in_features)),),
    )


@pytest.fixture
def layer():
    return Layer()


@pytest.fixture
def adapters(layer):
    """Of one block, where nobody has joined."""
    sites = (site(layer.up, "layers.0.up"), site(layer.down, "layers.0.down"))
    block = AdaptedBlock(layer, lambda _, words: words["pack"], sites)
    adapters = Adapters([block], ["layers.0.up", "layers.0.down"], AdapterPeers(), torch.float64, CPU)
    yield adapters
    adapters.close()


def pack(lengths):
    pieces = tuple(Slice(i, 0, n) for i, n in enumerate(lengths))
    return build_pack(MicroBatch(pieces, (0,)), lambda i: np.zeros(lengths[i], dtype=np.int64))


def state_of(adapter, steps=0):
    """Any values."""
    shapes = {}
    for name, (outputs, inputs) in {"layers.0.up": (6, 4), "layers.0.down": (4, 6)}.items():
        if adapter.targets([name]):
            rank = adapter.rank_of(name)
            shapes |= {f"{name}.lora_A": (rank, inputs), f"{name}.lora_B": (outputs, rank)}
    draw = torch.Generator().manual_seed(1)
    tensors = [
        {name: torch.rand(shape, generator=draw, dtype=torch.float64) for name, shape in shapes.items()}
        for _ in range(3)
    ]
    return AdapterState(*tensors, steps) if steps else AdapterState(tensors[0], {}, {}, 0)


@pytest.mark.parametrize("steps", [0, 7])
def test_a_state_goes_in_and_comes_out(adapters, steps):
    adapter = Adapter(r=3, rank_pattern={"down": 2})
    state = state_of(adapter, steps)
    adapters.join(4, adapter, TRAIN, state)
    found = adapters.state(4)
    assert found.steps == steps
    for kind, (wanted, tensors) in enumerate(zip(state[:3], found[:3], strict=True)):
        for name, tensor in tensors.items():
            assert torch.equal(tensor, wanted[name] if wanted else torch.zeros_like(tensor)), (kind, name)


@given(st.integers(1, 5), st.integers(1, 4), st.integers(0, 3))
def test_owners_together_update_as_one_alone(owners, rank, steps):
    layer, adapter = Layer(), Adapter(r=rank)
    sites = [site(layer.up, "layers.0.up"), site(layer.down, "layers.0.down")]
    state, gradient = state_of(adapter, steps), torch.rand(2 * rank * 10 + owners, dtype=torch.float64)

    def updated(owner, owners):
        of = {"owner": owner, "owners": owners, "dtype": torch.float64, "device": CPU, "state": state}
        tenant = TenantAdapter(adapter, TRAIN, sites, **of)
        tenant.gradients[: tenant.size] = gradient[: tenant.size]
        tenant.update(1e-2, norm=2.0)
        return tenant

    one, parts = updated(0, 1), [updated(owner, owners) for owner in range(owners)]
    size = one.size
    assert torch.equal(torch.cat([part.values[part.run] for part in parts])[:size], one.values)
    for kind in range(2):
        assert torch.equal(torch.cat([p.owned_moments()[kind] for p in parts])[:size], one.owned_moments()[kind])


@pytest.mark.parametrize(("norm", "scale"), [(0.4, 1.0), (0.5, 1.0), (2.0, 0.25)])
def test_a_gradient_is_clipped_where_its_norm_is_over_the_limit(norm, scale):
    layer, adapter = Layer(), Adapter(r=2)
    of = {"owner": 0, "owners": 1, "dtype": torch.float64, "device": CPU, "state": state_of(adapter)}
    tenant = TenantAdapter(adapter, TRAIN, [site(layer.up, "layers.0.up")], **of)
    tenant.gradients.fill_(0.1)
    tenant.update(1e-2, norm=norm)
    assert tenant.gradients[tenant.run].numpy() == pytest.approx(0.1 * scale, rel=1e-5)


def test_an_adapter_that_goes_on_moves_as_one_that_was_never_put_away(adapters):
    """Adam's own count of steps, which corrects its moments, is part of that."""
    adapter = Adapter(r=2)
    adapters.join(0, adapter, TRAIN, state_of(adapter))
    draw = torch.Generator().manual_seed(2)

    def step(*numbers):
        gradient = torch.rand(adapters._tenants[0].size, generator=draw, dtype=torch.float64)
        for number in numbers:
            adapters._tenants[number].gradients[: len(gradient)] = gradient
        adapters.update(dict.fromkeys(numbers, 1e-2), dict.fromkeys(numbers, 0.0))

    for _ in range(3):
        step(0)
    adapters.join(1, adapter, TRAIN, adapters.state(0))
    for _ in range(2):
        step(0, 1)
    stayed, came = adapters.state(0), adapters.state(1)
    assert came.steps == stayed.steps == 5
    for kind in range(3):
        assert all(torch.equal(tensor, stayed[kind][name]) for name, tensor in came[kind].items())


def test_gradients_of_a_step_are_its_own_and_a_tenant_without_data_keeps_its_moments(layer, adapters):
    x_TC = torch.rand(5, 4, dtype=torch.float64)
    adapter = Adapter(r=2)
    for number in (0, 1):
        adapters.join(number, adapter, TRAIN, state_of(adapter, steps=3))
    seen = []
    for _ in range(2):
        adapters.begin(np.array([0, 0]))
        layer(x_TC, pack=pack([2, 3])).sum().backward()
        seen.append({name: gradient.clone() for name, gradient in adapters.gradients(0).items()})
        adapters.update({0: 0.0}, {0: 0.0})
    assert any(gradient.any() for gradient in seen[0].values())
    assert all(torch.equal(gradient, seen[1][name]) for name, gradient in seen[0].items())
    assert (adapters.state(0).steps, adapters.state(1).steps) == (5, 3)


def test_who_joins_begins_as_the_base_alone_and_another_seed_begins_elsewhere(layer, adapters):
    x_TC = torch.rand(5, 4, dtype=torch.float64)
    bare = layer(x_TC, pack=pack([2, 3]))
    for number, seed in enumerate((1, 1, 2)):
        adapters.join(number, Adapter(r=2), TenantTrain(seed=seed))
    adapters.begin(np.array([0, 2]))
    assert torch.equal(layer(x_TC, pack=pack([2, 3])), bare)
    first, same, other = (adapters.state(number).weights["layers.0.up.lora_A"] for number in range(3))
    assert torch.equal(first, same)
    assert not torch.equal(first, other)


def test_who_left_is_held_by_nobody_and_closing_takes_all_hooks_off(layer, adapters):
    x_TC = torch.rand(5, 4, dtype=torch.float64)
    for number in (0, 1):
        adapters.join(number, Adapter(r=2), TRAIN)
    adapters.begin(np.array([0, 1]))
    layer(x_TC, pack=pack([2, 3])).sum().backward()
    left = weakref.ref(adapters._tenants[0])
    adapters.leave(0)
    gc.collect()
    assert left() is None
    assert adapters.numbers == (1,)
    adapters.close()
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in layer.modules())


def test_a_plan_with_a_stranger_is_refused(adapters):
    adapters.join(2, Adapter(), TRAIN)
    with pytest.raises(EvenloadError, match="tenants that have no adapter here"):
        adapters.begin(np.array([2, 3]))


REFUSED = {
    "a target that is no layer": (Adapter(target_modules=("upp", "down")), None, ["upp", "did you mean 'up'"]),
    "other layers": (Adapter(target_modules=("up",)), state_of(Adapter()), ["layers.0.down.lora_A", "target_modules"]),
    "another rank": (Adapter(r=3), state_of(Adapter(r=2)), ["layers.0.up.lora_A (2, 4), wanted (3, 4)"]),
}


@pytest.mark.parametrize("case", REFUSED)
def test_an_adapter_that_does_not_fit_is_refused_by_name(adapters, case):
    adapter, state, words = REFUSED[case]
    with pytest.raises(EvenloadError) as caught:
        adapters.join(0, adapter, TRAIN, state)
    text = " ".join((caught.value.what, caught.value.found, caught.value.do))
    for word in words:
        assert word in text
    assert adapters.numbers == ()


@pytest.mark.parametrize("owners", [1, 2, 3])
def test_bytes_of_a_tenant_are_those_that_it_takes(adapters, owners, monkeypatch):
    monkeypatch.setattr(AdapterPeers, "num_owners", owners)
    adapter = Adapter(r=3)
    adapters.join(0, adapter, TRAIN)
    tenant = adapters._tenants[0]
    taken = sum(t.numel() * t.element_size() for t in (tenant.values, tenant.gradients, *tenant.owned_moments()))
    assert adapters.bytes_of(adapter) == taken, "60 values, which all these owners divide evenly"
