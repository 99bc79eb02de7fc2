"""The command line of `evenload generate`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from ...commands.verbs.shared import AsJson, Checkpoint, NumRanks, Overrides, RecipePath, load, run_ranks
from ...core.errors import EvenloadError
from ...core.input.bounds import SIZE, number_of_word
from ...training.verbs import RankWork

GENERATE = RankWork(
    "generate",
    "evenload.plugins.rollout.generate:generate",
    refuse="evenload.plugins.rollout.generate:resolve_request",
    needs_data=False,
)


def generate(
    recipe: RecipePath,
    overrides: Overrides = None,
    prompts: Annotated[Path | None, typer.Option("--prompts", help='A prompt a line: {"prompt": ...} (JSONL).')] = None,
    out: Annotated[Path | None, typer.Option("--out", help="The file to write: a sample a line (JSONL).")] = None,
    samples: Annotated[str, typer.Option("--samples", metavar="N", help="Of each prompt.")] = "1",
    checkpoint: Checkpoint = None,
    tenant: Annotated[str, typer.Option("--tenant", metavar="NAME", help="By whose adapter; or NAME/best.")] = "",
    nproc: NumRanks = None,
    as_json: AsJson = False,
) -> None:
    """Text from the recipe's model: the same tokens on any number of ranks. The same command goes on where it ended."""
    from .tables import table

    if prompts is None or out is None:
        lacking = "--prompts" if prompts is None else "--out"
        raise EvenloadError("generate reads prompts and writes samples", f"no {lacking}", f"add {lacking} FILE")
    chosen, number = load(recipe, overrides), number_of_word(samples, "--samples", SIZE)
    how: dict[str, Any] = {
        "prompts": prompts,
        "out": out,
        "samples": number,
        "checkpoint": checkpoint,
        "tenant": tenant,
    }
    run_ranks(GENERATE, chosen, nproc, as_json, table, **how)
