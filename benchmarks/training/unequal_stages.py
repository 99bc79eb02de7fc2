"""Numbers of layers by stage, beside each other: `evenload bench` of each in turn, on the machine's own CPU ranks.

    python benchmarks/training/unequal_stages.py [--layers 6] [--hidden 128] [--vocabulary 4096] [--rounds 3]
                                                 [--costs FILE] [--json] [--out FILE]

A Llama of these sizes on two stages (Megatron-Core, float32), whose output layer is the work of one or two layers, on
files of up to 512 bytes, `plugins.pipeline` on. Every division of the layers runs once in each round, by itself:

    layers          of the first and of the second stage; (auto): what parallel.layers=auto gives
    tokens/s        the best of the rounds, and of the stock schedule (1F1B, a sequence a micro-batch) beside it
    over equal      of evenload's, over that of equally many layers
    bubble          of the timed steps: the least measured, and predicted
    spread          of evenload's tokens/s over the rounds, highest over lowest
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from evenload.commands.tables.show import emit, grid

STAGES = 2
Row = dict[str, Any]


def bench(asked: argparse.Namespace, layers: str) -> Row:
    """One run of `evenload bench`."""
    model = {"num_layers": asked.layers, "hidden_size": asked.hidden, "vocab_size": asked.vocabulary}
    recipe = {
        "model": {**model, "num_attention_heads": 4, "num_query_groups": 4},
        "data": {"source": "python-stdlib", "max_length": 512, "long_samples": "split"},
        "parallel": {"pp": STAGES},
        "train": {"steps": asked.steps, "global_batch_size": 32, "seed": 1234},
        "costs": asked.costs,
        "plugins": {"pipeline": {"enabled": True, "max_tokens": 1024}},
    }
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "recipe.yaml"
        path.write_text(json.dumps(recipe))
        words = [str(path), f"parallel.layers={layers}", "--against", "stock", "--json"]
        done = subprocess.run([sys.executable, "-m", "evenload", "bench", *words], stdout=subprocess.PIPE, check=True)
    result: Row = json.loads(done.stdout)
    return result


def measured(asked: argparse.Namespace) -> Row:
    """Every division in every round."""
    auto = bench(argparse.Namespace(**{**vars(asked), "steps": 1}), "auto")["recipe"]["parallel"]["layers"]
    divisions = [[first, asked.layers - first] for first in range(1, asked.layers)]
    near = [one for one in divisions if abs(one[0] - auto[0]) <= 1 or one[0] == one[1]]
    runs: dict[str, list[Row]] = {str(division): [] for division in near}
    for _ in range(asked.rounds):
        for division, rows in runs.items():
            rows.append(bench(asked, division))
    return {
        "auto": auto,
        "settings": {**vars(asked), "out": None},
        "rows": [_row(division, rows) for division, rows in runs.items()],
    }


def _row(division: str, rows: list[Row]) -> Row:
    ours = [row["tokens_per_s"]["evenload"] for row in rows]
    return {
        "layers": json.loads(division),
        "tokens_per_s": max(ours),
        "stock_tokens_per_s": max(row["tokens_per_s"]["stock"] for row in rows),
        "bubble_frac": min(row["bubble_frac"]["evenload"] for row in rows),
        "predicted_bubble_frac": rows[0]["predicted_bubble_frac"]["evenload"],
        "predicted_s": sum(rows[0]["predicted_s"]["evenload"]),
        "spread": max(ours) / min(ours),
        "peak_activation_bytes_of_stages": rows[0]["peak_activation_bytes_of_stages"]["evenload"],
    }


def table(result: Row) -> Any:
    rows, auto = result["rows"], result["auto"]
    equal = next((row["tokens_per_s"] for row in rows if len(set(row["layers"])) == 1), None)
    cells = [
        [
            " | ".join(map(str, row["layers"])) + " (auto)" * (row["layers"] == auto),
            f"{row['tokens_per_s']:,.0f}",
            f"{row['stock_tokens_per_s']:,.0f}",
            f"{row['tokens_per_s'] / equal:.3f}x" if equal else "-",
            f"{row['bubble_frac']:.1%}",
            f"{row['predicted_bubble_frac']:.1%}",
            f"{row['spread']:.3f}",
        ]
        for row in rows
    ]
    head = ["layers", "tokens/s", "stock", "over equal", "bubble", "predicted", "spread"]
    return grid("numbers of layers by stage", head, cells)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("layers", 6), ("hidden", 128), ("vocabulary", 4096), ("rounds", 3), ("steps", 4)):
        arguments.add_argument(f"--{name}", type=int, default=value)
    arguments.add_argument("--costs", default="auto")
    arguments.add_argument("--json", action="store_true")
    arguments.add_argument("--out", type=Path)
    asked = arguments.parse_args()
    result = measured(asked)
    if asked.out:
        asked.out.write_text(json.dumps(result, indent=1) + "\n")
    emit(result, asked.json, table)


if __name__ == "__main__":
    main()
