"""The command line of `evenload score`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...commands.verbs.shared import AsJson, Checkpoint, NewFolder, NumRanks, Overrides, RecipePath, load, run_ranks
from ...core.errors import EvenloadError
from ...training.verbs import RankWork

if TYPE_CHECKING:
    from rich.table import Table

SCORE = RankWork("score", "evenload.plugins.data.score:score")


def score(
    recipe: RecipePath,
    overrides: Overrides = None,
    out: NewFolder = None,
    checkpoint: Checkpoint = None,
    nproc: NumRanks = None,
    as_json: AsJson = False,
) -> None:
    """Losses of every token of the recipe's data by a trained model, for plugins.data.reference."""
    from .score import asked

    if out is None:
        raise EvenloadError("score does not know where to write", "no --out", "add --out DIR")
    chosen, folder = asked(load(recipe, overrides), out, checkpoint)
    run_ranks(SCORE, chosen, nproc, as_json, _table, checkpoint=folder, out=out)


def _table(result: dict[str, Any]) -> Table:
    from ...commands.tables.show import grid
    from ...commands.tables.sparse import said_of, word_of
    from ...core.input.format import mib, seconds

    rows = [(name, own["samples"], own["targets"], f"{own['loss']:.4f}") for name, own in result["domains"].items()]
    caption = f"{mib(result['bytes'])} in {seconds(result['seconds'])}{said_of(result['sparse'])}"
    return grid(result["folder"], ("domain", "samples", "targets", f"loss{word_of(result['sparse'])}"), rows, caption)
