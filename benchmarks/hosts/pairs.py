"""Instruction pairs with a long tail under TRL on two CPU ranks: padding, TRL's own packing, evenload.

    python benchmarks/hosts/pairs.py [--repeats 3] [--layout ddp] [--task sft|dpo|kto|reward|grpo|rloo] [--quick]
        [--svg FILE] [--json] [--out FILE]

One epoch of 192 prompts with completions, of which the completions' losses count; lengths are lognormal with a median
of 128 tokens, the longest near 1,024. The model is a Llama of 4 layers, hidden size 256 and 2,048 words, in float32.

    padded    SFTTrainer's default: micro-batches of 4 samples, padded to the longest
    bfd       packing=True, packing_strategy="bfd": rows of up to 1,024 tokens, micro-batches of one row. It packs once,
              before training: other samples share a step, a step's loss is over other tokens, and there are fewer
              steps or more; a sample longer than a row is cut. No step is that of the padded run
    rebalance Transformers' sampler that evens padded cost over ranks; its steps hold other samples too
    evenload  the padded run's arguments by ``evenload run``: each step has the samples, the loss and the norm of the
              padded run's

With ``--task dpo`` the texts are preferences, a prompt with a chosen and a rejected answer, DPOTrainer trains them
against a reference model, and the variants are padded and evenload: pairs change micro-batches and ranks. Median and
longest are half of those above, since a pair has two rows and both models run.

``kto`` and ``reward`` train on the same preferences by KTOTrainer, whose KL keeps rows in place, and RewardTrainer.
With ``grpo`` and ``rloo`` completions are drawn from the answers instead of generated, four to a prompt, so that
seconds are those of updates alone; a quarter of an epoch runs.

Variants alternate, and each is compared with the padded run before it. Seconds are of the epoch's steps, the first as
long as the mean of the others, on rank 0; a token is one of a sample, so tokens a second compare runs whose steps
differ. On a CPU TRL's packs run through PyTorch's attention under a block mask, which computes what it masks; with
flash-attn they do not.

``--svg`` draws a padded run and the evenload run after it step by step, of all repeats those of the median ratio:

    python benchmarks/hosts/pairs.py --variants padded,evenload --svg docs/run.svg
"""

from __future__ import annotations

import argparse
import datetime
import io
import json
import statistics
import sys
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

from evenload.benchmarks.frame import ROOT, Row, columns, machine, main, options
from evenload.commands.tables.show import stdout_aside
from evenload.core.input.format import seconds
from rich.console import Console

sys.path.append(str(ROOT / "tests" / "hosts"))
import assets
import launching

LONGEST, VOCABULARY, LAYERS, HIDDEN = 1024, 2048, 4, 256
RECIPE = "trainer: transformers\nplugins:\n  packing: {enabled: true, max_tokens: 2048}\n"
VARIANTS = {
    "padded": "--per_device_train_batch_size 4 --gradient_accumulation_steps 2",
    "bfd": "--packing True --packing_strategy bfd --per_device_train_batch_size 1 --gradient_accumulation_steps 2",
    "rebalance": "--train_sampling_strategy batch_rebalance --per_device_train_batch_size 4 "
    "--gradient_accumulation_steps 2",
    "evenload": "--per_device_train_batch_size 4 --gradient_accumulation_steps 2",
}

TASKS = {
    "sft": ("trl_sft_script.py", "completions", list(VARIANTS)),
    "dpo": ("dpo_script.py", "preferences", ["padded", "evenload"]),
    **{task: ("trl_script.py", "preferences", ["padded", "evenload"]) for task in ("kto", "reward", "grpo", "rloo")},
}
"""Script, kind of rows, and variants that there are."""
GENERATED = ("grpo", "rloo")


def make(folder: Path, quick: bool, kind: str) -> int:
    """Make the model and the pairs; the longest that the model takes."""
    source = assets.library()
    longest = 256 if quick else LONGEST if kind == "completions" else LONGEST // 2
    tokenizer = assets.make_tokenizer(source[:400_000], VOCABULARY, longest)
    sizes = {"hidden_size": HIDDEN, "intermediate_size": 4 * HIDDEN, "num_hidden_layers": LAYERS}
    if quick:
        sizes = {"num_hidden_layers": 1}
    config = {**assets.COMMON, **sizes, "vocab_size": VOCABULARY, "max_position_embeddings": longest}
    assets.save_model(folder / "model", assets.LlamaConfig(**config), tokenizer)
    texts = list(assets.draw_texts(source, tokenizer))
    assets.write_rows(folder / "pairs", texts, assets.ROWS[kind])
    return longest


