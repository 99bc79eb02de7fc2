import json
import os

import numpy as np
import pytest
from evenload.core.errors import EvenloadError
from evenload.data import jsonl
from evenload.data import lengths as lengths_module
from evenload.data.lengths import read_lengths, read_prompted
from hypothesis import given
from hypothesis import strategies as st

POSITIVE = st.lists(st.integers(1, 2**40), min_size=1, max_size=50)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("lengths")


@given(lengths=POSITIVE)
def test_every_kind_gives_back_what_was_written(folder, lengths):
    np.save(folder / "a.npy", np.array(lengths, dtype=np.uint64))
    (folder / "a.txt").write_text("\n".join(map(str, lengths)) + "\n")
    (folder / "a.jsonl").write_text("".join(json.dumps({"length": n} if n % 2 else n) + "\n" for n in lengths))
    for kind in ("npy", "txt", "jsonl"):
        found = read_lengths(folder / f"a.{kind}")
        assert found.dtype == np.int64
        assert found.tolist() == lengths


def test_jsonl_counts_tokens_and_bytes(tmp_path):
    rows = [{"input_ids": [5, 6]}, {"tokens": [1, 2, 3]}, {"text": "w\u00f6rter"}, {"length": 9, "text": "x"}, 4]
    (tmp_path / "a.jsonl").write_text("\n\n".join(map(json.dumps, rows)))
    assert read_lengths(str(tmp_path / "a.jsonl")).tolist() == [2, 3, 7, 9, 4]


def test_answers_of_a_prompt_are_samples_that_begin_alike(tmp_path):
    rows = [{"prompt": 5, "completions": [2, 9]}, 3, {"prompt": 4, "chosen": 1, "rejected": 2, "source": "x"}]
    rows += [{"prompt": 7, "completions": [1], "length": 6}, {"prompt": "abc", "text": "abcd"}]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    lengths, prompted = read_prompted(tmp_path / "a.jsonl")
    assert lengths.tolist() == read_lengths(tmp_path / "a.jsonl").tolist() == [7, 14, 3, 5, 6, 6, 4]
    assert prompted.prompts.tolist() == [5, 5, 0, 4, 4, 0, 0]
    assert [prompted.groups.tolist().index(group) for group in prompted.groups] == [0, 0, 2, 3, 3, 5, 6]
    (tmp_path / "a.jsonl").write_text("3\n4\n")
    assert read_prompted(tmp_path / "a.jsonl")[1] is None


@pytest.mark.parametrize(
    ("kind", "content", "message"),
    [
        ("txt", b"5\n0\n", "line 2 of .*\n  found: 0"),
        ("txt", b"5\n\n-3\n", "line 3 of .*\n  found: -3"),
        ("txt", b"5\n\n3.5\n", "line 3 of .*\n  found: 3.5"),
        ("txt", b"5\n1_000\n", "line 2 of .*\n  found: 1_000"),
        ("txt", b"5 6\n", "line 1 of .*\n  found: 5 6"),
        ("txt", b"5\n\xff\xfe\n", "line 2 of"),
        ("txt", b"5\n" + b"9" * 30, "line 2 of .*\n  found: 9999"),
        ("txt", b"5\n" + b"9" * 5000, "line 2 of .*\n  found: 9999"),
        ("txt", b"", "holds no length"),
        ("txt", b"\n \n", "holds no length"),
        ("jsonl", b'5\n{"length": 0}', "line 2 of .*\n  found: 0"),
        ("jsonl", b'{"length": 2.0}', "line 1 of .*\n  found: 2.0"),
        ("jsonl", b'{"length": true}', "line 1 of .*\n  found: True"),
        ("jsonl", b"5\n{", "line 2 of .* is not valid JSON"),
        ("jsonl", b'{"lenght": 3}', "line 1 of .*gives no length\n  found: did you mean 'lenght'"),
        ("jsonl", b'{"input_ids": [1, "2"]}', "'2'"),
        ("jsonl", b'"5"', "line 1 of .*\n  found: '5'"),
        ("jsonl", b"1e400", "line 1 of .*\n  found: inf"),
        ("jsonl", b"", "holds no length"),
        ("jsonl", b'7\n{"prompt": 5}', "line 2 of .* gives no completions"),
        ("jsonl", b'{"prompt": 5, "completions": []}', r"line 1 of .* gives no completions\n  found: \[\]"),
        ("jsonl", b'{"prompt": 5, "completions": 3}', r"line 1 of .* gives no completions\n  found: 3"),
        ("jsonl", b'{"prompt": 5, "chosen": 3}', "line 1 of .* gives no completions"),
        ("jsonl", b'{"completions": [3]}', "the prompt of line 1 of .*\n  found: None"),
        ("jsonl", b'{"prompt": 0, "completions": [3]}', "the prompt of line 1 of .*\n  found: 0"),
        ("jsonl", b'{"prompt": "a", "completions": ["b"]}', "the prompt of line 1 of .*\n  found: 'a'"),
        ("jsonl", b'{"prompt": 5, "completions": [3, -1]}', "an answer of line 1 of .*\n  found: -1"),
        ("jsonl", b'{"prompt": 5, "chosen": 3, "rejected": 0}', "an answer of line 1 of .*\n  found: 0"),
        ("jsonl", b'{"prompt": 1099511627776, "completions": [9]}', "is not a length\n  found: 1099511627785"),
    ],
)
def test_a_bad_line_is_named(tmp_path, kind, content, message):
    (tmp_path / f"a.{kind}").write_bytes(content)
    with pytest.raises(EvenloadError, match=message):
        read_lengths(tmp_path / f"a.{kind}")


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.array([3, 0]), "row 1 of .*\n  found: 0"),
        (np.array([3, -2], dtype=np.int8), "row 1 of .*\n  found: -2"),
        (np.array([3, 2**64 - 1], dtype=np.uint64), "row 1 of"),
        (np.array([3.0]), "float64"),
        (np.array([[3]]), r"shape \(1, 1\)"),
        (np.array([True]), "bool"),
        (np.zeros(0, dtype=np.int64), "holds no length"),
    ],
)
def test_a_bad_row_of_npy_is_named(tmp_path, array, message):
    np.save(tmp_path / "a.npy", array)
    with pytest.raises(EvenloadError, match=message):
        read_lengths(tmp_path / "a.npy")


