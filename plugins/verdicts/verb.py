"""The command line of `evenload compare`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from ...commands.verbs.shared import AsJson, show
from ...core.errors import refuse_first, shown
from ...core.input.bounds import REPEATS, number_of_word

Samples = Annotated[Path, Argument(help="Samples, as `evenload generate` writes them.")]


def compare(
    a: Samples,
    b: Samples,
    judge: Annotated[str | None, Option("--judge", metavar="MODULE:NAME", help="judge(prompt, first, second).")] = None,
    judge_command: Annotated[
        str | None, Option("--judge-command", metavar="CMD", help="A program: JSON lines in and out.")
    ] = None,
    prompts: Annotated[Path | None, Option("--prompts", metavar="FILE", help="What numbers of prompts mean.")] = None,
    repeats: Annotated[str, Option("--repeats", metavar="N", help="How often each question is asked.")] = "1",
    limit: Annotated[float, Option("--limit", metavar="SECONDS", help="For all answers of the judge.")] = 3600.0,
    people: Annotated[
        Path | None, Option("--people", metavar="FILE", help="Verdicts of people, who correct it.")
    ] = None,
    for_people: Annotated[
        Path | None, Option("--for-people", metavar="FILE", help="Write pairs for people to judge, and end.")
    ] = None,
    share: Annotated[float, Option("--share", help="Of the prompts that --for-people writes.")] = 0.1,
    report: Annotated[Path | None, Option("--report", metavar="FILE", help="Write a page to read (HTML).")] = None,
    as_json: AsJson = False,
) -> None:
    """Which of two files of samples is better: both orders, equal style, people's verdicts; or "no verdict"."""
    from ...training.files import refuse_path
    from .compare import compare as work
    from .judges import by_command, by_function
    from .pairs import read_pairs, read_people, write_sheet
    from .table import sheet_table, table, write_page

    asks = (judge is not None) + (judge_command is not None) + (for_people is not None)
    do = "give one of --judge module:name, --judge-command CMD and --for-people FILE"
    number = number_of_word(repeats, "--repeats", REPEATS)
    refuse_first(
        (asks != 1, "compare asks one judge, or prepares one file for people", f"{asks} of them", do),
        (not 0 < share <= 1, "--share is no share of the prompts", shown(share), "give more than 0, at most 1"),
    )
    for option, path, suffixes in ("--report", report, (".html", ".htm")), ("--for-people", for_people, (".jsonl",)):
        if path is not None:
            refuse_path(path, option, suffixes)
    pairs = read_pairs(a, b, prompts)
    if for_people is not None:
        written = write_sheet(for_people, pairs, share)
        return show(
            "compare", {"for_people": str(for_people), "prompts": written, "share": share}, as_json, sheet_table
        )
    by_people = read_people(people, pairs) if people else None
    asked = by_function(judge, limit) if judge is not None else by_command(judge_command or "", limit)
    result = {"a": str(a), "b": str(b), **work(pairs, asked, number, by_people)}
    if report is not None:
        write_page(report, result)
    show("compare", result, as_json, table)
