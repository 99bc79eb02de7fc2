"""The ``evenload`` command: a thin shell over `commands`. Exit codes: 0 fine, 1 the work failed, 2 a wrong request."""

from __future__ import annotations

import io
import json
import os
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer

from . import __version__
from .api import load_plugins, load_recipe
from .core.errors import EvenloadError, RankError, shown
from .core.input.bounds import LOCAL_RANKS, RANKS, REPEATS, SIZE, STEPS, number_of_word
from .core.input.format import seconds
from .core.recipe.recipe import Recipe

app = typer.Typer(
    name="evenload",
    help="Evens the load of LLM training inside Megatron-Core and DeepSpeed.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

_LONGEST_WORD = 8192
"""Characters; no path is longer, and no list of values to sweep."""

RecipePath = Annotated[Path, typer.Argument(metavar="RECIPE", help="YAML file, or a name of `evenload recipes`.")]
Command = Annotated[list[str], typer.Argument(metavar="[KEY=VALUE]... -- COMMAND ...")]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="e.g. train.steps=100")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout and nothing else.")]
# Integers come as text, so that `bounds` reads them all and says what is wrong with one.
NumRanks = Annotated[
    str | None, typer.Option("--nproc", metavar="N", help="Local ranks; default: what parallel.* needs.")
]
Against = Annotated[str, typer.Option("--against", help="Baselines, comma-separated: stock, padded, in_order, ...")]


def _version(asked: bool) -> None:
    if asked:
        print(f"evenload {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print it.")] = False,
) -> None:
    """Evens the load of LLM training inside Megatron-Core and DeepSpeed."""


