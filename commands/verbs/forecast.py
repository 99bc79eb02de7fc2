"""The command line of `evenload plan`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Option

from ...core.input.bounds import RANKS, STEPS, number_of_word
from .shared import AsJson, Lengths, Overrides, RecipePath, load, read_lengths, show


def plan(
    recipe: RecipePath,
    overrides: Overrides = None,
    lengths: Lengths = None,
    tokenizer: Annotated[
        str | None, Option("--tokenizer", metavar="DIR", help="Of --lengths that are data: text, chats, pairs.")
    ] = None,
    groups: Annotated[
        Path | None, Option("--groups", help="A file like that of lengths: samples of one number stay together.")
    ] = None,
    steps: Annotated[str, Option("--steps", metavar="N", help="Global batches to plan.")] = "1",
    nproc: Annotated[str | None, Option("--nproc", metavar="N", help="Ranks; default: what parallel.* needs.")] = None,
    out: Annotated[Path | None, Option("--out", help="Write the plans as JSON.")] = None,
    loads: Annotated[Path | None, Option("--loads", help="Replay what log.loads recorded of experts.")] = None,
    trace: Annotated[Path | None, Option("--trace", help="Write a Chrome trace, evenload and baselines.")] = None,
    plot: Annotated[Path | None, Option("--plot", help="Write a picture (PNG).")] = None,
    report: Annotated[Path | None, Option("--report", help="Write a page to read (HTML).")] = None,
    sweep: Annotated[list[str] | None, Option("--sweep", help="key=a,b,c: plan each; repeatable.")] = None,
    explain: Annotated[bool, Option("--explain", help="Show what every rank runs, in order.")] = False,
    as_json: AsJson = False,
) -> None:
    """Plan from lengths alone, next to every baseline. Needs no torch and no trainer; times are predicted."""
    from ...training.files import refuse_pictures
    from ...training.forecast.forecast import look_ahead, write_plans
    from ...training.forecast.unused import with_unused
    from ...training.pictures import draw

    num_steps = number_of_word(steps, "--steps", STEPS)
    num_ranks = None if nproc is None else number_of_word(nproc, "--nproc", RANKS)
    chosen = load(recipe, overrides)
    files = read_lengths(chosen, lengths or (), tokenizer)
    pictures = {"trace": trace, "plot": plot, "report": report}
    if sweep:
        from ...training.forecast.sweep import sweep as work
        from ..tables.progress import progress_shown

        taken = {"--out": out, "--loads": loads, "--groups": groups}
        taken |= {f"--{kind}": path for kind, path in pictures.items()}
        with progress_shown() as progress:
            result = work(chosen, sweep, files, num_steps, num_ranks, taken, progress)
        show("sweep", result, as_json)
        return
    refuse_pictures(**pictures)
    record = trace is not None or report is not None
    forecast = with_unused(look_ahead(chosen, files, num_steps, num_ranks, loads=loads, groups=groups, record=record))
    if out is not None:
        write_plans(forecast, out)
    draw(forecast, **pictures)
    show("plan", forecast.to_json(explain=explain), as_json)
