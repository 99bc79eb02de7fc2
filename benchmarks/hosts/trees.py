"""Prompts with several answers under TRL on two CPU ranks: padding, evenload on rows alone, evenload on trees.

    python benchmarks/hosts/trees.py [--task grpo|rloo|dpo] [--prompts 512] [--answers 8] [--longest 512] [--repeats 3]
        [--quick] [--json] [--out FILE]

Eight answers a prompt (a pair for dpo), of 32 to 512 tokens, even over this range. GRPO's and RLOO's answers are drawn
instead of generated, so that seconds are those of updates alone. The model is that of `pairs`, and so are the columns.

    stock     TRL's own micro-batches, padded to the longest
    rows      the same arguments by ``evenload run``, plugins.packing.trees=false: every row computes its prompt
    trees     what rows begin with in common is computed once

With ``--prompts 1`` nothing is shared, and trees over rows is what finding nothing costs.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

from evenload.benchmarks.frame import Row, main, options
from evenload.benchmarks.hosts import pairs
from evenload.commands.tables.show import stdout_aside
from evenload.core.input.format import seconds

sys.path.append(str(Path(pairs.__file__).parents[2] / "tests" / "hosts"))
import assets

RECIPE = "trainer: transformers\nplugins:\n  packing: {{enabled: true, max_tokens: 8192, trees: {trees}}}\n"
VARIANTS = {"stock": None, "rows": "false", "trees": "true"}
NUM_ROWS, SHORTEST = 64, 32


def make(folder: Path, asked: argparse.Namespace) -> int:
    """The model and the rows; tokens of the longest prompt with its answer."""
    source, longest = assets.library(), asked.prompts + asked.longest
    tokenizer = assets.make_tokenizer(source[:400_000], pairs.VOCABULARY, longest + 64)
    sizes = {"hidden_size": pairs.HIDDEN, "intermediate_size": 4 * pairs.HIDDEN, "num_hidden_layers": pairs.LAYERS}
    sizes = {"num_hidden_layers": 1} if asked.quick else sizes
    config = {**assets.COMMON, **sizes, "vocab_size": pairs.VOCABULARY, "max_position_embeddings": longest + 64}
    assets.save_model(folder / "model", assets.LlamaConfig(**config), tokenizer)
    drawn, tokens = random.Random(0), tokenizer(source[:600_000], add_special_tokens=False)["input_ids"]

    def text(least: int, most: int) -> str:
        length = drawn.randint(min(least, most), most)
        start = drawn.randrange(len(tokens) - length)
        return str(tokenizer.decode(tokens[start : start + length]))

    rows = [
        {
            "prompt": text(asked.prompts, asked.prompts),
            **{key: text(SHORTEST, asked.longest) for key in ("chosen", "rejected")},
        }
        for _ in range(NUM_ROWS + assets.NUM_TEST)
    ]
    assets.write_rows(folder / "pairs", rows, lambda row, _: row)
    return longest


def alternated(asked: argparse.Namespace, folder: Path) -> dict[str, list[Row]]:
    """The runs of every variant, one of each after the other."""
    longest = make(folder, asked)
    shared = ["--max_steps", str(asked.steps), "--max_length", str(longest)]
    batch = ["--per_device_train_batch_size", "8", "--gradient_accumulation_steps", "2"]
    if asked.task in pairs.GENERATED:
        shared = ["--max_steps", str(asked.steps), "--max_completion_length", str(asked.longest), "--beta", "0.0"]
        shared += ["--num_generations", str(asked.answers)]
    runs: dict[str, list[Row]] = {variant: [] for variant in VARIANTS}
    for repeat in range(asked.repeats):
        for variant, rows in runs.items():
            (recipe := folder / f"{variant}.yaml").write_text(RECIPE.format(trees=VARIANTS[variant]))
            rows.append(
                pairs.measured(
                    asked.task,
                    variant,
                    [*shared, *batch],
                    folder,
                    folder / f"{variant}{repeat}",
                    recipe if VARIANTS[variant] else None,
                )
            )
            print(variant, repeat, rows[-1].get("failed") or seconds(rows[-1]["step_s"]), file=sys.stderr)
    return runs


def benchmark(asked: argparse.Namespace) -> Row:
    with stdout_aside(), tempfile.TemporaryDirectory(prefix="trees-") as path:
        runs = alternated(asked, Path(path))
    rows = [pairs.summary(rows, runs["stock"]) for rows in runs.values()]
    return {"task": asked.task, "layout": "ddp", "rows": rows}


if __name__ == "__main__":
    sizes: dict[str, Any] = {"prompts": 512, "answers": 8, "longest": 512, "steps": 8}
    main(options(__doc__, task=("grpo", "rloo", "dpo"), repeats=3, **sizes, quick=False), benchmark, pairs.table)
