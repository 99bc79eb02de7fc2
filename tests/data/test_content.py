"""Data that are exchanged are noticed: by a fingerprint that counts content, and by a look at their files."""

import logging
import os
import struct
from pathlib import Path

import numpy as np
import pytest
from evenload.core.errors import EvenloadError
from evenload.data import content
from evenload.data.content import are_same
from evenload.data.sources import open_source

from .files import jsonl

ROWS, SIZE = 40, 12


def text(path, letter):
    return jsonl(path.with_suffix(".jsonl"), [{"text": letter * SIZE}] * ROWS)


def prompts(path, letter):
    return jsonl(path.with_suffix(".jsonl"), [{"prompt": "ask", "completion": letter * SIZE}] * ROWS)


def pair(path, letter):
    index = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, ROWS, 1) + struct.pack(f"<{ROWS}i", *[SIZE] * ROWS)
    index += struct.pack(f"<{ROWS}q", *[2 * SIZE * i for i in range(ROWS)]) + struct.pack("<q", 0)
    path.with_suffix(".idx").write_bytes(index)
    path.with_suffix(".bin").write_bytes(np.full(ROWS * SIZE, ord(letter), "<u2").tobytes())
    return str(path)


def arrow(path, letter):
    pa = pytest.importorskip("pyarrow")
    table = pa.table({"input_ids": [[ord(letter)] * SIZE] * ROWS})
    path = path.with_suffix(".arrow")
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    return str(path)


FORMATS = {"jsonl": text, "prompts": prompts, "pair": pair, "arrow": arrow}


def opened(spec, **settings):
    return open_source(spec, **{"max_length": 64, **settings})


@pytest.mark.parametrize("kind", FORMATS)
def test_a_fingerprint_tells_other_content_of_the_same_lengths(tmp_path, kind):
    one, again, other = (
        opened(FORMATS[kind](tmp_path / name, letter))
        for name, letter in (("one", "a"), ("again", "a"), ("other", "s"))
    )
    assert one.fingerprint == again.fingerprint
    assert one.fingerprint.partition("-")[0] == other.fingerprint.partition("-")[0]
    assert one.fingerprint != other.fingerprint


def test_one_changed_row_of_a_small_set_and_another_loss_are_other_data(tmp_path):
    rows = [{"input_ids": [1, 2, 3], "labels": [-100, 2, 3]} for _ in range(200)]
    rows[0]["labels"] = [-100, -100, 3]
    prints = {opened(jsonl(tmp_path / "one.jsonl", rows)).fingerprint}
    rows[137]["input_ids"] = [1, 9, 3]
    prints.add(opened(jsonl(tmp_path / "other.jsonl", rows)).fingerprint)
    rows[137] = {"input_ids": [1, 2, 3], "labels": [-100, 7, 3]}
    prints.add(opened(jsonl(tmp_path / "labels.jsonl", rows)).fingerprint)
    assert len(prints) == 3


def test_a_long_document_is_read_once_and_what_is_cut_off_does_not_count(tmp_path):
    long = "".join(chr(97 + i * i % 26) for i in range(9000))
    whole = jsonl(tmp_path / "one.jsonl", [{"text": long}])
    tail = jsonl(tmp_path / "tail.jsonl", [{"text": long[:64] + long[64:].upper()}])
    assert opened(whole).fingerprint == opened(tail).fingerprint
    split = opened(whole, long_samples="split")
    reads = []
    read = split._documents.read
    split._documents.read = lambda *where: reads.append(where) or read(*where)
    assert split.fingerprint != opened(tail, long_samples="split").fingerprint
    assert len(split.lengths) > 100
    assert len(reads) == 1


def test_few_documents_are_read_where_each_is_long(tmp_path, monkeypatch):
    monkeypatch.setattr(content, "_MOST_TOKENS", 5 * SIZE)
    source = opened(text(tmp_path / "one", "a"))
    assert len(content._chosen(source._documents, source._cut)) == 5


def test_what_an_earlier_version_kept_is_compared_by_lengths_with_a_warning(caplog):
    assert are_same("ab12", "ab12-77", "the checkpoint")
    assert "the checkpoint: an earlier version kept their lengths alone" in caplog.text
    caplog.clear()
    assert are_same("ab12-77", "ab12-77", "x")
    for kept in ("ab12-78", "ab1", "cd34", "", None, 5):
        assert not are_same(kept, "ab12-77", "x")
    assert not caplog.records


@pytest.fixture
def always(monkeypatch):
    """Files are looked at whenever a sample is read."""
    monkeypatch.setattr(content, "LOOK_S", 0.0)


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.usefixtures("always")
def test_files_that_change_while_they_are_in_use_are_noticed(tmp_path, kind, caplog):
    """Overwritten in place, with a file that lies beside for all of a set's files."""
    source = opened(FORMATS[kind](tmp_path / "data", "a"))
    before = source.tokens(3).tolist()
    for path in tmp_path.glob("data.*"):
        os.utime(path, ns=(0, path.stat().st_mtime_ns + 1))
    with caplog.at_level(logging.WARNING):
        assert source.tokens(3).tolist() == before
    assert "was written or replaced while it is in use" in caplog.text
    caplog.clear()
    assert source.tokens(3).tolist() == before
    assert not caplog.records, "said once"
    FORMATS[kind](tmp_path / "new", "s")
    for path in tmp_path.glob("data.*"):
        with path.open("r+b") as file:
            file.write(path.with_name(f"new{path.suffix}").read_bytes())
    if kind == "prompts":  # whose tokens are in the cache: the run goes on with what it began with
        assert source.tokens(3).tolist() == before
        assert "was written or replaced" in caplog.text
        return
    with pytest.raises(EvenloadError, match=r"data.* changed while it was in use") as caught:
        source.tokens(3)
    assert "last checkpoint" in caught.value.do


@pytest.mark.usefixtures("always")
def test_a_file_that_is_exchanged_before_the_first_sample_is_noticed(tmp_path):
    source = opened(text(tmp_path / "data", "a"))
    text(tmp_path / "new", "s")
    os.replace(tmp_path / "new.jsonl", tmp_path / "data.jsonl")
    with pytest.raises(EvenloadError, match="changed while it was in use"):
        source.tokens(0)
    (tmp_path / "data.jsonl").unlink()
    with pytest.raises(EvenloadError, match=r"changed while it was in use|cannot read"):
        source.tokens(0)


def test_files_are_looked_at_once_a_second_some_at_a_time(tmp_path, monkeypatch):
    clock, looked = [0.5], []
    monkeypatch.setattr(content.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(content, "_stamp", lambda path: looked.append(path))
    watch = content.Watch("data", [Path(str(i)) for i in range(40)], lambda: "same")
    looked.clear()
    counts = []
    for second in (0.5, 1.0, 1.6, 2.7, 3.8):
        clock[0] = second
        watch.look()
        counts.append(len(looked))
    assert counts == [40, 40, 56, 72, 88]
    assert {str(path) for path in looked[40:]} == {str(i) for i in range(40)}
