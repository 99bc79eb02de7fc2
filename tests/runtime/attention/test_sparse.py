"""Attention that leaves blocks out is dense attention under that mask, and choosers keep what they promise."""

from __future__ import annotations

import logging
from itertools import combinations
from typing import Any

import numpy as np
import pytest
import torch
from evenload.core.plan.limits import Limits
from evenload.core.plan.step_plan import MicroBatch, Slice, StepPlan, as_lengths
from evenload.runtime.attention.choosers import CHOOSERS, BlockChoice, Chooser, Grid, block_mass, fewest
from evenload.runtime.attention.prefix import PrefixStore
from evenload.runtime.attention.scores import ScoreForm
from evenload.runtime.attention.sparse import (
    SPARSE,
    KeptBlocks,
    SparseCall,
    SparsePass,
    num_pairs,
    say_dense,
    sparse_attention,
)
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

DIM, GRID = 16, Grid(8, 4)
SIZES = st.tuples(st.integers(1, 40), st.integers(0, 40))
HEADS = st.sampled_from([(4, 4), (4, 2), (4, 1)])
ROWS = {row.name: row for row in SPARSE}


def choice_of(seed: int, size: tuple[int, int], heads: tuple[int, int], mass: float = 0.7, peak: float = 1.0) -> Any:
    """A choice over random queries and keys, so many and so many before them, and values; ``peak`` sharpens scores."""
    draw = torch.Generator().manual_seed(seed)
    shapes = (size[0], heads[0]), (sum(size), heads[1]), (sum(size), heads[1])
    q, k, v = (torch.randn(*shape, DIM, generator=draw, dtype=torch.float64) for shape in shapes)
    return BlockChoice(q, k, peak * DIM**-0.5, mass, GRID), v


def any_blocks(choice: BlockChoice, seed: int) -> Tensor:
    chosen, draw = choice.empty(), torch.Generator().manual_seed(seed)
    for number, block in enumerate(choice.query_blocks):
        chosen[:, number, : block.begin // GRID.keys] = torch.rand(
            len(chosen), block.begin // GRID.keys, generator=draw
        ) < torch.rand(1, generator=draw)
        chosen[:, number, : min(1, block.begin)] = True
    return chosen


