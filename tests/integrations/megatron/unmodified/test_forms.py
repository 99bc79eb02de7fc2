"""Batches of packed samples, in the forms of --sft and Megatron-Bridge: cut at their borders, and said of a pack."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch
from evenload.core.errors import EvenloadError
from evenload.core.plan.step_plan import MicroBatch, Slice
from evenload.integrations.megatron.unmodified.reading.form import FIELDS, form_of
from evenload.integrations.megatron.unmodified.reading.samples import PackForm, lay_out
from evenload.integrations.megatron.unmodified.reading.samples import split as split_in_form
from hypothesis import given
from hypothesis import strategies as st

LENGTHS = st.lists(st.integers(1, 6), min_size=1, max_size=5)


def split(batch):
    return split_in_form(batch, form_of(batch))


def packed(rows):
    """`FIELDS` of rows of samples, each (first token, padding behind it, loss mask)."""
    built: dict[str, list[list[int]]] = {name: [] for name in FIELDS}
    for row in rows:
        tokens = [0 if i >= len(mask) else first + i for first, pad, mask in row for i in range(len(mask) + pad)]
        masks = [int(c) for _, pad, mask in row for c in mask + "0" * pad]
        built["tokens"].append(tokens)
        built["labels"].append([*tokens[1:], 99])
        built["loss_mask"].append(masks)
        built["position_ids"].append([i for _, pad, mask in row for i in range(len(mask) + pad)])
    batch = {name: torch.tensor(value) for name, value in built.items()}
    return {**batch, "loss_mask": batch["loss_mask"].float()}


def borders(lengths, dtype=torch.int32):
    return torch.tensor([list(accumulate(lengths, initial=0))], dtype=dtype)


def sft(*masks):
    """One row of `--sft`."""
    row = packed([[(10 * i + 10, 0, mask) for i, mask in enumerate(masks)]])
    return {**row, "cu_seqlens": borders(list(map(len, masks))), "max_seqlen": torch.tensor([max(map(len, masks))])}


def tokens_of(batch):
    return [sample["tokens"].tolist() for sample in split(batch)]


def test_a_row_is_cut_at_its_borders_and_each_sample_behind_its_last_loss():
    assert tokens_of(sft("0110", "111", "1000")) == [[10, 11, 12], [20, 21, 22], [30]]
    first, second, _ = split(sft("0110", "111", "1"))
    assert first["labels"].tolist() == [11, 12, 13]
    assert second["labels"].tolist() == [21, 22, 30]  # what stock's loader has behind the border
    assert second["position_ids"].tolist() == [0, 1, 2]


def test_samples_without_loss_are_left_out_unless_nothing_else_is_there():
    assert tokens_of(sft("000", "011")) == [[20, 21, 22]]
    assert tokens_of(sft("000", "00")) == [[10]]


def test_rows_of_a_micro_batch_have_borders_of_their_own():
    rows = packed([[(10, 0, "11"), (20, 2, "11")], [(30, 0, "111111")]])
    filled = torch.tensor([[0, 2, 6, 6, 6, 6, 6], [0, 6, 6, 6, 6, 6, 6]], dtype=torch.int32)  # as at 0.19
    assert tokens_of({**rows, "cu_seqlens": filled, "max_seqlen": torch.tensor([4, 6])}) == [
        [10, 11],
        [20, 21],
        [30, 31, 32, 33, 34, 35],
    ]


def bridge(two, filled):
    """A row of Megatron-Bridge: three samples, the second with padding behind it; ``two`` lists of borders."""
    row = packed([[(10, 0, "011"), (20, 2, "01"), (30, 1, "1")]])
    if not filled:
        where, inside = borders([3, 4, 2]), borders([3, 2, 1])
        pairs = {"cu_seqlens_q": inside, "cu_seqlens_kv": inside, "cu_seqlens_q_padded": where}
        pairs = {**pairs, "cu_seqlens_kv_padded": where} if two else {"cu_seqlens_q": where, "cu_seqlens_kv": where}
        longest = {"max_seqlen_q": torch.tensor([[4]]), "max_seqlen_kv": torch.tensor([[4]])}
        mask = torch.tensor([[False] * 5 + [True] * 2 + [False, True]])
        return {**row, **pairs, **longest, "attention_mask": None, "padding_mask": mask, "token_count": [9]}
    tail = torch.tensor([[-1, -1]])
    pairs = {"cu_seqlens": torch.cat([borders([3, 4, 2]), tail], 1), "cu_seqlens_argmin": torch.tensor([[4]])}
    if two:
        pairs |= {
            "cu_seqlens_unpadded": torch.cat([borders([3, 2, 1]), tail], 1),
            "cu_seqlens_unpadded_argmin": torch.tensor([[4]]),
        }
    return {**row, **pairs, "max_seqlen": torch.tensor([[4]])}


@pytest.mark.parametrize("two", [True, False])
@pytest.mark.parametrize("filled", [True, False])
def test_both_forms_of_megatron_bridge_are_cut_alike(two, filled):
    batch = bridge(two, filled)
    assert tokens_of(batch) == [[10, 11, 12], [20, 21], [30]]
    samples = dict(enumerate(split(batch)))
    micro_batch = MicroBatch((Slice(2, 0, 1), Slice(0, 0, 3)), (0,))
    pack = lay_out(micro_batch, samples=samples, form=PackForm(samples[0], form_of(batch), 3))
    fields = pack.fields
    assert fields.keys() == batch.keys() - {"token_count"}
    assert fields["tokens"].tolist() == [[30, 10, 11, 12, 0, 0]]
    physical, logical = [[0, 1, 6]], [[0, 1, 4]]
    if filled:
        assert fields["cu_seqlens"].tolist() == [[0, 1, 6, -1]]
        assert fields["cu_seqlens_argmin"].tolist() == [[3]]
        assert fields["max_seqlen"].tolist() == [[5]]
        if two:
            assert fields["cu_seqlens_unpadded"].tolist() == [[0, 1, 4, -1]]
    else:
        assert fields["cu_seqlens_kv"].tolist() == fields["cu_seqlens_q"].tolist() == (logical if two else physical)
        assert fields["max_seqlen_q"].tolist() == [[5]]
        assert fields["padding_mask"].tolist() == [[False] * 4 + [True] * 2]
        assert fields["attention_mask"] is None
        if two:
            assert fields["cu_seqlens_q_padded"].tolist() == physical
    for key in fields.keys() - {"attention_mask"}:
        assert (fields[key].dim(), fields[key].dtype) == (batch[key].dim(), batch[key].dtype), key


def test_borders_without_a_row_dimension_and_plain_numbers_stay_so():
    batch = {**sft("011", "11"), "input_ids": torch.ones(1, 5), "dataset_id": torch.zeros(1)}
    batch |= {"cu_seqlens": batch["cu_seqlens"][0], "max_seqlen": torch.tensor(3), "total_tokens": 5}
    assert tokens_of(batch) == [[10, 11, 12], [20, 21]]
    samples = dict(enumerate(split(batch)))
    fields = lay_out(
        MicroBatch((Slice(1, 0, 2),), (0,)), samples=samples, form=PackForm(samples[0], form_of(batch))
    ).fields
    assert (fields["cu_seqlens"].tolist(), fields["max_seqlen"].item(), fields["total_tokens"]) == ([0, 2], 2, 2)
    assert fields["max_seqlen"].dim() == 0
    assert fields["input_ids"].tolist() == fields["tokens"].tolist() == [[20, 21]]
    assert "dataset_id" not in fields


def test_keys_without_a_value_are_no_borders():
    batch = {**sft("11"), "cu_seqlens": None, "max_seqlen": None}
    assert not form_of(batch).has_borders
    assert tokens_of(batch) == [[10, 11]]
    samples = dict(enumerate(split(batch)))
    fields = lay_out(MicroBatch((), (0,)), samples={}, form=PackForm(samples[0], form_of(batch))).fields
    assert fields["cu_seqlens"] is fields["max_seqlen"] is None


@given(rows=st.lists(LENGTHS, min_size=1, max_size=3), padding=st.integers(0, 3), data=st.data())
def test_every_token_with_loss_is_in_one_sample_with_its_label(rows, padding, data):
    width = max(map(sum, rows)) + padding
    batch = packed(
        [
            [(100 * r + 10 * i, 0, "1" * n) for i, n in enumerate(row)] + [(0, width - sum(row), "")]
            for r, row in enumerate(rows)
        ]
    )
    batch["loss_mask"] *= torch.tensor(data.draw(st.lists(st.booleans(), min_size=width, max_size=width))).float()
    counts = [list(accumulate([*row, width - sum(row)], initial=0)) for row in rows]
    longest = max(map(len, counts))
    batch["cu_seqlens"] = torch.tensor([row + [width] * (longest - len(row)) for row in counts])
    batch["max_seqlen"] = torch.full((len(rows),), width)
    samples = split(batch)
    seen = [
        (t, label)
        for s in samples
        for t, label, m in zip(*(s[name].tolist() for name in ("tokens", "labels", "loss_mask")), strict=True)
        if m
    ]
    mask = batch["loss_mask"] != 0
    assert seen == list(zip(batch["tokens"][mask].tolist(), batch["labels"][mask].tolist(), strict=True))
    assert all(s["loss_mask"][-1] or len(s["tokens"]) == 1 for s in samples)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"cu_seqlens": [[0, 3]]}, "does not cover its row"),
        ({"cu_seqlens": [[1, 5]]}, "does not cover its row"),
        ({"cu_seqlens": [[0, 4, 3, 5]]}, "descends"),
        ({"cu_seqlens": [[0, 3, 8]]}, "beyond its row"),
        ({"cu_seqlens": [[0, 3], [0, 5]]}, "a row of borders for each row"),
        ({"cu_seqlens": [[0.0, 5.0]]}, "a row of borders for each row"),
        ({"cu_seqlens": [[-1]]}, "does not cover its row"),
        ({"cu_seqlens_argmin": [3], "cu_seqlens": [[0, 5, -1, -1]]}, "from the place on that the batch names"),
        ({"cu_seqlens_unpadded": [[0, 4, 5]]}, "longer than their places"),
        ({"cu_seqlens_unpadded": [[0, 5]]}, "longer than their places"),
        ({"cu_seqlens_unpadded": [[0, 3, 2]]}, "descends"),
        ({"cu_seqlens_unpadded": [[0, 3, 4]]}, "tokens with loss lie in the padding"),
        ({"local_cp_size": [1]}, "keys local_cp_size"),
        ({"labels": [[1, 2]]}, "not all one shape"),
    ],
)
def test_borders_that_do_not_divide_a_row_are_refused(change, says):
    with pytest.raises(EvenloadError, match=says) as refused:
        split({**sft("011", "11"), **{key: torch.tensor(value) for key, value in change.items()}})
    assert refused.value.do


def test_a_mask_of_tokens_must_have_what_carries_loss():
    batch = {key: value for key, value in sft("0110").items() if key in FIELDS}
    assert tokens_of({**batch, "attention_mask": torch.tensor([[1, 1, 1, 0]])}) == [[10, 11, 12]]
    with pytest.raises(EvenloadError, match="not the causal one"):
        split({**batch, "attention_mask": torch.tensor([[0, 1, 1, 1]])})
