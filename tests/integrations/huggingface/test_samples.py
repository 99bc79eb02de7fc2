"""The samples of collated batches: cut at their borders, and refused where the batch trains something else."""

from __future__ import annotations

import pickle

import pytest
import torch
from evenload.core.errors import EvenloadError
from evenload.integrations.huggingface.models import is_rotary
from evenload.integrations.huggingface.refusals import PaddedLabelsError, raise_together
from evenload.integrations.huggingface.samples import split, with_all_labels
from harness.lazy import LazyModule

transformers = LazyModule("transformers")

ROWS = [[11, 12, 13, 14], [21, 22], [31, 32, 33]]


def _padded(side="right", masked=True):
    width = max(map(len, ROWS))

    def row(values, fill):
        padding = [fill] * (width - len(values))
        return padding + values if side == "left" else values + padding

    labels = [row([-100, *values[1:]] if side == "left" else values, -100 if masked else 0) for values in ROWS]
    return {
        "input_ids": torch.tensor([row(values, 0) for values in ROWS]),
        "labels": torch.tensor(labels),
        "attention_mask": torch.tensor([row([1] * len(values), 0) for values in ROWS]),
    }


def _flattened():
    return {
        "input_ids": torch.tensor([[11, 12, 13, 14, 21, 22, 31, 32, 33]]),
        "labels": torch.tensor([[-100, 12, 13, 14, -100, 22, -100, -100, 33]]),
        "position_ids": torch.tensor([[0, 1, 2, 3, 0, 1, 0, 1, 2]]),
    }


def _tokens(samples):
    return [sample.tokens.tolist() for sample in samples]


@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_rows_lose_their_padding(side):
    samples = split(_padded(side), rotary=True)
    assert _tokens(samples) == ROWS
    assert [sample.labels.tolist()[1:] for sample in samples] == [row[1:] for row in ROWS]
    assert [sample.num_targets for sample in samples] == [3, 1, 2]


@pytest.mark.parametrize("form", ["number", "places", "mask"])
def test_labels_that_go_with_some_logits_are_those_of_all_tokens_again(form):
    """What a model that keeps these logits computes its loss of, and what it computes of all."""
    batch = _padded()
    batch["labels"][:, :2] = -100
    keep = {"number": 3, "places": torch.tensor([1, 2, 3]), "mask": torch.tensor([False, True, True, True])}[form]
    cut = batch | {"logits_to_keep": keep, "labels": batch["labels"][:, 1:]}
    whole = with_all_labels(cut)
    assert whole.keys() == batch.keys()
    assert torch.equal(whole["labels"], batch["labels"])
    gap = {**batch, "logits_to_keep": torch.tensor([0, 3]), "labels": batch["labels"][:, :2].clone()}
    gap["labels"][0, 1] = 12
    assert with_all_labels(gap)["labels"].tolist()[0] == [-100, 12, -100, -100]
    unlike = cut | {"labels": batch["labels"]}
    assert with_all_labels(unlike) is unlike


def test_rows_without_a_mask_are_whole_samples():
    batch = {key: value for key, value in _padded().items() if key != "attention_mask"}
    assert _tokens(split(batch, rotary=False)) == [row + [0] * (4 - len(row)) for row in ROWS]


def test_a_flattened_row_is_cut_where_positions_start_again():
    samples = split(_flattened(), rotary=True)
    assert _tokens(samples) == ROWS
    assert [sample.num_targets for sample in samples] == [3, 1, 1]


def test_what_collators_of_flattened_rows_give_is_read():
    collate = transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True)
    batch = collate([{"input_ids": row, "labels": row} for row in ROWS])
    assert set(batch) > {"cu_seq_lens_q", "max_length_k", "seq_idx"}
    assert _tokens(split(batch, rotary=False)) == ROWS


