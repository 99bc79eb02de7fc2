"""Rounded weights, torch's products over them, and drafts by a model that has them: no token changes."""

from dataclasses import replace
from itertools import product

import hypothesis.strategies as st
import pytest
import torch
from evenload.core.drafters import drafter_of
from evenload.core.recipe.generated import DraftRule
from evenload.plugins.rollout.quantized import _Seconds
from evenload.runtime.generate import quantized
from evenload.runtime.generate.drafts import Drafts
from evenload.runtime.generate.engine import Quantizable, generate
from evenload.runtime.generate.quantized import GROUP, QuantizedView, linears_of, packed, restored, rounded
from evenload.runtime.generate.request import Generation, Request, Sampling
from harness.cases import full
from hypothesis import given
from torch import nn

from . import tiny

BITS = "int8", "int4"
ROWS = [(packed, "int8"), (packed, "int4"), (restored, "int8"), (restored, "int4")]
REQUESTS = [Request(number, tuple(range(1 + 5 * number, 9 + 7 * number)), 30, (0, 1, 2)) for number in range(3)]
HOW = Generation(seed=3, priced=False)


def drawn(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@given(st.integers(0, 10**6), st.sampled_from(BITS), st.integers(-30, 30), st.booleans())
def test_a_rounded_weight_is_half_a_step_off_at_most(seed, bits, size, some_zeros):
    weight_NK = drawn(seed, 6, 3 * GROUP) * torch.logspace(0, 3, 3).repeat_interleave(GROUP) * 2.0**size
    weight_NK[:, :GROUP] *= not some_zeros
    own = rounded(weight_NK, bits)
    steps_NK = own.scales_NU.double().repeat_interleave(weight_NK.shape[1] // own.scales_NU.shape[1], 1)
    assert own.q_NK.abs().max() <= (127 if bits == "int8" else 7)
    assert ((weight_NK - own.restored(torch.float64)).abs() <= steps_NK / 2 * (1 + 1e-12)).all()
    largest = weight_NK.unflatten(1, (own.scales_NU.shape[1], -1)).abs().amax(-1)
    assert (own.scales_NU * (127 if bits == "int8" else 7) <= largest * 1.02 + 1e-30).all()


@pytest.mark.parametrize(("row", "bits"), ROWS, ids=lambda one: getattr(one, "__name__", one))
def test_what_is_packed_is_read_as_it_was(row, bits):
    """Times each unit vector; scales are powers of two, so that nothing is rounded."""
    most = 127 if bits == "int8" else 7
    weight_NK = torch.randint(-most, most + 1, (32, 2 * GROUP), generator=torch.Generator().manual_seed(0)).double()
    own = rounded(weight_NK, bits)
    steps = 2.0 ** torch.arange(own.scales_NU.numel()).remainder(7).view_as(own.scales_NU)
    own = own._replace(scales_NU=steps.bfloat16())
    torch.testing.assert_close(row(own)(torch.eye(2 * GROUP)).t().double(), own.restored(torch.float64), rtol=0, atol=0)


@pytest.mark.parametrize(("row", "bits"), ROWS, ids=lambda one: getattr(one, "__name__", one))
@pytest.mark.parametrize("rows", [1, 5, 33])
def test_products_are_those_of_rounded_weights(row, bits, rows):
    weight_NK, x_RK = drawn(0, 48, 3 * GROUP), drawn(1, rows, 3 * GROUP)
    own = rounded(weight_NK, bits)
    want = x_RK @ own.restored(torch.float64).t()
    assert (row(own)(x_RK).double() - want).norm() <= (0.01 if row is packed else 1e-12) * want.norm()


def layers(*inputs):
    return nn.ModuleList(nn.Linear(size, 32, dtype=torch.float64) for size in inputs)


@pytest.mark.parametrize("bits", BITS)
def test_layers_are_rounded_inside_alone_and_keep_their_bias(bits, caplog):
    own = layers(GROUP, 96, 2 * GROUP)
    x = [drawn(0, 2, 3, layer.in_features) for layer in own]
    with torch.no_grad():
        exact = [layer(one) for layer, one in zip(own, x, strict=True)]
        view = QuantizedView(linears_of([own]), bits, always=True)
        with view.entered(4):
            inside = [layer(one) for layer, one in zip(own, x, strict=True)]
        after = [layer(one) for layer, one in zip(own, x, strict=True)]
    stays = bits == "int4"
    for layer, one, want, got in zip(own, x, exact, inside, strict=True):
        assert got.dtype == torch.float64
        if stays and layer.in_features == 96:
            assert torch.equal(got, want)
            continue
        weight = rounded(layer.weight, bits).restored(torch.float64)
        torch.testing.assert_close(got, nn.functional.linear(one, weight, layer.bias), rtol=0.02, atol=0.02)
        assert not torch.equal(got, want)
    assert all(map(torch.equal, exact, after))
    assert not any("forward" in vars(layer) for layer in own)
    assert caplog.text.count("1 of 3 linear layers keep their weights while tokens are drafted") == stays


@pytest.mark.parametrize(
    ("factor", "seconds", "taken"), [(1, 1.0, True), (1, 3.0, False), (1.1, 1.0, False), (0, 1.0, False)]
)
@pytest.mark.parametrize("always", [False, True])
def test_a_product_is_taken_where_it_is_faster_and_right(factor, seconds, taken, always, monkeypatch):
    """Of one that is never slower, one that is not right, and one that is not there."""

    def other(weights):
        if not factor:
            raise RuntimeError("no such kernel here")
        return lambda x_RK: restored(weights)(x_RK) * factor

    def timed(call, device):
        return 2.0 if call.func is nn.functional.linear else seconds

    monkeypatch.setattr(quantized, "seconds_of", timed)
    monkeypatch.setattr(quantized, "packed", other)
    view = QuantizedView(linears_of([layers(GROUP)]), "int8", always=always)
    assert len(view.products(8)) == (taken or always)
    [kind] = view._kinds.values()
    assert kind is (other if factor == 1 else restored if always else None)


def drafted(model, bits="int8", how=HOW, most=8, quantizable=None):
    """Samples, and what came of the drafts of a model that is rounded so."""
    drafts = Drafts(drafter_of(DraftRule(by="quantized", most=most, weights=bits))(()), tiny.VOCABULARY)
    quantizable = quantizable or Quantizable(linears_of([model.linears]), model.logits)
    out = {one[:2]: one for one in generate(REQUESTS, how, model.decoder(quantizable=quantizable), None, drafts)}
    assert model.tables.num_taken == 0
    return out, drafts.counts


SAMPLING = {"drawn": Sampling(), "greedy": Sampling(0.0), "cut": Sampling(0.7, 8, 0.9)}
CHANGES = {"whole": {}, "chunks": {"slots": 2, "step_tokens": 5}, "small": {"cache_tokens": 80}}
CASES = [(bits, *pair) for bits in BITS for pair in product(SAMPLING, CHANGES)]
AT_EVERY_CHANGE = ("int8", "drawn", "chunks"), ("int4", "drawn", "small"), ("int4", "cut", "whole")


@pytest.mark.parametrize(
    "case", [one if one in AT_EVERY_CHANGE else pytest.param(one, marks=full) for one in CASES], ids="-".join
)
def test_a_rounded_model_drafts_and_changes_no_token(case):
    bits, sampling, changes = case
    model = tiny.Tiny(dim=32)
    how = replace(HOW, sampling=SAMPLING[sampling], end_tokens=frozenset({5}), **CHANGES[changes])
    got, counts = drafted(model, bits, how)
    tiny.refuse_other(got, tiny.one_by_one(model.whole, REQUESTS, how))
    assert counts.drafted > counts.accepted > 0.1 * counts.drafted


def test_a_model_that_is_not_rounded_guesses_all_tokens():
    """So keys, places and noise of guesses are those of the forward that checks them."""
    model = tiny.Tiny()
    got, counts = drafted(model, quantizable=Quantizable([], model.logits), most=4)
    tiny.refuse_other(got, tiny.one_by_one(model.whole, REQUESTS, HOW))
    assert {len(one.tokens) for one in got.values()} == {30}
    assert counts == (9 * 6, 9 * 24, 9 * 24)


def test_weights_are_rounded_anew_for_each_generation():
    """Those of a step before would be right about as often as those of a stranger."""
    make, model = drafter_of(DraftRule(by="quantized")), tiny.Tiny()
    quantizable = Quantizable(linears_of([model.linears]), model.logits)
    accepted = []
    for seed in range(3):
        for layer, other in zip(model.linears, tiny.Tiny(seed).linears, strict=True):
            layer.weight.copy_(other.weight)
        drafts = Drafts(make(()), tiny.VOCABULARY)
        out = [*generate(REQUESTS, HOW, model.decoder(quantizable=quantizable), None, drafts)]
        accepted.append(drafts.counts.accepted / sum(len(one.tokens) for one in out))
    assert min(accepted) > 0.7


def test_guesses_are_as_many_as_give_the_most_tokens_a_second():
    seconds = _Seconds()
    assert seconds.depth(0.9, 8) == 0, "an exact forward is measured first"
    seconds.exact += [2.0, 1.0]
    assert seconds.depth(0.9, 8) == 2, "then the rounded model's"
    seconds.rounded += [0.25, 0.5]
    seconds.more += [0.0, 0.05]
    rates = [(1 - 0.9 ** (k + 1)) / 0.1 / (1.0 + 0.25 * k) for k in range(9)]
    assert seconds.depth(0.9, 8) == rates.index(max(rates)) == 6
    assert seconds.depth(0.2, 8) == 0
    seconds.rounded += [1.0, 1.0, 1.0, 1.0]
    assert seconds.depth(1.0, 8) == 0


def test_where_nothing_is_faster_nothing_is_drafted_and_it_is_said(monkeypatch, caplog):
    monkeypatch.setattr(quantized, "seconds_of", lambda call, _: 1.0)
    model = tiny.Tiny()
    got, counts = drafted(model, how=replace(HOW, priced=True))
    tiny.refuse_other(got, tiny.one_by_one(model.whole, REQUESTS, HOW))
    assert (counts.drafted, counts.accepted) == (0, 0)
    assert caplog.text.count("no product with int8 weights is faster here than the layers' own") == 1


def test_a_rounded_model_that_fails_costs_a_warning_and_no_token(caplog):
    model, calls = tiny.Tiny(), []

    def failing(pack, slots_R):
        calls.append(pack)
        if len(calls) > 5:
            raise RuntimeError("out of memory")
        return model.logits(pack, slots_R)

    got, _ = drafted(model, quantizable=Quantizable([], failing))
    tiny.refuse_other(got, tiny.one_by_one(model.whole, REQUESTS, HOW))
    assert caplog.text.count("no longer drafted, as drafting them failed: RuntimeError: out of memory") == 1


def test_ranks_of_a_pipeline_draft_as_the_last_one_says():
    """And a failure of one ends all, since the others wait for it."""
    model, told = tiny.Tiny(), []

    def shared(picks_2R):
        told.append(picks_2R.shape[1])
        return picks_2R

    quantizable, drafts = Quantizable([], model.logits), Drafts(drafter_of(DraftRule(by="quantized", most=3))(()), 24)
    assert len([*generate(REQUESTS, HOW, model.decoder(quantizable=quantizable, shared=shared), None, drafts)]) == 9
    assert told.count(1) > 5
    drafts = Drafts(drafter_of(DraftRule(by="quantized", most=3))(()), 24)
    broken = Quantizable([], lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        list(generate(REQUESTS, HOW, model.decoder(quantizable=broken, shared=shared), None, drafts))
