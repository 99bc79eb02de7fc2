"""Samples out of a user's batches, and back into packs: nothing that carries loss is lost."""

from __future__ import annotations

import pytest
import torch
from evenload.core.errors import EvenloadError
from evenload.core.plan.step_plan import MicroBatch, Slice
from evenload.integrations.megatron.unmodified.reading.form import FIELDS, form_of
from evenload.integrations.megatron.unmodified.reading.samples import PackForm, exchange, lay_out, one_batch
from evenload.integrations.megatron.unmodified.reading.samples import split as split_in_form
from evenload.runtime.attention.pack import IGNORE


def split(batch):
    return split_in_form(batch, form_of(batch))


def batch(masks, dtype=torch.float32):
    rows, length = len(masks), len(masks[0])
    tokens = torch.arange(1, rows * length + 1).view(rows, length)
    return {
        "tokens": tokens,
        "labels": tokens + 100,
        "loss_mask": torch.tensor([[float(c) for c in mask] for mask in masks]).to(dtype),
        "position_ids": torch.arange(length).expand(rows, length),
    }


def test_a_sample_ends_with_its_last_loss():
    samples = split(batch(["011010", "111111", "000000"]))
    assert [len(s["tokens"]) for s in samples] == [5, 6, 1]
    assert samples[0]["tokens"].tolist() == [1, 2, 3, 4, 5]
    assert samples[0]["loss_mask"].tolist() == [0, 1, 1, 0, 1]


def test_a_pack_holds_the_samples_side_by_side():
    given = batch(["0110", "1110"])
    samples = dict(enumerate(split(given)))
    packed = lay_out(
        MicroBatch((Slice(1, 0, 3), Slice(0, 0, 3)), (0,)),
        samples=samples,
        form=PackForm(samples[0], form_of({**given, "attention_mask": torch.zeros(1, 1, 4, 4)})),
    )
    assert packed.fields["attention_mask"].tolist() == [[[[False]]]]
    assert packed.fields["tokens"].tolist() == [[5, 6, 7, 1, 2, 3]]
    assert packed.fields["labels"].tolist() == [[105, 106, 107, 101, 102, 103]]
    assert packed.fields["loss_mask"].tolist() == [[1, 1, 1, 0, 1, 1]]
    assert packed.fields["position_ids"].tolist() == [[0, 1, 2, 0, 1, 2]]
    pack = packed.pack
    assert pack.segments == (0, 3, 6)
    assert pack.cu_seqlens.tolist() == [0, 3, 6]
    assert pack.labels_T.tolist() == [105, 106, 107, IGNORE, 102, 103]
    assert (pack.max_seqlen, pack.num_targets, pack.num_padded_tokens) == (3, 5, 6)


@pytest.mark.parametrize("multiple", [1, 2, 4, 8])
def test_padding_and_dummies_carry_no_loss_and_overrun_no_positions(multiple):
    samples = dict(enumerate(split(batch(["111"]))))
    padded = lay_out(MicroBatch((Slice(0, 0, 3),), (0,)), samples=samples, form=PackForm(samples[0], multiple=multiple))
    slots = -(-3 // multiple) * multiple
    assert padded.fields["tokens"].shape == (1, slots)
    assert padded.pack.segments == (0, slots)
    assert padded.pack.num_targets == padded.fields["loss_mask"].sum() == 3
    assert padded.fields["position_ids"].max() == 2
    dummy = lay_out(MicroBatch((), (0,)), samples={}, form=PackForm(samples[0], multiple=multiple))
    assert dummy.fields["tokens"].shape == (1, multiple)
    assert dummy.pack.num_targets == dummy.fields["loss_mask"].sum() == 0


def test_a_part_of_a_sample_brings_its_own_labels_and_positions():
    given = batch(["011111", "111000"])
    samples, slices = dict(enumerate(split(given))), (Slice(1, 0, 3), Slice(0, 2, 4))
    packed = lay_out(MicroBatch(slices, (0,)), samples=samples, form=PackForm(samples[0], multiple=4))
    assert packed.fields["tokens"].tolist() == [[7, 8, 9, 3, 4, 0, 0, 0]]
    assert packed.fields["labels"].tolist() == [[107, 108, 109, 103, 104, 0, 0, 0]]
    assert packed.fields["position_ids"].tolist() == [[0, 1, 2, 2, 3, 3, 3, 3]]
    pack = packed.pack
    assert pack.positions_T.tolist() == [0, 1, 2, 2, 3, 3, 3, 3]
    assert (pack.slices, pack.segments, pack.padding, pack.lengths) == (slices, (0, 3, 8), (0, 3), (3, 2))
    assert pack.cu_seqlens.tolist() == [0, 3, 5]
    assert pack.num_targets == packed.fields["loss_mask"].sum() == 5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bool, torch.int64])
def test_any_dtype_of_a_loss_mask_is_kept(dtype):
    samples = dict(enumerate(split(batch(["011"], dtype))))
    packed = lay_out(MicroBatch((Slice(0, 0, 3),), (0,)), samples=samples, form=PackForm(samples[0]))
    assert packed.fields["loss_mask"].dtype == dtype
    assert packed.pack.num_targets == 2


def test_a_batch_is_given_once():
    data = one_batch({"tokens": 1})
    assert next(data) == {"tokens": 1}
    with pytest.raises(EvenloadError, match="more than one batch"):
        next(data)


@pytest.mark.parametrize("spoil", [{"labels": torch.ones(1, 3)}, {"tokens": None}, {"extra": torch.ones(1, 4)}])
def test_another_structure_is_refused(spoil):
    with pytest.raises(EvenloadError):
        split({**batch(["1111"]), **spoil})


def moved():
    import torch.distributed as dist

    me, lengths, source, target = dist.get_rank(), [3, 1, 4, 2], [0, 0, 1, 1], [{1}, {0}, {0, 1}, {1}]
    whole = {
        i: {name: torch.arange(n) + 100 * i + (name == "labels") for name in FIELDS} for i, n in enumerate(lengths)
    }
    for sample in whole.values():
        sample["loss_mask"] = sample["loss_mask"].to(torch.bool)
    got = exchange({i: whole[i] for i in whole if source[i] == me}, source, target, lengths, None, like=whole[0])
    return [(i, name, got[i][name].tolist() == whole[i][name].tolist()) for i in sorted(got) for name in FIELDS]


def all_to_one():
    import torch.distributed as dist

    me = dist.get_rank()
    sample = {name: torch.full((2 + me,), me) for name in FIELDS}
    return sorted(exchange({me: sample}, [0, 1], [{0}, {0}], [2, 3], None, like=sample))


@pytest.mark.slow
def test_samples_reach_the_ranks_that_compute_them(world):
    for rank, got in enumerate(world(2).run(moved)):
        assert {i for i, _, _ in got} == {1: {0, 2, 3}, 0: {1, 2}}[rank]
        assert all(equal for _, _, equal in got)
    assert world(2).run(all_to_one) == [[0, 1], []]