def test_unreadable_files_are_refused(tmp_path):
    (tmp_path / "a.npy").write_bytes(b"\x93NUMPY garbage")
    (tmp_path / "empty.npy").write_bytes(b"")
    (tmp_path / "a.csv").write_text("5")
    np.save(tmp_path / "objects.npy", np.array([{}], dtype=object))
    for name, message in [
        ("a.npy", "not a numpy array"),
        ("empty.npy", "not a numpy array"),
        ("objects.npy", "not a list of integers"),
        ("a.csv", "known: .idx, .jsonl, .npy, .txt"),
        ("missing.txt", "no lengths file"),
    ]:
        with pytest.raises(EvenloadError, match=message):
            read_lengths(tmp_path / name)


def npy(header, data=b"\7" * 320):
    text = header.encode() + b" " * (-(11 + len(header)) % 64) + b"\n"
    return b"\x93NUMPY\1\0" + len(text).to_bytes(2, "little") + text + data


def header(descr="'<i8'", shape="(40,)"):
    return f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}, }}"


@pytest.mark.parametrize(
    "content",
    [
        npy("(" * 5000),
        npy("__import__('os').abort()"),
        npy(header(shape="(True,)")),
        npy(header(shape="(-5,)")),
        npy(header(shape="(10000000000000,)")),
        npy(header(shape="'x'")),
        npy(header(descr="'|O'")),
        npy(header(descr="5")),
        npy(header(), b"x"),
        b"PK\3\4" + b"x" * 100,
        b"\x93NUMPY\x09\0\x10\0" + b"{" * 16,
        b"\x80\4N.",
    ],
)
def test_headers_of_any_kind_are_refused(tmp_path, content):
    (tmp_path / "a.npy").write_bytes(content)
    with pytest.raises(EvenloadError, match=r"is not a (numpy array|list of integers)") as caught:
        read_lengths(tmp_path / "a.npy")
    assert len(caught.value.found) <= 200


@given(lengths=POSITIVE, block=st.integers(15, 60), end=st.sampled_from(["\n", "\r\n", "\r", "\n\n"]))
def test_a_file_read_in_blocks_is_the_file(folder, lengths, block, end):
    (folder / "b.txt").write_text(end.join(map(str, lengths)), newline="")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lengths_module, "_BLOCK_BYTES", block)
        assert read_lengths(folder / "b.txt").tolist() == lengths


@given(before=st.integers(0, 40), block=st.integers(10, 60))
def test_lines_are_counted_through_all_blocks(folder, before, block):
    (folder / "c.txt").write_text("12\n" * before + "no\n" + "5\n" * 3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lengths_module, "_BLOCK_BYTES", block)
        with pytest.raises(EvenloadError, match=f"line {before + 1} of .*\n  found: no"):
            read_lengths(folder / "c.txt")


def test_a_line_without_end_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(lengths_module, "_BLOCK_BYTES", 1000)
    monkeypatch.setattr(jsonl, "_PART_BYTES", 100)
    monkeypatch.setattr(jsonl, "_LINE_BYTES", 1000)
    for name, content in (
        ("a.txt", "5\n" + "1" * 5000),
        ("a.jsonl", "5\n" + "1" * 5000),
        ("b.jsonl", "5\n" + "\0" * 500),
    ):
        (tmp_path / name).write_text(content)
        with pytest.raises(EvenloadError, match=r"line 2 of|not JSON Lines"):
            read_lengths(tmp_path / name)


@pytest.mark.parametrize("suffix", [".npy", ".txt", ".jsonl", ".idx"])
def test_only_regular_files_hold_lengths(tmp_path, suffix):
    os.mkfifo(tmp_path / f"pipe{suffix}")
    (tmp_path / f"folder{suffix}").mkdir()
    (tmp_path / f"zero{suffix}").symlink_to("/dev/zero")
    for name in ("pipe", "folder", "zero", "x" * 300):
        with pytest.raises(EvenloadError, match="there is no lengths file"):
            read_lengths(tmp_path / f"{name}{suffix}")


def test_more_tokens_than_can_be_counted_are_refused(tmp_path):
    np.save(tmp_path / "a.npy", np.full(1 << 21, 1 << 40))
    with pytest.raises(EvenloadError, match="more tokens than can be counted"):
        read_lengths(tmp_path / "a.npy")
