"""The folder of tenants: files count when they stand still, and what is wrong with one stands beside it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from evenload.commands.tenants.arrivals.folder import Folder
from evenload.core.errors import EvenloadError

TEXT = "data: {source: a.jsonl}\n"


def names(folder: Folder) -> tuple[list[str], list[str]]:
    news = folder.look()
    return [came.name for came in news.came], list(news.gone)


def test_those_that_are_there_at_the_start_come_at_once_in_the_order_of_names(tmp_path: Path) -> None:
    for name in ("b", "a", "c.d"):
        (tmp_path / f"{name}.yaml").write_text(TEXT)
    (tmp_path / ".hidden.yaml").write_text(TEXT)
    (tmp_path / "notes.txt").write_text("none of it")
    folder = Folder(tmp_path)
    assert folder.names == ["a", "b", "c.d"]
    assert names(folder) == (["a", "b", "c.d"], [])
    assert not folder.look()


def test_a_file_counts_when_two_looks_find_it_alike(tmp_path: Path) -> None:
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


def test_what_is_wrong_stands_beside_the_file_until_it_is_mended_or_gone(tmp_path: Path) -> None:
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


def test_a_file_that_is_no_text_or_cannot_be_read_comes_with_its_error(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "b.yaml").mkdir()
    os.symlink(tmp_path / "nowhere", tmp_path / "c.yaml")
    errors = {came.name: str(came.error) for came in Folder(tmp_path).look().came}
    assert sorted(errors) == ["a", "b"]
    assert "no UTF-8" in errors["a"]
    assert "a folder" in errors["b"]


def test_the_file_stop_is_news_once(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    (tmp_path / "stop").touch()
    assert folder.look().stop
    assert not folder.look().stop
    assert not (tmp_path / "stop").exists()


def test_a_folder_that_is_not_there_is_refused_and_one_that_goes_away_is_not_read_as_empty(tmp_path: Path) -> None:
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


def test_a_file_of_another_ending_is_said_to_be_none(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "a.yml").write_text(TEXT)
    folder = Folder(tmp_path)
    assert not folder.look().came
    folder.look()
    assert [record.getMessage() for record in caplog.records] == ["a.yml is no tenant: a tenant's file ends in .yaml"]