def seen_of(choice: BlockChoice, chosen: Tensor) -> Tensor:
    """Keys by query, bool [G, N, M]."""
    num, start = len(choice.k_MGD), len(choice.k_MGD) - len(choice.q_NHD)
    keys, queries = torch.arange(num), torch.arange(start, num)[:, None]
    own = queries // GRID.queries
    blocks = torch.zeros(len(chosen), chosen.shape[1], -(-num // GRID.keys), dtype=torch.bool)
    blocks[..., : chosen.shape[2]] = chosen
    kept = blocks[:, own - start // GRID.queries, keys // GRID.keys]
    return (keys <= queries) & ((keys >= own * GRID.queries) | kept)


def weights_of(choice: BlockChoice, seen: Tensor) -> Tensor:
    """The softmax over the keys that are seen, [G, H / G, N, M]."""
    (rows, _, dim), groups = choice.q_NHD.shape, choice.k_MGD.shape[1]
    q = choice.q_NHD.reshape(rows, groups, -1, dim)
    scores = torch.einsum("ngrd,mgd->grnm", q, choice.k_MGD) * choice.scale
    return scores.masked_fill(~seen[:, None], -torch.inf).softmax(-1)


def output_of(weights: Tensor, v_MGD: Tensor) -> Tensor:
    return torch.einsum("grnm,mgd->ngrd", weights, v_MGD).flatten(1, 2)


def all_of(choice: BlockChoice) -> Tensor:
    return torch.ones_like(choice.empty())


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("row", ROWS)
@given(st.integers(0, 10**6), SIZES, HEADS)
def test_any_blocks_give_dense_attention_under_their_mask(row: str, seed: int, size: Any, heads: Any) -> None:
    choice, v = choice_of(seed, size, heads)
    chosen = any_blocks(choice, seed)
    if not chosen.numel():
        return
    seen = seen_of(choice, chosen)
    assert (ROWS[row].run(SparseCall(choice, v, chosen)) - output_of(weights_of(choice, seen), v)).abs().max() < 1e-12
    assert num_pairs(choice, chosen) == (int(seen.sum()), int(seen_of(choice, all_of(choice)).sum()))


@pytest.mark.parametrize("name", CHOOSERS)
@given(st.integers(0, 10**6), SIZES, HEADS, st.sampled_from([0.1, 0.5, 0.9, 0.999]), st.sampled_from([0.1, 1.0, 9.0]))
def test_chosen_blocks_have_the_mass_and_the_first_is_among_them(
    name: str, seed: int, size: Any, heads: Any, mass: float, peak: float
) -> None:
    choice, v = choice_of(seed, size, heads, mass, peak)
    chosen = CHOOSERS[name].choose(choice)
    whole, kept = weights_of(choice, seen_of(choice, all_of(choice))), seen_of(choice, chosen)
    for number, block in enumerate(choice.query_blocks):
        assert block.begin == 0 or chosen[:, number, 0].all()
        rows = slice(block.first, block.end)
        share_G = (whole * kept[:, None])[:, :, rows].sum((1, 2, 3)) / whole[:, :, rows].sum((1, 2, 3))
        assert name != "kept" or (share_G > mass - 1e-6).all()
    # The bound of what is left out: r is each query's own share.
    r_GRN = (whole * kept[:, None]).sum(-1)
    off_NHD = output_of(weights_of(choice, kept), v) - output_of(whole, v)
    bound_NH = 2 * (1 - r_GRN).permute(2, 0, 1).flatten(1) * v.norm(dim=-1).max()
    assert (off_NHD.norm(dim=-1) <= bound_NH + 1e-9).all()


def test_the_bound_is_reached_by_values_that_point_apart() -> None:
    choice, v = choice_of(0, (16, 0), (1, 1))
    choice = choice._replace(q_NHD=choice.q_NHD * 0)  # every key counts as much
    v[:] = torch.zeros(DIM)
    v[:4, :, 0], v[4:8, :, 0], v[8:, :, 0] = 1.0, -1.0, 1.0
    chosen = choice.empty()
    chosen[:, :, 0] = True
    seen, whole = seen_of(choice, chosen), weights_of(choice, seen_of(choice, all_of(choice)))
    off = output_of(weights_of(choice, seen), v) - output_of(whole, v)
    bound = 2 * (1 - (whole * seen[:, None]).sum(-1))[0, 0, 8]
    assert abs(float(off[8].norm() / bound) - 1) < 1e-9


@given(st.integers(0, 10**6), st.integers(1, 7), st.floats(0.05, 0.999), st.booleans())
def test_the_fewest_blocks_have_the_most_mass_of_as_many(seed: int, num: int, mass: float, flat: bool) -> None:
    draw = torch.Generator().manual_seed(seed)
    mass_GJ = torch.rand(2, num, generator=draw, dtype=torch.float64) ** (1 if flat else 8)
    own_G, always_J = torch.rand(2, generator=draw, dtype=torch.float64), torch.rand(num, generator=draw) < 0.3
    always_J[0] = True
    chosen = fewest(mass_GJ, always_J, own_G, mass)
    forced = {int(j) for j in always_J.nonzero()}
    for group in range(2):
        whole = float(own_G[group] + mass_GJ[group].sum())
        kept = {int(j) for j in chosen[group].nonzero()}
        assert forced <= kept
        of = {
            blocks: float(own_G[group] + mass_GJ[group, list(blocks)].sum()) / whole
            for count in range(num + 1)
            for blocks in combinations(range(num), count)
            if forced <= set(blocks)
        }
        own = of[tuple(sorted(kept))]
        assert own >= mass - 1e-12
        assert own >= max(share for blocks, share in of.items() if len(blocks) == len(kept)) - 1e-12
        assert len(kept) == min(len(blocks) for blocks, share in of.items() if share >= mass - 1e-12)


@given(st.integers(0, 10**6), st.integers(9, 40), HEADS)
def test_masses_are_those_of_the_softmax(seed: int, length: int, heads: Any) -> None:
    choice, _ = choice_of(seed, (length, 0), heads)
    whole = weights_of(choice, seen_of(choice, all_of(choice)))
    block = list(choice.query_blocks)[-1]
    mass_GJ, own_G = block_mass(choice, block)
    of_GM = whole[:, :, block.first : block.end].sum((1, 2))
    wanted_GJ = of_GM[:, : block.begin].reshape(len(of_GM), -1, GRID.keys).sum(-1)
    assert (mass_GJ - wanted_GJ).abs().max() < 1e-12
    assert (own_G - of_GM[:, block.begin :].sum(-1)).abs().max() < 1e-12


def test_each_group_chooses_for_itself_however_heads_lie_on_ranks() -> None:
    choice, _ = choice_of(3, (40, 5), (4, 2), 0.6)
    for chooser in CHOOSERS.values():
        whole = chooser.choose(choice)
        for group in range(2):
            own = choice._replace(
                q_NHD=choice.q_NHD[:, 2 * group : 2 * group + 2], k_MGD=choice.k_MGD[:, group : group + 1]
            )
            assert torch.equal(chooser.choose(own)[0], whole[group])


def run_pass(run: SparsePass, sequence: int, choice: BlockChoice, v: Tensor, layer: int = 0, **scores: Any) -> Tensor:
    segment = run.segment(Slice(sequence, 0, len(v)), None)
    assert segment is not None
    dense = lambda: output_of(weights_of(choice, seen_of(choice, all_of(choice))), v)  # noqa: E731
    with torch.no_grad():
        form = ScoreForm(choice.scale, **scores)
        return sparse_attention(choice.q_NHD, choice.k_MGD, v, segment, layer, form, dense)


def test_kept_blocks_are_those_of_the_sample_and_the_layer_until_they_are_searched_again() -> None:
    searched: list[int] = []

    def choose(choice: BlockChoice) -> Tensor:
        searched.append(len(searched))
        return any_blocks(choice, len(searched))

    blocks, (choice, v) = KeptBlocks(search_every=3), choice_of(5, (40, 0), (4, 2))
    dense = output_of(weights_of(choice, seen_of(choice, all_of(choice))), v)
    for turn in range(6):
        run = SparsePass(Chooser("drawn", choose, keeps=True), 0.5, ["a", "b"], blocks, GRID)
        for number, (sequence, layer) in enumerate([(0, 0), (1, 0), (0, 1)]):
            out = run_pass(run, sequence, choice, v, layer)
            drawn = any_blocks(choice, number + 1 + 3 * (turn // 3))
            kept = output_of(weights_of(choice, seen_of(choice, drawn)), v)
            assert (out - (kept if turn % 3 else dense)).abs().max() < 1e-12, (turn, sequence, layer)
        shares = run.pairs()
        assert (shares.computed < 1).all() == bool(turn % 3)
        assert (shares.kept < 1).all()
    assert len(searched) == 6, "three choices, twice"


def test_kept_blocks_of_a_slice_that_ends_elsewhere_are_none() -> None:
    blocks, key = KeptBlocks(cap_bytes=10), ("a", 0, 0)
    chosen = torch.ones(1, 4, 5, dtype=torch.bool)
    blocks.write(key, chosen)
    assert torch.equal(blocks.read(key, chosen), chosen)
    assert blocks.read(key, torch.zeros(1, 5, 4)) is None
    assert blocks.has_room(key, torch.zeros(80))
    assert not blocks.has_room(key, torch.zeros(81))
    assert not blocks.has_room(("b", 0, 0), torch.zeros(64))


def test_what_has_no_room_is_dense_and_said(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "evenload")
    say_dense.cache_clear()
    choice, v = choice_of(5, (40, 0), (4, 2))
    dense = output_of(weights_of(choice, seen_of(choice, all_of(choice))), v)
    size = -(-choice.empty().numel() // 8)
    blocks = KeptBlocks(cap_bytes=size)
    for turn in range(2):
        run = SparsePass(CHOOSERS["kept"], 0.5, ["a", "b"], blocks, GRID)
        first, second = run_pass(run, 0, choice, v), run_pass(run, 1, choice, v)
        assert (second - dense).abs().max() < 1e-12
        assert (first - dense).abs().max() < 1e-12 or turn
        assert list(run.pairs().computed < 1) == [bool(turn), False]
    assert blocks.num_bytes == size
    assert "beyond the 10 bytes" in caplog.text


def test_windows_caps_and_sinks_are_dense_and_said(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "evenload")
    say_dense.cache_clear()
    choice, v = choice_of(5, (40, 0), (4, 2), 0.1)
    dense = output_of(weights_of(choice, seen_of(choice, all_of(choice))), v)
    for options in ({"window": 5}, {"softcap": 2.0}, {"sinks_H": torch.zeros(4)}):
        run = SparsePass(CHOOSERS["kept"], 0.1, ["a"], grid=GRID)
        assert torch.equal(run_pass(run, 0, choice, v, **options), dense)
        assert next(iter(options)).partition("_")[0] in caplog.text
    assert (run_pass(SparsePass(CHOOSERS["sample"], 0.1, ["a"], grid=GRID), 0, choice, v) - dense).abs().max() > 1e-3


def test_samples_that_are_not_named_or_that_ranks_share_have_no_segment() -> None:
    run = SparsePass(CHOOSERS["sample"], 0.5, ["a", None])
    assert run.segment(Slice(1, 0, 9), None) is None
    assert run.segment(None, None) is None
    store, pieces = PrefixStore({0: 9}), (Slice(0, 0, 5), Slice(0, 5, 9), Slice(1, 0, 4))
    assert run.segment(pieces[0], store) == (run, pieces[0], store)
    micro_batches = [MicroBatch((piece,), ranks) for piece, ranks in zip(pieces, ((0,), (0, 1), (0,)), strict=True)]
    run.begin(StepPlan(as_lengths([9, 4]), tuple(micro_batches), Limits(2, 9)))
    assert run.segment(pieces[0], store) is None
    assert np.array_equal(run.pairs().kept, [1.0, 1.0])
