"""Are settings as fast as `evenload search` says? Trained on the cores of this machine, in turn, after `profile`.

    python benchmarks/planning/search_measured.py [--rounds 3] [--steps 8] [--only NAME,NAME] [--quick]
                                                  [--json] [--out FILE]

Two ranks. Both trainers, each with costs that ``evenload profile`` has just measured for it: a file for a trainer and
model (DeepSpeed's with ``--also deepspeed.zero_stage=3``), and one for TP 2. Every setting trains in processes of its
own; a round profiles and then trains, and rounds go forth and back, so a machine that slows down does so for all.
Rounds train the same steps: measured is each step's least of the rounds, without waiting for plans, and so is what was
predicted for it; both are means over the steps after the first. Kendall's tau-b compares the two orders; an inversion
is a pair that is measured more than 15 % apart and predicted the other way round. "Choice" is the setting predicted to
be fastest.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from evenload.api import load_recipe
from evenload.commands.tables.show import emit, grid
from evenload.core.input.format import seconds
from rich.table import Table

RANKS, APART = 2, 0.15
DENSE = {"num_layers": 4, "hidden_size": 128, "num_attention_heads": 4, "num_query_groups": 4, "family": "llama"}
EXPERTS = {**DENSE, "family": "mixtral", "num_layers": 2, "moe": {"num_experts": 4, "topk": 2}}

Result = dict[str, Any]


class Setting(NamedTuple):
    """What is trained."""

    name: str
    trainer: str
    changes: dict[str, Any]
    experts: bool = False

    @property
    def profile(self) -> str:
        """Which costs are its own."""
        tp = self.changes.get("parallel.tp", 1)
        return f"{self.trainer}{'_experts' if self.experts else ''}_tp{tp}"


def on(cap: int = 4096, **plugins: dict[str, Any]) -> dict[str, Any]:
    """Packing under a cap, and other plugins."""
    sections = {"packing": {"enabled": True, "max_tokens": cap}, **plugins}
    return {"plugins": {name: {"max_tokens": cap, **keys} for name, keys in sections.items()}}


MESH, PIPELINE = {"mesh": {"enabled": True}}, {"pipeline": {"enabled": True}}
SETTINGS = (
    Setting("dp2", "megatron", on()),
    Setting("dp2, cap 1K", "megatron", on(1024)),
    Setting("dp2, cap 16K", "megatron", on(16384)),
    Setting("dp2, recomputed", "megatron", {**on(), "train.recompute": True}),
    Setting("dp2, overlapped", "megatron", {**on(), "megatron.overlap_grad_reduce": True}),
    Setting("dp2, mesh", "megatron", on(**MESH)),
    Setting("dp2, mesh, cap 1K", "megatron", on(1024, **MESH)),
    Setting("tp2", "megatron", {**on(), "parallel.tp": 2}),
    Setting("tp2, cap 16K", "megatron", {**on(16384), "parallel.tp": 2}),
    Setting("pp2", "megatron", {**on(**PIPELINE), "parallel.pp": 2}),
    Setting("pp2, 1 | 3", "megatron", {**on(**PIPELINE), "parallel.pp": 2, "parallel.layers": [1, 3]}),
    Setting("pp2, cap 1K", "megatron", {**on(1024, **PIPELINE), "parallel.pp": 2}),
    Setting("ep2", "megatron", {**on(), "parallel.ep": 2}, experts=True),
    Setting("dp2, experts", "megatron", on(), experts=True),
    Setting("ZeRO 0", "deepspeed", {**on(), "deepspeed.zero_stage": 0}),
    Setting("ZeRO 1", "deepspeed", {**on(), "deepspeed.zero_stage": 1}),
    Setting("ZeRO 2", "deepspeed", {**on(), "deepspeed.zero_stage": 2}),
    Setting("ZeRO 3", "deepspeed", {**on(), "deepspeed.zero_stage": 3}),
    Setting("ZeRO 1, recomputed", "deepspeed", {**on(), "train.recompute": True}),
    Setting("ZeRO 1, cap 1K", "deepspeed", on(1024)),
    Setting("ZeRO 1, pp2", "deepspeed", {**on(**PIPELINE), "parallel.pp": 2}),
)


def evenload(words: list[str]) -> Result:
    """What a command says with --json."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, "-m", "evenload", *words, "--nproc", str(RANKS), "--json"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(words)}: {done.stderr[-2000:]}")
    result: Result = json.loads(done.stdout)
    return result


def words_of(setting: Setting, steps: int) -> list[str]:
    """The recipe of a setting as a command line says it."""
    train = {"global_batch_size": 8, "steps": steps + 1, "dtype": "fp32"}
    fields = {
        "trainer": setting.trainer,
        "model": EXPERTS if setting.experts else DENSE,
        "data": {"source": "python-stdlib", "max_length": 4096, "long_samples": "drop"},
        "parallel": {},
        "train": train,
        **setting.changes,
    }
    return ["quickstart", *(f"{key}={json.dumps(value)}" for key, value in fields.items())]


