"""What the scripts of this folder share: sets of lengths, batches drawn as training draws them, words and tables."""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from evenload.commands.tables.show import emit
from evenload.core.plan.step_plan import Lengths, as_lengths
from evenload.core.planning.chain import PlanChain
from evenload.data.lengths import read_lengths
from evenload.data.samples.cut import cut
from evenload.data.samples.order import SampleOrder

sys.path.append(str(Path(__file__).parents[1] / "published"))
from lengths import drawn

SEED = 1234
MOST_LINES = 60_000
"""Of a file of lengths."""
LONG_TAIL = "long tail (log-normal)"
"""After long prompts of conversations, an assumption: median 6,800 tokens, shape 1.1, up to 131,072."""

Row = dict[str, Any]


def script(name: str) -> Any:
    """Another benchmark as a module, by its path below this folder's parent."""
    path = Path(__file__).parents[1] / name
    spec = importlib.util.spec_from_file_location(f"of_{path.parent.name}_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module
    spec.loader.exec_module(module)
    return module


def sets_of(files: list[Path]) -> dict[str, Lengths]:
    """Lengths by name: the files, or a stand-in for Wikipedia where there are none, and a drawn long tail."""
    named = {path.stem: read_lengths(path)[:MOST_LINES] for path in files}
    if not named:
        named = {"wikipedia-like": as_lengths(drawn("wikipedia-like", MOST_LINES))}
    tail = np.random.default_rng(SEED).lognormal(np.log(6800), 1.1, MOST_LINES)
    return {**named, LONG_TAIL: as_lengths(tail.astype(np.int64).clip(16, 131_072))}


def batches(lengths: Lengths, longest: int, size: int, count: int) -> Iterator[Lengths]:
    """Global batches of ``size`` samples, longer ones split; a short file is gone through again."""
    samples = cut(lengths, longest, "split", 2).length
    samples = np.tile(samples, -(-size * count // len(samples)))
    order = SampleOrder(len(samples), SEED)
    for _ in range(count):
        chosen, order = order.take(size)
        yield as_lengths(samples[chosen])


def without_sums(chain: PlanChain) -> PlanChain:
    """The chain where gradients and weights travel for nothing: what is compared is compute."""
    traffic = replace(chain.context.traffic, gradient_bytes=0.0, weight_bytes=0.0)
    return replace(chain, context=replace(chain.context, traffic=traffic))


def timed(work: Callable[[], Any], repeats: int = 3) -> tuple[Any, float]:
    """What work gives, and the CPU seconds of this process that it takes: the least of ``repeats``."""
    taken = []
    for _ in range(repeats):
        began = time.process_time()
        answer = work()
        taken.append(time.process_time() - began)
    return answer, min(taken)


def means(rows: list[Row]) -> Row:
    """The mean of every number of rows that are alike."""
    return {key: float(np.mean([row[key] for row in rows])) for key in rows[0]}


def leaders(rows: list[Row], key: str) -> list[str]:
    """Names of rows that are below evenload's in ``key`` by more than rounding; rows of one case."""
    ours = min(row[key] for row in rows if row["name"].startswith("evenload"))
    return [row["name"] for row in rows if row[key] < ours * (1 - 1e-6)]


def arguments(about: str | None, **numbers: int) -> argparse.Namespace:
    """The words of a script; ``numbers``: options of its own with their defaults."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=Path, action="append", default=[], help="A file of lengths; repeatable.")
    for name, value in numbers.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--json", action="store_true", help="Print one JSON object instead of the table.")
    parser.add_argument("--out", type=Path, help="Write the JSON here too.")
    return parser.parse_args()


def finish(result: Row, words: argparse.Namespace, table: Callable[[Row], Any]) -> None:
    if words.out:
        words.out.write_text(json.dumps(result, indent=1) + "\n")
    emit(result, words.json, table)