def measured(
    task: str,
    variant: str,
    arguments: list[str],
    data: Path,
    folder: Path,
    recipe: Path | None,
    limit_s: float = 240.0,
) -> Row:
    """Seconds, steps, tokens, memory and losses of a run; figures "after the first" step are of the others."""
    script = launching.SCRIPTS / TASKS[task][0]
    words = [*launching.COMMON, *arguments, *VARIANTS.get(variant, "").split(), "--output_dir", folder / "out"]
    names = ["--model_name_or_path", data / "model", "--dataset_name", data / "pairs", "--bf16", "False"]
    folder.mkdir()
    first = [task] if script.name == "trl_script.py" else []
    variables = {"HOSTS_MEASURED": str(folder)}
    words = [*first, *names, *words]
    run = launching.launch(script, words, folder, recipe, variables=variables, limit_s=limit_s)
    if run.code:
        return {"variant": variant, "failed": run.output.strip().splitlines()[-1:]}
    ranks = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(launching.RANKS)]
    steps, log = ranks[0]["steps"], ranks[0]["log"]
    seen = [int(row["num_tokens"]) for row in log if "num_tokens" in row]

    def after_first(name: str) -> Any:
        return sum(rank[name][-1] - rank[name][0] for rank in ranks)

    return {
        "variant": variant,
        "updates": len(steps),
        "epoch_s": (steps[-1] - steps[0]) * len(steps) / (len(steps) - 1),
        "steps_s": [b - a for a, b in pairwise(steps)],
        "says": [line for line in run.output.splitlines() if line.startswith("evenload: planned")],
        "step_s": statistics.median(b - a for a, b in pairwise(steps)),
        "computed": sum(rank["tokens"] for rank in ranks),
        "tokens": max(seen),
        "tokens_after_first": max(seen) - min(seen),
        "computed_after_first": after_first("computed"),
        "cpu_step_s": after_first("cpu_s") / (len(steps) - 1),
        "search_step_s": after_first("search_s") / launching.RANKS / (len(steps) - 1),
        "peak_bytes": max(rank.get("peak_bytes", 0) for rank in ranks),
        "loss": {row["step"]: row["loss"] for row in log if "loss" in row},
        "grad_norm": {row["step"]: row["grad_norm"] for row in log if "grad_norm" in row},
    }


def summary(rows: list[Row], padded: list[Row]) -> Row:
    """The runs of a variant as one row; each is compared with the padded run before it."""
    if failed := next((row for row in rows if "failed" in row), None):
        return failed
    speeds = [row["tokens"] / row["epoch_s"] for row in rows]
    ratios = [speed * other["epoch_s"] / other["tokens"] for speed, other in zip(speeds, padded, strict=True)]
    one, other = rows[0], padded[0]
    apart = {name: _furthest(one[name], other[name]) for name in ("loss", "grad_norm")}  # ZeRO 0 logs no norm
    return {
        **{key: one[key] for key in ("variant", "updates", "computed", "tokens")},
        "tokens_per_s": statistics.median(speeds),
        "over_padded": statistics.median(ratios),
        "ratios": [min(ratios), max(ratios)],
        "step_s": statistics.median(row["step_s"] for row in rows),
        "epoch_s": statistics.median(row["epoch_s"] for row in rows),
        "apart": apart,
        "same_steps": one["loss"].keys() == other["loss"].keys(),
    }


def _furthest(one: dict[int, float], other: dict[int, float]) -> float | None:
    """The largest difference of a step, of the largest value or 0.001: centred advantages have losses of rounding."""
    both = one.keys() & other.keys()
    most = max((abs(other[step]) for step in both), default=0.0)
    return max(abs(one[step] - other[step]) for step in both) / max(most, 1e-3) if both else None


def table(result: Row) -> Any:
    """The result for a person."""

    def unless_failed(template: str) -> Any:
        return lambda row: "-" if "failed" in row else template.format(**row)

    def apart(name: str) -> Any:
        return lambda row: "-" if row.get("apart", {}).get(name) is None else f"{row['apart'][name]:.0e}"

    below = (
        "loss, norm: largest difference from the padded run, step by step, of its largest. bfd's and "
        "rebalance's steps hold other samples, so these are other losses; evenload's are the padded run's."
    )
    cells = {
        "variant": "{variant}",
        "tokens/s": unless_failed("{tokens_per_s:,.0f}"),
        "over padded": unless_failed("{over_padded:.2f}x"),
        "lowest .. highest": unless_failed("{ratios[0]:.2f} .. {ratios[1]:.2f}"),
        "s an epoch": unless_failed("{epoch_s:.3g}"),
        "s a step": unless_failed("{step_s:.3g}"),
        "steps": unless_failed("{updates}"),
        "computed": lambda r: " ".join(r.get("failed", ())) or f"{r['computed']:,} of {r['tokens']:,}",
        "loss": apart("loss"),
        "norm": apart("grad_norm"),
    }
    return columns(f"Pairs, {result['task']}, {result['layout']}", result["rows"], cells, below)


