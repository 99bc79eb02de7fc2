"""The files that ranks write beside the samples of a run."""

from __future__ import annotations

from pathlib import Path

from evenload.runtime.generate.request import Completion
from evenload.training.run.sample_file import SampleFile


def test_files_of_others_stay_where_a_run_takes_its_own_away(tmp_path: Path) -> None:
    out, others = tmp_path / "s.jsonl", ("s.jsonl.part-notes.txt", "s.jsonl.part-", "s.jsonl.part-0.bak", "s.jsonl2")
    for name in others:
        (tmp_path / name).write_text("of somebody else")
    file, sample = SampleFile(out, "mark", str), Completion(0, 0, (5, 6), (-0.5, -0.25), "end")
    with file.adding(rank=10) as add:
        add(sample)
    assert file.read() == [sample]
    file.finish([sample])
    assert {path.name for path in tmp_path.iterdir()} == {out.name, *others}
    assert all((tmp_path / name).read_text() == "of somebody else" for name in others)
    assert file.read() == [sample]
