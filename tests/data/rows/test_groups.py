"""Rows that say in a field which of them stay together, from every format that has rows."""

import pytest
from evenload.core.errors import EvenloadError
from evenload.data.sources import open_source

from ..files import jsonl, table

IDS = ["b", 7, "7", "b", "c", 7]
ROWS = [{"text": "x" * (3 + i), "of": one} for i, one in enumerate(IDS)]


def test_samples_of_one_value_are_a_group(tmp_path):
    source = open_source(jsonl(tmp_path / "a.jsonl", ROWS), max_length=None, group="of")
    assert source.groups.tolist() == [0, 1, 2, 0, 3, 1]
    assert source.report()["groups"] == 4
    again = open_source(str(tmp_path / "a.jsonl"), max_length=None, group="of")  # of the cache
    assert again.groups.tolist() == source.groups.tolist()
    assert open_source(str(tmp_path / "a.jsonl"), max_length=None).groups is None


def test_a_run_that_goes_on_notices_other_groups(tmp_path):
    prints = []
    for number, of in enumerate((None, "of", "of")):
        rows = [{**row, "of": number > 1 or row["of"]} for row in ROWS] if number > 1 else ROWS
        rows = [{**row, "of": str(row["of"])} for row in rows]
        spec = jsonl(tmp_path / f"{number}.jsonl", rows)
        prints.append(open_source(spec, max_length=None, group=of).fingerprint)
    assert len(set(prints)) == 3


@pytest.mark.parametrize("kind", ["arrow", "parquet"])
@pytest.mark.parametrize("chats", [False, True], ids=["text", "prompts"])
def test_tables_say_the_groups_that_lines_say(tmp_path, kind, chats):
    text = [{"prompt": "a", "completion": row["text"]} if chats else {"text": row["text"]} for row in ROWS]
    rows = [{**row, "of": str(one)} for row, one in zip(text, IDS, strict=True)]
    saved = open_source(table(tmp_path, kind, rows), max_length=None, group="of")
    lines = open_source(jsonl(tmp_path / "a.jsonl", rows), max_length=None, group="of")
    assert saved.groups.tolist() == lines.groups.tolist() == [0, 1, 1, 0, 2, 1]


def test_pieces_and_chats_of_a_row_are_of_its_group(tmp_path, plain_folder):
    """Long rows are split, some are left out, and a row may hold several chats."""
    spec = jsonl(tmp_path / "a.jsonl", [*ROWS, {"text": "", "of": "nobody"}, {"text": "y" * 9, "of": "c"}])
    source = open_source(spec, max_length=4, long_samples="split", group="of")
    texts = [bytes(source.tokens(i).tolist()).decode() for i in range(len(source.lengths))]
    assert list(zip(texts, source.groups.tolist(), strict=True))[-3:] == [("xxxx", 1), ("yyyy", 3), ("yyyy", 3)]
    turns = [{"role": role, "content": "name"} for role in ("system", "user", "assistant")]
    rows = [{"messages": turns * (1 + number), "of": 9 - number // 2} for number in range(3)]
    chats = open_source(jsonl(tmp_path / "b.jsonl", rows), max_length=None, tokenizer=str(plain_folder), group="of")
    assert chats.groups.tolist() == [0, 0, 0, 1, 1, 1]


def test_what_says_no_group_is_refused_by_row(tmp_path):
    with pytest.raises(EvenloadError, match=r"line 7 of .*a\.jsonl has no field 'of' that data\.group asks for"):
        open_source(jsonl(tmp_path / "a.jsonl", [*ROWS, {"text": "more"}]), max_length=None, group="of")
    for value in (None, 0.5, True, [1]):
        with pytest.raises(EvenloadError, match=r"'of' in line 1 of .* names no group"):
            open_source(jsonl(tmp_path / "b.jsonl", [{"text": "xy", "of": value}]), max_length=None, group="of")
    with pytest.raises(EvenloadError, match=r"no rows that say their group\n.*data\.group 'of'"):
        open_source("python-stdlib", max_length=None, group="of")
    with pytest.raises(EvenloadError, match="has no field 'off' that data"):
        open_source(table(tmp_path, "parquet", [{"text": "x"}]), max_length=None, group="off")
