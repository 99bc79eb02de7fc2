"""`evenload compare` on files: judges that are functions and commands, people's sheets, and all that can be wrong."""

import json
import shlex
import sys
import time
from pathlib import Path

import pytest
from evenload.core.errors import EvenloadError
from evenload.plugins.verdicts.judges import Question, by_command, preference
from evenload.plugins.verdicts.pairs import read_pairs, read_people, write_sheet
from harness.cases import only_full
from harness.commands import command

JUDGES = """
import sys
ANSWERS = 0
def better(prompt, first, second):
    print("judging", prompt)
    good = "good" in first, "good" in second
    return "tie" if good[0] == good[1] else "first" if good[0] else 0
def raising(prompt, first, second):
    raise KeyError("no such key")
def leaving(prompt, first, second):
    sys.exit(0)
def nan(prompt, first, second):
    return float("nan")
def high(prompt, first, second):
    return 5
def none(prompt, first, second):
    pass
def same(prompt, first, second):
    return "first"
"""
COMMAND = """
import json, sys
for line in sys.stdin:
    row = json.loads(line)
    print(json.dumps(%s))
"""


FAST = shlex.join(
    [sys.executable, "-S", "-c", COMMAND % "0.5 + 0.5 * ('good' in row['first']) - 0.5 * ('good' in row['second'])"]
)
"""The judge `better` as a command."""


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder with samples of ten prompts: A is better in eight, and nowhere longer than B."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "judges_here", raising=False)
    (tmp_path / "judges_here.py").write_text(JUDGES)
    for name, goods in ("a", range(2, 10)), ("b", range(0, 1)):
        rows = [{"prompt": n, "sample": 0, "text": f"{'good' if n in goods else 'poor'} {n}"} for n in range(10)]
        write(tmp_path / f"{name}.jsonl", rows)
    write(tmp_path / "prompts.jsonl", [{"prompt": f"question {n}"} for n in range(10)])
    return tmp_path


