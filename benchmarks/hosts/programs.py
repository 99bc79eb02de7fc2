"""LLaMA-Factory, Axolotl and ms-swift by their own commands on two CPU ranks: stock and planned, in turn.

    python benchmarks/hosts/programs.py [--programs axolotl] [--tunings full lora] [--repeats 2] [--steps 8] [--json]

Each runs in its own environment, which `make test-hosts` makes (`.venv-llamafactory` and so on), by the YAML of
`tests/programs`: 16 pairs of instruction and answer a step in two micro-batches of four a rank, of lognormal lengths
with a median of 64 tokens and up to 512, on a Llama of 4 layers and hidden size 256, in float32.

Seconds are of a step after the first, on rank 0: stock and planned runs take turns, each planned one over the stock one
before it. "computed" is how many places of input all ranks computed, padding included. "equal": whether what the
program prints of losses, norms and tokens is equal to its last digit.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

# In front, since this file has the same name.
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "programs"))
import programs

ROOT = Path(__file__).resolve().parents[2]
SIZES = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4}
RECIPE = programs.RECIPE.replace("1024", "2048")
ROWS = {"per_device_train_batch_size": 4}
"""What a YAML says besides; Axolotl has a name of its own for it."""

Row = dict[str, Any]


def measured(name: str, tuning: str, data: Path, folder: Path, recipe: str, steps: int) -> Row:
    """One run of a program in this environment."""
    rows = {"micro_batch_size": 4} if name == "axolotl" else ROWS
    run = programs.train(name, tuning, data, folder, recipe, max_steps=steps, **rows)
    if run.code:
        return {"failed": run.output.strip().splitlines()[-1:]}
    printed = run.printed()
    seconds = [later - earlier for earlier, later in pairwise(run.steps)]
    return {"tokens": run.tokens, "step_s": statistics.mean(seconds), "printed": printed, "updates": len(run.steps)}


def in_turn(name: str, tuning: str, repeats: int, steps: int) -> list[dict[str, Row]]:
    """Runs of a program, stock and planned in turn; for the program's own environment."""
    with tempfile.TemporaryDirectory(prefix="programs-") as path:
        folder = Path(path)
        programs.make(folder / "data", **SIZES)
        return [
            {
                kind: measured(name, tuning, folder / "data", folder / f"{kind}{repeat}", recipe, steps)
                for kind, recipe in (("stock", ""), ("planned", RECIPE))
            }
            for repeat in range(repeats)
        ]


def summary(name: str, tuning: str, runs: list[dict[str, Row]]) -> Row:
    """The runs of a program as one row."""
    if failed := [one["failed"] for run in runs for one in run.values() if "failed" in one]:
        return {"program": name, "tuning": tuning, "failed": failed[0]}
    ratios = sorted(run["stock"]["step_s"] / run["planned"]["step_s"] for run in runs)
    stock, planned = runs[0]["stock"], runs[0]["planned"]
    return {
        **{"program": name, "tuning": tuning, "updates": planned["updates"], "ratios": ratios},
        **{f"{kind}_tokens": one["tokens"] for kind, one in runs[0].items()},
        **{f"{kind}_step_s": statistics.median(run[kind]["step_s"] for run in runs) for kind in runs[0]},
        "faster": statistics.median(ratios),
        "equal": stock["printed"] == planned["printed"] and bool(stock["printed"]),
    }


def table(rows: list[Row]) -> Any:
    """The rows for a person."""
    from evenload.commands.tables.show import grid
    from evenload.core.input.format import seconds

    def cells(row: Row) -> list[Any]:
        if "failed" in row:
            return [row["program"], row["tuning"], *("-" for _ in range(6)), " ".join(row["failed"])]
        computed = f"{row['planned_tokens']:,} of {row['stock_tokens']:,}"
        times = [seconds(row[f"{kind}_step_s"]) for kind in ("stock", "planned")]
        faster = [f"{row['faster']:.2f}x", f"{row['ratios'][0]:.2f} .. {row['ratios'][-1]:.2f}"]
        return [row["program"], row["tuning"], row["updates"], computed, *times, *faster, row["equal"]]

    head = ("program", "tuning", "steps", "computed", "s a step, stock", "planned", "faster", "lowest .. highest")
    below = "equal: losses, norms and tokens are printed as in a stock run, to the last digit"
    return grid("Programs, 2 CPU ranks", (*head, "equal"), [cells(row) for row in rows], below)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", nargs="+", default=list(programs.PROGRAMS), choices=programs.PROGRAMS)
    parser.add_argument("--tunings", nargs="+", default=["full", "lora"], choices=("full", "lora"))
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    if programs.here():  # in a program's own environment: its runs, for the benchmark that has started this
        print(json.dumps(in_turn(asked.programs[0], asked.tunings[0], asked.repeats, asked.steps)))
        return
    from evenload.commands.tables.show import emit, stdout_aside

    rows = []
    with stdout_aside():
        for name in asked.programs:
            for tuning in asked.tunings:
                own = [ROOT / f".venv-{name}" / "bin" / "python", __file__, "--programs", name, "--tunings", tuning]
                sizes = ["--repeats", str(asked.repeats), "--steps", str(asked.steps)]
                printed = subprocess.run([*own, *sizes], check=True, stdout=subprocess.PIPE).stdout
                runs = json.loads(printed.splitlines()[-1])  # before it stands what the program's packages print
                rows.append(summary(name, tuning, runs))
                print(name, tuning, rows[-1].get("failed") or f"{rows[-1]['faster']:.2f}x", file=sys.stderr)
    emit({"rows": rows}, asked.json, lambda result: table(result["rows"]))


if __name__ == "__main__":
    main()
