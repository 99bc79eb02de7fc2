import logging
import multiprocessing
import os
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from evenload.core.errors import EvenloadError
from evenload.data import cache as module
from evenload.data.cache import cache_dir, cached_arrays, cached_file, cached_folder, key_of


def arrays(calls):
    def build():
        calls.append(1)
        return {"lengths": np.arange(5)}

    return build


def test_arrays_are_built_once(cache):
    calls = []
    for _ in range(3):
        assert cached_arrays("entry", arrays(calls))["lengths"].tolist() == [0, 1, 2, 3, 4]
    assert len(calls) == 1
    assert [path.name for path in cache.iterdir()] == ["entry.npz"]


@pytest.mark.parametrize("damage", [b"", b"garbage", None])
def test_a_damaged_entry_is_made_again(cache, damage, caplog):
    calls = []
    cached_arrays("entry", arrays(calls))
    content = (cache / "entry.npz").read_bytes()
    (cache / "entry.npz").write_bytes(content[:-30] if damage is None else damage)
    with caplog.at_level(logging.WARNING):
        assert cached_arrays("entry", arrays(calls))["lengths"].tolist() == [0, 1, 2, 3, 4]
    assert len(calls) == 2
    assert "damaged" in caplog.text


def test_a_failed_build_leaves_nothing(cache):
    def fail():
        raise EvenloadError("bad data")

    with pytest.raises(EvenloadError, match="bad data"):
        cached_arrays("entry", fail)
    with pytest.raises(EvenloadError, match="bad data"):
        cached_file("entry", ".arrow", lambda path: fail())
    assert list(cache.iterdir()) == []


def test_a_cache_that_cannot_be_written_costs_arrays_only_time(tmp_path, monkeypatch, caplog):
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("EVENLOAD_CACHE", str(tmp_path / "file"))
    calls = []
    with caplog.at_level(logging.WARNING):
        assert len(cached_arrays("entry", arrays(calls))["lengths"]) == 5
    assert len(calls) == 1
    assert "read again next time" in caplog.text
    with pytest.raises(EvenloadError, match="EVENLOAD_CACHE"):
        cached_file("entry", ".arrow", lambda path: None)


def test_a_full_disk_is_told(cache):
    def write(path):
        path.write_text("half")
        raise OSError(28, "No space left on device")

    with pytest.raises(EvenloadError, match="No space left"):
        cached_file("entry", ".arrow", write)
    assert list(cache.iterdir()) == []


def test_the_key_follows_the_file_and_what_is_made_of_it(tmp_path):
    path = tmp_path / "data"
    path.write_text("a")
    keys = {key_of([path]), key_of([path], "bytes"), key_of([path, path])}
    path.write_text("ab")
    keys.add(key_of([path]))
    os.utime(path, ns=(1, 1))
    keys.add(key_of([path]))
    assert len(keys) == 5
    assert key_of([path], "x") == key_of([path], "x")


def test_the_cache_is_beside_the_others_of_the_user(monkeypatch):
    monkeypatch.delenv("EVENLOAD_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert cache_dir() == Path("/somewhere/evenload")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_dir() == Path.home() / ".cache" / "evenload"


def write_until_killed(began):
    def write(aside):
        (aside / "half").write_text("half of it")
        Path(began).touch()
        time.sleep(60)

    cached_folder("shared", write)


@pytest.mark.slow
def test_a_writer_that_is_killed_blocks_nobody_and_leaves_nothing(cache, tmp_path):
    """One process writes and another waits for it, as hosts with a shared folder do; then the writer is killed."""
    began = tmp_path / "began"
    writer = multiprocessing.get_context("fork").Process(target=write_until_killed, args=(str(began),))
    writer.start()
    while not began.exists():
        time.sleep(0.01)
    waiting = threading.Thread(target=cached_folder, args=("shared", lambda aside: (aside / "whole").touch()))
    waiting.start()
    time.sleep(0.3)
    assert not (cache / "shared").exists()
    writer.kill()
    waiting.join(20)
    writer.join()
    assert not waiting.is_alive()
    assert [path.name for path in cache.iterdir()] == ["shared"]
    assert [path.name for path in (cache / "shared").iterdir()] == ["whole"]


def test_without_locks_an_entry_that_another_process_writes_stays_its_own(cache, monkeypatch):
    """As on file systems that know none: an entry may be made twice, and none is taken away under its writer."""

    def refuse(descriptor, operation):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(module.fcntl, "flock", refuse)
    cache.mkdir(exist_ok=True)
    (cache / "entryother.part").write_text("of another process")
    assert cached_arrays("entry", arrays([]))["lengths"].tolist() == [0, 1, 2, 3, 4]
    assert {path.name for path in cache.iterdir()} == {"entry.npz", "entryother.part"}


@pytest.mark.parametrize(("after_s", "lines"), [(0.01, 1), (30.0, 0)])
def test_who_waits_a_moment_for_another_says_nothing_of_it(cache, monkeypatch, caplog, after_s, lines):
    """Ranks that open the same data do so in every run."""
    monkeypatch.setattr(module, "_NEWS_S", after_s)
    caplog.set_level(logging.INFO)
    entered = threading.Event()

    def slow():
        entered.set()
        while lines and not caplog.records:
            time.sleep(0.01)
        time.sleep(0.05)
        return {"a": np.arange(3)}

    first = threading.Thread(target=cached_arrays, args=("key", slow))
    first.start()
    entered.wait()
    assert cached_arrays("key", dict)["a"].tolist() == [0, 1, 2]
    first.join()
    assert len([record for record in caplog.records if "another process is preparing" in record.getMessage()]) == lines