def said(place, *words):
    """What `evenload compare a.jsonl b.jsonl --json` prints."""
    done = command(place, "compare", "a.jsonl", "b.jsonl", *words, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def refused(place, *words):
    done = command(place, "compare", *words)
    assert done.returncode == 2, done.stdout
    return done.stderr


def test_a_function_judges_and_sees_the_prompts(place):
    result = said(
        place, "--judge", "judges_here:better", "--prompts", "prompts.jsonl", "--report", "r.html"
    )  # it prints
    assert (result["verdict"], result["prompts"], result["calls"]) == ("A", 10, 18)
    assert result["sign_test"] == {"wins": 8, "losses": 1, "ties": 1, "p": pytest.approx(20 / 512)}
    assert result["judge"]["flips"] == 0
    assert (result["a"], result["b"]) == ("a.jsonl", "b.jsonl")
    page = (place / "r.html").read_text()
    assert page.count("<tr>") == 8 + 7
    assert "85.0 %" in page
    assert "http" not in page


def test_a_command_judges(place):
    (place / "judge.py").write_text(COMMAND % '"first" if row["first"].startswith("good") else "second"')
    result = said(place, "--judge-command", f"{shlex.quote(sys.executable)} judge.py", "--repeats", "2")
    assert (result["calls"], result["judge"]["repeats_differ"]) == (36, 0.0)
    assert result["both_orders"]["rate"] == pytest.approx((8 + 0 + 0.5) / 10)


def test_a_table_has_the_verdict_and_every_row(place):
    done = command(place, "compare", "a.jsonl", "b.jsonl", "--judge-command", FAST)
    assert done.stdout.rstrip().splitlines()[-1].startswith("A: at equal style A wins 85.0 %")
    for row in ("one order", "both orders", "within 10 words", "at equal length", "corrected by people", "sign test"):
        assert row in done.stdout


def test_people_judge_blindly_and_correct_the_judge(place):
    """A sheet has every pair of the drawn prompts and names neither file; its verdicts find their pairs again."""
    many = [{"prompt": f"p{n}", "text": f"good {n} {s}"} for n in range(60) for s in range(2)]
    write(place / "a.jsonl", many)
    write(place / "b.jsonl", [{**row, "text": row["text"].replace("good", "poor") + " too" * 4} for row in many])
    result = said(place, "--for-people", "sheet.jsonl", "--share", "0.5")
    rows = [json.loads(line) for line in (place / "sheet.jsonl").read_text().splitlines()]
    assert 15 < result["prompts"] < 45
    assert len(rows) == 2 * result["prompts"]
    assert {row["verdict"] for row in rows} == {None}
    firsts = sum(row["first"].startswith("good") for row in rows)
    assert 0.2 * len(rows) < firsts < 0.8 * len(rows)
    for number, row in enumerate(rows):
        poor = "second" if row["first"].startswith("good") else "first"
        row["verdict"] = "tie" if number < 4 else poor
    write(place / "sheet.jsonl", rows)
    result = said(place, "--judge-command", FAST, "--people", "sheet.jsonl")
    assert result["both_orders"]["rate"] == 1.0
    assert result["people"]["rate"] == pytest.approx(2 * 0.5 / (len(rows) / 2))
    assert result["verdict"] == "B"
    shown = command(place, "compare", "a.jsonl", "b.jsonl", "--judge-command", FAST, "--people", "sheet.jsonl")
    assert "people saw none of with probability" in " ".join(shown.stdout.split())


def test_the_draw_of_prompts_for_people_knows_no_text(place):
    pairs = read_pairs(place / "a.jsonl", place / "b.jsonl")
    turned = pairs._replace(texts=[(b + " more", a) for a, b in pairs.texts])
    numbers = []
    for each in pairs, turned:
        write_sheet(place / "sheet.jsonl", each, 0.6)
        numbers.append([json.loads(line)["prompt"] for line in (place / "sheet.jsonl").read_text().splitlines()])
    assert numbers[0] == numbers[1]
    assert 2 <= len(numbers[0]) < 10


def test_verdicts_of_several_people_on_a_pair_are_averaged(place):
    pairs = read_pairs(place / "a.jsonl", place / "b.jsonl")
    a, b = pairs.texts[3]
    rows = [
        {"prompt": 3, "first": a, "second": b, "verdict": "first"},
        {"prompt": 3, "first": b, "second": a, "verdict": 0.75},
    ]
    places, values = read_people(write(place / "people.jsonl", rows), pairs)
    assert (places.tolist(), values.tolist()) == ([3], [0.625])


def test_samples_are_paired_in_their_order_and_none_is_dropped_silently(place):
    write(place / "a.jsonl", [{"prompt": [1], "text": "x"}, {"prompt": {"b": 1, "a": 2}, "text": "y"}])
    rows = [{"prompt": {"a": 2, "b": 1}, "text": "z"}, {"prompt": [1], "text": "v"}, {"prompt": [1], "text": "w"}]
    pairs = read_pairs(place / "a.jsonl", write(place / "b.jsonl", rows))
    assert (pairs.prompts, pairs.texts, pairs.left_out) == ([[1], {"a": 2, "b": 1}], [("x", "v"), ("y", "z")], 1)


@pytest.mark.parametrize(
    ("judge", "expected"),
    [
        ("judges_here:raising", ["ended with exit code 1", "0 of 18 answers"]),
        only_full("judges_here:leaving", ["fewer answers than it was asked", "0 of 18 answers"]),
        only_full("judges_here:nan", ["answer 1 of the judge judges_here:nan has no verdict", "found: nan"]),
        only_full("judges_here:high", ["has no verdict", "found: 5", "a number from 0 to 1"]),
        only_full("judges_here:none", ["has no verdict", "found: None"]),
        only_full("judges_here:same", ["says the same of every pair"]),
        only_full("judges_here:nobody", ["ended with exit code 1", "--judge cannot be imported"]),
        only_full("no_module:f", ["--judge cannot be imported"]),
        only_full("judges_here:JUDGES", ["--judge cannot be imported"]),
        only_full("judges_here:ANSWERS", ["--judge names no function"]),
    ],
)
def test_a_judge_that_is_wrong_is_named(place, judge, expected):
    error = refused(place, "a.jsonl", "b.jsonl", "--judge", judge)
    assert not [words for words in expected if words not in error], error


def test_a_judge_that_hangs_is_ended_with_all_that_it_started(place):
    judge = "sh -c 'for n in 1 2 3; do echo tie; done; sleep 600 & echo $! > sleeping; sleep 600'"
    with pytest.raises(EvenloadError, match="has not ended in 1 s") as caught:
        by_command(judge, 1.0)([Question(n, "a", "b") for n in range(8)])
    assert caught.value.found == "3 of 8 answers"
    number = (place / "sleeping").read_text().strip()
    for _ in range(100):  # the kernel ends it when it has a moment
        try:
            state = Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            state = "gone"
        if state in ("Z", "X", "gone"):
            return
        time.sleep(0.1)
    raise AssertionError("what the judge started goes on")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], "asks one judge"),
        (["--judge", "a:b", "--judge-command", "c"], "asks one judge"),
        (["--judge", "a:b", "--for-people", "x.jsonl"], "asks one judge"),
        (["--judge-command", "'"], "--judge-command is no command"),
        (["--judge-command", " "], "--judge-command is no command"),
        (["--judge-command", "/nowhere/judge"], "the judge cannot be started"),
        (["--judge-command", "cat"], "has no verdict"),
        (["--judge-command", "true"], "fewer answers than it was asked"),
        (["--judge-command", "yes tie"], "more answers than it was asked"),
        (["--judge-command", "sleep 60", "--limit", "0.2"], "has not ended in 0.2 s"),
        (["--judge-command", "sh -c 'exec >&-; sleep 60'", "--limit", "0.2"], "has not ended in 0.2 s"),
        (["--judge", "a:b", "--limit", "nan"], "--limit is no time"),
        (["--judge", "a:b", "--limit", "0"], "--limit is no time"),
        (["--judge", "a:b", "--repeats", "0"], "--repeats"),
        (["--for-people", "x.jsonl", "--share", "0"], "--share is no share"),
        (["--for-people", "x.jsonl", "--share", "nan"], "--share is no share"),
        (["--for-people", "x.jsonl", "--share", "1e-9"], "fewer than two prompts"),
        (["--for-people", "none/x.jsonl"], "no folder for --for-people"),
        (["--judge", "judges_here:better", "--report", "x.txt"], "--report writes another kind of file"),
        (["--judge", "judges_here:better", "--people", "a.jsonl"], "is of none of the pairs"),
        (["--judge", "judges_here:better", "--people", "none.jsonl"], "cannot be read"),
        (["--judge", "judges_here:better", "--prompts", "few.jsonl"], "few.jsonl does not have a prompt"),
    ],
)
def test_words_that_cannot_be_are_refused(place, words, expected):
    write(place / "few.jsonl", [{"prompt": "only one"}])
    assert expected in refused(place, "a.jsonl", "b.jsonl", *words)
    assert not (place / "x.jsonl").exists()


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([{"prompt": n, "text": "x"} for n in range(1, 11)], "has other prompts"),
        ([{"prompt": n, "text": "x"} for n in range(9)], "1 of them are not in b.jsonl, such as 9"),
        ([{"prompt": 0, "tokens": [1]}], "line 1 of b.jsonl is no sample"),
        ([{"prompt": 0, "text": 7}], "line 1 of b.jsonl is no sample"),
        ([[]], "line 1 of b.jsonl is not a JSON object"),
    ],
)
def test_files_of_other_things_are_refused(place, rows, expected):
    write(place / "b.jsonl", rows)
    assert expected in refused(place, "a.jsonl", "b.jsonl", "--judge", "judges_here:better")


