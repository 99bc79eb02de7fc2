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

import json
import sys
import tempfile
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from evenload.api import load_recipe
from evenload.benchmarks.chains import plugins
from evenload.benchmarks.frame import Row, columns, command, machine, main, options

RANKS, APART = 2, 0.15
DENSE = {"num_layers": 4, "hidden_size": 128, "num_attention_heads": 4, "num_query_groups": 4, "family": "llama"}
EXPERTS = {**DENSE, "family": "mixtral", "num_layers": 2, "moe": {"num_experts": 4, "topk": 2}}


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


def on(cap: int = 4096, *names: str) -> dict[str, Any]:
    """Packing under a cap, and other plugins."""
    return {"plugins": plugins(cap, "packing", *names)}


SETTINGS = (
    Setting("dp2", "megatron", on()),
    Setting("dp2, cap 1K", "megatron", on(1024)),
    Setting("dp2, cap 16K", "megatron", on(16384)),
    Setting("dp2, recomputed", "megatron", {**on(), "train.recompute": True}),
    Setting("dp2, overlapped", "megatron", {**on(), "megatron.overlap_grad_reduce": True}),
    Setting("dp2, mesh", "megatron", on(4096, "mesh")),
    Setting("dp2, mesh, cap 1K", "megatron", on(1024, "mesh")),
    Setting("tp2", "megatron", {**on(), "parallel.tp": 2}),
    Setting("tp2, cap 16K", "megatron", {**on(16384), "parallel.tp": 2}),
    Setting("pp2", "megatron", {**on(4096, "pipeline"), "parallel.pp": 2}),
    Setting("pp2, 1 | 3", "megatron", {**on(4096, "pipeline"), "parallel.pp": 2, "parallel.layers": [1, 3]}),
    Setting("pp2, cap 1K", "megatron", {**on(1024, "pipeline"), "parallel.pp": 2}),
    Setting("ep2", "megatron", {**on(), "parallel.ep": 2}, experts=True),
    Setting("dp2, experts", "megatron", on(), experts=True),
    Setting("ZeRO 0", "deepspeed", {**on(), "deepspeed.zero_stage": 0}),
    Setting("ZeRO 1", "deepspeed", {**on(), "deepspeed.zero_stage": 1}),
    Setting("ZeRO 2", "deepspeed", {**on(), "deepspeed.zero_stage": 2}),
    Setting("ZeRO 3", "deepspeed", {**on(), "deepspeed.zero_stage": 3}),
    Setting("ZeRO 1, recomputed", "deepspeed", {**on(), "train.recompute": True}),
    Setting("ZeRO 1, cap 1K", "deepspeed", on(1024)),
    Setting("ZeRO 1, pp2", "deepspeed", {**on(4096, "pipeline"), "parallel.pp": 2}),
)


def on_ranks(*words: object) -> Row:
    return command(*words, "--nproc", RANKS)


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
            on_ranks("profile", *words_of(setting, 1), *also, "--out", files[setting.profile])
    return files


def measured(settings: tuple[Setting, ...], rounds: int, steps: int) -> list[Row]:
    """Every setting's seconds, predicted and measured."""
    runs: dict[str, list[list[tuple[float, float]]]] = {setting.name: [] for setting in settings}
    for turn in range(rounds):
        with tempfile.TemporaryDirectory() as name:
            costs = profiled(settings, Path(name))
            for setting in settings[:: 1 - turn % 2 * 2]:
                words = [*words_of(setting, steps), f"costs={json.dumps(str(costs[setting.profile]))}"]
                load_recipe(words[0], words[1:])
                rows = on_ranks("train", *words)["steps"][1:]
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


def inversions(rows: list[Row]) -> list[tuple[str, str]]:
    """Pairs that are measured more than `APART` apart and predicted the other way round, the faster one first."""
    pairs = ((a, b) if a["measured_s"] < b["measured_s"] else (b, a) for a, b in combinations(rows, 2))
    return [
        (a["setting"], b["setting"])
        for a, b in pairs
        if b["measured_s"] > (1 + APART) * a["measured_s"] and b["predicted_s"] < a["predicted_s"]
    ]


def summary(rows: list[Row]) -> Row:
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


def benchmark(asked: Any) -> Row:
    settings = SETTINGS[:3] if asked.quick else SETTINGS
    if asked.only:
        settings = tuple(one for one in SETTINGS if one.name in asked.only.split(";"))
    rounds, steps = (1, 3) if asked.quick else (asked.rounds, asked.steps)
    rows = measured(settings, rounds, steps)
    return {"machine": machine(), "rounds": rounds, "steps": steps, "rows": rows, **summary(rows)}


def table(result: Row) -> Any:
    """A row a setting, the fastest first."""
    said = (
        f"dense settings: tau-b {result['tau_b']:.2f}, inversions {result['inversions'] or 'none'}; choice "
        f"{result['choice']}, {result['choice_over_best']:.3f}x the best; mean error {result['mean_error']:.1%}"
    )
    cells = {"setting": "{setting}", "trainer": "{trainer}", "measured": "{measured_s:seconds}"}
    cells |= {"predicted": "{predicted_s:seconds}", "over": lambda row: row["predicted_s"] / row["measured_s"]}
    rows = sorted(result["rows"], key=lambda row: row["measured_s"])
    return columns("Settings on two cores", rows, cells, said)


if __name__ == "__main__":
    main(options(__doc__, rounds=3, steps=8, only="", quick=False), benchmark, table)
