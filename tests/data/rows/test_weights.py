"""Weights of targets that rows give in a field: every target has its own, wherever its document is cut."""

import numpy as np
import pytest
from evenload.core.errors import EvenloadError
from evenload.data.samples.cut import IGNORE
from evenload.data.sources import open_source

from ..files import jsonl, table

RANDOM = np.random.default_rng(0)


def opened(spec, **settings):
    return open_source(spec, **{"max_length": None, "weight_column": "w", **settings})


def labelled(lengths, *, by_token):
    """Rows of token ids, some of which are no targets, with weights of any sign and 0."""
    rows = []
    for number, length in enumerate(lengths):
        ids = RANDOM.integers(1, 90, length).tolist()
        labels = [one if RANDOM.random() < 0.7 else IGNORE for one in ids]
        count = sum(label != IGNORE for label in labels[1:])
        drawn = (RANDOM.choice([0.0, -1.0, 1.0], count) * RANDOM.uniform(0.5, 2, count)).tolist()
        rows.append({"input_ids": ids, "labels": labels, "w": drawn if by_token else [0.0, -0.75, 1, 2.5][number % 4]})
    return rows


def expected(row):
    """The weight of each token of a row, 0 where it carries no loss."""
    targets = [place for place, label in enumerate(row["labels"]) if label != IGNORE and place]
    weights = [0.0] * len(row["labels"])
    for number, place in enumerate(targets):
        weights[place] = row["w"][number] if isinstance(row["w"], list) else row["w"]
    return weights


@pytest.mark.parametrize("by_token", [False, True], ids=["a number a row", "one a target"])
@pytest.mark.parametrize("long_samples", ["split", "truncate"])
def test_every_target_has_its_own_weight_wherever_its_row_is_cut(tmp_path, long_samples, by_token):
    rows = labelled([9, 1, 14, 30, 2, 7, 21, 3, 16], by_token=by_token)
    settings = {"max_length": 8, "long_samples": long_samples, "min_length": 1}
    spec = jsonl(tmp_path / "a.jsonl", rows)
    source, plain = opened(spec, **settings), open_source(spec, **settings)
    pieces = [
        (row, start)
        for row in rows
        for start in range(0, len(row["labels"]), 8)
        if not start or long_samples == "split"
    ]
    assert len(pieces) == len(source.lengths) == len(plain.lengths)
    for sample, (row, start) in enumerate(pieces):
        length = int(source.lengths[sample])
        weights, labels = expected(row)[start : start + 8], row["labels"][start : start + 8]
        target = [place for place, weight in enumerate(weights) if weight and place]
        assert source.targets[sample] == len(target)
        if target:  # it ends at its last one
            assert length == target[-1] + 1
        read, counts = source.labels(sample), source.weights(sample)
        assert [place for place in range(1, length) if read[place] != IGNORE] == target
        assert [float(counts[place]) for place in target] == [weights[place] for place in target]
        assert [int(read[place]) for place in target] == [labels[place] for place in target]
        assert source.weight_sums[sample] == pytest.approx(sum(weights[place] for place in target), abs=1e-12)


def test_weights_of_plain_text_count_from_its_second_token(tmp_path):
    rows = [{"text": "abcd", "w": [0.5, 0, -2]}, {"text": "", "w": []}, {"text": "xyz", "w": 0}, {"text": "uv", "w": 3}]
    source = opened(jsonl(tmp_path / "a.jsonl", rows))
    assert source.lengths.tolist() == [4, 3, 2]
    assert source.targets.tolist() == [2, 0, 1]
    assert source.weight_sums.tolist() == [-1.5, 0.0, 3.0]
    assert source.labels(0).tolist()[1:] == [ord("b"), IGNORE, ord("d")]
    assert source.weights(0).tolist()[1:] == [0.5, 0.0, -2.0]
    assert source.report()["without_target"] == 1
    assert source.report()["weight_sum"] == 1.5


