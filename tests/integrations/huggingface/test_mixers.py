"""Packs of models with windows, soft caps, sinks and parts that mix tokens without attention: a sample gets what it
gets alone, also where it is cut, or a layer is recomputed; what cannot keep samples apart stays out of packs."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np
import pytest
from evenload.core.errors import EvenloadError
from harness.cases import only_full

pytestmark = pytest.mark.slow  # imports Transformers' Trainer

DOUBLE, SINGLE = 1e-9, 2e-6


@pytest.fixture(scope="module")
def torch() -> Any:
    return pytest.importorskip("torch")


@pytest.fixture(scope="module")
def mixers() -> Any:
    from evenload.integrations.huggingface import mixers

    return mixers


def pack_of(*lengths: int) -> Any:
    from evenload.core.plan.step_plan import MicroBatch, Slice
    from evenload.runtime.attention.pack import build_pack

    slices = tuple(Slice(i, 0, length) for i, length in enumerate(lengths))
    return build_pack(MicroBatch(slices, (0,)), lambda i: np.zeros(lengths[i], dtype=np.int64))


@pytest.mark.parametrize(
    ("dtype", "names"),
    [
        ("float64", ["gemma3_text", "gpt_oss", "nemotron_h", "mamba"]),
        ("float32", ["gemma2"]),
        only_full("float64", ["gemma2", "mistral", "bamba"]),
        only_full("float32", ["gemma3_text"]),
    ],
    ids=str,
)
def test_packs_are_exact_in_double_and_single_precision(on_ranks, dtype, names):
    for found in on_ranks(2, "rank_rows.errors", names=names, dtype=dtype):
        for family, one in found.items():
            assert one["padded"] == [False], (family, one)
            assert one["grad"] < (DOUBLE if dtype == "float64" else SINGLE), (family, one)
            assert one["loss"] < 1e-6, (family, one)


RECOMPUTED = {"gradient_checkpointing": True, "dtype": "float32"}
"""What is float64 throughout in a forward is not in a layer that is recomputed."""


@pytest.mark.parametrize(
    ("names", "more"),
    [(["gemma2"], {}), (["mistral"], RECOMPUTED), only_full(["mistral", "gpt_oss"], {})],
    ids=str,
)
def test_samples_that_are_cut_in_a_window_are_exact_beside_checkpointing(on_ranks, names, more):
    plugins = {"packing": {"max_tokens": 48, "slices": "auto"}}
    for found in on_ranks(2, "rank_rows.errors", names=names, plugins=plugins, **more):
        for family, one in found.items():
            assert one["cut"] > 0, (family, one)
            assert one["grad"] < (SINGLE if more else DOUBLE), (family, one)


def test_parts_that_mix_tokens_keep_samples_apart_where_layers_are_recomputed(on_ranks):
    names = ["nemotron_h", "mamba"]  # mamba's model hands its layers no arguments
    for found in on_ranks(2, "rank_rows.errors", names=names, **RECOMPUTED):
        assert [found[name]["padded"] for name in names] == [[False], [False]], found
        assert all(one["grad"] < SINGLE for one in found.values()), found


def test_ranks_share_no_window(on_ranks):
    plugins = {"packing": {"max_tokens": 128}, "mesh": {}}
    for found in on_ranks(2, "rank_rows.errors", names=["mistral"], plugins=plugins):
        assert found["mistral"]["shared"] == 0, found
        assert found["mistral"]["padded"] == [False], found
        assert found["mistral"]["grad"] < DOUBLE, found


def test_rows_of_like_length_waste_at_most_half(mixers):
    sizes = [3, 100, 51, 7, 50, 1, 99, 2, 49]
    rows = mixers.like_lengths(sizes)
    assert sorted(place for row in rows for place in row) == list(range(len(sizes)))
    assert all(2 * sizes[place] >= sizes[row[0]] for row in rows for place in row)
    assert [len(row) for row in rows] == [4, 1, 1, 2, 1]


def decay(torch: Any, knows_borders: bool) -> Any:
    """A model of one layer with a part that sums what came before, and may know where samples end."""

    class Decay(torch.nn.Module):
        def forward(self, x: Any, scale: Any = None, seq_idx: Any = None, **_: Any) -> Any:
            if seq_idx is not None and not knows_borders:
                raise ValueError("can't keep packed sequences apart")
            state, outs = torch.zeros_like(x[:, 0]), []
            for place in range(x.shape[1]):
                if seq_idx is not None and place and seq_idx[0, place] != seq_idx[0, place - 1]:
                    state = torch.zeros_like(state)
                state = 0.9 * state + x[:, place] * (1 if scale is None else scale[:, place])
                outs.append(state)
            return torch.stack(outs, dim=1), None

    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.decay = torch.nn.LayerNorm(4), Decay()

        def forward(self, x: Any, **kwargs: Any) -> Any:
            return x + self.decay(self.norm(x), **kwargs)[0]

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList([Layer(), Layer()])

        def forward(self, x: Any, **kwargs: Any) -> Any:
            for layer in self.layers:
                x = layer(x, **kwargs)
            return x

    return Model().double()


@pytest.mark.parametrize("knows_borders", [False, True])
def test_a_state_does_not_run_over_the_border_of_two_samples(torch, mixers, knows_borders):
    from evenload.integrations.transformers.proof import difference

    model = decay(torch, knows_borders)
    lengths = (9, 4, 1, 30, 5)
    rows = [torch.randn(1, length, 4, dtype=torch.float64, requires_grad=True) for length in lengths]
    alone = torch.cat([model(row) for row in rows], dim=1)
    wanted = torch.autograd.grad(alone.square().sum(), rows)
    search = mixers.MixerSearch(model, lambda: 0, 1e-4, difference)
    with search.watching():
        model(torch.cat(rows, dim=1), evenload_pack=pack_of(*lengths))
    assert [type(mixer.module).__name__ for mixer in search.mixers] == ["Decay"] * 2
    assert {mixer.form for mixer in search.mixers} == {mixers.with_borders if knows_borders else mixers.in_rows}
    with mixers.apart(search.mixers):
        packed = model(torch.cat(rows, dim=1), evenload_pack=pack_of(*lengths))
        assert torch.equal(model(rows[0]), alone[:, :9])  # without a pack nothing is changed
    assert difference(packed[0], alone[0]) < 1e-12
    found = torch.autograd.grad(packed.square().sum(), rows)
    assert max(difference(a[0], b[0]) for a, b in zip(found, wanted, strict=True)) < 1e-12
    across = model(torch.cat(rows, dim=1), evenload_pack=pack_of(*lengths))
    assert difference(across[0], alone[0]) > 1e-2


def test_a_state_that_would_run_over_a_border_is_measured_before_the_first_step(mixers, families):
    from evenload.runtime.attributes import with_attributes

    with with_attributes(mixers.MixerSearch, watching=nullcontext):
        assert families.outcome("nemotron_h") == ("padded groups", pytest.approx(0, abs=DOUBLE))
    assert families.outcome("nemotron_h") == ("planned", pytest.approx(0, abs=DOUBLE))


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("hooks_run_again", [False, True])
def test_a_layer_that_is_recomputed_has_its_pack_again(torch, mixers, reentrant, hooks_run_again):
    from torch.utils.checkpoint import checkpoint

    model = decay(torch, knows_borders=False)
    parts = [mixers.Mixer(layer, layer.decay, mixers.in_rows) for layer in model.layers]
    x, pack = torch.randn(1, 14, 4, dtype=torch.float64, requires_grad=True), pack_of(9, 5)

    def gradient(run: Any) -> Any:
        with mixers.apart(parts):
            x.grad = None
            run().square().sum().backward()
        return x.grad

    wanted = gradient(lambda: model(x, evenload_pack=pack))
    for layer in model.layers:
        plain = type(layer).forward
        inner = layer.__call__ if hooks_run_again else partial(plain, layer)
        layer._gradient_checkpointing_func = partial(checkpoint, use_reentrant=reentrant)

        def again(x: Any, layer: Any = layer, inner: Any = inner, **kwargs: Any) -> Any:
            return layer._gradient_checkpointing_func(partial(inner, **kwargs), x)

        layer.again = again
        if not hooks_run_again:
            layer.forward = again

    def recomputed() -> Any:
        y = x
        for layer in model.layers:
            y = (layer.again if hooks_run_again else layer)(y, evenload_pack=pack)
        return y

    assert torch.equal(gradient(recomputed), wanted)


def test_a_layer_that_is_recomputed_without_its_pack_raises(torch, mixers):
    model = decay(torch, knows_borders=False)
    part = mixers.Mixer(model.layers[0], model.layers[0].decay, mixers.in_rows)
    with mixers.apart([part]), pytest.raises(EvenloadError, match="gradient_checkpointing=True"):
        model.layers[0].decay(torch.zeros(1, 3, 4, dtype=torch.float64))


def test_weights_that_each_call_gathers_are_not_called_by_lengths(torch, mixers):
    module = torch.nn.Linear(2, 2)
    mixers.Mixer(module, module, mixers.in_rows).refuse_divided()
    module.weight.ds_id = 0  # as under ZeRO 3
    mixers.Mixer(module, module, mixers.with_borders).refuse_divided()
    with pytest.raises(EvenloadError, match="gathers their weights"):
        mixers.Mixer(module, module, mixers.in_rows).refuse_divided()
