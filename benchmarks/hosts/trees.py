"""Prompts with several answers under TRL on two CPU ranks: padding, evenload on rows alone, evenload on trees.

    python benchmarks/hosts/trees.py [--task grpo|rloo|dpo] [--model narrow|wide] [--prompts 512] [--answers 8]
        [--longest 512] [--accumulate 2] [--steps 8] [--repeats 3] [--variants stock,rows,trees] [--quick] [--json]
        [--out FILE]

Eight answers a prompt (a pair for dpo), of 32 to 512 tokens, even over this range. GRPO's and RLOO's answers are drawn
instead of generated, so that seconds are those of updates alone. Variants alternate:

    stock     TRL's own micro-batches, padded to the longest
    rows      the same arguments by ``evenload run``, plugins.packing.trees=false: every row computes its prompt
    trees     what rows begin with in common is computed once

Attention computes as many pairs of query and key on trees as on rows, so models differ by its share of the work: 15 %
on prompts of 512 tokens with ``narrow``, the model of `pairs`; 7 % with ``wide``, whose layers have the form of
Qwen2.5-7B's, where it is 1 %. The head takes 10 %, 7 % and 8 %. These shares are counted, of multiplications forwards
on rows without padding. TRL's head runs on the tokens of a pack, so those of a prompt go through it once on trees, too.

Seconds, tokens, CPU seconds (of both ranks, which other work on the machine changes less) and memory are those of steps
after the first. Memory is by how much what a rank has resident rises above what is left after the first update, the
most of both ranks: activations, gradients and optimizer's temporaries, as the system counts pages. "search" is what
looking for equal beginnings takes in a step of a rank.

With ``--prompts 1`` nothing is shared but one token, and trees over rows is what finding nothing costs.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from evenload.benchmarks.frame import Row, columns, main, options
from evenload.benchmarks.hosts import pairs
from evenload.commands.tables.show import stdout_aside
from evenload.core.input.format import seconds

sys.path.append(str(Path(pairs.__file__).parents[2] / "tests" / "hosts"))
import assets

RECIPE = "trainer: transformers\nplugins:\n  packing: {{enabled: true, max_tokens: 8192, trees: {trees}}}\n"
VARIANTS = {"stock": None, "rows": "false", "trees": "true"}
NUM_ROWS, SHORTEST, LIMIT_S = 64, 32, 1800.0
MODELS = {
    "narrow": {
        "hidden_size": pairs.HIDDEN,
        "intermediate_size": 4 * pairs.HIDDEN,
        "num_hidden_layers": pairs.LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": pairs.VOCABULARY,
    },
    "wide": {
        "hidden_size": 512,
        "intermediate_size": 2816,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "vocab_size": 1536,
    },
}
QUICK = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}


def model_of(asked: argparse.Namespace) -> dict[str, int]:
    """The sizes of the model."""
    return MODELS[asked.model] | (QUICK if asked.quick else {})


def shares(model: dict[str, int], length: int) -> tuple[float, float]:
    """What the head and attention's pairs take of the multiplications of a row so long, forwards."""
    hidden, layers = model["hidden_size"], model["num_hidden_layers"]
    of_keys = hidden * model["num_key_value_heads"] // model["num_attention_heads"]
    layer = 2 * hidden * (hidden + of_keys) + 3 * hidden * model["intermediate_size"]
    head, pairs_of = hidden * model["vocab_size"], layers * hidden * (length + 1)
    whole = layers * layer + head + pairs_of
    return head / whole, pairs_of / whole


def make(folder: Path, asked: argparse.Namespace) -> int:
    """The model and the rows; tokens of the longest prompt with its answer."""
    source, longest, sizes = assets.library(), asked.prompts + asked.longest, model_of(asked)
    tokenizer = assets.make_tokenizer(source[:400_000], sizes["vocab_size"], longest + 64)
    config = {**assets.COMMON, **sizes, "max_position_embeddings": longest + 64}
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
    batch = ["--per_device_train_batch_size", "8", "--gradient_accumulation_steps", str(asked.accumulate)]
    if asked.task in pairs.GENERATED:
        shared = ["--max_steps", str(asked.steps), "--max_completion_length", str(asked.longest), "--beta", "0.0"]
        shared += ["--num_generations", str(asked.answers)]
    runs: dict[str, list[Row]] = {variant: [] for variant in asked.variants}
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
                    LIMIT_S,
                )
            )
            print(variant, repeat, rows[-1].get("failed") or seconds(rows[-1]["step_s"]), file=sys.stderr)
    return runs


def row_of(variant: str, runs: dict[str, list[Row]]) -> Row:
    """The runs of a variant, each compared with those of `rows` and of the first variant before it."""
    first, own = next(iter(runs.values())), runs[variant]
    row = pairs.summary(own, first)
    rows = runs.get("rows", first)
    if "failed" in row or any("failed" in one for one in rows):
        return row
    of_each = ("step_s", "cpu_step_s", "search_step_s", "peak_bytes")
    over = {key: sorted(a[key] / b[key] for a, b in zip(rows, own, strict=True)) for key in ("step_s", "cpu_step_s")}
    return {
        **row,
        **{key: own[0][key] for key in ("tokens_after_first", "computed_after_first")},
        **{key: statistics.median(one[key] for one in own) for key in of_each},
        "over_rows": over["step_s"],
        "cpu_over_rows": over["cpu_step_s"],
    }


def benchmark(asked: argparse.Namespace) -> Row:
    with stdout_aside(), tempfile.TemporaryDirectory(prefix="trees-") as path:
        runs = alternated(asked, Path(path))
    head, attention = shares(model_of(asked), asked.prompts + (SHORTEST + asked.longest) // 2)
    about = {"task": asked.task, "model": asked.model, "head": head, "attention": attention}
    return {**about, "layout": "ddp", "rows": [row_of(variant, runs) for variant in runs]}


def table(result: Row) -> Any:
    """The result for a person."""
    ran = [row for row in result["rows"] if "over_rows" in row]
    if len(ran) < len(result["rows"]):
        return pairs.table(result)
    cells = {
        "variant": "{variant}",
        "s a step": "{step_s:seconds}",
        "rows over it": lambda row: f"{statistics.median(row['over_rows']):.2f}x",
        "lowest .. highest": lambda row: f"{row['over_rows'][0]:.2f} .. {row['over_rows'][-1]:.2f}",
        "CPU s a step": "{cpu_step_s:seconds}",
        "by CPU s": lambda row: f"{statistics.median(row['cpu_over_rows']):.2f}x",
        "search": "{search_step_s:seconds}",
        "of a step": lambda row: f"{row['search_step_s'] / row['step_s']:.3%}",
        "memory": "{peak_bytes:mib}",
        "computed": "{computed_after_first:,} of {tokens_after_first:,}",
        "loss": "{apart[loss]:.0e}",
        "norm": "{apart[grad_norm]:.0e}",
    }
    below = "loss, norm: largest difference from the first variant, step by step, of its largest"
    shares = f"head {result['head']:.1%}, attention {result['attention']:.1%} of a row's multiplications"
    return columns(f"Trees, {result['task']}, {result['model']}: {shares}", ran, cells, below)


if __name__ == "__main__":
    tasks, models = ("grpo", "rloo", "dpo"), tuple(MODELS)
    sizes: dict[str, Any] = {"prompts": 512, "answers": 8, "longest": 512, "steps": 8, "accumulate": 2, "repeats": 3}
    main(options(__doc__, task=tasks, model=models, variants=[*VARIANTS], **sizes, quick=False), benchmark, table)