def test_fewer_than_two_prompts_are_refused(place):
    for name in "a.jsonl", "b.jsonl":
        write(place / name, [{"prompt": 0, "text": name}])
    assert "needs two prompts" in refused(place, "a.jsonl", "b.jsonl", "--judge", "judges_here:better")


def test_nothing_in_data_names_code(place):
    """Rows that name judges, functions and commands of all sorts are samples like others."""
    names = dict.fromkeys(("judge", "judge_command", "score", "function", "command", "people"), "sabotage:run")
    (place / "sabotage.py").write_text("open('ran', 'w').close()\ndef run(*_): open('ran', 'w').close()")
    for name in "a", "b":
        lines = (place / f"{name}.jsonl").read_text().splitlines()
        write(place / f"{name}.jsonl", [{**json.loads(line), **names} for line in lines])
    write(place / "prompts.jsonl", [{"prompt": f"{{sabotage:run}} $(touch ran) {n}", **names} for n in range(10)])
    assert said(place, "--judge-command", FAST, "--prompts", "prompts.jsonl")["verdict"] == "A"
    assert said(place, "--judge", "judges_here:better", "--prompts", "prompts.jsonl")["prompts"] == 10
    assert not (place / "ran").exists()


@pytest.mark.parametrize("answer", [True, "First", "", 1.0001, -0.1, float("nan"), None, [1], {"verdict": 1}])
def test_what_is_no_verdict_is_refused(answer):
    with pytest.raises(EvenloadError, match="answer 3 has no verdict"):
        preference(answer, "answer 3")


def test_verdicts_are_numbers():
    assert [preference(answer, "") for answer in ("first", "tie", "second", 0, 0.25, 1)] == [1, 0.5, 0, 0, 0.25, 1]


def test_a_judge_may_answer_in_words_without_quotes():
    judge = by_command("sh -c 'while read line; do echo second; done'", 30.0)
    assert judge([Question("p", "a", "b")] * 3) == [0.0] * 3
