import subprocess
import sys
from pathlib import Path

import pytest
from evenload.core.errors import EvenloadError
from evenload.data import stdlib
from evenload.data.sources import open_source

from .files import tokenizer


@pytest.fixture
def library(tmp_path, monkeypatch):
    """A small standard library of known files."""
    for name, content in {
        "b.py": b"print(1)\n",
        "a/z.py": b"0123456789",
        "a.py": b"x",
        "empty.py": b"",
        "a/test/skipped.py": b"no",
        "site-packages/skipped.py": b"no",
        "a/tests/skipped.py": b"no",
        "notes.txt": b"no",
        "raw.py": b"\xff\x00\xfe",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content)
    monkeypatch.setattr(stdlib.sysconfig, "get_path", lambda name: str(tmp_path))
    return tmp_path


def test_the_library_is_its_files_sorted_by_path(library):
    source = open_source("python-stdlib", max_length=None)
    assert [bytes(source.tokens(i).tolist()) for i in range(3)] == [b"0123456789", b"print(1)\n", b"\xff\x00\xfe"]
    assert source.tokens(0).flags.writeable
    assert source.report() == {
        "source": "python-stdlib",
        "documents": 5,
        "samples": 3,
        "tokens": 22,
        "targets": 19,
        "without_target": 0,
        "longest": 10,
        "empty": 1,
        "too_short": 1,
        "truncated": 0,
        "split": 0,
        "dropped": 0,
        "tokens_left_out": 1,
        "fingerprint": source.report()["fingerprint"],
    }


def test_a_library_that_changes_is_noticed(library):
    source = open_source("python-stdlib", max_length=None)
    (library / "b.py").write_bytes(b"p")
    with pytest.raises(EvenloadError, match=r"b\.py changed while it was in use"):
        source.tokens(1)
    (library / "b.py").unlink()
    with pytest.raises(EvenloadError, match=r"cannot read .*b\.py"):
        source.tokens(1)


def test_a_machine_without_the_library_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(stdlib.sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(EvenloadError, match="no sample to train on\n  found: 0 documents"):
        open_source("python-stdlib", max_length=None)


def test_samples_outside_of_the_source_are_our_own_mistake(library):
    source = open_source("python-stdlib", max_length=None)
    for index in (-1, 3):
        with pytest.raises(IndexError):
            source.tokens(index)
    with pytest.raises(ValueError, match="read-only"):
        source.lengths[0] = 1


def test_the_fingerprint_follows_the_lengths(library):
    prints = {open_source("python-stdlib", max_length=limit).report()["fingerprint"] for limit in (3, 4, None, 1000)}
    assert len(prints) == 3


@pytest.mark.parametrize(
    ("spec", "settings", "message"),
    [
        ("python-stdlb", {}, "of a similar name: python-stdlib"),
        ("/nowhere/at/all", {}, "nothing of a similar name"),
        ("{folder}/corpsu.jsonl", {}, r"of a similar name: corpus\.jsonl"),
        ("{folder}/notes.md", {}, r"ending '\.md'"),
        ("{folder}/empty", {}, "no data set below it"),
        ("{folder}/*.arrow", {}, "there is no data"),
        ("{folder}/corpus.jsonl", {"tokenizer": "bytez"}, "no tokenizer 'bytez'"),
        ("{folder}/corpus.jsonl", {"vocab_size": 100}, "ids up to 255, vocabulary of 100"),
        ("{folder}/corpus.jsonl", {"max_length": 1}, "max_length=1, min_length=2"),
        ("{folder}/corpus.jsonl", {"long_samples": "cut"}, "known: drop, split, truncate"),
        ("{folder}/corpus.jsonl", {"long_samples": "drop", "max_length": 3}, "1 longer than 3"),
        ("{folder}/corpus.jsonl", {"min_length": 9}, "1 shorter than 9"),
    ],
)
def test_a_wrong_request_is_told_in_three_parts(tmp_path, spec, settings, message):
    (tmp_path / "corpus.jsonl").write_text('{"text": "abcd"}\n')
    (tmp_path / "notes.md").write_text("no data")
    (tmp_path / "empty").mkdir()
    with pytest.raises(EvenloadError, match=message) as caught:
        open_source(spec.format(folder=tmp_path), **{"max_length": None, **settings})
    assert caught.value.found
    assert caught.value.do


def test_the_library_is_text_under_a_tokenizer(library, tmp_path):
    tokenizer(tmp_path, {"a": 0}, "a")
    source = open_source("python-stdlib", max_length=None, tokenizer=str(tmp_path), min_length=1)
    assert source.report()["documents"] == 5
    assert source.name == "python-stdlib"
    assert source.vocab_size == 1


def test_a_tokenizer_file_bounds_ids_that_are_stored_already(tmp_path):
    tokenizer(tmp_path, {"a": 0}, "a")
    (tmp_path / "ids.jsonl").write_text('{"input_ids": [0, 5]}\n')
    with pytest.raises(EvenloadError, match="ids up to 5, vocabulary of 1"):
        open_source(str(tmp_path / "ids.jsonl"), max_length=None, tokenizer=str(tmp_path))


def test_importing_data_needs_numpy_alone():
    heavy = "torch", "pyarrow", "tokenizers", "megatron", "deepspeed", "transformers"
    program = f"import sys, evenload.data; print(sorted(set({heavy!r}) & set(sys.modules)))"
    printed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=Path("/"))
    assert printed.stdout.strip() == "[]"