def test_a_list_goes_on_from_one_chat_of_a_row_to_the_next(tmp_path, plain_folder):
    turns = [{"role": role, "content": "name"} for role in ("system", "user", "assistant")]
    settings = {"max_length": None, "tokenizer": str(plain_folder)}
    bare = open_source(jsonl(tmp_path / "a.jsonl", [{"messages": turns * 2}]), **settings)
    count = int(bare.targets[0])
    assert bare.targets.tolist() == [count, count]
    drawn = RANDOM.uniform(1, 2, 2 * count)
    source = opened(jsonl(tmp_path / "b.jsonl", [{"messages": turns * 2, "w": drawn.tolist()}]), **settings)
    for sample in range(2):
        counted = source.labels(sample)[1:] != IGNORE
        wanted = drawn[sample * count : (sample + 1) * count]
        assert source.weights(sample)[1:][counted].tolist() == wanted.tolist()


@pytest.mark.parametrize("kind", ["arrow", "parquet"])
@pytest.mark.parametrize("by_token", [False, True], ids=["a number a row", "one a target"])
def test_tables_give_the_weights_that_lines_give(tmp_path, kind, by_token):
    rows = labelled([9, 3, 14, 5], by_token=by_token)
    rows = rows if by_token else [{**row, "w": float(row["w"])} for row in rows]
    saved = opened(table(tmp_path, kind, rows))
    lines = opened(jsonl(tmp_path / "a.jsonl", rows))
    assert saved.weight_sums.tolist() == lines.weight_sums.tolist()
    assert all((saved.weights(i) == lines.weights(i)).all() for i in range(len(saved.lengths)))


def test_weights_that_are_all_one_are_none(tmp_path):
    rows = [{"text": "abcd", "w": 1}, {"text": "xyz", "w": [1.0, 1]}]
    source, bare = opened(spec := jsonl(tmp_path / "a.jsonl", rows)), open_source(spec, max_length=None)
    assert source.weight_sums is None
    assert source.targets is None
    assert source.fingerprint == bare.fingerprint


def test_a_run_that_goes_on_notices_other_weights(tmp_path):
    prints = set()
    for number, weights in enumerate(([2.0, 1.0, 3.0], [1.0, 2.0, 3.0], 2.0)):
        rows = [{"text": "abcd", "w": weights}, {"text": "xyz", "w": 2}]
        prints.add(opened(jsonl(tmp_path / f"{number}.jsonl", rows)).fingerprint)
    assert len(prints) == 3


@pytest.mark.parametrize(
    ("weights", "error"),
    [
        (None, r"'w' in line 2 of .*a\.jsonl is no weight"),
        (float("nan"), r"'w' in line 2 of .* is no weight\n.*nan"),
        (float("-inf"), "is no weight"),
        (True, "is no weight"),
        (10**400, "is no weight"),
        ("1.0", "is no weight"),
        ([1.0, None, 2.0], "is no weight"),
        ([1.0, 2.0], r"'w' in line 2 of .* has not one weight for each target token\n.*2 numbers, 3 target tokens"),
        ([1.0] * 4, "4 numbers, 3 target tokens"),
    ],
)
def test_what_is_no_weight_is_refused_by_row(tmp_path, weights, error):
    rows = [{"text": "xy", "w": 1}, {"text": "abcd", "w": weights}]
    with pytest.raises(EvenloadError, match=error):
        opened(jsonl(tmp_path / "a.jsonl", rows))


def test_a_weight_column_that_is_missing_is_refused(tmp_path):
    rows = [{"text": "xy", "weight": 1}]
    with pytest.raises(EvenloadError, match=r"line 1 of .* has no field 'w' that data\.weight_column asks for"):
        opened(jsonl(tmp_path / "a.jsonl", rows))
    with pytest.raises(EvenloadError, match=r"no rows that give their weight\n.*data\.weight_column 'w'"):
        opened("python-stdlib")
    with pytest.raises(EvenloadError, match="has no field 'w' that data"):
        opened(table(tmp_path, "parquet", rows))
