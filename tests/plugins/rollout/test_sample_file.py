"""The files that ranks write beside the samples of a run."""

import json
import math
import os

import pytest
from evenload.core.errors import EvenloadError
from evenload.plugins.rollout.sample_file import SampleFile
from evenload.runtime.generate.request import Completion


def test_files_of_others_stay_where_a_run_takes_its_own_away(tmp_path):
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


LINE = '{"prompt": 0, "sample": 0, "ended": "end", "tokens": [5], "log_probs": [-0.5], "run": "mark"}\n'
OTHERS = {
    "text": lambda path: path.write_text("notes\n"),
    "deep": lambda path: path.write_text('{"a":' * 100_000),
    "a terabyte": lambda path: (path.touch(), os.truncate(path, 1 << 40)),
    "a pipe": os.mkfifo,
    "a device": lambda path: path.symlink_to("/dev/zero"),
    "a link": lambda path: path.symlink_to("theirs"),
    "a folder": lambda path: path.mkdir(),
}
"""What else may stand where a rank would write."""


@pytest.mark.parametrize("kind", OTHERS)
def test_what_is_no_part_of_a_run_is_refused_and_stays(tmp_path, kind):
    (tmp_path / "theirs").write_text("")
    part = tmp_path / "s.jsonl.part-1"
    OTHERS[kind](part)
    with pytest.raises(EvenloadError, match=r"s\.jsonl\.part-1"):
        SampleFile(tmp_path / "s.jsonl", "mark", str).read()
    assert {path.name for path in tmp_path.iterdir()} == {"theirs", part.name}
    assert (tmp_path / "theirs").read_text() == ""


def test_log_probabilities_and_scores_of_any_value_are_read_again(tmp_path):
    file = SampleFile(tmp_path / "s.jsonl", "mark", str)
    file.finish([Completion(0, 0, (5, 6), (-math.inf, 0.0), "end", -math.inf), Completion(1, 0, (), (), "stop", 1)])
    assert [sample[3:6] for sample in file.read()] == [((-math.inf, 0.0), "end", -math.inf), ((), "stop", 1)]


def test_a_name_that_no_rank_gives_is_no_part_and_a_line_that_was_cut_is_passed_over(tmp_path):
    file, part = SampleFile(tmp_path / "s.jsonl", "mark", str), tmp_path / "s.jsonl.part-0"
    (tmp_path / "s.jsonl.part-00").write_text("as `split -d` names its parts\n")
    for size in range(len('{"prompt": 0, "sample": 0,')):
        part.write_text(f"{LINE}{LINE[:size]}\n{LINE}")
        assert len(file.read()) == 1
    file.finish(file.read())
    assert {path.name for path in tmp_path.iterdir()} == {"s.jsonl", "s.jsonl.part-00"}


def made(*places, **more):
    return [Completion(p, s, (10 * p + s,), (-0.5,), "end")._replace(**more) for p, s in places]


def test_what_ranks_wrote_is_there_until_all_is_in_one_file(tmp_path):
    """The end of a generation is a moment in which it may die, too."""
    out, samples = tmp_path / "s.jsonl", made((0, 0), (0, 1))

    def failing(sample):
        if dies and sample == samples[1]:
            raise OSError("as if the process was killed")
        return "text"

    dies = False
    file = SampleFile(out, "mark", failing)
    for rank, sample in enumerate(samples):
        with file.adding(rank) as add:
            add(sample)
    dies = True
    with pytest.raises(Exception, match="as if the process was killed"):
        file.finish(samples)
    assert not out.exists()
    assert sorted(file.read()) == samples
    dies = False
    file.finish(samples)
    assert [path.name for path in tmp_path.iterdir()] == [out.name]


def test_samples_lie_by_prompt_and_number_and_come_back_as_they_were(tmp_path):
    """Scores of 0, too."""
    file = SampleFile(tmp_path / "s.jsonl", "mark", str)
    samples = made((2, 0), (0, 1), (10, 3), (0, 0), (10, 0), score=0.0)
    file.finish(samples)
    assert file.read() == sorted(samples)
    rows = [json.loads(line) for line in (tmp_path / "s.jsonl").read_text().splitlines()]
    places = [(row["prompt"], row["sample"], row["score"]) for row in rows]
    assert places == [(0, 0, 0.0), (0, 1, 0.0), (2, 0, 0.0), (10, 0, 0.0), (10, 3, 0.0)]


def test_a_sample_is_on_disk_when_it_was_added_and_a_torn_line_costs_that_sample_alone(tmp_path):
    out, (first, second, third) = tmp_path / "s.jsonl", made((0, 0), (0, 1), (1, 0))
    file = SampleFile(out, "mark", str)
    file.finish([first])
    with file.adding(rank=0) as add:
        add(second)
        assert sorted(SampleFile(out, "mark", str).read()) == [first, second], "of the file and of the rank"
    part = tmp_path / "s.jsonl.part-0"
    with part.open("a") as cut:
        cut.write('{"prompt": 1, "sample": 0, "tok')
    assert sorted(file.read()) == [first, second]
    with file.adding(rank=0) as add:
        add(third)
    assert sorted(file.read()) == [first, second, third]


def test_a_torn_line_is_no_sample_where_nobody_appends(tmp_path):
    """`finish` writes a file whole, so what is torn there, or of another form, is of somebody else."""
    out = tmp_path / "s.jsonl"
    SampleFile(out, "mark", str).finish(made((0, 0), (0, 1)))
    for text in (out.read_text()[:-20], LINE.replace("[5]", '"5"'), "[1]\n"):
        out.write_text(text)
        with pytest.raises(EvenloadError, match="something else than samples"):
            SampleFile(out, "mark", str).read()
        assert out.read_text() == text
