"""Laws of a pack: whatever the plan, every token and every target is there once, in its place."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from evenload.core.errors import EvenloadError
from evenload.core.plan.step_plan import MicroBatch, Slice, as_lengths
from evenload.runtime.attention.labels import (
    Labels,
    TargetWeights,
    checked_divisor,
    count_targets,
    loss_divisor,
    readers_of,
    weighed,
)
from evenload.runtime.attention.pack import IGNORE, PADDING, build_pack, padded_borders, slice_losses
from hypothesis import given
from hypothesis import strategies as st


def tokens_of(lengths):
    """Token p of sample i is 1000 i + p + 1: the next token of a token t is t + 1, and 0 is none."""
    return lambda index: np.arange(lengths[index], dtype=np.uint16) + 1000 * index + 1


multiples = st.fixed_dictionaries({"segment_multiple": st.integers(1, 8), "pack_multiple": st.integers(1, 6)})


@st.composite
def cut_batches(draw):
    """Lengths, and micro-batches that hold every token of every sequence once: cut anywhere, dealt in any order."""
    lengths = draw(st.lists(st.integers(1, 40), min_size=1, max_size=6))
    slices = []
    for index, length in enumerate(lengths):
        cuts = draw(st.sets(st.integers(1, max(1, length - 1)), max_size=3)) - {length}
        borders = [0, *sorted(cuts), length]
        slices += [Slice(index, a, b) for a, b in pairwise(borders)]
    slices = draw(st.permutations(slices))
    size = draw(st.integers(1, len(slices)))
    longest = max(s.length for s in slices)
    pad_to = draw(st.sampled_from([0, longest, longest + 5]))
    return lengths, [MicroBatch(tuple(slices[i : i + size]), (0,), pad_to) for i in range(0, len(slices), size)]


@given(cut_batches())
def test_every_token_and_every_target_once(batch):
    lengths, micro_batches = batch
    packs = [build_pack(m, tokens_of(lengths)) for m in micro_batches]
    tokens = torch.cat([p.tokens_T for p in packs])
    labels = torch.cat([p.labels_T for p in packs])
    everything = np.concatenate([tokens_of(lengths)(i) for i in range(len(lengths))])
    assert sorted(tokens[tokens > 0].tolist()) == sorted(everything.tolist())
    trained = labels != IGNORE
    assert torch.equal(labels[trained], tokens[trained] + 1)
    assert len(set(labels[trained].tolist())) == int(trained.sum())
    assert sum(p.num_targets for p in packs) == int(trained.sum()) == count_targets(as_lengths(lengths))


@given(cut_batches(), st.randoms(use_true_random=False))
def test_the_labels_of_a_batch_are_there_once_wherever_it_is_cut(batch, draw):
    lengths, micro_batches = batch
    kept = [np.array([draw.random() < 0.5 for _ in range(n)]) for n in lengths]
    rows = [np.where(mask, tokens_of(lengths)(i).astype(np.int64) + 50_000, IGNORE) for i, mask in enumerate(kept)]
    labels = Labels(rows.__getitem__, np.array([int(mask[1:].sum()) for mask in kept]))
    packs = [build_pack(m, tokens_of(lengths), **readers_of(labels)) for m in micro_batches]
    tokens, found = (torch.cat([getattr(p, name) for p in packs]) for name in ("tokens_T", "labels_T"))
    carries = found != IGNORE
    # What a token predicts is the label at the place of the next one.
    assert torch.equal(found[carries], tokens[carries] + 1 + 50_000)
    wanted = [label for row in rows for label in row[1:].tolist() if label != IGNORE]
    assert sorted(found[carries].tolist()) == sorted(wanted)
    assert sum(p.num_targets for p in packs) == count_targets(as_lengths(lengths), labels) == len(wanted)


@given(cut_batches(), st.randoms(use_true_random=False))
def test_each_target_has_its_own_weight_wherever_the_batch_is_cut(batch, draw):
    """The weight of a token is 1 / itself, and some are 0 or carry no loss in the first place."""
    lengths, micro_batches = batch
    whole = [tokens_of(lengths)(i).astype(np.int64) for i in range(len(lengths))]
    rows = [(1 / tokens) * [draw.choice([0, -1, 1]) for _ in tokens] for tokens in whole]
    bare = [np.where([draw.random() < 0.8 for _ in tokens], tokens, IGNORE) for tokens in whole]
    known = Labels(bare.__getitem__, np.array([np.count_nonzero(row[1:] != IGNORE) for row in bare]))
    labels = weighed(known, tokens_of(lengths), as_lengths(lengths), rows.__getitem__)
    packs = [build_pack(m, tokens_of(lengths), **readers_of(labels)) for m in micro_batches]
    found = torch.cat([p.labels_T for p in packs])
    carries = found != IGNORE
    weights = torch.cat([(p.labels_T != IGNORE).double() if p.weights_T is None else p.weights_T for p in packs])
    assert weights.dtype == torch.float64
    assert torch.equal(weights != 0, carries)
    assert torch.equal(weights[carries].abs(), 1 / found[carries].double())
    wanted = [w for row, of in zip(rows, bare, strict=True) for w, one in zip(row[1:], of[1:], strict=True) if one >= 0]
    assert sorted(weights[carries].tolist()) == sorted(w for w in wanted if w)
    assert sum(p.num_targets for p in packs) == count_targets(as_lengths(lengths), labels) == np.count_nonzero(wanted)
    assert loss_divisor(as_lengths(lengths), labels) == pytest.approx(float(weights.sum()), abs=1e-9)
    losses = [torch.rand(p.num_padded_tokens, dtype=torch.float64) for p in packs]
    sums = torch.cat([slice_losses(loss, pack)[0] for loss, pack in zip(losses, packs, strict=True)])
    assert float(sums.sum()) == pytest.approx(float((torch.cat(losses) * weights).sum()), abs=1e-9)


@given(cut_batches())
def test_weights_of_one_leave_packs_as_they_are_without(batch):
    lengths, micro_batches = batch
    ones = [np.ones(n) for n in lengths]
    labels = weighed(None, tokens_of(lengths), as_lengths(lengths), ones.__getitem__)
    assert loss_divisor(as_lengths(lengths), labels) == loss_divisor(as_lengths(lengths))
    for micro_batch in micro_batches:
        pack = build_pack(micro_batch, tokens_of(lengths), **readers_of(labels))
        bare = build_pack(micro_batch, tokens_of(lengths))
        assert pack.weights_T is None
        assert torch.equal(pack.labels_T, bare.labels_T)


def test_weights_that_a_loss_cannot_be_divided_by_are_refused():
    lengths = as_lengths([3, 2])
    for sums in ([1.5, -1.5], [np.inf, 1.0], [np.nan, 1.0]):
        rows = [np.full(3, sums[0] / 2), np.full(2, sums[1])]
        weights = TargetWeights(rows.__getitem__, np.array(sums))
        with pytest.raises(EvenloadError, match="add up to nothing that its loss can be divided by"):
            checked_divisor(lengths, Labels(tokens_of([3, 2]), np.array([2, 1]), weights))
    assert checked_divisor(lengths, None) == 3.0


@given(cut_batches())
def test_segments_positions_and_sequence_ids(batch):
    lengths, micro_batches = batch
    for micro_batch in micro_batches:
        pack = build_pack(micro_batch, tokens_of(lengths))
        assert pack.cu_seqlens.dtype == torch.int32
        assert tuple(pack.cu_seqlens.tolist()) == pack.segments
        assert pack.num_padded_tokens == micro_batch.num_padded_tokens == len(pack.tokens_T) == len(pack.labels_T)
        assert pack.max_seqlen == int(pack.cu_seqlens.diff().max())
        assert pack.slices == micro_batch.slices
        real_T = pack.sequence_ids_T != PADDING
        assert torch.equal(real_T, pack.tokens_T > 0)
        assert torch.equal(pack.sequence_ids_T[real_T], (pack.tokens_T[real_T] - 1) // 1000)
        for piece, (first, end) in zip(pack.slices, pairwise(pack.segments), strict=False):
            real = first + piece.length
            assert pack.positions_T[first:real].tolist() == list(range(piece.start, piece.stop))
            assert pack.positions_T[real:end].tolist() == [piece.stop - 1] * (end - real)
            assert (pack.tokens_T[first:real] // 1000).unique().tolist() == [piece.sequence]
            assert (pack.labels_T[real:end] == IGNORE).all()
            assert (pack.tokens_T[real:end] == 0).all()


@given(st.lists(st.integers(1, 40), min_size=1, max_size=6), multiples)
def test_padded_borders_hold_their_multiples_and_waste_nothing(lengths, wanted):
    borders = padded_borders(lengths, **wanted)
    slots = [b - a for a, b in pairwise(borders)]
    each, whole = wanted["segment_multiple"], wanted["pack_multiple"]
    assert borders[0] == 0
    assert all(n % each == 0 for n in slots)
    assert borders[-1] % whole == 0
    assert all(length <= n < length + each for length, n in zip(lengths[:-1], slots[:-1], strict=True))
    # The last one is the smallest that makes both divisible.
    rest = borders[-2]
    assert slots[-1] == next(n for n in range(lengths[-1], 1000) if n % each == 0 and (rest + n) % whole == 0)


@given(cut_batches(), multiples)
def test_padding_to_multiples_moves_tokens_and_changes_none(batch, wanted):
    lengths, micro_batches = batch
    for micro_batch in micro_batches:
        bare = build_pack(micro_batch, tokens_of(lengths))
        pack = build_pack(micro_batch, tokens_of(lengths), **wanted)
        assert pack.segments == padded_borders(bare.lengths, **wanted)
        assert pack.cu_seqlens_padded.dtype == pack.cu_seqlens.dtype == torch.int32
        assert tuple(pack.cu_seqlens_padded.tolist()) == pack.segments
        assert torch.equal(pack.cu_seqlens, bare.cu_seqlens)
        assert (pack.lengths, pack.max_seqlen, pack.num_targets) == (bare.lengths, bare.max_seqlen, bare.num_targets)
        assert all(pack.num_padded_tokens % multiple == 0 for multiple in wanted.values())
        assert len(pack.tokens_T) == len(pack.labels_T) == len(pack.positions_T) == pack.num_padded_tokens
        there = torch.cat([torch.arange(a, a + n) for a, n in zip(pack.segments, pack.lengths, strict=False)])
        for name in ("tokens_T", "labels_T", "positions_T", "sequence_ids_T"):
            assert torch.equal(getattr(pack, name)[there], getattr(bare, name))
        padding = torch.ones(pack.num_padded_tokens, dtype=torch.bool).index_fill(0, there, False)
        assert (pack.tokens_T[padding] == 0).all()
        assert (pack.labels_T[padding] == IGNORE).all()
        assert (pack.sequence_ids_T[padding] == PADDING).all()


@given(cut_batches(), multiples)
def test_losses_of_slices_add_up_to_those_of_samples(batch, wanted):
    """Whatever the cuts and packs, and with rubbish on every slot without a target."""
    lengths, micro_batches = batch
    sums, counts = torch.zeros(len(lengths)), torch.zeros(len(lengths), dtype=torch.int64)
    for micro_batch in micro_batches:
        pack = build_pack(micro_batch, tokens_of(lengths), **wanted)
        losses = torch.where(pack.labels_T != IGNORE, pack.labels_T % 1000, torch.nan).float()
        of_slices, targets = slice_losses(losses, pack)
        owners = torch.tensor([piece.sequence for piece in pack.slices])
        sums.index_add_(0, owners, of_slices)
        counts.index_add_(0, owners, targets)
    assert counts.tolist() == [n - 1 for n in lengths]
    assert sums.tolist() == [n * (n + 1) / 2 - 1 for n in lengths]  # the labels of a sample are 2 .. n


def test_samples_weighted_anew_get_gradients_in_proportion():
    pack = build_pack(
        MicroBatch((Slice(0, 0, 4), Slice(1, 0, 3), Slice(2, 0, 1)), (0,)), tokens_of([4, 3, 1]), segment_multiple=3
    )
    losses = torch.ones(pack.num_padded_tokens, requires_grad=True)
    sums, counts = slice_losses(losses, pack)
    assert sums.tolist() == counts.tolist() == [3, 2, 0]
    (sums / counts.clamp(min=1) * torch.tensor([1.0, 10.0, 100.0])).sum().backward()
    assert losses.grad.tolist() == pytest.approx([1 / 3, 1 / 3, 1 / 3, 0, 0, 0, 5, 5, 0, 0, 0, 0])


def test_a_dummy_has_no_target_and_its_losses_are_none_and_connected():
    pack = build_pack(MicroBatch((), (0,)), tokens_of([]), pack_multiple=4)
    assert (pack.num_padded_tokens, pack.lengths, pack.padding, pack.num_targets) == (4, (1,), (3,), 0)
    assert (pack.labels_T == IGNORE).all()
    losses = torch.ones(4, requires_grad=True)
    sums, counts = slice_losses(losses.bfloat16(), pack)
    assert (sums.shape, counts.shape, sums.dtype) == ((0,), (0,), torch.float32)
    sums.sum().backward()
    assert losses.grad.tolist() == [0] * 4


def test_a_sample_shorter_than_planned_is_refused():
    with pytest.raises(EvenloadError, match="sample 0 of the batch is shorter than planned"):
        build_pack(MicroBatch((Slice(0, 0, 5),), (0,)), tokens_of([4]))


def test_only_the_slice_is_read():
    class Disk(list):
        def __getitem__(self, key):
            self.append((key.start, key.stop))
            return np.zeros(key.stop - key.start, dtype=np.int32)

        def __len__(self):
            return 1_000_000

    disk = Disk()
    build_pack(MicroBatch((Slice(0, 500, 600),), (0,)), lambda index: disk)
    starts, stops = zip(*list.__iter__(disk), strict=True)
    assert (min(starts), max(stops)) == (500, 601)
