"""Verbs whose work is done by ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from ...core.errors import EvenloadError
from ...core.input.bounds import LOCAL_RANKS, RANKS, REPEATS, number_of_word
from ...training.verbs import BENCH, EXPORT, PROFILE, TRAIN, VERIFY
from .shared import AsJson, NewFolder, NumRanks, Overrides, RecipePath, load, names, run_ranks

Against = Annotated[str, Option("--against", help="Baselines, comma-separated: stock, padded, in_order, ...")]


def train(
    recipe: RecipePath,
    overrides: Overrides = None,
    nproc: NumRanks = None,
    against: Against = "",
    trace: Annotated[Path | None, Option("--trace", help="Write a Chrome trace, measured and predicted.")] = None,
    plot: Annotated[Path | None, Option("--plot", help="With --against: write a picture (PNG).")] = None,
    report: Annotated[Path | None, Option("--report", help="With --against: write a page to read (HTML).")] = None,
    elastic: Annotated[bool, Option("--elastic", help="Replicas may be lost: others go on, it is restarted.")] = False,
    replica: Annotated[
        str | None, Option("--replica", metavar="N", help="Start this one of parallel.replicas, which joins others.")
    ] = None,
    meet: Annotated[str, Option("--meet", metavar="HOST:PORT", help="Where replicas of other machines meet.")] = "",
    as_json: AsJson = False,
) -> None:
    """Train on the recipe's trainer; with --against, baselines train the same batches in turn, each its own model."""
    from ...training.files import refuse_pictures
    from ...training.launching.replica_choice import Elastic

    baselines = names(against)
    if (plot or report) and not baselines:
        do = "add --against stock, or use --trace for evenload alone"
        raise EvenloadError("a picture of a run compares it with baselines", "--plot or --report without --against", do)
    pictures = {"plot": plot, "report": report}
    refuse_pictures(**pictures)
    chosen = load(recipe, [*(overrides or ()), *([f"log.trace={json.dumps(str(trace))}"] if trace else ())])
    number = None if replica is None else number_of_word(replica, "--replica", RANKS, least=0)
    comes_and_goes = elastic or replica is not None or bool(meet)
    asked = Elastic(elastic, number, meet) if comes_and_goes else None
    run_ranks(TRAIN, chosen, nproc, as_json, elastic=asked, against=baselines, pictures=pictures)


def verify(
    recipe: RecipePath,
    overrides: Overrides = None,
    nproc: NumRanks = None,
    steps: Annotated[str, Option("--steps", metavar="K", help="Updates, a resume in their middle.")] = "3",
    weights: Annotated[bool, Option("--weights", help="Targets have drawn weights, of any sign and 0.")] = False,
    generation: Annotated[bool, Option("--generate", help="Samples instead of updates.")] = False,
    prompts: Annotated[Path | None, Option("--prompts", help="With --generate: as of `generate`.")] = None,
    as_json: AsJson = False,
) -> None:
    """Hold steps of the run against plain training of whole sequences, through a resume; or samples against plain
    generation. Exit code 1 if they differ."""
    updates, chosen = number_of_word(steps, "--steps", REPEATS), load(recipe, overrides)
    run_ranks(VERIFY, chosen, nproc, as_json, steps=updates, weights=weights, generation=generation, prompts=prompts)


def bench(
    recipe: RecipePath,
    overrides: Overrides = None,
    nproc: NumRanks = None,
    against: Against = "stock,in_order",
    repeats: Annotated[str, Option("--repeats", metavar="N", help="Runs of every step; the median counts.")] = "1",
    as_json: AsJson = False,
) -> None:
    """Tokens per second next to baselines, alternating on the same batches in one run."""
    runs, chosen = number_of_word(repeats, "--repeats", REPEATS), load(recipe, overrides)
    if chosen.adapts:
        do = "use `evenload plan`, which says what company saves, predicted; or disable plugins.lora"
        raise EvenloadError("bench trains one model by several plans, and no tenants", "plugins.lora.enabled true", do)
    run_ranks(BENCH, chosen, nproc, as_json, against=names(against), repeats=runs)


def profile(
    recipe: Annotated[Path | None, Argument(metavar="[RECIPE]", help="Whose model to measure.")] = None,
    overrides: Overrides = None,
    nproc: NumRanks = None,
    out: Annotated[Path, Option("--out", help="Where to write the cost model.")] = Path("costs.yaml"),
    tp: Annotated[
        str | None, Option("--tp", metavar="1,2,4", help="Measure these degrees of tensor parallelism.")
    ] = None,
    also: Annotated[
        list[str] | None,
        Option("--also", metavar="KEY=VALUE", help="Measure with this changed too: deepspeed.zero_stage=3."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Measure this machine's layers and links and fit the cost model."""
    from ...training.profiling.degrees import at_degree_of, layouts_of, sharded_otherwise

    name, words = recipe or "quickstart", list(overrides or ())
    wanted = load(name, words)
    # Tensor parallelism stays: not all that a layer does is divided by it.
    degrees = [number_of_word(word, "--tp", RANKS) for word in names(tp or "")]
    others = sharded_otherwise(wanted, {word: load(name, [*words, word]) for word in also or ()}, degrees)
    fewest = max(degrees, default=wanted.min_world_size)
    num_ranks = fewest if nproc is None else number_of_word(nproc, "--nproc", LOCAL_RANKS)
    first, *_ = layouts_of(wanted, degrees, num_ranks) or [at_degree_of(wanted, wanted.parallel.tp, num_ranks)]
    run_ranks(PROFILE, first, str(num_ranks), as_json, out=out.absolute(), degrees=degrees, also=others)


def export(
    checkpoint: Annotated[Path, Argument(metavar="CHECKPOINT", help="One, or a folder that checkpoint.dir named.")],
    overrides: Overrides = None,
    out: NewFolder = None,
    nproc: NumRanks = None,
    as_json: AsJson = False,
) -> None:
    """Write the model of a checkpoint as a Hugging Face folder, which transformers' from_pretrained opens."""
    from ...training.verbs.export import recipe_of

    if out is None:
        raise EvenloadError("export does not know where to write", "no --out", "add --out DIR")
    recipe, folder = recipe_of(checkpoint, overrides or (), out)
    run_ranks(EXPORT, recipe, nproc, as_json, checkpoint=folder, out=out)
