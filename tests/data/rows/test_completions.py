"""Rows of a prompt and several completions: a document of each, with the trunk that they share."""

import json

import numpy as np
import pytest
from evenload.core.errors import EvenloadError
from evenload.data.sources import open_source


def source_of(tmp_path, rows, **settings):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return open_source(str(path), **{"max_length": None, **settings})


@pytest.mark.parametrize("loss_on", ["completion", "all"])
def test_the_last_token_of_a_prompt_predicts_another_target_in_each_and_is_in_no_trunk(tmp_path, loss_on):
    rows = [
        {"prompt": "one two", "completions": [" three", " four", " fourteen"]},
        {"prompt": "alone", "completions": ["!"]},
        {"prompt": "equal", "completions": ["same", "same"]},
    ]
    source = source_of(tmp_path, rows, loss_on=loss_on)
    texts = [bytes(source.tokens(i).astype(np.uint8)).decode() for i in range(len(source.lengths))]
    assert texts == ["one two three", "one two four", "one two fourteen", "alone!", "equalsame", "equalsame"]
    assert source.groups.tolist() == [0, 0, 0, 1, 2, 2]
    # "one two " is common to all three, and its last token predicts "t" or "f"; equal rows have a last token each.
    assert source.trunks.tolist() == [7, 7, 7, 0, 8, 8]


def test_a_sample_that_is_cut_keeps_a_token_of_its_own(tmp_path):
    rows = [{"prompt": "0123456789", "completions": ["abc", "xyz"]}]
    assert source_of(tmp_path, rows, max_length=11).trunks.tolist() == [9, 9]
    split = source_of(tmp_path, rows, max_length=6, long_samples="split", loss_on="all")
    assert split.lengths.tolist() == [6, 6, 6, 6]
    assert split.trunks.tolist() == [5, 0, 5, 0]


def test_rows_of_one_completion_each_share_nothing_and_are_in_no_groups(tmp_path):
    source = source_of(tmp_path, [{"prompt": "a b", "completion": "c"}, {"prompt": "a b", "completion": "d"}])
    assert source.trunks is None
    assert source.groups is None


def test_groups_that_are_asked_for_are_kept_and_nothing_is_shared(tmp_path):
    rows = [{"prompt": "a b", "completions": ["c", "d"], "of": "x"}, {"prompt": "a", "completions": ["c"], "of": "x"}]
    source = source_of(tmp_path, rows, group="of")
    assert source.groups.tolist() == [0, 0, 0]
    assert source.trunks is None


@pytest.mark.parametrize("bad", [[], "text", None, [1], {"completion": "d"}])
def test_what_is_no_list_of_completions_is_refused_by_its_line(tmp_path, bad):
    row = (
        {"prompt": "a b", "completions": ["c"], **bad} if isinstance(bad, dict) else {"prompt": "a", "completions": bad}
    )
    with pytest.raises(EvenloadError, match="line 2"):
        source_of(tmp_path, [{"prompt": "a b", "completions": ["c"]}, row])
