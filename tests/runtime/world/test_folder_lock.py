"""One run at a time has a folder, and one that is dead has none."""

import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable

import pytest
from evenload.core.errors import EvenloadError
from evenload.runtime.files import LOCK
from evenload.runtime.world import folder_lock as module
from evenload.runtime.world.folder_lock import file_lock, folder_lock

OTHER = """
import fcntl, os, sys, time
file = open(sys.argv[1], "a+")
try:
    fcntl.lockf(file, (fcntl.LOCK_SH if "shared" in sys.argv else fcntl.LOCK_EX) | fcntl.LOCK_NB)
except OSError:
    print("refused", flush=True)
else:
    file.write("process 77 on elsewhere, since noon\\n")
    file.flush()
    print("held", flush=True)
if "hands over" in sys.argv:
    time.sleep(.3)
    os.unlink(sys.argv[1])
    sys.exit()
time.sleep(60)
"""
"""Another process that holds a file."""
Start = Callable[..., "tuple[subprocess.Popen[str], str]"]


@pytest.fixture
def other():
    """Another process, and whether it could lock the file of a folder."""
    started = []

    def start(folder, *words):
        lock = folder / LOCK if folder.is_dir() else folder.with_name(f".{folder.name}.lock")
        command = [sys.executable, "-S", "-c", OTHER, str(lock), *words]
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        assert started[-1].stdout is not None
        return started[-1], started[-1].stdout.readline().strip()

    yield start
    for process in started:
        process.kill()
        process.wait()


def test_a_folder_is_held_by_one_that_says_who_it_is(tmp_path, other):
    folder = tmp_path / "runs" / "kept"
    with folder_lock(folder, None):
        assert other(folder, "shared")[1] == "refused", "nobody else may have it either"
        said = (folder / LOCK).read_text()
        assert said.startswith(f"process {os.getpid()} on {socket.gethostname()}, since 20")
    assert other(folder)[1] == "held", "whoever has ended has no lock"


def test_a_second_run_is_refused_by_the_name_of_the_first(tmp_path, other, monkeypatch):
    monkeypatch.setattr(module, "WAIT_S", 0.2)
    other(tmp_path)
    with pytest.raises(EvenloadError, match="another run writes into") as caught, folder_lock(tmp_path):
        pass
    assert caught.value.found == "process 77 on elsewhere, since noon"
    assert "name another one" in caught.value.do


def test_a_run_that_was_killed_keeps_nobody_out(tmp_path, other):
    """Also where it is gone a moment later only."""
    holder, _ = other(tmp_path)
    reaper = subprocess.Popen(
        [sys.executable, "-S", "-c", f"import os, time; time.sleep(.3); os.kill({holder.pid}, 9)"]
    )
    with folder_lock(tmp_path):
        assert f"process {os.getpid()}" in (tmp_path / LOCK).read_text()
    assert holder.wait() == -signal.SIGKILL
    assert reaper.wait() == 0


def test_two_folders_are_held_or_none(tmp_path, other, monkeypatch):
    monkeypatch.setattr(module, "WAIT_S", 0.0)
    one, two = tmp_path / "one", tmp_path / "two"
    two.mkdir()
    holder, _ = other(two)
    with pytest.raises(EvenloadError, match="two"), folder_lock(one, two):
        pass
    assert other(one)[1] == "held"
    holder.kill()
    holder.wait()
    with folder_lock(two):
        time.sleep(0)


def test_where_nothing_can_be_locked_a_run_goes_on_with_a_warning(tmp_path, monkeypatch, caplog):
    (tmp_path / "file").touch()
    with caplog.at_level(logging.WARNING, "evenload"), folder_lock(tmp_path / "file" / "below"):
        assert "cannot be locked" in caplog.text
    caplog.clear()

    def refuse(*_):
        raise OSError(37, "No locks available")

    monkeypatch.setattr(module.fcntl, "lockf", refuse)
    with folder_lock(tmp_path):
        assert "cannot be locked (No locks available): a second run on it would not be noticed" in caplog.text


def test_a_file_is_held_by_one_next_to_it_which_goes_with_its_run(tmp_path, other, monkeypatch):
    out = tmp_path / "o.jsonl"
    with file_lock(out), folder_lock(tmp_path), file_lock(tmp_path / "p.jsonl"):
        assert other(out, "shared")[1] == "refused"
    assert {path.name for path in tmp_path.iterdir()} == {LOCK}
    other(out)
    monkeypatch.setattr(module, "WAIT_S", 0.2)
    with pytest.raises(EvenloadError, match=r"another run writes into .*o\.jsonl"), file_lock(out):
        pass


def test_a_lock_that_is_removed_when_its_run_ends_is_none_for_the_next(tmp_path, other):
    """It waits for the file of the first, which nobody else will meet again."""
    out = tmp_path / "o.jsonl"
    other(out, "hands over")
    with file_lock(out):
        assert other(out, "shared")[1] == "refused"


def test_no_file_of_others_is_written_through_a_link(tmp_path, caplog):
    (tmp_path / "theirs").write_text("notes")
    (tmp_path / ".o.lock").symlink_to("theirs")
    with caplog.at_level(logging.WARNING, "evenload"), file_lock(tmp_path / "o"):
        assert "cannot be locked" in caplog.text
    assert (tmp_path / ".o.lock").is_symlink()
    assert (tmp_path / "theirs").read_text() == "notes"


@pytest.mark.parametrize("content", [b"notes of somebody", b"\xff\xfe\x00", b"\0" * 9])
def test_a_file_of_that_name_that_is_no_lock_is_refused_and_stays(tmp_path, content):
    (tmp_path / LOCK).write_bytes(content)
    with pytest.raises(EvenloadError, match="is a file of something else"), folder_lock(tmp_path):
        pass
    assert (tmp_path / LOCK).read_bytes() == content
