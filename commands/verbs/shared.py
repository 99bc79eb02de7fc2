"""What several verbs share: options, the recipe, tables, ranks."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from ...core.input.bounds import LOCAL_RANKS, number_of_word

if TYPE_CHECKING:
    from ...core.recipe.recipe import Recipe
    from ...training.launching.replica_choice import Elastic
    from ...training.verbs import RankWork

RecipePath = Annotated[Path, Argument(metavar="RECIPE", help="YAML file, or a name of `evenload recipes`.")]
Overrides = Annotated[list[str] | None, Argument(metavar="[KEY=VALUE]...", help="e.g. train.steps=100")]
AsJson = Annotated[bool, Option("--json", help="Print one JSON object on stdout and nothing else.")]
NewFolder = Annotated[Path | None, Option("--out", help="The folder to write; not there, or empty.")]
Checkpoint = Annotated[Path | None, Option("--checkpoint", help="Whose weights to take.")]
# Integers come as text, so that `bounds` reads them all and says what is wrong with one.
NumRanks = Annotated[str | None, Option("--nproc", metavar="N", help="Local ranks; default: what parallel.* needs.")]

Lengths = Annotated[
    list[str] | None,
    Option("--lengths", metavar="FILE", help="Lengths or data; of a tenant: NAME=FILE. Default: its own data."),
]


def load(recipe: Path | str, overrides: Sequence[str] | None) -> Recipe:
    from ...api import load_recipe

    return load_recipe(recipe, overrides or ())


def read_lengths(recipe: Recipe, words: Sequence[str], tokenizer: str | None) -> Any:
    """What is planned; says how long it took to take the lengths of data."""
    from ...core.input.format import seconds
    from ...training.forecast.samples import lengths_of

    begin = time.perf_counter()
    files = lengths_of(recipe, words, tokenizer)
    if not isinstance(files, (Path, dict)):
        of = (words or [recipe.data.source])[0]
        print(f"{len(files):,} lengths of {of}, taken in {seconds(time.perf_counter() - begin)}", file=sys.stderr)
    return files


def names(text: str) -> tuple[str, ...]:
    return tuple(filter(None, map(str.strip, text.split(","))))


def show(verb: str, result: dict[str, Any], as_json: bool, table: Callable[[Any], Any] | None = None) -> None:
    """Print what a verb gives, by ``table`` or the host's table of its name."""
    from ..tables.show import emit

    emit(result, as_json, table or import_module(f"..tables.{verb}", __package__).table)


def run_ranks(
    work: RankWork,
    recipe: Recipe,
    nproc: str | None,
    as_json: bool,
    table: Callable[[Any], Any] | None = None,
    elastic: Elastic | None = None,
    **arguments: Any,
) -> None:
    """Do a verb's work if this is a rank; else start the ranks, and `show` rank 0's result."""
    from ...runtime.world.schedulers import adopt
    from ...training.early_end import ASK_AGAIN
    from ...training.launching.launch import is_rank, on_ranks
    from ..tables.progress import progress_shown
    from ..tables.show import stdout_aside

    adopt(os.environ)
    num_ranks = None if nproc is None else number_of_word(nproc, "--nproc", LOCAL_RANKS)
    with stdout_aside() if is_rank() else nullcontext(), progress_shown() as progress:
        result = on_ranks(work, recipe, sys.argv[1:], num_ranks, progress, elastic, **arguments)
    if result is not None:
        show(work.verb, result, as_json, table)
        if result.get("exact") is False:
            raise SystemExit(1)
        if result.get("ended_early"):
            raise SystemExit(ASK_AGAIN)
