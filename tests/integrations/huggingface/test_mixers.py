"""Packs of models with windows, soft caps, sinks and parts that mix tokens without attention: a sample gets what it
gets alone, also where it is cut, or a layer is recomputed; what cannot keep samples apart stays out of packs."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from evenload.core.errors import EvenloadError
from evenload.core.plan.step_plan import MicroBatch, Slice
from evenload.runtime.attention.pack import build_pack
from evenload.runtime.attributes import with_attributes
from harness.cases import only_full
from harness.lazy import LazyModule
from torch.utils.checkpoint import checkpoint
from variant_checks import check_exact

mixers = LazyModule("evenload.integrations.huggingface.mixers")
proof = LazyModule("evenload.integrations.transformers.proof")

pytestmark = pytest.mark.slow  # imports Transformers' Trainer

DOUBLE, SINGLE = 1e-9, 2e-6


def pack_of(*lengths: int) -> Any:
    slices = tuple(Slice(i, 0, length) for i, length in enumerate(lengths))
    return build_pack(MicroBatch(slices, (0,)), lambda i: np.zeros(lengths[i], dtype=np.int64))


def rows_of(*lengths: int, requires_grad: bool = False) -> list[Any]:
    return [torch.randn(1, length, 4, dtype=torch.float64, requires_grad=requires_grad) for length in lengths]


def search_in(model: Any) -> Any:
    return mixers.MixerSearch(model, lambda: 0, 1e-4, proof.difference)


@pytest.mark.parametrize(
    ("dtype", "names"),
    [
        ("float64", ["gemma3_text", "gpt_oss", "mamba"]),
        ("float32", ["gemma2"]),
        only_full("float64", ["gemma2", "mistral", "bamba", "nemotron_h"]),
        only_full("float32", ["gemma3_text"]),
    ],
    ids=str,
)
def test_packs_are_exact_in_double_and_single_precision(on_ranks, dtype, names):
    found = on_ranks(2, "rank_rows.errors", names=names, dtype=dtype)
    check_exact(found, DOUBLE if dtype == "float64" else SINGLE, padded=[False])


RECOMPUTED = {"gradient_checkpointing": True, "dtype": "float32"}
"""What is float64 throughout in a forward is not in a layer that is recomputed."""


@pytest.mark.parametrize(
    ("names", "more"),
    [(["gemma2"], {}), (["mistral"], RECOMPUTED), only_full(["mistral", "gpt_oss"], {})],
    ids=str,
)
def test_samples_that_are_cut_in_a_window_are_exact_beside_checkpointing(on_ranks, names, more):
    plugins = {"packing": {"max_tokens": 48, "slices": "auto"}}
    of_ranks = on_ranks(2, "rank_rows.errors", names=names, plugins=plugins, **more)
    check_exact(of_ranks, SINGLE if more else DOUBLE)
    assert all(one["cut"] > 0 for found in of_ranks for one in found.values()), of_ranks


def test_parts_that_mix_tokens_keep_samples_apart_where_layers_are_recomputed(on_ranks):
    names = ["nemotron_h", "mamba"]  # mamba's model hands its layers no arguments
    check_exact(on_ranks(2, "rank_rows.errors", names=names, **RECOMPUTED), SINGLE, padded=[False])


def test_ranks_share_no_window(on_ranks):
    plugins = {"packing": {"max_tokens": 128}, "mesh": {}}
    check_exact(on_ranks(2, "rank_rows.errors", names=["mistral"], plugins=plugins), DOUBLE, shared=0, padded=[False])


def test_rows_of_like_length_waste_at_most_half():
    sizes = [3, 100, 51, 7, 50, 1, 99, 2, 49]
    rows = mixers.like_lengths(sizes)
    assert sorted(place for row in rows for place in row) == list(range(len(sizes)))
    assert all(2 * sizes[place] >= sizes[row[0]] for row in rows for place in row)
    assert [len(row) for row in rows] == [4, 1, 1, 2, 1]


def decay(knows_borders: bool) -> Any:
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
def test_a_state_does_not_run_over_the_border_of_two_samples(knows_borders):
    model = decay(knows_borders)
    lengths = (9, 4, 1, 30, 5)
    rows = rows_of(*lengths, requires_grad=True)
    alone = torch.cat([model(row) for row in rows], dim=1)
    wanted = torch.autograd.grad(alone.square().sum(), rows)
    search = search_in(model)
    with search.watching():
        model(torch.cat(rows, dim=1), evenload_pack=pack_of(*lengths))
    assert [type(mixer.module).__name__ for mixer in search.mixers] == ["Decay"] * 2
    assert {mixer.form for mixer in search.mixers} == {mixers.with_borders if knows_borders else mixers.in_rows}
    with mixers.apart(search.mixers):
        packed = model(torch.cat(rows, dim=1), evenload_pack=pack_of(*lengths))
        assert torch.equal(model(rows[0]), alone[:, :9])  # without a pack nothing is changed
    assert proof.difference(packed[0], alone[0]) < 1e-12
    found = torch.autograd.grad(packed.square().sum(), rows)
    assert max(proof.difference(a[0], b[0]) for a, b in zip(found, wanted, strict=True)) < 1e-12
    across = model(torch.cat(rows, dim=1), evenload_pack=pack_of(*lengths))
    assert proof.difference(across[0], alone[0]) > 1e-2


def test_a_state_that_would_run_over_a_border_is_measured_before_the_first_step(families):
    with with_attributes(mixers.MixerSearch, watching=nullcontext):
        assert families.outcome("nemotron_h") == ("padded groups", pytest.approx(0, abs=DOUBLE))


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("hooks_run_again", [False, True])
def test_a_layer_that_is_recomputed_has_its_pack_again(reentrant, hooks_run_again):
    """And leaves none behind, or a part that is called out of its layer would take an earlier pack for its own."""
    model = decay(knows_borders=False)
    parts = [mixers.Mixer(layer, layer.decay, mixers.in_rows) for layer in model.layers]
    x, pack = torch.randn(1, 14, 4, dtype=torch.float64, requires_grad=True), pack_of(9, 5)

    def gradient(run: Any) -> Any:
        with mixers.apart(parts):
            x.grad = None
            run().square().sum().backward()
            with pytest.raises(EvenloadError, match=r"recomputed without its pack(.|\n)*gradient_checkpointing=True"):
                model.layers[0].decay(x)
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


def test_weights_that_each_call_gathers_are_not_called_by_lengths():
    module = torch.nn.Sequential(torch.nn.Sequential(torch.nn.Linear(2, 2)))
    mixers.Mixer(module, module, mixers.in_rows).refuse_divided()
    module[0][0].weight.ds_id = 0  # as under ZeRO 3
    mixers.Mixer(module, module, mixers.with_borders).refuse_divided()
    with pytest.raises(EvenloadError, match="gathers their weights"):
        mixers.Mixer(module, module, mixers.in_rows).refuse_divided()


def test_parts_that_look_at_their_own_token_alone_are_no_mixers_and_numbers_are_not_made_loud():
    """The first sample is multiplied by a thousand to be heard; indices of a table are not, or the part would raise and
    go unnoticed."""

    class ByPlace(torch.nn.Module):
        """Sums what came before, each weighed by a table of places."""

        def __init__(self) -> None:
            super().__init__()
            self.table = torch.nn.Embedding(16, 4)

        def forward(self, x: Any, places: Any) -> Any:
            return (x * self.table(places)).cumsum(1)

    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mlp, self.mixer = torch.nn.Linear(4, 4), ByPlace()

        def forward(self, x: Any, places: Any, **_: Any) -> Any:
            return x + self.mixer(self.mlp(x), places)

    layers = torch.nn.ModuleList([Layer()]).double()
    model = torch.nn.Module()
    model.layers = layers
    lengths = (7, 3, 12)
    rows = rows_of(*lengths)
    places = [torch.arange(length)[None] for length in lengths]
    search = search_in(model)
    with search.watching():
        layers[0](torch.cat(rows, 1), torch.cat(places, 1), evenload_pack=pack_of(*lengths))
    assert [type(mixer.module).__name__ for mixer in search.mixers] == ["ByPlace"]
    with mixers.apart(search.mixers):
        packed = layers[0](torch.cat(rows, 1), torch.cat(places, 1), evenload_pack=pack_of(*lengths))
    alone = [layers[0](row, place) for row, place in zip(rows, places, strict=True)]
    torch.testing.assert_close(packed, torch.cat(alone, 1), rtol=0, atol=1e-12)


def test_a_call_that_is_told_borders_is_told_all_of_them():
    told: dict[str, Any] = {}
    pack = pack_of(3, 8, 2)
    mixers.with_borders(lambda x, **words: told.update(words), pack, (torch.zeros(1, 13, 4),), {"scale": 2})
    assert told.pop("scale") == 2
    assert told.pop("seq_idx").tolist() == [[0] * 3 + [1] * 8 + [2] * 2]
    assert (told.pop("max_length_q"), told.pop("max_length_k")) == (8, 8)
    borders = [0, 3, 11, 13]
    assert {name: own.tolist() for name, own in told.items()} == {"cu_seq_lens_q": borders, "cu_seq_lens_k": borders}


def test_a_part_of_several_layers_has_the_pack_and_the_form_of_the_one_that_calls_it():
    model = decay(knows_borders=True)
    first, second = model.layers
    second.decay = first.decay
    forms = []

    def noted(form: Any) -> Any:
        def run(forward: Any, pack: Any, args: Any, kwargs: Any) -> Any:
            forms.append((form.__name__, pack.lengths))
            return form(forward, pack, args, kwargs)

        return run

    parts = [
        mixers.Mixer(first, first.decay, noted(mixers.in_rows)),
        mixers.Mixer(second, first.decay, noted(mixers.with_borders)),
    ]
    rows = rows_of(6, 3)
    alone = torch.cat([model(row) for row in rows], dim=1)
    with mixers.apart(parts):
        packed = model(torch.cat(rows, dim=1), evenload_pack=pack_of(6, 3))
    assert forms == [("in_rows", (6, 3)), ("with_borders", (6, 3))]
    torch.testing.assert_close(packed, alone, rtol=0, atol=1e-12)


def test_a_part_that_takes_borders_and_reads_none_is_called_in_rows():
    """Its signature swallows every word: whether it keeps samples apart is measured, not taken from what it accepts."""
    model = decay(knows_borders=True)
    for layer in model.layers:
        plain = layer.decay.forward
        layer.decay.forward = lambda x, plain=plain, **words: plain(x)
    lengths = (6, 3, 8)
    rows = rows_of(*lengths)
    search = search_in(model)
    with search.watching(), torch.no_grad():
        packed = model(torch.cat(rows, dim=1), evenload_pack=pack_of(*lengths))
        alone = torch.cat([model(row) for row in rows], dim=1)
    assert {mixer.form for mixer in search.mixers} == {mixers.in_rows}
    torch.testing.assert_close(packed, alone, rtol=0, atol=1e-12)
