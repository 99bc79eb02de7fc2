"""The folder of tenants: files count when they stand still, and what is wrong with one stands beside it."""

import os

import pytest
from evenload.core.errors import EvenloadError
from evenload.plugins.lora.arrivals import folder as module
from evenload.plugins.lora.arrivals.folder import Folder

TEXT = "data: {source: a.jsonl}\n"


def names(folder):
    news = folder.look()
    return [came.name for came in news.came], list(news.gone)


def test_those_that_are_there_at_the_start_come_at_once_in_the_order_of_names(tmp_path):
    for name in ("b", "a", "c.d"):
        (tmp_path / f"{name}.yaml").write_text(TEXT)
    (tmp_path / ".hidden.yaml").write_text(TEXT)
    (tmp_path / "notes.txt").write_text("none of it")
    folder = Folder(tmp_path)
    assert folder.names == ["a", "b", "c.d"]
    assert names(folder) == (["a", "b", "c.d"], [])
    assert not folder.look()


def test_a_file_counts_when_two_looks_find_it_alike(tmp_path):
    folder, path = Folder(tmp_path), tmp_path / "a.yaml"
    assert not folder.look()
    path.write_text(TEXT[:5])
    assert not folder.look()
    path.write_text(TEXT)
    assert not folder.look()
    news = folder.look()
    assert [(came.name, came.text, came.error) for came in news.came] == [("a", TEXT, None)]
    path.write_text(TEXT + "train: {steps: 3}\n")
    assert not folder.look()
    assert names(folder) == (["a"], [])
    path.unlink()
    assert names(folder) == ([], ["a"])
    assert not folder.look()


def test_what_is_wrong_stands_beside_the_file_until_it_is_mended_or_gone(tmp_path):
    folder, path, error = Folder(tmp_path), tmp_path / "a.yaml", tmp_path / "a.error"
    path.write_text(TEXT)
    folder.look()
    folder.complain("a", EvenloadError("this is wrong", "x", "mend it"))
    assert error.read_text() == "this is wrong\n  found: x\n  do: mend it\n"
    folder.clear("a")
    assert not error.exists()
    folder.complain("a", EvenloadError("this is wrong"))
    path.unlink()
    folder.look()
    assert not error.exists()


def test_a_file_that_is_no_text_or_cannot_be_read_comes_with_its_error(tmp_path):
    (tmp_path / "a.yaml").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "b.yaml").mkdir()
    os.symlink(tmp_path / "nowhere", tmp_path / "c.yaml")
    errors = {came.name: str(came.error) for came in Folder(tmp_path).look().came}
    assert sorted(errors) == ["a", "b"]
    assert "no UTF-8" in errors["a"]
    assert "a folder" in errors["b"]


def test_the_file_stop_is_news_once(tmp_path):
    folder = Folder(tmp_path)
    (tmp_path / "stop").touch()
    assert folder.look().stop
    assert not folder.look().stop
    assert not (tmp_path / "stop").exists()


def test_a_folder_of_the_name_stop_ends_nothing_and_is_said_once(tmp_path, caplog):
    folder = Folder(tmp_path)
    (tmp_path / "stop").mkdir()
    (tmp_path / "a.yaml").write_text(TEXT)
    news = [folder.look() for _ in range(3)]
    assert [came.name for came in news[0].came] == ["a"]
    assert not any(one.stop for one in news)
    assert len([record for record in caplog.records if "stop is a folder" in record.getMessage()]) == 1


def test_a_link_in_a_circle_is_one_file_that_cannot_be_read(tmp_path):
    os.symlink("loop.yaml", tmp_path / "loop.yaml")
    (tmp_path / "a.yaml").write_text(TEXT)
    folder = Folder(tmp_path)
    errors = {came.name: str(came.error) for came in folder.look().came}
    assert errors["a"] == "None"
    assert "cannot be read" in errors["loop"]
    assert not folder.look()
    (tmp_path / "loop.yaml").unlink()
    assert names(folder) == ([], ["loop"])


def test_what_is_wrong_is_written_in_place_of_a_pipe_or_a_link(tmp_path):
    (tmp_path / "a.yaml").write_text(TEXT)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_text("of somebody else")
    os.symlink(elsewhere, tmp_path / "a.error")
    os.mkfifo(tmp_path / "b.error")
    (tmp_path / "c.error").mkdir()
    for name in "abc":
        Folder(tmp_path).complain(name, EvenloadError("this is wrong"))
    assert [(tmp_path / f"{name}.error").read_text() for name in "ab"] == ["this is wrong\n"] * 2
    assert elsewhere.read_text() == "of somebody else"


def test_files_that_come_all_at_once_come_in_parts_and_none_is_lost(tmp_path, monkeypatch):
    """With a step in between; but for those of the start, whose tenants a checkpoint may have."""
    monkeypatch.setattr(module, "_QUICK_S", 60.0)
    for number in range(120):
        (tmp_path / f"a{number}.yaml").write_text(TEXT)
    folder = Folder(tmp_path)
    assert len(folder.look().came) == 120
    for number in range(120):
        (tmp_path / f"b{number}.yaml").write_text(TEXT)
    came = [names(folder)[0] for _ in range(7)]
    assert [len(part) for part in came] == [0, 50, 0, 50, 0, 20, 0]
    assert sorted(name for part in came for name in part) == sorted(f"b{number}" for number in range(120))


def test_a_long_look_is_followed_by_a_rest_in_which_stop_is_seen(tmp_path, monkeypatch):
    """A look of 0.1 CPU seconds is followed by twenty seconds without one, two where files come; short ones by none."""
    clock, cost = [100.0], [0.1]
    looks = []

    class Time:
        monotonic = staticmethod(lambda: clock[0])
        thread_time = staticmethod(lambda: len(looks) * cost[0])

    monkeypatch.setattr(module, "time", Time)
    stamps = Folder._stamps
    monkeypatch.setattr(Folder, "_stamps", lambda self: looks.append(clock[0]) or stamps(self))
    folder = Folder(tmp_path)
    for _ in range(100):
        folder.look()
        clock[0] += 0.1
    assert len(looks) == 1
    (tmp_path / "a.yaml").write_text(TEXT)
    came = []
    for _ in range(60):
        came += [one.name for one in folder.look().came]
        clock[0] += 0.1
    assert came == ["a"]
    (tmp_path / "stop").touch()
    folder.look()
    (tmp_path / "stop").touch()
    assert folder.look().stop
    cost[0], count = 0.001, len(looks)
    for _ in range(40):
        folder.look()
        clock[0] += 0.1
    assert len(looks) > count + 15


def test_a_folder_that_is_not_there_is_refused_and_one_that_goes_away_is_not_read_as_empty(tmp_path):
    with pytest.raises(EvenloadError, match="cannot be read"):
        _ = Folder(tmp_path / "none").names
    inner = tmp_path / "inner"
    inner.mkdir()
    (inner / "a.yaml").write_text(TEXT)
    folder = Folder(inner)
    assert names(folder) == (["a"], [])
    inner.rename(tmp_path / "away")
    assert not folder.look()
    (tmp_path / "away").rename(inner)
    assert not folder.look()
