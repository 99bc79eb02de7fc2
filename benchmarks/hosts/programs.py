"""The program whose environment this is (LLaMA-Factory, Axolotl or ms-swift), stock and by ``evenload run``, on two CPU
ranks: tokens that are computed, and seconds.

    make .venv-llamafactory/ready
    .venv-llamafactory/bin/python benchmarks/hosts/programs.py [--repeats 3] [--quick] [--json] [--out FILE]

Each run is the program's own command with its own YAML, full and LoRA. The two alternate. The model is a Llama of 4
layers and hidden size 256 in float32; pairs of instruction and answer have lognormal lengths, the longest near 1,024
tokens; two batches of 4 on each rank make an update. Seconds are of 8 updates, the first as long as the mean of the
others, on rank 0. Losses and norms are compared as they are printed, digit by digit.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from evenload.commands.tables.show import emit, grid, stdout_aside
from evenload.core.input.format import seconds

sys.path.append(str(Path(__file__).resolve().parents[2] / "tests" / "programs"))
import programs

SIZES = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4}
LONGEST, UPDATES = 1024, 8
RECIPE = "trainer: transformers\nplugins:\n  packing: {enabled: true, max_tokens: 2048}\n"
BATCH = {
    "llamafactory": {"per_device_train_batch_size": 4, "cutoff_len": LONGEST},
    "axolotl": {"micro_batch_size": 4, "sequence_len": LONGEST},
    "swift": {"per_device_train_batch_size": 4, "max_length": LONGEST},
}

Row = dict[str, Any]


def alternated(name: str, tuning: str, repeats: int, data: Path, folder: Path) -> Row:
    """What the runs of a program come to."""
    runs: dict[str, list[Any]] = {"": [], RECIPE: []}
    for repeat in range(repeats):
        for recipe, done in runs.items():
            place = folder / f"{tuning}{repeat}{'planned' if recipe else 'stock'}"
            done.append(programs.train(name, tuning, data, place, recipe, max_steps=UPDATES, **BATCH[name]))
            print(place.name, done[-1].code, file=sys.stderr)
            if done[-1].code:
                return {"program": name, "tuning": tuning, "failed": done[-1].output.splitlines()[-3:]}
    stock, planned = ([epoch_s(run.steps) for run in done] for done in runs.values())
    (first, *_), (other, *_) = runs.values()
    return {
        "program": name,
        "tuning": tuning,
        "stock_s": statistics.median(stock),
        "evenload_s": statistics.median(planned),
        "ratios": sorted(a / b for a, b in zip(stock, planned, strict=True)),
        "stock_tokens": first.tokens,
        "evenload_tokens": other.tokens,
        "digits_alike": all(run.printed() == first.printed() for done in runs.values() for run in done),
    }


def epoch_s(ends: list[float]) -> float:
    """Seconds of all updates."""
    return (ends[-1] - ends[0]) * len(ends) / (len(ends) - 1)


def cells(row: Row) -> list[Any]:
    if "failed" in row:
        return [row["program"], row["tuning"], *("-" for _ in range(5)), " ".join(row["failed"])]
    ratios = row["ratios"]
    return [
        row["program"],
        row["tuning"],
        seconds(row["stock_s"]),
        seconds(row["evenload_s"]),
        f"{statistics.median(ratios):.2f}x",
        f"{ratios[0]:.2f} .. {ratios[-1]:.2f}",
        f"{row['evenload_tokens']:,} of {row['stock_tokens']:,}",
        "as stock" if row["digits_alike"] else "differ",
    ]


def table(result: Row) -> Any:
    """The result for a person."""
    head = ("program", "weights", "stock", "evenload", "faster", "lowest .. highest", "computed", "printed")
    return grid("Programs", head, [cells(row) for row in result["rows"]], "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="the smallest model, once: whether it runs")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    if not (names := programs.here()):
        parser.error("run this by the Python of a program's environment: make .venv-llamafactory/ready")
    with stdout_aside(), tempfile.TemporaryDirectory(prefix="programs-") as path:
        folder = Path(path)
        programs.make(folder / "data", LONGEST, **({} if asked.quick else SIZES))
        repeats = 1 if asked.quick else asked.repeats
        rows = [alternated(names[0], tuning, repeats, folder / "data", folder) for tuning in ("full", "lora")]
    if asked.out:
        asked.out.write_text(json.dumps({"rows": rows}, indent=1))
    emit({"rows": rows}, asked.json, table)


if __name__ == "__main__":
    main()
