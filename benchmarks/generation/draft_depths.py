"""Forwards and drafted tokens of drafts by texts, as long as they pay, beside every fixed length: texts played again.

    python benchmarks/generation/draft_depths.py [--samples new.jsonl] [--earlier old.jsonl] [--prompts prompts.jsonl]
                                                 [--slots 64 16 4] [--files 64] [--json] [--out FILE]

Nothing is computed by a model: each forward of a live sample is asked what it drafts, and what its known text has there
is accepted. Without files of samples the text is the standard library of this Python: 512 bytes of each of some modules
after the 256 before, each sample's own prompt. Predicted seconds are 1 a step, 1/64 a row and nothing
for a key, the proportions that drafts assume where no costs are measured. The best fixed length of 1 to 8 has the
fewest; next to it stands the shortest one that takes no more forwards of samples.
"""

from __future__ import annotations

import json
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from evenload.benchmarks.frame import Row, columns, main, options
from evenload.plugins.rollout.texts import TextDrafter
from evenload.runtime.generate.drafts import Drafts
from evenload.runtime.generate.request import Completion, Request

BEFORE, AFTER, SKIPPED = 256, 512, 1000
STEP_S, ROW_S = 1.0, 1 / 64
MOST = 15
Texts = tuple[list[Completion], dict[int, Request]]


class FixedLength(TextDrafter):
    """Drafts of so many tokens, however probable they are."""

    def guess(self, sample: Any, most: int, least: float) -> list[int]:
        return super().guess(sample, most, 0.0)


def replayed(texts: Texts, drafts: Drafts, slots: int, *, fixed: bool) -> Row:
    """Forwards of the rank and of samples, drafted tokens, and predicted seconds."""
    samples, requests = texts
    waiting = [
        SimpleNamespace(request=requests[one.prompt], number=one.sample, new=[], all=one.tokens) for one in samples
    ]
    live: list[Any] = []
    forwards, seconds = 0, 0.0
    while waiting or live:
        while waiting and len(live) < slots:
            live.append(waiting.pop(0))
        for one in live:
            one.length = len(one.request.tokens) + len(one.new)
        if not fixed:
            drafts.begin(live, waiting=bool(waiting))
        for one in live:
            one.drafted = drafts.of(one, len(one.all) - len(one.new) - 1, len(live))
        forwards += 1
        seconds += STEP_S + ROW_S * sum(1 + len(one.drafted) for one in live)
        for one in live:
            pairs = zip(one.drafted, one.all[len(one.new) :], strict=False)
            accepted = next((place for place, (guess, token) in enumerate(pairs) if guess != token), len(one.drafted))
            one.new.extend(one.all[len(one.new) : len(one.new) + accepted + 1])
            drafts.saw(one, accepted)
        live = [one for one in live if len(one.new) < len(one.all)]
    return {
        "forwards": forwards,
        "seconds": seconds,
        "of_samples": drafts.counts.forwards,
        "drafted": drafts.counts.drafted,
    }


def library(files: int) -> Texts:
    """Text of modules, a request each."""
    paths = sorted(path for path in Path(sysconfig.get_path("stdlib")).glob("*.py") if path.stat().st_size > 8192)
    texts = [path.read_bytes()[SKIPPED : SKIPPED + BEFORE + AFTER] for path in paths[::2][:files]]
    requests = {i: Request(i, tuple(text[:BEFORE]), AFTER) for i, text in enumerate(texts)}
    return [Completion(i, 0, tuple(text[BEFORE:]), (), "limit") for i, text in enumerate(texts)], requests


def samples_in(path: Path) -> list[Completion]:
    rows = map(json.loads, path.read_text().splitlines())
    return [Completion(row["prompt"], row["sample"], tuple(row["tokens"]), (), row["ended"]) for row in rows]


def compared(name: str, texts: Texts, earlier: Sequence[Completion], slots: int) -> Row:
    fixed = [replayed(texts, Drafts(FixedLength(most, earlier)), slots, fixed=True) for most in range(1, 9)]
    own = replayed(texts, Drafts(TextDrafter(MOST, earlier)), slots, fixed=False)
    best = min(range(8), key=lambda place: fixed[place]["seconds"])
    none = replayed(texts, Drafts(), slots, fixed=True)
    as_few = [place for place, row in enumerate(fixed) if row["of_samples"] <= own["of_samples"]]
    equal = as_few[0] if as_few else len(fixed) - 1
    over = {"over_none": none["seconds"] / own["seconds"], "best_over_none": none["seconds"] / fixed[best]["seconds"]}
    saved = {
        "as_few": equal + 1,
        "fewer_forwards": not as_few,
        "saved_frac": 1 - own["drafted"] / fixed[equal]["drafted"],
    }
    return {"text": name, "slots": slots, "own": own, "fixed": fixed, "best": best + 1, **over, **saved}


def benchmark(asked: Any) -> Row:
    cases: list[tuple[str, Texts, list[Completion]]] = [("standard library", library(asked.files), [])]
    if asked.samples:
        rows = [json.loads(line)["prompt"] for line in asked.prompts.read_text().splitlines()]
        requests = {i: Request(i, tuple(row.encode()), 1 << 20) for i, row in enumerate(rows)}
        cases = [(asked.samples.stem, (samples_in(asked.samples), requests), [])]
        if asked.earlier:
            cases.append((f"{asked.samples.stem}, {asked.earlier.stem}", cases[0][1], samples_in(asked.earlier)))
    return {"rows": [compared(*case, slots) for case in cases for slots in asked.slots], "predicted": True}


def table(result: Row) -> Any:
    cells = {
        "text": "{text}",
        "slots": "{slots}",
        "over none": "{over_none:.2f}x",
        "best fixed": "{best_over_none:.2f}x ({best})",
        "forwards of samples": lambda row: f"{row['own']['of_samples']:,}",
        "drafted": lambda row: f"{row['own']['drafted']:,}",
        "a fixed length with as few forwards": lambda row: f"{row['as_few']}" + row["fewer_forwards"] * " has more",
        "drafted over its": lambda row: f"{-row['saved_frac']:+.0%}",
    }
    return columns("drafts as long as they pay, next to a fixed length: predicted", result["rows"], cells)


def arguments() -> Any:
    return options(__doc__, samples=Path, earlier=Path, prompts=Path, slots=[64, 16, 4], files=64)


if __name__ == "__main__":
    main(arguments(), benchmark, table)
