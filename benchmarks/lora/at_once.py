"""Tenants in one job against a job each, all at once on the same cores: tokens/s, memory, seconds to the first step.

    python benchmarks/lora/at_once.py [--samples 8] [--tenants 4] [--steps 20] [--repeats 3] [--json] [--out FILE]

Every job has 2 CPU ranks (gloo, float32, adapters of rank 16), and each tenant trains on equal samples in both
variants, as many steps. Variants alternate. Jobs line up when all of them are ready, so nobody's imports take time from
another one's steps: *to the first step* is from the launch until then, with building the model and a step to warm up;
tokens/s are those of all jobs from there until the last one is done. *Memory* is what all processes have of their own
(resident and anonymous: no code, no files) after the last step: a base each, and what torch and its libraries take.
Measured.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from evenload.benchmarks.frame import begun, columns, main, options, result_of
from evenload.benchmarks.lora.lora_ranks import ADAPTER, LONGEST, batch_of, on_rank, plan_of, train_of, trained

TOGETHER, AT_ONCE = "one job", "a job each"
RANKS = 2
PATIENCE_S = 300.0
"""For the other jobs to be ready."""


def work(asked: argparse.Namespace) -> None:
    """One job on one of its ranks."""
    numbers = [int(word) for word in asked.numbers.split(",")]
    with on_rank("dp2") as job:
        for number in numbers:
            job.host.adapters.join(number, ADAPTER, train_of(number, asked.samples))
        batches = [batch_of(step, numbers, asked.samples, asked.longest) for step in range(asked.steps + 1)]
        plans = [plan_of(job.chain, batch) for batch in batches]
        trained(job, plans[0], batches[0])
        if job.is_rank0:
            _line_up(Path(asked.meet), asked.numbers, asked.jobs)
        job.gather(0.0)
        begin = time.time()  # a clock that all processes share
        for plan, batch in zip(plans[1:], batches[1:], strict=True):
            losses = trained(job, plan, batch)
        end = time.time()
        own_bytes = float(job.gather(_own_bytes()).sum())
        is_rank0 = job.is_rank0
    if is_rank0:
        tokens = sum(int(batch.lengths.sum()) for batch in batches[1:])
        result = {"begin": begin, "end": end, "tokens": tokens, "own_bytes": own_bytes, "losses": list(losses.items())}
        print(json.dumps(result))


def _line_up(folder: Path, name: str, jobs: int) -> None:
    (folder / name).touch()
    limit = time.monotonic() + PATIENCE_S
    while len(list(folder.iterdir())) < jobs:
        assert time.monotonic() < limit, "another job is not ready"
        time.sleep(0.02)


def _own_bytes() -> float:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
    return float(line.split()[1]) * 1024


def run(parts: list[str], asked: argparse.Namespace) -> dict[str, Any]:
    """Jobs of these tenants, all at once."""
    with tempfile.TemporaryDirectory() as meet:
        words = ["--samples", str(asked.samples), "--steps", str(asked.steps), "--longest", str(asked.longest)]
        words += ["--meet", meet, "--jobs", str(len(parts))]
        launched = time.time()
        jobs = [begun(__file__, [*words, "--numbers", part], RANKS) for part in parts]
        results = [result_of(job) for job in jobs]
    seconds = max(r["end"] for r in results) - min(r["begin"] for r in results)
    return {
        "start_s": max(r["begin"] for r in results) - launched,
        "tokens_per_s": sum(r["tokens"] for r in results) / seconds,
        "own_bytes": sum(r["own_bytes"] for r in results),
        "losses": dict(pair for r in results for pair in r["losses"]),
    }


def benchmark(asked: argparse.Namespace) -> dict[str, Any]:
    """Both variants, alternating."""
    numbers = [str(number) for number in range(1, asked.tenants + 1)]
    variants = {TOGETHER: [",".join(numbers)], AT_ONCE: numbers}
    rows = []
    for repeat in range(asked.repeats):
        order = list(variants)[:: 1 if repeat % 2 == 0 else -1]
        rows.append({name: run(variants[name], asked) for name in order})
    apart = [abs(row[TOGETHER]["losses"][n] / row[AT_ONCE]["losses"][n] - 1) for row in rows for n in map(int, numbers)]
    return {"samples": asked.samples, "variants": summary(rows), "apart": max(apart), "rows": rows}


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians of the repeats, by variant."""
    keys = ("start_s", "tokens_per_s", "own_bytes")
    return {name: {key: float(np.median([row[name][key] for row in rows])) for key in keys} for name in rows[0]}


def table(result: dict[str, Any]) -> Any:
    cells = {
        "tenants in": "{name}",
        "tokens/s": "{tokens_per_s:,.0f}",
        "memory of their own": "{own_bytes:gib}",
        "to the first step": "{start_s:seconds}",
    }
    rows = [{"name": name, **own} for name, own in sorted(result["variants"].items(), reverse=True)]
    note = f"{result['samples']} samples a tenant and step; losses of the last step apart: {result['apart']:.0e}"
    return columns(f"tenants at once on {RANKS} CPU ranks, measured", rows, cells, note)


if __name__ == "__main__":
    own = options(__doc__, samples=8, tenants=4, steps=20, repeats=3, longest=LONGEST, numbers="", meet="", jobs=1)
    main(own, benchmark, table, work)
