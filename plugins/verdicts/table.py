"""What `compare` shows: the rows of its result, for a terminal and for a page of their own."""

from __future__ import annotations

from html import escape
from pathlib import Path

from rich.console import Group

from ...commands.tables.show import Result, grid, plain
from ...core.input.format import percent
from ...training.files import whole
from .compare import CLOSE, MISSED

HEAD = "A against B", "A wins", "95 %", "prompts"
_PAGE = """<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title>
<style>body{{font:15px/1.5 system-ui,sans-serif;max-width:60em;margin:2em auto;padding:0 1em}}
table{{border-collapse:collapse}}td,th{{padding:.3em .8em;text-align:left;border-bottom:1px solid #8884}}
p{{font-size:1.2em}}:root{{color-scheme:light dark}}</style>
<h1>{title}</h1><p><b>{verdict}</b>: {says}</p><table>{rates}</table><h2>The judge</h2><table>{judge}</table></html>
"""
_BAR = (
    '<svg width="204" height="16" role="img"><path d="M102 0v16M2 8h200" stroke="currentColor" opacity=".3"/>'
    '<path d="M{low:.1f} 8H{high:.1f}" stroke="currentColor" stroke-width="2"/><circle cx="{rate:.1f}" cy="8" r="4"/>'
    "</svg>"
)


def table(result: Result) -> Group:
    """The rates with their intervals, what the judge is like, and the verdict."""
    rows = [(name, *_words(rate)) for name, rate in _rates(result)]
    missed, left = "", f"{result['left_out']} samples had no partner. " * bool(result["left_out"])
    if result["people"]:
        missed = f"A kind of prompt that is {percent(MISSED)} of all, people saw none of with probability "
        missed += f"{percent(result['people']['missed'])}."
    verdict = plain(f"{result['verdict']}: {result['says']}", "bold")
    about = grid("the judge", ("", ""), _judge(result), f"asked {result['calls']:,} times")
    return Group(grid(f"{result['a']} against {result['b']}", HEAD, rows, left + missed), about, verdict)


def sheet_table(result: Result) -> Group:
    """What was written for people to judge."""
    rows = [("prompts, drawn by their hashes", result["prompts"]), ("share asked for", percent(result["share"]))]
    do = 'write "first", "second" or "tie" in place of each null, then give the file as --people'
    return Group(grid(result["for_people"], ("for people", "number"), rows, do))


def write_page(path: Path, result: Result) -> None:
    """Write the result as one page of HTML that needs nothing else."""
    rates = "".join(_line(name, *_words(rate), bar=_bar(rate)) for name, rate in _rates(result))
    judge = "".join(_line(*map(str, row)) for row in _judge(result))
    words = {name: escape(str(result[name])) for name in ("verdict", "says")}
    title = escape(f"{result['a']} against {result['b']}")
    head = "".join(f"<th>{name}" for name in (*HEAD, "0 to 100 %"))
    with whole(path) as part:
        page = _PAGE.format(title=title, rates=f"<tr>{head}{rates}", judge=judge, **words)
        part.write_text(page, encoding="utf-8", errors="backslashreplace")


def _rates(result: Result) -> list[tuple[str, Result | None]]:
    length = result["by_length"]
    return [
        ("one order, as a plain comparison asks", result["one_order"]),
        ("both orders", result["both_orders"]),
        (f"A shorter by more than {CLOSE} words", length["shorter"]),
        (f"within {CLOSE} words", length["within"]),
        (f"A longer by more than {CLOSE} words", length["longer"]),
        ("at equal length, lists and headings", result["equal_style"]),
        ("both orders, corrected by people", result["people"]),
    ]


def _words(rate: Result | None) -> tuple[str, str, str]:
    if rate is None:
        return "-", "-", "-"
    return percent(rate["rate"]), f"{100 * rate['low']:.1f} to {100 * rate['high']:.1f}", f"{rate['prompts']:,}"


def _judge(result: Result) -> list[tuple[str, str]]:
    judge, sign = result["judge"], result["sign_test"]
    shares = {
        "prefers what it reads first": judge["first"],
        "contradicts itself when the order is swapped": judge["flips"],
        "answers otherwise when asked again": judge["repeats_differ"],
        "prefers the longer text": judge["longer"],
    }
    rows = [(name, "-" if share is None else percent(share)) for name, share in shares.items()]
    rows.append(("prompts won, lost and tied by A", f"{sign['wins']}, {sign['losses']}, {sign['ties']}"))
    rows.append(("sign test of these, p", f"{sign['p']:.2g}"))
    return [*rows, ("words of a text of A and of B", "{:.1f} and {:.1f}".format(*result["words"]))]


def _line(*cells: str, bar: str = "") -> str:
    return "<tr>" + "".join(f"<td>{escape(cell)}" for cell in cells) + (f"<td>{bar}" if bar else "")


def _bar(rate: Result | None) -> str:
    places = {name: 2 + 200 * min(1.0, max(0.0, rate[name])) for name in ("rate", "low", "high")} if rate else {}
    return _BAR.format(**places) if places else " "
