"""What it takes a rank to tell the others which samples and weights it has, before the model is built. Measured.

    python benchmarks/faults/same_files.py [--weights DIR] [--repeats 5] [--json]

The least of so many times, for data that come with Python and, with --weights, for a folder of weights; sources and
heads of files are open by then, as a run has to open them anyway.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from evenload.benchmarks.frame import Row, main, options
from evenload.commands.tables.show import grid
from evenload.data.sources import open_source


def of_data(name: str) -> Callable[[], object]:
    source = open_source(name, max_length=4096)
    return lambda: source.fingerprint


def of_weights(folder: Path) -> Callable[[], object]:
    from evenload.integrations.huggingface.folders.reading import WeightFolder

    return WeightFolder.open(folder).fingerprint


def least_ms(opened: Callable[[], Callable[[], object]], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        tell = opened()
        begin = time.perf_counter()
        tell()
        times.append(1e3 * (time.perf_counter() - begin))
    return min(times)


def table(result: dict[str, Any]) -> Any:
    return grid("before the model is built", ("of", "ms"), [(row["of"], row["ms"]) for row in result["rows"]])


def benchmark(asked: Any) -> Row:
    named: dict[str, Callable[[], Callable[[], object]]] = {
        name: partial(of_data, name) for name in ("python-stdlib", "python-docstrings")
    }
    if asked.weights:
        named[str(asked.weights)] = partial(of_weights, asked.weights)
    return {"rows": [{"of": name, "ms": least_ms(opened, asked.repeats)} for name, opened in named.items()]}


if __name__ == "__main__":
    main(options(__doc__, weights=Path, repeats=5), benchmark, table)
