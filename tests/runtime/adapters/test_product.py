"""What adapters add, tenant by tenant, against autograd through y + s (x A^T) B^T of each tenant alone."""

import hypothesis.strategies as st
import pytest
import torch
from evenload.core.recipe.adapter import Adapter, TenantTrain
from evenload.runtime.adapters.places import AdapterState, Place, Site
from evenload.runtime.adapters.product import TenantSpan, added
from evenload.runtime.adapters.tenant import TenantAdapter
from hypothesis import given

INPUTS, GROUPS = 6, 2
RUNS = {"q": 3, "k": 2, "v": 2}
"""Outputs of each layer in each of the groups of a fused module."""


def fused_site():
    places, first = [], 0
    for name, run in RUNS.items():
        places.append(Place(name, GROUPS * run, INPUTS, (0, GROUPS * run), (0, INPUTS), GROUPS, first))
        first += run
    return Site(torch.nn.Linear(INPUTS, GROUPS * first), tuple(places))


SITE = fused_site()
ADAPTERS = (
    Adapter(r=2),
    Adapter(r=3, target_modules=("q", "v"), lora_alpha=5),
    Adapter(r=1, target_modules=("k",), use_rslora=True),
    Adapter(r=2, target_modules=("elsewhere",)),
)


def tenant(number):
    """With matrices that are not zero."""
    generator = torch.Generator().manual_seed(number)
    adapter = ADAPTERS[number]
    weights = {}
    for place in SITE.places:
        if adapter.targets([place.name]):
            rank = adapter.rank_of(place.name)
            weights[f"{place.name}.lora_A"] = torch.randn(rank, INPUTS, generator=generator, dtype=torch.float64)
            weights[f"{place.name}.lora_B"] = torch.randn(place.outputs, rank, generator=generator, dtype=torch.float64)
    state = AdapterState(weights, {}, {}, 0)
    where = {"owner": 0, "owners": 1, "dtype": torch.float64, "device": torch.device("cpu")}
    return TenantAdapter(adapter, TenantTrain(), [SITE], **where, state=state)


def run(spans, y_TD, x_TC):
    """Output, and the gradient of the inputs where that of the outputs is a cosine of them."""
    x_TC = x_TC.clone().requires_grad_()
    output_TD = added(y_TD, x_TC, SITE, spans, None)
    if output_TD.requires_grad:
        output_TD.backward(output_TD.detach().cos())
    return output_TD.detach(), torch.zeros_like(x_TC) if x_TC.grad is None else x_TC.grad


def textbook(one, y_tD, x_tC):
    """Output, gradient of the inputs, gradients of the matrices."""
    x_tC = x_tC.clone().requires_grad_()
    leaves = {m.name: m.value.clone().requires_grad_() for m in one.matrices} if one else {}
    outputs = []
    for place in SITE.places:
        product = x_tC @ torch.zeros(INPUTS, place.outputs, dtype=torch.float64)
        if one and f"{place.name}.lora_A" in leaves:
            a, b = leaves[f"{place.name}.lora_A"], leaves[f"{place.name}.lora_B"]
            product = one.adapter.scaling_of(place.name) * (x_tC @ a.T) @ b.T
        outputs.append(product.view(len(x_tC), GROUPS, -1))
    output_tD = y_tD + torch.cat(outputs, -1).flatten(1)
    output_tD.backward(output_tD.detach().cos())
    return output_tD.detach(), x_tC.grad, {name: leaf.grad for name, leaf in leaves.items()}


def inputs(size):
    generator = torch.Generator().manual_seed(size)
    outputs = GROUPS * sum(RUNS.values())
    return tuple(torch.randn(size, n, generator=generator, dtype=torch.float64) for n in (outputs, INPUTS))


SPANS = st.lists(st.tuples(st.integers(1, 5), st.sampled_from([None, 0, 1, 2, 3])), min_size=1, max_size=7)


@given(SPANS)
def test_each_tenant_gets_what_autograd_gives_it_alone(drawn):
    tenants = [tenant(number) for number in range(len(ADAPTERS))]
    sizes = [size for size, _ in drawn]
    y_TD, x_TC = inputs(sum(sizes))
    output_TD, dx_TC = run([TenantSpan(n, None if who is None else tenants[who]) for n, who in drawn], y_TD, x_TC)
    expected = [dict[str, torch.Tensor]() for _ in tenants]
    rows = zip(*(torch.split(t, sizes) for t in (y_TD, x_TC, output_TD, dx_TC)), strict=True)
    for (_, who), (y_tD, x_tC, output_tD, dx_tC) in zip(drawn, rows, strict=True):
        wanted, dx, of_matrices = textbook(None if who is None else tenants[who], y_tD, x_tC)
        torch.testing.assert_close(output_tD, wanted, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(dx_tC, dx, rtol=1e-12, atol=1e-12)
        for name, gradient in of_matrices.items():
            expected[who or 0][name] = expected[who or 0].get(name, 0) + gradient
    for one, gradients in zip(tenants, expected, strict=True):
        for matrix in one.matrices:
            wanted = gradients.get(matrix.name, torch.zeros_like(matrix.gradient))
            torch.testing.assert_close(matrix.gradient, wanted, rtol=1e-12, atol=1e-12)


@given(SPANS)
def test_company_changes_no_bit_of_a_span(drawn):
    sizes = [size for size, _ in drawn]
    y_TD, x_TC = inputs(sum(sizes))
    spans = [TenantSpan(size, None if who is None else tenant(who)) for size, who in drawn]
    output_TD, dx_TC = run(spans, y_TD, x_TC)
    in_company = zip(*(torch.split(t, sizes) for t in (y_TD, x_TC, output_TD, dx_TC)), strict=True)
    for (size, who), (y_tD, x_tC, output_tD, dx_tC) in zip(drawn, in_company, strict=True):
        alone = run([TenantSpan(size, None if who is None else tenant(who))], y_tD.clone(), x_tC.clone())
        assert torch.equal(output_tD, alone[0])
        assert torch.equal(dx_tC, alone[1])


@pytest.mark.parametrize("where", ["inputs", "matrices"])
def test_what_is_not_a_number_stays_with_its_tenant(where):
    y_TD, x_TC = inputs(9)
    good, tenants = [tenant(number) for number in range(3)], [tenant(number) for number in range(3)]
    expected = run([TenantSpan(3, one) for one in good], y_TD, x_TC)
    if where == "inputs":
        x_TC = x_TC.clone()
        x_TC[3:6] = torch.nan
    else:
        tenants[1].values.fill_(torch.inf)
    found = run([TenantSpan(3, one) for one in tenants], y_TD, x_TC)
    for tensor, wanted in zip(found, expected, strict=True):
        assert torch.equal(tensor[:3], wanted[:3])
        assert torch.equal(tensor[6:], wanted[6:])
        assert not tensor[3:6].isfinite().all()
    for number in (0, 2):
        assert torch.equal(tenants[number].gradients, good[number].gradients)
    assert not tenants[1].gradients.isfinite().all()


def test_where_nobody_has_an_adapter_the_output_is_the_same_tensor():
    y_TD, x_TC = inputs(4)
    assert added(y_TD, x_TC, SITE, [TenantSpan(3, None), TenantSpan(1, tenant(3))], None) is y_TD
