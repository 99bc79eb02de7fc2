"""The command line of `evenload search`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Option

from ...commands.verbs.shared import AsJson, Lengths, Overrides, RecipePath, load, read_lengths, show
from ...core.input.bounds import RANKS, REPEATS, SIZE, STEPS, number_of_word


def search(
    recipe: RecipePath,
    overrides: Overrides = None,
    lengths: Lengths = None,
    tokenizer: Annotated[str | None, Option("--tokenizer", metavar="DIR", help="Of --lengths that are data.")] = None,
    nproc: Annotated[str, Option("--nproc", metavar="N[,N...]", help="Devices; several: each by itself.")] = "8",
    memory: Annotated[
        str | None, Option("--memory", metavar="GIB", help="Of a device. Default: the cluster's.")
    ] = None,
    steps: Annotated[str, Option("--steps", metavar="N", help="Global batches for each setting.")] = "1",
    pin: Annotated[
        list[str] | None, Option("--pin", metavar="KEY=VALUE", help="A key that is not searched; repeatable.")
    ] = None,
    measure: Annotated[
        str | None, Option("--measure", metavar="N", help="Train the best N a few steps here, and rank again.")
    ] = None,
    gap: Annotated[float, Option("--gap", help="End when nothing can be more percent faster.")] = 0.5,
    minutes: Annotated[float, Option("--minutes", help="End after so many, with what is known.")] = 5.0,
    loads: Annotated[Path | None, Option("--loads", help="What log.loads recorded of experts.")] = None,
    out: Annotated[Path | None, Option("--out", help="Write the best setting as a recipe.")] = None,
    report: Annotated[Path | None, Option("--report", help="Write a page to read of its steps (HTML).")] = None,
    as_json: AsJson = False,
) -> None:
    """The best layout, caps and plugins for these lengths, with a bound on what anything else could gain; predicted."""
    from ...commands.tables.progress import progress_shown
    from ...training.files import refuse_pictures
    from .search import Enough
    from .search import search as work
    from .table import table

    refuse_pictures(report=report)
    chosen = load(recipe, overrides)
    files = read_lengths(chosen, lengths or (), tokenizer)
    ranks = [number_of_word(word, "--nproc", RANKS) for word in nproc.split(",")]
    enough, num_steps = Enough(gap / 100, 60 * minutes), number_of_word(steps, "--steps", STEPS)
    memory_gib = None if memory is None else number_of_word(memory, "--memory", SIZE)
    count = 0 if measure is None else number_of_word(measure, "--measure", REPEATS)
    with progress_shown() as progress:
        result = work(
            chosen, files, ranks, pin or (), steps=num_steps, memory_gib=memory_gib, loads=loads, enough=enough,
            measure=count, out=out, report=report, progress=progress,
        )  # fmt: skip
    show("search", result, as_json, table)
