"""How far `train.max_minutes` is overrun: by less than a step and a save, and what follows them. Measured.

    python benchmarks/faults/max_minutes.py [--minutes 0.4,0.5] [--json] [--out FILE] [key=value ...]

`evenload train quickstart` with more steps than fit, on two ranks. Over: seconds from the limit to the end of the
command, which is later by the save, the summary and the end of processes alone, as no step begins that might end after
the limit. Before it: from the last step's end to the limit.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from evenload.benchmarks.frame import columns, main, options

SMALL = ("train.steps=100000", "data.max_length=1024", "train.global_batch_size=16", "plugins.packing.max_tokens=2048")


def run(minutes: float, settings: list[str], folder: Path) -> dict[str, Any]:
    words = [*SMALL, f"train.max_minutes={minutes}", "checkpoint.dir=kept", "log.jsonl=log.jsonl", *settings]
    environment = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **os.environ}
    command = [sys.executable, "-m", "evenload", "train", "quickstart", *words]
    began_s = time.time()
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    ended_s, limit_s = time.time(), began_s + 60 * minutes
    log = folder / "log.jsonl"
    steps = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    kept = folder / "kept" / "latest"
    saved_s = kept.stat().st_mtime if kept.exists() else ended_s
    return {
        "minutes": minutes,
        "code": done.returncode,
        "steps": len(steps),
        "longest_step_s": max((row["step_s"] for row in steps[1:]), default=0.0),
        "step_ended_before_s": limit_s - log.stat().st_mtime if steps else None,
        "saved_after_s": saved_s - limit_s,
        "over_s": ended_s - limit_s,
        "checkpoint": kept.read_text() if kept.exists() else None,
        "said": done.stderr[-600:],
    }


def table(result: dict[str, Any]) -> Any:
    cells = {"minutes": "{minutes}", "exit code": "{code}", "steps": "{steps}"}
    cells |= {"longest step": "{longest_step_s:.1f} s", "last step before the limit": "{step_ended_before_s:.1f}"}
    cells |= {"saved after it": "{saved_after_s:.1f} s", "ended after it": "{over_s:.1f} s"}
    return columns("train.max_minutes, measured", result["rows"], cells)


def benchmark(asked: Any) -> dict[str, Any]:
    rows = []
    for minutes in asked.minutes:
        with tempfile.TemporaryDirectory(prefix="evenload-minutes-") as folder:
            rows.append(run(minutes, asked.settings, Path(folder)))
    return {"rows": rows}


if __name__ == "__main__":
    main(options(__doc__, minutes=[0.4, 0.5], settings=...), benchmark, table)
