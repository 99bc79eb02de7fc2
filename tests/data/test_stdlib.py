"""Instruction pairs of the standard library."""

import json

import pytest
from evenload.core.errors import EvenloadError
from evenload.data import stdlib
from evenload.data.sources import open_source
from evenload.data.stdlib import HELD_OUT, PAIRS, pairs_as_jsonl, pairs_of

SOURCE = b'''
class One(Base, metaclass=Meta):
    """Stands
    for one.

    And more."""

    async def two(self, *args: int, **more) -> "str":
        \'\'\'Gives two.\'\'\'

    def plain(self): pass

def three(a, b=(1, 2)):
    """

    Gives three."""
    def inner():
        """Is inside."""
'''
WANTED = [
    ("class One(Base):\n", "Stands\nfor one."),
    ("async def two(self, *args: int, **more) -> 'str':\n", "Gives two."),
    ("def three(a, b=(1, 2)):\n", "Gives three."),
    ("def inner():\n", "Is inside."),
]


def test_pairs_are_signatures_and_first_paragraphs():
    assert [(pair["prompt"], pair["completion"]) for pair in pairs_of(SOURCE)] == WANTED
    assert list(pairs_of(b'def broken(:\n    """Never."""')) == []


def test_they_are_the_same_every_time_and_completions_carry_the_loss(tmp_path, monkeypatch):
    (tmp_path / "b.py").write_bytes(SOURCE)
    (tmp_path / "a.py").write_bytes(b'def first():\n    """Comes first."""')
    monkeypatch.setattr(stdlib.sysconfig, "get_path", lambda name: str(tmp_path))
    rows = [json.loads(line) for line in pairs_as_jsonl(PAIRS).read_text().splitlines()]
    assert [(row["prompt"], row["completion"]) for row in rows] == [("def first():\n", "Comes first."), *WANTED]
    source = open_source("python-docstrings", max_length=None)
    assert source.name == "python-docstrings"
    assert source.targets.tolist() == [len(row["completion"]) for row in rows]
    assert bytes(source.labels(0)[-12:].tolist()) == b"Comes first."


def test_every_tenth_module_is_held_out(tmp_path, monkeypatch):
    for number in range(21):
        (tmp_path / f"m{number:02}.py").write_text(f'def f{number}():\n    """Gives {number}."""')
    monkeypatch.setattr(stdlib.sysconfig, "get_path", lambda name: str(tmp_path))
    rows = {
        name: [json.loads(line)["prompt"] for line in pairs_as_jsonl(name).read_text().splitlines()]
        for name in (PAIRS, HELD_OUT)
    }
    assert rows[HELD_OUT] == ["def f9():\n", "def f19():\n"]
    assert len(rows[PAIRS]) == 19
    assert not set(rows[PAIRS]) & set(rows[HELD_OUT])


def test_pairs_of_one_package_and_every_tenth_of_them_held_out(tmp_path, monkeypatch):
    (tmp_path / "web").mkdir()
    for number in range(11):
        text = "".join(f'def f{number}_{k}():\n    """Gives {k}."""\n' for k in range(3))
        (tmp_path / "web" / f"m{number:02}.py").write_text(text)
    (tmp_path / "other.py").write_bytes(SOURCE)
    (tmp_path / "silent.py").write_text("")
    monkeypatch.setattr(stdlib.sysconfig, "get_path", lambda name: str(tmp_path))

    def prompts(spec):
        return [json.loads(line)["prompt"] for line in pairs_as_jsonl(spec).read_text().splitlines()]

    trained, held_out = prompts(f"{PAIRS}/web"), prompts(f"{HELD_OUT}/web")
    assert held_out == ["def f3_0():\n", "def f6_1():\n", "def f9_2():\n"]
    assert len(trained) == 30
    assert not set(trained) & set(held_out)
    assert len(prompts(f"{PAIRS}/other")) == 4
    assert open_source(f"{PAIRS}/web", max_length=None).name == f"{PAIRS}/web"
    with pytest.raises(EvenloadError, match="did you mean 'other'"):
        pairs_as_jsonl(f"{PAIRS}/othr")
    for spec in (f"{PAIRS}/silent", f"{HELD_OUT}/other"):
        with pytest.raises(EvenloadError, match="no pairs"):
            pairs_as_jsonl(spec)
