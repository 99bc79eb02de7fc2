"""Two replicas of one rank each, one of them held to half speed: sequences dealt by speed over equal shares.

    python benchmarks/lora/replicas.py [--steps 12] [--repeats 3] [--share 0.5] [--json] [--out FILE]

Rank 1 is stopped and let go on by signals so that it runs the given share of the time. *Equal*: the recipe calls both
replicas alike; *by speed*: the second one's cluster file has its share of the rate. Both train the same three tenants
on CPUs (gloo, float32), alternating; the step is the mean after the first two. Measured.
"""

from __future__ import annotations

import argparse
import os
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from evenload.benchmarks.frame import RECIPES, columns, command, main, options

EQUAL, BY_SPEED = "equal", "by speed"
TURN_S = 0.02
"""In which the slow rank is stopped once."""
MODEL = {"num_layers": 4, "hidden_size": 128, "num_attention_heads": 4, "ffn_hidden_size": 512, "vocab_size": 256}
TENANT = {"data": {"source": "python-stdlib", "max_length": 512}, "adapter": {"r": 8}}


def files(folder: Path, share: float, steps: int) -> None:
    """The tenants, and the recipe of either way."""
    (folder / "tenants").mkdir()
    for seed in range(3):
        tenant = {**TENANT, "train": {"steps": steps, "batch_size": 8, "seed": seed}}
        (folder / "tenants" / f"tenant{seed}.yaml").write_text(yaml.safe_dump(tenant))
    cluster = yaml.safe_load((RECIPES / "clusters" / "local.yaml").read_text())
    slow = {**cluster, "name": "slow", "flops_per_s": float(cluster["flops_per_s"]) * share}
    (folder / "slow.yaml").write_text(yaml.safe_dump({**slow, "launch_s": float(cluster["launch_s"]) / share}))
    plugins = {"packing": {"enabled": True, "max_tokens": 1024}, "lora": {"enabled": True, "tenants": "tenants"}}
    for name, second in ((EQUAL, {"dp": 1}), (BY_SPEED, {"dp": 1, "cluster": "slow.yaml"})):
        recipe = {"model": MODEL, "parallel": {"replicas": [{"dp": 1}, second]}, "plugins": plugins}
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(recipe))


def rank_1() -> int | None:
    """The process of rank 1 that descends from this one."""
    for folder in Path("/proc").iterdir():
        with suppress(OSError, ValueError):
            if folder.name.isdigit() and b"RANK=1\0" in (folder / "environ").read_bytes():
                words = (folder / "cmdline").read_bytes().split(b"\0")
                if b"train" in words and os.getpgid(int(folder.name)) == os.getpgid(0):
                    return int(folder.name)
    return None


@contextmanager
def held_back(share: float) -> Iterator[None]:
    """Inside, rank 1 runs this share of the time, once it is there."""
    over = threading.Event()

    def hold() -> None:
        rank = None
        while not over.wait(share * TURN_S):
            rank = rank or rank_1()
            with suppress(ProcessLookupError):
                if rank:
                    os.kill(rank, signal.SIGSTOP)
                    time.sleep((1 - share) * TURN_S)
                    os.kill(rank, signal.SIGCONT)

    thread = threading.Thread(target=hold)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def benchmark(asked: argparse.Namespace) -> dict[str, Any]:
    """Both ways, alternating."""
    rows: dict[str, list[dict[str, Any]]] = {EQUAL: [], BY_SPEED: []}
    for repeat in range(asked.repeats):
        for name in list(rows)[:: 1 if repeat % 2 == 0 else -1]:
            with tempfile.TemporaryDirectory() as folder, held_back(asked.share):
                files(Path(folder), asked.share, asked.steps)
                result = command("train", f"{name}.yaml", folder=Path(folder))
            step_s = float(np.mean([row["step_s"] for row in result["steps"][2:]]))
            rows[name].append({"step_s": step_s, "sequences": [one["sequences"] for one in result["replicas"]]})
    by_name = {name: float(np.median([row["step_s"] for row in some])) for name, some in rows.items()}
    return {"share": asked.share, "over": by_name[EQUAL] / by_name[BY_SPEED], "step_s": by_name, "rows": rows}


def table(result: dict[str, Any]) -> Any:
    cells = {"dealt": "{name}", "step": "{step_s:seconds}", "sequences of the replicas": "{sequences}"}
    rows = [
        {"name": name, "step_s": result["step_s"][name], "sequences": some[0]["sequences"]}
        for name, some in result["rows"].items()
    ]
    note = f"medians; by speed {result['over']:.2f}x"
    return columns(f"two replicas, the second at {result['share']:.0%} of its speed, measured", rows, cells, note)


if __name__ == "__main__":
    main(options(__doc__, steps=12, repeats=3, share=0.5), benchmark, table)