def drawn(padded: list[Row], planned: list[Row], task: str) -> Console:
    """A padded run and the planned one after it, step by step, as a terminal would show them."""
    ratios = [one["epoch_s"] / other["epoch_s"] for one, other in zip(padded, planned, strict=True)]
    middle = ratios.index(statistics.median_low(ratios))
    stock, ours = padded[middle], planned[middle]
    script, cap = f"torchrun --nproc-per-node {launching.RANKS} {TASKS[task][0]}", "plugins.packing.max_tokens=2048"
    seconds_of = [[None, *run["steps_s"]] for run in (stock, ours)]
    rows = [
        {"step": step, "stock": loss, "ours": ours["loss"][step], "stock_s": stock_s, "ours_s": ours_s}
        for (step, loss), stock_s, ours_s in zip(stock["loss"].items(), *seconds_of, strict=True)
    ]
    cells: dict[str, Any] = {
        "step": "{step}",
        "loss, stock": "{stock:.6f}",
        "loss, evenload": "{ours:.6f}",
        "seconds, stock": "{stock_s:.2f}",
        "seconds, evenload": "{ours_s:.2f}",
    }
    totals = [sum(run["steps_s"]) for run in (stock, ours)]
    after = f"after the first step: {totals[0]:.1f} s stock, {totals[1]:.1f} s with evenload"
    console = Console(record=True, width=110, file=io.StringIO(), highlight=False)
    console.print(f"$ {script}\n$ evenload run hf-trainer {cap} -- {script}", style="bold")
    for line in ours["says"]:
        console.print(line, style="green", markup=False)
    console.print()
    console.print(columns("", rows, cells))
    console.print(f"\n{after}: {totals[0] / totals[1]:.2f}x (lowest {min(ratios):.2f}x, highest {max(ratios):.2f}x)")
    console.print(f"{datetime.date.today()}: python benchmarks/hosts/pairs.py --svg, {machine()}", style="dim")
    return console


def alternated(asked: argparse.Namespace, folder: Path) -> dict[str, list[Row]]:
    """The runs of every variant, one of each after the other."""
    longest = make(folder, asked.quick, TASKS[asked.task][1])
    (folder / "recipe.yaml").write_text(RECIPE)
    shared = ["--num_train_epochs", "1", "--max_length", str(longest)]
    if asked.task in GENERATED:
        shared = ["--num_train_epochs", "0.25", "--max_completion_length", str(longest), "--num_generations", "4"]
        shared += ["--beta", "0.0"]
    shared += launching.trainer_arguments(asked.layout, folder)
    runs: dict[str, list[Row]] = {variant: [] for variant in asked.variants or TASKS[asked.task][2]}
    for repeat in range(asked.repeats):
        for variant, rows in runs.items():
            recipe = folder / "recipe.yaml" if variant == "evenload" else None
            rows.append(measured(asked.task, variant, shared, folder, folder / f"{variant}{repeat}", recipe))
            print(variant, repeat, rows[-1].get("failed") or seconds(rows[-1]["epoch_s"]), file=sys.stderr)
    return runs


def benchmark(asked: argparse.Namespace) -> Row:
    with stdout_aside(), tempfile.TemporaryDirectory(prefix="pairs-") as path:
        runs = alternated(asked, Path(path))
    if asked.svg:
        drawn(runs["padded"], runs["evenload"], asked.task).save_svg(str(asked.svg), title="evenload")
    rows = [summary(rows, runs["padded"]) for rows in runs.values()]
    return {"task": asked.task, "layout": asked.layout, "rows": rows}


if __name__ == "__main__":
    layouts = ("ddp", *(layout for layout in launching.LAYOUTS if layout != "ddp"))
    own = {"layout": layouts, "task": tuple(TASKS), "variants": [], "quick": False, "svg": Path}
    main(options(__doc__, repeats=3, **own), benchmark, table)
