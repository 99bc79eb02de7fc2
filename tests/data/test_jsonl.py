import os
from itertools import chain

import numpy as np
import pytest
from evenload.core.errors import EvenloadError
from evenload.data import jsonl as module
from evenload.data.sources import open_source
from hypothesis import given
from hypothesis import strategies as st

from .files import jsonl, tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("jsonl")


def write(path, *rows):
    return jsonl(path, rows)


@given(texts=st.lists(st.text(min_size=1), min_size=1, max_size=20))
def test_text_comes_back_as_its_bytes(folder, texts):
    source = open_source(write(folder / "a.jsonl", *({"text": t} for t in texts)), max_length=None, min_length=1)
    assert [bytes(source.tokens(i).tolist()) for i in range(len(texts))] == [t.encode() for t in texts]
    assert source.lengths.tolist() == [len(t.encode()) for t in texts]
    assert source.vocab_size == 256


@given(documents=st.lists(st.lists(st.integers(0, 2**31 - 1), max_size=9), min_size=1).filter(any))
def test_token_ids_come_back_in_pieces_that_make_up_the_whole(folder, documents):
    path = write(folder / "ids.jsonl", *({"input_ids": ids, "text": "ignored"} for ids in documents))
    source = open_source(path, max_length=4, long_samples="split", min_length=1)
    tokens = np.concatenate([source.tokens(i) for i in range(len(source.lengths))])
    assert tokens.tolist() == list(chain(*documents))
    assert source.vocab_size == tokens.max() + 1


def test_blank_lines_and_nulls_are_skipped_and_counted(tmp_path):
    path = write(
        tmp_path / "a.jsonl", {"text": "ab"}, "", {"text": None}, "  ", {"text": ""}, {"text": "c"}, {"text": "de"}
    )
    source = open_source(path, max_length=None)
    assert [bytes(source.tokens(i).tolist()) for i in range(2)] == [b"ab", b"de"]
    report = source.report()
    assert (report["documents"], report["empty"], report["too_short"], report["samples"]) == (5, 2, 1, 2)


def test_a_field_of_another_name(tmp_path):
    path = write(tmp_path / "a.jsonl", {"content": "abc", "input_ids": [1]})
    assert open_source(path, max_length=None, text_key="content").tokens(0).tolist() == [97, 98, 99]


def test_the_tokenizer_reads_each_text_once_and_then_only_what_is_asked(tmp_path, monkeypatch):
    file = tokenizer(tmp_path, {"a": 0, "b": 1, "?": 2})
    path = write(tmp_path / "a.jsonl", *({"text": "a b " * n} for n in range(1, 1500)))

    def opened():
        return open_source(path, max_length=7, tokenizer=str(file))

    first = opened()
    monkeypatch.setattr(module.JsonlDocuments, "_scan", lambda self: pytest.fail("read again"))
    second = opened()
    assert second.lengths.tolist() == first.lengths.tolist() == [min(7, 2 * n) for n in range(1, 1500)]
    assert second.tokens(1498).tolist() == [0, 1, 0, 1, 0, 1, 0]
    assert second.vocab_size == 3


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"text": "ab"}, '{"text": "cd"'], "line 2 of .* is not valid JSON"),
        ([{"text": "ab"}, "", "nonsense"], "line 3 of .* is not valid JSON"),
        ([{"txt": "ab"}], "no field 'input_ids' or 'tokens' or 'text'\n  found: did you mean 'txt'"),
        ([{"text": "ab"}, {"txet": "ab"}], "line 2 of .* has no field 'text'\n  found: did you mean 'txet'"),
        ([{"text": "ab"}, {"input_ids": [1, 2]}], "line 2 of .* has no field 'text'"),
        ([[1, 2]], "line 1 of .* is not a JSON object"),
        ([{"text": 5}], "neither text nor a list"),
        ([{"input_ids": [1, 2.0]}], "not an integer\n  found: 2.0"),
        ([{"input_ids": [1, True]}], "not an integer\n  found: True"),
        ([{"tokens": [1, "a"]}], "not an integer\n  found: 'a'"),
        ([{"input_ids": [1, 2]}, {"input_ids": [1, -2]}], "line 2 of .* impossible token id\n  found: -2"),
        ([{"input_ids": [1, 2**31]}], "impossible token id\n  found: 2147483648"),
        ([{"text": ""}], "no sample to train on\n  found: 1 documents: 1 empty"),
        ([], "holds no data"),
        (["", " "], "holds no data"),
        (["[" * 100_000], "line 1 of .* is not valid JSON"),
    ],
)
def test_a_bad_line_is_named_and_nothing_is_kept(tmp_path, cache, rows, message):
    path = write(tmp_path / "a.jsonl", *rows)
    with pytest.raises(EvenloadError, match=message) as caught:
        open_source(path, max_length=8)
    assert caught.value.found
    assert caught.value.do
    kept = [entry.name for entry in cache.glob("*")] if "no sample" not in message else []
    assert kept == []


def test_bytes_that_are_no_utf8_are_refused(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "ab"}\n{"text": "\xff\xff"}\n')
    with pytest.raises(EvenloadError, match=r"line 2 of .* is not valid JSON"):
        open_source(str(tmp_path / "a.jsonl"), max_length=8)


def test_a_file_that_changes_while_in_use_is_noticed(tmp_path):
    path = tmp_path / "a.jsonl"
    source = open_source(write(path, {"text": "abcd"}, {"text": "efgh"}), max_length=8)
    for other in ('{"text": "abc"}\n', "[]", '{"text": null}', ""):
        path.write_text(other)
        with pytest.raises(EvenloadError, match="changed while it was in use"):
            source.tokens(0)
    os.unlink(path)
    with pytest.raises(EvenloadError, match="cannot be read"):
        source.tokens(0)


def test_a_changed_file_is_read_anew(tmp_path):
    path = tmp_path / "a.jsonl"
    assert open_source(write(path, {"text": "abcd"}), max_length=8).lengths.tolist() == [4]
    assert open_source(write(path, {"text": "abcde"}), max_length=8).lengths.tolist() == [5]
