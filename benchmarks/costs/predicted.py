"""Predicted against measured step time of many plans on this machine, on both trainers.

    python benchmarks/costs/predicted.py [--only TEXT] [--steps 2] [--repeats 3] [--json] [--out FILE] [--plot FILE.png]

For each trainer `evenload profile` measures a model on 2 ranks and writes its costs; then `evenload bench` runs plans
of several layouts and settings with these costs. A plan is a trainer, a layout, a planner and a batch. Predicted is the
simulator's step (`core.simulate.step`), made from the plan and the costs alone. Measured is the wall time of the
slowest rank from lining up to the end of the update, the median of the repeats, which alternate between the planners of
a batch; a step of warm-up comes first. Batches are those of the recipe's data in the order of its seed (`SEED`).

ZeRO 3 has a profile of its own, as its hooks gather weights in every layer; ZeRO 0 and 1 use that of ZeRO 2. Pipelines
of Megatron-Core use the profile of 2 data-parallel ranks, tensor-parallel ranks one of their own. A model with experts
is profiled on as many data-parallel ranks as run it, each with all experts. Nothing else should
run: predictions know no other load. Where something does, "busiest" still compares CPU seconds of the busiest rank, as
predicted, with those measured.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from evenload.benchmarks.frame import RECIPES, columns, command, main, options
from evenload.core.input.format import percent

SEED = 1234
SIZES = [
    *("data.max_length=4096", "train.global_batch_size=8", "train.micro_batch_size=1"),
    *("plugins.packing.max_tokens=4096", f"train.seed={SEED}"),
]
"""A model of 2 layers of 128, whose steps take 0.3 to 3 s on two CPU cores."""


class Scenario(NamedTuple):
    """One run of `evenload bench`."""

    trainer: str
    name: str
    profile: str
    """Whose costs it uses: a key of `PROFILES`."""
    overrides: tuple[str, ...] = ()
    against: str = "in_order"


MOE = ("model.family=mixtral", "model.moe={num_experts: 8, topk: 2, ffn_hidden_size: 256}")

PROFILES: dict[str, tuple[str, tuple[str, ...]]] = {
    "megatron": ("quickstart.yaml", ()),
    "megatron tp 2": ("quickstart.yaml", ("parallel.dp=1", "parallel.tp=2")),
    "megatron experts": ("quickstart.yaml", MOE),
    "megatron experts, 4 ranks": ("quickstart.yaml", (*MOE, "parallel.dp=4")),
    "deepspeed": ("deepspeed.yaml", ("deepspeed.zero_stage=2",)),
    "deepspeed zero 3": ("deepspeed.yaml", ("deepspeed.zero_stage=3",)),
}
"""Recipe and overrides of every profile."""

SLICES = "plugins.packing.max_tokens=1024"
TP = ("parallel.dp=1", "parallel.tp=2")
PP = ("parallel.dp=1", "parallel.pp=2")
REPLAYS = (SLICES, "plugins.packing.activation_gib=0.06")
EP = (*MOE, "parallel.ep=2")

SCENARIOS = (
    Scenario("megatron", "dp 2", "megatron", against="stock,in_order"),
    Scenario("megatron", "dp 2, slices", "megatron", (SLICES,)),
    Scenario("megatron", "dp 2, replays", "megatron", REPLAYS),
    Scenario("megatron", "dp 2, recompute", "megatron", ("train.recompute=true",)),
    Scenario("megatron", "pp 2", "megatron", PP),
    Scenario("megatron", "pp 2, slices", "megatron", (*PP, SLICES)),
    Scenario("megatron", "pp 2, replays", "megatron", (*PP, *REPLAYS)),
    Scenario("megatron", "tp 2", "megatron tp 2", TP),
    Scenario("megatron", "experts, dp 2", "megatron experts", MOE),
    Scenario("megatron", "experts, ep 2", "megatron experts", EP, "stock,in_order"),
    Scenario("megatron", "experts, ep 2, slices", "megatron experts", (*EP, SLICES)),
    Scenario("megatron", "experts, ep 2, replays", "megatron experts", (*EP, *REPLAYS)),
    Scenario("megatron", "experts, ep 2, recompute", "megatron experts", (*EP, "train.recompute=true")),
    Scenario("megatron", "experts, ep 2 x dp 2", "megatron experts, 4 ranks", (*EP, "parallel.dp=4")),
    Scenario("megatron", "experts, pp 2 x ep 2", "megatron experts, 4 ranks", (*EP, "parallel.pp=2")),
    Scenario("deepspeed", "zero 0", "deepspeed", ("deepspeed.zero_stage=0",)),
    Scenario("deepspeed", "zero 1", "deepspeed", ("deepspeed.zero_stage=1",)),
    Scenario("deepspeed", "zero 2", "deepspeed", ("deepspeed.zero_stage=2",), "stock,in_order"),
    Scenario("deepspeed", "zero 2, slices", "deepspeed", ("deepspeed.zero_stage=2", SLICES)),
    Scenario("deepspeed", "zero 1, recompute", "deepspeed", ("deepspeed.zero_stage=1", "train.recompute=true")),
    Scenario("deepspeed", "zero 3", "deepspeed zero 3", ("deepspeed.zero_stage=3",)),
)


def benchmark(scenarios: tuple[Scenario, ...], steps: int, repeats: int) -> dict[str, Any]:
    """Profiles, then every scenario. Raises CalledProcessError where a run fails."""
    profiles: dict[str, Any] = {}
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for name in dict.fromkeys(s.profile for s in scenarios):
            recipe, overrides = PROFILES[name]
            costs = Path(folder) / f"{name.replace(' ', '_')}.yaml"
            profiles[name] = evenload("profile", recipe, [*SIZES, *overrides], ["--out", str(costs)])
            for scenario in (s for s in scenarios if s.profile == name):
                words = [*SIZES, *scenario.overrides, f"train.steps={steps}", f"costs={costs}"]
                options = ["--against", scenario.against, "--repeats", str(repeats)]
                new_rows = list(rows_of(scenario, evenload("bench", recipe, words, options)))
                for row in new_rows:
                    print("{trainer} {layout} {planner} {batch}: {error:+.3f}".format(**row), file=sys.stderr)
                rows += new_rows
    return {**summary(rows), "rows": rows, "profiles": {k: _short(p) for k, p in profiles.items()}, "seed": SEED}


def evenload(verb: str, recipe: str, overrides: list[str], options: list[str]) -> Any:
    """The JSON of one command on the recipe's ranks with one thread each."""
    return command(verb, RECIPES / recipe, *overrides, *options)


