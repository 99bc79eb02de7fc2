"""Where a rank is, read from outside: its last whole mark, whatever became of it."""

import os
import signal

import pytest
from evenload.runtime.watchdog import marks
from evenload.runtime.watchdog.marks import MarkFile, read
from evenload.runtime.watchdog.watchdog import Watchdog
from hypothesis import given
from hypothesis import strategies as st


@given(st.lists(st.text(max_size=400), min_size=1, max_size=5))
def test_the_last_mark_is_read_whatever_its_text(tmp_path_factory, texts):
    folder = tmp_path_factory.mktemp("marks")
    file = MarkFile(folder, 3)
    for text in texts:
        file.write(text)
    last = texts[-1].encode(errors="replace").decode()
    text = read(folder, 3) or ""
    assert text.removesuffix("\ufffd") == last[: len(text.removesuffix("\ufffd"))]
    assert len(text.encode()) >= min(len(last.encode()), 250)


def test_a_rank_that_set_no_mark_has_none(tmp_path):
    assert read(tmp_path, 0) is None
    MarkFile(tmp_path, 0)
    assert read(tmp_path, 0) is None
    (tmp_path / "mark.1").write_bytes(b"")
    assert read(tmp_path, 1) is None


def test_a_write_that_was_cut_off_leaves_the_mark_before(tmp_path):
    file = MarkFile(tmp_path, 0)
    file.write("forward")
    before = (tmp_path / "mark.0").read_bytes()
    file.write("update")
    after = (tmp_path / "mark.0").read_bytes()
    assert read(tmp_path, 0) == "update"
    (tmp_path / "mark.0").write_bytes(before[:1] + after[1:])  # all but the last byte that a write sets
    assert read(tmp_path, 0) == "forward"


def test_a_killed_process_leaves_its_last_mark(tmp_path, monkeypatch):
    monkeypatch.setenv(marks.MARKS, str(tmp_path))
    monkeypatch.setenv("RANK", "1")
    child = os.fork()
    if not child:
        with Watchdog() as dog:
            dog.at("forward", 3)
            dog.at("update", 3)
            os.kill(os.getpid(), signal.SIGKILL)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL
    assert marks.of_rank(1) == "update"
    assert marks.of_rank(0) is None


@pytest.mark.parametrize("rank", ["", "x"])
def test_without_a_launcher_or_a_rank_there_is_no_file(rank, tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv(marks.MARKS, str(tmp_path))
    assert marks.own() is None
    monkeypatch.delenv(marks.MARKS)
    monkeypatch.setenv("RANK", "0")
    assert marks.own() is None
    assert marks.of_rank(0) is None
