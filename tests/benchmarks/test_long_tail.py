"""Samples of given lengths have those lengths."""

from __future__ import annotations

import json


def test_samples_are_as_long_as_the_file_says(ran, tmp_path):
    (tmp_path / "lengths.txt").write_text("5\n900\n1\n17\n2\n33\n")
    ran("long_tail.py", "--lengths", "lengths.txt", "--out", "x.jsonl", "--longest", 100, "--count", 3, folder=tmp_path)
    rows = [json.loads(line)["text"] for line in (tmp_path / "x.jsonl").read_text().splitlines()]
    assert [len(text.encode()) for text in rows] == [5, 17, 2]