def rows_of(scenario: Scenario, result: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A row for every plan that a bench has run."""
    for variant, predicted in result["predicted_s"].items():
        for step, (predicted_s, measured_s) in enumerate(zip(predicted, result["measured_s"][variant], strict=True)):
            about = {"trainer": scenario.trainer, "layout": scenario.name, "planner": variant, "batch": step + 1}
            errors = {"error": predicted_s / measured_s - 1.0, "busiest_error": result["busiest_error"][variant][step]}
            yield {**about, "predicted_s": predicted_s, "measured_s": measured_s, **errors}


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Mean and worst absolute error, of all plans and by trainer."""

    def of(some: list[dict[str, Any]]) -> dict[str, Any]:
        errors = np.abs([row["error"] for row in some])
        return {"plans": len(some), "mean": float(errors.mean()), "worst": float(errors.max())}

    trainers = dict.fromkeys(row["trainer"] for row in rows)
    return {"error": {"all": of(rows), **{t: of([row for row in rows if row["trainer"] == t]) for t in trainers}}}


def _short(profile: dict[str, Any]) -> dict[str, Any]:
    return {key: profile[key] for key in ("source", "passes", "update_s", "links", "fit_error")}


def table(result: dict[str, Any]) -> Any:
    """What a person reads."""
    said = [
        f"{name}: {e['plans']} plans, mean error {percent(e['mean'])}, worst {percent(e['worst'])}"
        for name, e in result["error"].items()
    ]
    cells = {
        "": "{trainer} {layout}",
        "planner": "{planner}",
        "batch": "{batch}",
        "predicted": "{predicted_s:seconds}",
        "measured": "{measured_s:seconds}",
        "error": lambda row: f"{100 * row['error']:+.1f} %",
        "busiest": lambda row: f"{100 * row['busiest_error']:+.1f} %",
    }
    return columns("step time, predicted and measured", result["rows"], cells, "\n".join(said))


def plot(result: dict[str, Any], path: Path) -> None:
    """Predicted over measured seconds, with a band of 10 %."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.5, 5), layout="constrained")
    axes = figure.subplots()
    rows = result["rows"]
    ends = np.array([0.0, 1.1 * max(max(r["measured_s"], r["predicted_s"]) for r in rows)])
    axes.fill_between(ends, 0.9 * ends, 1.1 * ends, color="0.9", label="within 10 %")
    axes.plot(ends, ends, color="0.6", linewidth=1)
    for trainer, marker in zip(dict.fromkeys(r["trainer"] for r in rows), "o^", strict=False):
        some = [r for r in rows if r["trainer"] == trainer]
        axes.plot([r["measured_s"] for r in some], [r["predicted_s"] for r in some], marker, label=trainer, alpha=0.7)
    axes.set(xlabel="measured step [s]", ylabel="predicted step [s]", xlim=ends, ylim=ends)
    axes.legend()
    figure.savefig(path, dpi=150)


def measured(asked: Any) -> dict[str, Any]:
    chosen = tuple(s for s in SCENARIOS if asked.only in f"{s.trainer} {s.name}")
    if not chosen:
        raise SystemExit(f"--only {asked.only}: no such scenario")
    result = benchmark(chosen, asked.steps, asked.repeats)
    if asked.plot:
        plot(result, asked.plot)
    return result


if __name__ == "__main__":
    main(options(__doc__, only="", steps=2, repeats=3, plot=Path), measured, table)