def profiled(settings: tuple[Setting, ...], folder: Path) -> dict[str, Path]:
    """Costs for each kind of setting, measured now."""
    files: dict[str, Path] = {}
    for setting in settings:
        if setting.profile not in files:
            files[setting.profile] = folder / f"{setting.profile}.yaml"
            also = ["--also", "deepspeed.zero_stage=3"] if setting.trainer == "deepspeed" else []
            evenload(["profile", *words_of(setting, 1), *also, "--out", str(files[setting.profile])])
    return files


def measured(settings: tuple[Setting, ...], rounds: int, steps: int) -> list[Result]:
    """Every setting's seconds, predicted and measured."""
    runs: dict[str, list[list[tuple[float, float]]]] = {setting.name: [] for setting in settings}
    for turn in range(rounds):
        with tempfile.TemporaryDirectory() as name:
            costs = profiled(settings, Path(name))
            for setting in settings[:: 1 - turn % 2 * 2]:
                words = [*words_of(setting, steps), f"costs={json.dumps(str(costs[setting.profile]))}"]
                load_recipe(words[0], words[1:])
                rows = evenload(["train", *words])["steps"][1:]
                runs[setting.name].append([(row["predicted_s"], row["step_s"] - row["plan_wait_s"]) for row in rows])
                print(f"round {turn + 1} of {rounds}: {setting.name}", file=sys.stderr, flush=True)
    least = {name: np.min(of_rounds, axis=0).mean(axis=0).tolist() for name, of_rounds in runs.items()}
    return [
        {"setting": one.name, "trainer": one.trainer, "experts": one.experts, "predicted_s": p, "measured_s": m}
        for one in settings
        for p, m in [least[one.name]]
    ]


def tau_b(first: list[float], second: list[float]) -> float:
    """Kendall's tau-b: pairs in the same order less those in the other, over pairs that are no ties in either."""
    signs = [
        (np.sign(first[i] - first[j]), np.sign(second[i] - second[j])) for i, j in combinations(range(len(first)), 2)
    ]
    a, b = np.array(signs).T
    return float((a * b).sum() / np.sqrt((a != 0).sum() * (b != 0).sum()))


def inversions(rows: list[Result]) -> list[tuple[str, str]]:
    """Pairs that are measured more than `APART` apart and predicted the other way round, the faster one first."""
    pairs = ((a, b) if a["measured_s"] < b["measured_s"] else (b, a) for a, b in combinations(rows, 2))
    return [
        (a["setting"], b["setting"])
        for a, b in pairs
        if b["measured_s"] > (1 + APART) * a["measured_s"] and b["predicted_s"] < a["predicted_s"]
    ]


def summary(rows: list[Result]) -> Result:
    """How well the orders agree, of settings of one model together: dense ones, and those with experts."""
    dense = [row for row in rows if not row["experts"]]
    chosen, best = (min(dense, key=lambda row: row[key]) for key in ("predicted_s", "measured_s"))
    return {
        "settings": len(rows),
        "tau_b": tau_b(*([row[key] for row in dense] for key in ("predicted_s", "measured_s"))),
        "inversions": inversions(dense) + inversions([row for row in rows if row["experts"]]),
        "choice": chosen["setting"],
        "choice_over_best": chosen["measured_s"] / best["measured_s"],
        "mean_error": float(np.mean([abs(row["predicted_s"] / row["measured_s"] - 1) for row in rows])),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--only", help="names of settings, separated by semicolons")
    parser.add_argument("--quick", action="store_true", help="three settings, one round of three steps")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--out", type=Path)
    words = parser.parse_args()
    settings = SETTINGS[:3] if words.quick else SETTINGS
    if words.only:
        settings = tuple(one for one in SETTINGS if one.name in words.only.split(";"))
    rounds, steps = (1, 3) if words.quick else (words.rounds, words.steps)
    rows = measured(settings, rounds, steps)
    machine = f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"
    result: Result = {"machine": machine, "rounds": rounds, "steps": steps, "rows": rows, **summary(rows)}
    if words.out:
        words.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    emit(result, words.json, table)


def table(result: Result) -> Table:
    """A row a setting, the fastest first."""
    rows = sorted(result["rows"], key=lambda row: row["measured_s"])
    said = (
        f"dense settings: tau-b {result['tau_b']:.2f}, inversions {result['inversions'] or 'none'}; choice "
        f"{result['choice']}, {result['choice_over_best']:.3f}x the best; mean error {result['mean_error']:.1%}"
    )
    cells = [
        (row["setting"], row["trainer"], *map(seconds, of), of[1] / of[0])
        for row, of in ((row, (row["measured_s"], row["predicted_s"])) for row in rows)
    ]
    return grid("Settings on two cores", ("setting", "trainer", "measured", "predicted", "over"), cells, said)


if __name__ == "__main__":
    main()
