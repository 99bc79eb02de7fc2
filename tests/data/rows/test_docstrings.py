"""Instruction pairs of the standard library."""

import json

from evenload.data import stdlib
from evenload.data.rows.docstrings import HELD_OUT, NAME, as_jsonl, pairs_of
from evenload.data.sources import open_source

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
PAIRS = [
    ("class One(Base):\n", "Stands\nfor one."),
    ("async def two(self, *args: int, **more) -> 'str':\n", "Gives two."),
    ("def three(a, b=(1, 2)):\n", "Gives three."),
    ("def inner():\n", "Is inside."),
]


def test_pairs_are_signatures_and_first_paragraphs():
    assert list(pairs_of(SOURCE)) == PAIRS
    assert list(pairs_of(b'def broken(:\n    """Never."""')) == []


def test_they_are_the_same_every_time_and_completions_carry_the_loss(tmp_path, monkeypatch):
    (tmp_path / "b.py").write_bytes(SOURCE)
    (tmp_path / "a.py").write_bytes(b'def first():\n    """Comes first."""')
    monkeypatch.setattr(stdlib.sysconfig, "get_path", lambda name: str(tmp_path))
    rows = [json.loads(line) for line in as_jsonl(NAME).read_text().splitlines()]
    assert [(row["prompt"], row["completion"]) for row in rows] == [("def first():\n", "Comes first."), *PAIRS]
    source = open_source("python-docstrings", max_length=None)
    assert source.name == "python-docstrings"
    assert source.targets.tolist() == [len(row["completion"]) for row in rows]
    assert bytes(source.labels(0)[-12:].tolist()) == b"Comes first."


def test_every_tenth_module_is_held_out(tmp_path, monkeypatch):
    for number in range(21):
        (tmp_path / f"m{number:02}.py").write_text(f'def f{number}():\n    """Gives {number}."""')
    monkeypatch.setattr(stdlib.sysconfig, "get_path", lambda name: str(tmp_path))
    rows = {
        name: [json.loads(line)["prompt"] for line in as_jsonl(name).read_text().splitlines()]
        for name in (NAME, HELD_OUT)
    }
    assert rows[HELD_OUT] == ["def f9():\n", "def f19():\n"]
    assert len(rows[NAME]) == 19
    assert not set(rows[NAME]) & set(rows[HELD_OUT])