@app.command()
def train(
    recipe: RecipePath,
    overrides: Overrides = None,
    nproc: NumRanks = None,
    against: Against = "",
    trace: Annotated[Path | None, typer.Option("--trace", help="Write a Chrome trace, measured and predicted.")] = None,
    plot: Annotated[Path | None, typer.Option("--plot", help="With --against: write a picture (PNG).")] = None,
    report: Annotated[
        Path | None, typer.Option("--report", help="With --against: write a page to read (HTML).")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Train on the recipe's trainer; with --against, baselines train the same batches in turn, each its own model."""
    from .training.pictures import refuse

    names = _names(against)
    if (plot or report) and not names:
        do = "add --against stock, or use --trace for evenload alone"
        raise EvenloadError("a picture of a run shows it beside baselines", "--plot or --report without --against", do)
    pictures = {"plot": plot, "report": report}
    refuse(**pictures)
    chosen = load_recipe(recipe, [*(overrides or ()), *([f"log.trace={json.dumps(str(trace))}"] if trace else ())])
    _run_ranks("train", chosen, nproc, as_json, against=names, pictures=pictures)


@app.command()
def verify(
    recipe: RecipePath,
    overrides: Overrides = None,
    nproc: NumRanks = None,
    steps: Annotated[str, typer.Option("--steps", metavar="K", help="Updates, a resume in their middle.")] = "3",
    weights: Annotated[bool, typer.Option("--weights", help="Targets have drawn weights, of any sign and 0.")] = False,
    generation: Annotated[bool, typer.Option("--generate", help="Samples instead of updates.")] = False,
    prompts: Annotated[Path | None, typer.Option("--prompts", help="With --generate: as of `generate`.")] = None,
    as_json: AsJson = False,
) -> None:
    """Hold steps of the run against plain training of whole sequences, through a resume; or samples against plain
    generation. Exit code 1 if they differ."""
    updates, chosen = number_of_word(steps, "--steps", REPEATS), load_recipe(recipe, overrides or ())
    how: Any = {"weights": weights, "generation": generation, "prompts": prompts}
    if generation or prompts:
        from .training.verbs.generate import refuse_proof

        refuse_proof(chosen, **how)
    _run_ranks("verify", chosen, nproc, as_json, steps=updates, **how)


@app.command()
def bench(
    recipe: RecipePath,
    overrides: Overrides = None,
    nproc: NumRanks = None,
    against: Against = "stock,in_order",
    repeats: Annotated[
        str, typer.Option("--repeats", metavar="N", help="Runs of every step; the median counts.")
    ] = "1",
    as_json: AsJson = False,
) -> None:
    """Tokens per second beside baselines, alternating on the same batches in one run."""
    runs, chosen = number_of_word(repeats, "--repeats", REPEATS), load_recipe(recipe, overrides or ())
    if chosen.adapts:
        do = "use `evenload plan`, which says what company saves, predicted; or disable plugins.lora"
        raise EvenloadError("bench trains one model by several plans, and no tenants", "plugins.lora.enabled true", do)
    _run_ranks("bench", chosen, nproc, as_json, against=_names(against), repeats=runs)


@app.command()
def plan(
    recipe: RecipePath,
    overrides: Overrides = None,
    lengths: Annotated[
        list[str] | None,
        typer.Option(
            "--lengths", metavar="FILE", help="Lengths or data; of a tenant: NAME=FILE. Default: its own data."
        ),
    ] = None,
    tokenizer: Annotated[
        str | None, typer.Option("--tokenizer", metavar="DIR", help="Of --lengths that are data: text, chats, pairs.")
    ] = None,
    groups: Annotated[
        Path | None, typer.Option("--groups", help="A file like that of lengths: samples of one number stay together.")
    ] = None,
    steps: Annotated[str, typer.Option("--steps", metavar="N", help="Global batches to plan.")] = "1",
    nproc: Annotated[
        str | None, typer.Option("--nproc", metavar="N", help="Ranks; default: what parallel.* needs.")
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", help="Write the plans as JSON.")] = None,
    loads: Annotated[Path | None, typer.Option("--loads", help="Replay what log.loads recorded of experts.")] = None,
    trace: Annotated[Path | None, typer.Option("--trace", help="Write a Chrome trace, evenload and baselines.")] = None,
    plot: Annotated[Path | None, typer.Option("--plot", help="Write a picture (PNG).")] = None,
    report: Annotated[Path | None, typer.Option("--report", help="Write a page to read (HTML).")] = None,
    sweep: Annotated[list[str] | None, typer.Option("--sweep", help="key=a,b,c: plan each; repeatable.")] = None,
    explain: Annotated[bool, typer.Option("--explain", help="Show what every rank runs, in order.")] = False,
    as_json: AsJson = False,
) -> None:
    """Plan from lengths alone, beside every baseline. Needs no torch and no trainer; times are predicted."""
    from .training.forecast.forecast import look_ahead, write_plans
    from .training.forecast.unused import with_unused
    from .training.pictures import draw, refuse

    num_steps = number_of_word(steps, "--steps", STEPS)
    num_ranks = None if nproc is None else number_of_word(nproc, "--nproc", RANKS)
    chosen = load_recipe(recipe, overrides or ())
    files = _lengths(chosen, lengths or (), tokenizer)
    pictures = {"trace": trace, "plot": plot, "report": report}
    if sweep:
        from .commands.tables.progress import progress_shown
        from .training.forecast.sweep import sweep as work

        taken = {
            "--out": out,
            "--loads": loads,
            "--groups": groups,
            **{f"--{kind}": path for kind, path in pictures.items()},
        }
        with progress_shown() as progress:
            result = work(chosen, sweep, files, num_steps, num_ranks, taken, progress)
        _show("sweep", result, as_json)
        return
    refuse(**pictures)
    record = trace is not None or report is not None
    forecast = with_unused(look_ahead(chosen, files, num_steps, num_ranks, loads=loads, groups=groups, record=record))
    if out is not None:
        write_plans(forecast, out)
    draw(forecast, **pictures)
    _show("plan", forecast.to_json(explain=explain), as_json)


@app.command()
def search(
    recipe: RecipePath,
    overrides: Overrides = None,
    lengths: Annotated[
        list[str] | None,
        typer.Option(
            "--lengths", metavar="FILE", help="Lengths or data; of a tenant: NAME=FILE. Default: its own data."
        ),
    ] = None,
    tokenizer: Annotated[
        str | None, typer.Option("--tokenizer", metavar="DIR", help="Of --lengths that are data.")
    ] = None,
    nproc: Annotated[str, typer.Option("--nproc", metavar="N[,N...]", help="Devices; several: each by itself.")] = "8",
    memory: Annotated[
        str | None, typer.Option("--memory", metavar="GIB", help="Of a device. Default: the cluster's.")
    ] = None,
    steps: Annotated[str, typer.Option("--steps", metavar="N", help="Global batches for each setting.")] = "1",
    pin: Annotated[
        list[str] | None, typer.Option("--pin", metavar="KEY=VALUE", help="A key that is not searched; repeatable.")
    ] = None,
    measure: Annotated[
        str | None, typer.Option("--measure", metavar="N", help="Train the best N a few steps here, and rank again.")
    ] = None,
    gap: Annotated[float, typer.Option("--gap", help="End when nothing can be more percent faster.")] = 0.5,
    minutes: Annotated[float, typer.Option("--minutes", help="End after so many, with what is known.")] = 5.0,
    loads: Annotated[Path | None, typer.Option("--loads", help="What log.loads recorded of experts.")] = None,
    out: Annotated[Path | None, typer.Option("--out", help="Write the best setting as a recipe.")] = None,
    report: Annotated[Path | None, typer.Option("--report", help="Write a page to read of its steps (HTML).")] = None,
    as_json: AsJson = False,
) -> None:
    """The best layout, caps and plugins for these lengths, with a bound on what anything else could gain; predicted."""
    from .commands.tables.progress import progress_shown
    from .commands.tables.show import emit
    from .commands.tables.sweep import table_of_search
    from .training.forecast.search import Enough
    from .training.forecast.search import search as work
    from .training.launching.few_steps import trained
    from .training.pictures import draw, refuse

    refuse(report=report)
    chosen = load_recipe(recipe, overrides or ())
    files = _lengths(chosen, lengths or (), tokenizer)
    ranks = [number_of_word(word, "--nproc", RANKS) for word in nproc.split(",")]
    enough, num_steps = Enough(gap / 100, 60 * minutes), number_of_word(steps, "--steps", STEPS)
    memory_gib = None if memory is None else number_of_word(memory, "--memory", SIZE)
    count = 0 if measure is None else number_of_word(measure, "--measure", REPEATS)
    with progress_shown() as progress:
        result = work(
            chosen, files, ranks, pin or (), steps=num_steps, memory_gib=memory_gib, loads=loads, enough=enough,
            measure=count, train=trained, out=out, draw=partial(draw, report=report) if report else None,
            progress=progress,
        )  # fmt: skip
    emit(result, as_json, table_of_search)


@app.command()
def profile(
    recipe: Annotated[Path | None, typer.Argument(metavar="[RECIPE]", help="Whose model to measure.")] = None,
    overrides: Overrides = None,
    nproc: NumRanks = None,
    out: Annotated[Path, typer.Option("--out", help="Where to write the cost model.")] = Path("costs.yaml"),
    tp: Annotated[
        str | None, typer.Option("--tp", metavar="1,2,4", help="Measure these degrees of tensor parallelism.")
    ] = None,
    also: Annotated[
        list[str] | None,
        typer.Option("--also", metavar="KEY=VALUE", help="Measure with this changed too: deepspeed.zero_stage=3."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Measure this machine's layers and links and fit the cost model."""
    from .training.profiling.degrees import at_degree_of, layouts_of, sharded_otherwise

    name, words = recipe or "quickstart", list(overrides or ())
    wanted = load_recipe(name, words)
    # Tensor parallelism stays: not all that a layer does is divided by it.
    degrees = [number_of_word(word, "--tp", RANKS) for word in _names(tp or "")]
    others = sharded_otherwise(wanted, {word: load_recipe(name, [*words, word]) for word in also or ()}, degrees)
    fewest = max(degrees, default=wanted.min_world_size)
    num_ranks = fewest if nproc is None else number_of_word(nproc, "--nproc", LOCAL_RANKS)
    first, *_ = layouts_of(wanted, degrees, num_ranks) or [at_degree_of(wanted, wanted.parallel.tp, num_ranks)]
    _run_ranks("profile", first, str(num_ranks), as_json, out=out.absolute(), degrees=degrees, also=others)


@app.command()
def export(
    checkpoint: Annotated[
        Path, typer.Argument(metavar="CHECKPOINT", help="One, or a folder that checkpoint.dir named.")
    ],
    overrides: Overrides = None,
    out: Annotated[Path | None, typer.Option("--out", help="The folder to write; not there, or empty.")] = None,
    nproc: NumRanks = None,
    as_json: AsJson = False,
) -> None:
    """Write the model of a checkpoint as a Hugging Face folder, which transformers' from_pretrained opens."""
    from .training.verbs.export import recipe_of

    if out is None:
        raise EvenloadError("export does not know where to write", "no --out", "add --out DIR")
    recipe, folder = recipe_of(checkpoint, overrides or (), out)
    _run_ranks("export", recipe, nproc, as_json, checkpoint=folder, out=out)


@app.command()
def generate(
    recipe: RecipePath,
    overrides: Overrides = None,
    prompts: Annotated[Path | None, typer.Option("--prompts", help='A prompt a line: {"prompt": ...} (JSONL).')] = None,
    out: Annotated[Path | None, typer.Option("--out", help="The file to write: a sample a line (JSONL).")] = None,
    samples: Annotated[str, typer.Option("--samples", metavar="N", help="Of each prompt.")] = "1",
    checkpoint: Annotated[Path | None, typer.Option("--checkpoint", help="Whose weights to take.")] = None,
    tenant: Annotated[str, typer.Option("--tenant", metavar="NAME", help="By whose adapter; or NAME/best.")] = "",
    nproc: NumRanks = None,
    as_json: AsJson = False,
) -> None:
    """Text from the recipe's model: the same tokens on any number of ranks. The same command goes on where it ended."""
    from .training.verbs.generate import asked

    if prompts is None or out is None:
        lacking = "--prompts" if prompts is None else "--out"
        raise EvenloadError("generate reads prompts and writes samples", f"no {lacking}", f"add {lacking} FILE")
    chosen, number = load_recipe(recipe, overrides or ()), number_of_word(samples, "--samples", SIZE)
    asked(chosen, prompts, out, number, checkpoint, tenant)
    how: Any = {"prompts": prompts, "out": out, "samples": number, "checkpoint": checkpoint, "tenant": tenant}
    _run_ranks("generate", chosen, nproc, as_json, **how)


@app.command()
def score(
    recipe: RecipePath,
    overrides: Overrides = None,
    out: Annotated[Path | None, typer.Option("--out", help="The folder to write; not there, or empty.")] = None,
    checkpoint: Annotated[Path | None, typer.Option("--checkpoint", help="Whose weights to take.")] = None,
    nproc: NumRanks = None,
    as_json: AsJson = False,
) -> None:
    """Losses of every token of the recipe's data by a trained model, for plugins.data.reference."""
    from .training.verbs.score import asked

    if out is None:
        raise EvenloadError("score does not know where to write", "no --out", "add --out DIR")
    chosen, folder = asked(load_recipe(recipe, overrides or ()), out, checkpoint)
    _run_ranks("score", chosen, nproc, as_json, checkpoint=folder, out=out)


@app.command()
def lora(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="plugins.lora.out of a job, or plugins.lora.tenants.")],
    as_json: AsJson = False,
) -> None:
    """How the tenants of a job stand: state, steps, loss, lowest loss of evaluations, tokens, time left."""
    from .commands.lora import lora as work

    _show("lora", work(folder), as_json)


@app.command()
def watch(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="A run's log.jsonl, or the folder that has it.")],
    once: Annotated[bool, typer.Option("--once", help="Show what there is, and end.")] = False,
    as_json: AsJson = False,
) -> None:
    """The last steps of a run as its log grows, on any machine and until the run ends; --json shows them once."""
    from .commands.tables.watch import shown_live
    from .commands.watch import watch as work

    with nullcontext(None) if once or as_json else shown_live() as show:
        result = work(folder, show)
    _show("watch", result, as_json)


@app.command(context_settings={"ignore_unknown_options": True})
def run(
    recipe: RecipePath,
    command: Command,
    require: Annotated[
        bool, typer.Option("--require", help="Fail if the script cannot be planned, instead of running it unmodified.")
    ] = False,
) -> None:
    """Run an unmodified training script with the recipe's plugins switched on."""
    from .commands.run import run as work

    raise SystemExit(work(recipe, command, required=require))


@app.command("env")
def env(
    recipe: RecipePath,
    overrides: Overrides = None,
    export: Annotated[str, typer.Option("--export", help="shell, json, dotenv, k8s or ray.")] = "shell",
) -> None:
    """The variables that `evenload run` sets, for launchers that start processes on other machines."""
    from .commands import env as forms

    print(forms.variables_as(load_recipe(recipe, overrides or ()), export))


@app.command(context_settings={"ignore_unknown_options": True})
def check(
    recipe: RecipePath,
    command: Command,
    as_json: AsJson = False,
) -> None:
    """One step of an unmodified training script with the plugins on, without an update: what is on, refused, gained."""
    from .commands.check import EXIT_CODES
    from .commands.check import check as work
    from .commands.tables.show import stdout_aside

    with stdout_aside():
        result = work(recipe, command)
    _show("check", result, as_json)
    raise SystemExit(EXIT_CODES[result["verdict"]])


@app.command(context_settings={"ignore_unknown_options": True})
def audit(
    recipe: RecipePath,
    command: Command,
    border: Annotated[str | None, typer.Option("--border", metavar="ID", help="The token that ends a sample.")] = None,
    as_json: AsJson = False,
) -> None:
    """Judge the batches of a training script as it makes them: each sample as it is alone? Nothing is planned."""
    from .commands.audit import EXIT_CODES
    from .commands.audit import audit as work
    from .commands.tables.show import stdout_aside

    token = None if border is None else number_of_word(border, "--border", SIZE)
    with stdout_aside():
        result = work(recipe, command, token)
    _show("audit", result, as_json)
    raise SystemExit(EXIT_CODES[result["verdict"]])


@app.command()
def doctor(
    recipe: Annotated[
        Path | None, typer.Argument(metavar="[RECIPE]", help="Whose model and plugins to look at.")
    ] = None,
    overrides: Overrides = None,
    gpu: Annotated[bool, typer.Option("--gpu", help="Try this machine's GPUs out, in minutes, into --out.")] = False,
    out: Annotated[Path | None, typer.Option("--out", help="With --gpu: a folder; default: evenload-gpu.")] = None,
    limit: Annotated[str, typer.Option("--limit", metavar="S", help="With --gpu: seconds of all parts.")] = "900",
    as_json: AsJson = False,
) -> None:
    """What is installed and supported, which patches and attention kernels apply, what plugins do in which loop."""
    if not gpu:
        from .commands.doctor import doctor as work

        if out is not None:
            raise EvenloadError("doctor writes files about GPUs alone", f"--out {out}", "add --gpu, or drop --out")
        _show("doctor", work(load_recipe(recipe, overrides or ()) if recipe else None), as_json)
        return
    from rich.markdown import Markdown

    from .commands.first_hour.page import page
    from .commands.first_hour.parts import first_hour
    from .commands.tables.progress import progress_shown
    from .commands.tables.show import emit

    limit_s, folder = number_of_word(limit, "--limit", 86400), (out or Path("evenload-gpu")).absolute()
    with progress_shown() as progress:
        result = first_hour(recipe, overrides or (), folder, limit_s, progress)
    emit(result, as_json, lambda done: Markdown(page(done)))
    if not result["well"]:
        raise SystemExit(1)


@app.command()
def plugins(as_json: AsJson = False) -> None:
    """The registered plugins."""
    from .core.registry import registered

    load_plugins()
    keys = ("name", "summary", "papers", "origin")
    rows = [{**{key: getattr(p, key) for key in keys}, "baselines": list(p.baselines.rows)} for p in registered()]
    _show("plugins", {"plugins": rows}, as_json)


@app.command()
def recipes(as_json: AsJson = False) -> None:
    """The recipes that come with evenload; every command takes their names."""
    from .core.recipe.recipe import shipped

    rows = []
    for name, path in shipped().items():
        one = load_recipe(path)
        ranks, enabled = one.min_world_size, [plugin.name for plugin in one.enabled()]
        rows.append({"name": name, "trainer": one.trainer, "ranks": ranks, "plugins": enabled, "path": str(path)})
    _show("recipes", {"recipes": rows}, as_json)


@app.command()
def schema() -> None:
    """The JSON Schema of a recipe, for editors."""
    from .core.recipe.recipe import json_schema

    load_plugins()
    print(json.dumps(json_schema(), indent=2))


def main() -> None:
    """Entry point: every EvenloadError becomes a message on stderr and an exit code."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # names may hold what the terminal's encoding lacks
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        _refuse_long_words(sys.argv[1:])
        app()
    except EvenloadError as error:
        print(f"evenload: {error}", file=sys.stderr)
        raise SystemExit(1 if isinstance(error, RankError) else 2) from None


def _refuse_long_words(words: list[str]) -> None:
    """Raise EvenloadError for a word that the parser's messages would repeat in full; a COMMAND to run is its own."""
    for word in words[: words.index("--")] if "--" in words else words:
        if len(word) > _LONGEST_WORD:
            detail = f"{len(word)} characters: {shown(word)}"
            raise EvenloadError("a word of the command line is too long", detail, "write it into the recipe")


def _lengths(chosen: Recipe, words: Sequence[str], tokenizer: str | None) -> Any:
    """What `plan` plans; says how long it took to take the lengths of data."""
    from .training.shared_plan.reading import lengths_of

    begin = time.perf_counter()
    files = lengths_of(chosen, words, tokenizer)
    if not isinstance(files, (Path, dict)):
        of = (words or [chosen.data.source])[0]
        print(f"{len(files):,} lengths of {of}, taken in {seconds(time.perf_counter() - begin)}", file=sys.stderr)
    return files


def _names(text: str) -> tuple[str, ...]:
    return tuple(filter(None, map(str.strip, text.split(","))))


_TABLES = {"generate": ("export", "table_of_samples"), "score": ("export", "table_of_losses")}
"""Modules and functions that show what a verb gives, where they are not called as it is."""


def _show(verb: str, result: dict[str, Any], as_json: bool) -> None:
    from .commands.tables.show import emit

    module, table = _TABLES.get(verb, (verb, "table"))
    emit(result, as_json, getattr(import_module(f".commands.tables.{module}", __package__), table))


def _run_ranks(verb: str, recipe: Recipe, nproc: str | None, as_json: bool, **arguments: Any) -> None:
    """Do the verb's work if this is a rank; else start the ranks, and show rank 0's result."""
    from .commands.tables.progress import progress_shown
    from .commands.tables.show import stdout_aside
    from .runtime.world.schedulers import adopt
    from .training.early_end import ASK_AGAIN
    from .training.launching.launch import is_rank, on_ranks

    adopt(os.environ)
    num_ranks = None if nproc is None else number_of_word(nproc, "--nproc", LOCAL_RANKS)
    with stdout_aside() if is_rank() else nullcontext(), progress_shown() as progress:
        result = on_ranks(verb, recipe, sys.argv[1:], num_ranks, progress, **arguments)
    if result is not None:
        _show(verb, result, as_json)
        if result.get("exact") is False:
            raise SystemExit(1)
        if result.get("ended_early"):
            raise SystemExit(ASK_AGAIN)