def test_trl_collators_are_read_with_padding_to_a_multiple():
    sft = pytest.importorskip("trl.trainer.sft_trainer")
    rows = [{"input_ids": row, "labels": row} for row in ROWS]
    for padding_free in (True, False):
        collate = sft.DataCollatorForLanguageModeling(0, padding_free=padding_free, pad_to_multiple_of=8)
        assert _tokens(split(collate(rows), rotary=True)) == ROWS


def _changed(batch, **changes):
    return {**batch, **{key: torch.tensor(value) for key, value in changes.items()}}


@pytest.mark.parametrize(
    ("batch", "text"),
    [
        (_padded(masked=False), "3 labels of 2 samples are not -100 where attention_mask is 0"),
        (_changed(_padded(), attention_mask=[[1, 0, 1, 1], [1, 1, 0, 0], [1, 1, 1, 0]]), "padding between tokens"),
        (_changed(_padded(), attention_mask=[[1, 1, 1, 1], [0, 0, 0, 0], [1, 1, 1, 0]]), "row 1 of the batch"),
        (_changed(_padded(), attention_mask=[[1, 1, 2, 2], [1, 1, 0, 0], [1, 1, 1, 0]]), "values up to 2"),
        (_changed(_padded(), attention_mask=[1, 1, 1]), r"rows of one shape.*attention_mask \[3\]"),
        (_changed(_padded(), loss_mask=[1]), "a batch with loss_mask"),
        (_changed(_padded(), shift_labels=[1]), "a batch with shift_labels"),
        ({"input_ids": torch.ones(1, 3)}, "a batch without labels"),
        (_changed(_padded(), token_type_ids=[[0, 1]]), "return_token_type_ids=False"),
        (
            _changed(
                _padded("left"), labels=_padded("left")["input_ids"].where(_padded("left")["input_ids"] > 0, -100)
            ),
            "2 rows whose first label is not -100",
        ),
        (_changed(_flattened(), labels=[[-100, 12, 13, 14, 21, 22, 31, 32, 33]]), "2 of 2 borders"),
        (_changed(_flattened(), attention_mask=[[1] * 9]), "leave attention_mask out of flattened rows"),
        (_changed(_flattened(), position_ids=[[2, 3, 4, 5, 2, 3, 2, 3, 4]]), "count up from 0"),
        (_changed(_flattened(), cu_seq_lens_q=[0, 4, 9]), "other borders than position_ids"),
        ({key: value.repeat(2, 1) for key, value in _flattened().items()}, r"flatten the batch to one row"),
    ],
)
@pytest.mark.filterwarnings("ignore:To copy construct")
def test_what_single_samples_would_not_train_is_refused(batch, text):
    with pytest.raises(EvenloadError, match=f"(?s){text}") as caught:
        split(batch, rotary=True)
    assert caught.value.do


def test_models_that_learn_positions_refuse_left_padding_and_token_types():
    with pytest.raises(EvenloadError, match=r"tokenizer\.padding_side = 'right'"):
        split(_padded("left"), rotary=False)
    places = [[0, 1, 2, 3], [9, 9, 0, 1], [9, 0, 1, 2]]
    assert _tokens(split(_changed(_padded("left"), position_ids=places), rotary=False)) == ROWS
    with pytest.raises(EvenloadError, match="may embed type 0"):
        split(_changed(_padded(), token_type_ids=[[0]]), rotary=False)
    assert _tokens(split(_changed(_padded(), token_type_ids=[[0]]), rotary=True)) == ROWS
    configs = transformers.LlamaConfig(), transformers.GPTNeoXConfig(), transformers.GPT2Config()
    assert list(map(is_rotary, configs)) == [True, True, False]


def test_refusals_of_all_ranks_are_one():
    raise_together([])
    errors = pickle.loads(pickle.dumps([PaddedLabelsError(3, 2), PaddedLabelsError(4, 1)]))
    with pytest.raises(PaddedLabelsError, match="7 labels of 3 samples"):
        raise_together(errors)
    with pytest.raises(EvenloadError, match="another"):
        raise_together([*errors, EvenloadError("another", "a", "b")])
