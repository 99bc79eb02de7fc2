"""Is a plan ever slower than a lawful row of its own table? Drawn settings, planned, and compared; times predicted.

    python benchmarks/planning/drawn_plans.py [--settings 300] [--first 0] [--against ROOT] [--limit-s 120] [--quick]
                                     [--json] [--out FILE]

A setting is a function of its number: plugins (each subset but none), trainer, one of five clusters, costs, model,
layout, caps and other keys of the plugins, and lengths of ten kinds, from equal ones to a giant among short ones. Each
is planned as ``evenload plan`` does, and the plan is held to the laws once more. A row of its table is lawful that
keeps caps, settings and memory (``over_caps`` null). ``--against`` names a folder from which another version of the
package can be imported as ``evenload``: it plans the same settings, the two taking turns in processes of their own.
Planning seconds are CPU seconds of `PlanChain.plan`, without the table.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt

RECIPE = Path(__file__).resolve().parents[2] / "recipes" / "quickstart.yaml"
QUICK = 12
SAME = 1e-9
"""Share of a step within which two sums of the same terms are one."""
PLUGINS = ("packing", "mesh", "pipeline")
CLUSTERS = ("h200", "h100", "a100", "a800", "flexsp-a100")
COSTS = ("auto", "auto", "cpu", "verl-7b", "galvatron-llama2-7b", "flexsp-gpt-7b-a100", "flexsp-gpt-30b-a100")
KINDS = ("uniform", "equal", "giant", "two giants", "powers", "zipf", "lognormal", "short", "ladder", "bimodal")

Lengths = npt.NDArray[np.int64]
Setting = dict[str, Any]


def drawn(number: int) -> tuple[Setting, Lengths]:
    """Overrides of the recipe and the lengths of one global batch int64 [S]."""
    random = np.random.default_rng([0, number])
    large = random.random() < 0.1
    plugins = [name for name in PLUGINS if random.random() < 0.55] or [str(random.choice(PLUGINS))]
    trainer = str(random.choice(["megatron", "megatron", "deepspeed"]))
    pp = int(random.choice([1, 2, 4, 8])) if random.random() < (0.8 if "pipeline" in plugins else 0.3) else 1
    tp = int(random.choice([1, 1, 2, 4])) if trainer == "megatron" else 1
    cp = int(random.choice([2, 4])) if "mesh" not in plugins and random.random() < 0.15 else 1
    size = int(2 ** random.uniform(0, 11 if large else 7))
    dp = max(1, min(size, int(2 ** random.uniform(0, 8 if large else 5)), 1024 // (tp * pp * cp)))
    lengths = _lengths(random, size, int(2 ** random.uniform(4, 18 if large else 14)))
    setting: Setting = {
        "trainer": trainer,
        "cluster": str(random.choice(CLUSTERS)),
        "costs": str(random.choice(COSTS)),
        "parallel": {"tp": tp, "pp": pp, "cp": cp, "dp": dp},
        "model.num_layers": 8 * int(random.choice([1, 2, 4])),
        "model.hidden_size": int(random.choice([256, 2048, 4096])),
        "model.num_attention_heads": int(random.choice([8, 16, 32])),
        "model.num_query_groups": int(random.choice([4, 8])),
        "data.max_length": max(2, int(lengths.max())),
        "data.min_length": 2,
        "train.global_batch_size": size,
        "train.micro_batch_size": int(random.choice([1, 1, 4])),
        "train.dtype": "fp32" if trainer == "deepspeed" and pp > 1 else str(random.choice(["bf16", "fp32"])),
        "train.recompute": bool(random.random() < 0.2),
    }
    if trainer == "deepspeed":
        setting["deepspeed.zero_stage"] = int(random.choice([0, 1, 2, 3] if pp == 1 else [0, 1]))
    else:
        setting["megatron.overlap_grad_reduce"] = bool(random.random() < 0.5)
    longest = int(lengths.max())
    cap = max(8, int(longest * random.choice([0.25, 0.5, 1, 1, 2, 4] if longest > 512 else [0.5, 1, 2])))
    setting["plugins"] = {name: _section(random, name, cap) for name in plugins}
    return setting, lengths


def _lengths(random: np.random.Generator, size: int, longest: int) -> Lengths:
    kind = KINDS[int(random.integers(len(KINDS)))]
    uniform, short = random.integers(1, longest + 1, size), random.integers(1, max(2, longest // 50 + 2), size)
    values: Any = {
        "uniform": uniform,
        "equal": np.full(size, longest),
        "giant": np.where(np.arange(size) == size // 2, longest, short),
        "two giants": np.where(np.arange(size) < 2, longest, short),
        "powers": 2 ** random.integers(0, longest.bit_length(), size),
        "zipf": np.minimum(random.zipf(1.3, size) * 16, longest),
        "lognormal": random.lognormal(np.log(longest) - 2, 1.2, size).clip(1, longest),
        "short": random.integers(2, 50, size),
        "ladder": np.linspace(1, longest, size),
        "bimodal": np.where(random.random(size) < 0.1, longest, max(1, longest // 100)),
    }[kind]
    return np.maximum(np.asarray(values).astype(np.int64), 2)


def _section(random: np.random.Generator, name: str, cap: int) -> Setting:
    """A plugin's section of the recipe."""

    def maybe(share: float, key: str, *values: Any) -> Setting:
        value = values[int(random.integers(len(values)))]
        return {key: value} if random.random() < share else {}

    own = {"enabled": True, **maybe(0.6 if name == "mesh" else 1.0, "max_tokens", cap)}
    if name == "packing":
        own |= maybe(0.5, "slices", "even", "off") | maybe(0.1, "activation_gib", 0.5, 4, 40)
    elif name == "mesh":
        own |= maybe(0.3, "engines", ["ring"], ["all_to_all"], ["all_gather"], ["ring", "hybrid"])
        own |= maybe(0.2, "max_degree", 1, 2, 3, 8) | maybe(0.2, "powers_of_two", True)
    else:
        own |= maybe(0.3, "split_backward", "on", "off") | maybe(0.3, "chunks", 1, 2, 8)
        own |= maybe(0.2, "recompute", "off") | maybe(0.2, "activation_gib", 0.5, 4, 40)
    return own


class _TooLongError(BaseException):
    """No EvenloadError, which planners may catch."""


def _ring(*_: object) -> None:
    raise _TooLongError


def work(limit_s: float) -> None:
    """Plan the settings whose numbers come in, one JSON object each: what a process of either version does."""
    import evenload
    from evenload.core.errors import EvenloadError
    from evenload.core.laws import check
    from evenload.training.forecast import forecast as command

    logging.disable(logging.CRITICAL)
    # CPU seconds in the place of those of the wall, whatever else runs on the machine.
    command.time = SimpleNamespace(perf_counter=time.process_time)  # type: ignore[attr-defined]
    signal.signal(signal.SIGVTALRM, _ring)
    for line in sys.stdin:
        setting, lengths = drawn(int(line))
        overrides = ["plugins={}", *(f"{key}={json.dumps(value)}" for key, value in setting.items())]
        row: dict[str, Any] = {"number": int(line), "plugins": "+".join(setting["plugins"])}
        begun = time.process_time()
        signal.setitimer(signal.ITIMER_VIRTUAL, limit_s)
        try:
            forecast = command.look_ahead(evenload.load_recipe(RECIPE, overrides), lengths, 1)
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
            step = forecast.to_json()["steps"][0]
            check(forecast.steps[0].ours.plan)
            lawful = {n: b["step_s"] for n, b in step["baselines"].items() if b["over_caps"] is None}
            row |= {"step_s": step["step_s"], "plan_cpu_s": step["plan_s"], "rows": lawful}
        except EvenloadError as error:
            row["refused"] = str(error).splitlines()[0]
        except _TooLongError:
            row["stopped"] = limit_s
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        row["cpu_s"] = time.process_time() - begun
        print(json.dumps(row), flush=True)


class _Version:
    """A process that plans with one version of the package."""

    def __init__(self, root: Path | None, limit_s: float) -> None:
        paths = [str(root)] if root else []
        inherited = [os.environ["PYTHONPATH"]] if os.environ.get("PYTHONPATH") else []
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*paths, *inherited]), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-P", __file__, "--worker", "--limit-s", str(limit_s)]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment)

    def plan(self, number: int) -> dict[str, Any]:
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write(f"{number}\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise SystemExit(f"the process that plans ended at setting {number}, with {self._process.wait()}")
        result: dict[str, Any] = json.loads(answer)
        return result

    def __enter__(self) -> _Version:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait()


def planned(numbers: range, against: Path | None, limit_s: float) -> Iterator[list[dict[str, Any]]]:
    """What each version makes of each setting, ours first; they take turns in who begins."""
    with ExitStack() as stack:
        roots = [None, against] if against else [None]
        versions = [stack.enter_context(_Version(root, limit_s)) for root in roots]
        for number in numbers:
            order = range(len(versions))[:: -1 if number % 2 else 1]
            answers = {place: versions[place].plan(number) for place in order}
            yield [answers[place] for place in range(len(versions))]


def summary(pairs: list[list[dict[str, Any]]]) -> dict[str, Any]:
    """The figures of all settings."""
    ours = [pair[0] for pair in pairs]
    rows = [row for row in ours if "step_s" in row]
    slower = []
    for row in rows:
        name, least_s = min(row["rows"].items(), key=lambda one: one[1], default=("", float("inf")))
        if row["step_s"] > least_s * (1 + SAME):
            slower.append({"number": row["number"], "row": name, "ratio": row["step_s"] / least_s})
    plan_s = [row["plan_cpu_s"] for row in rows]
    result: dict[str, Any] = {
        "settings": len(pairs),
        "planned": len(rows),
        "refused": sum("refused" in row for row in ours),
        "stopped": [row["number"] for row in ours if "stopped" in row],
        "lawful_rows": sum(len(row["rows"]) for row in rows),
        "slower": sorted(slower, key=lambda one: -one["ratio"]),
        "plan_cpu_s": {"sum": sum(plan_s), "most": max(plan_s, default=0.0)},
    }
    both = [pair for pair in pairs if len(pair) == 2 and all("step_s" in row for row in pair)]
    if both:
        ratios = [own["step_s"] / other["step_s"] for own, other in both]
        result["against"] = {
            "planned_by_both": len(both),
            "step_ratio": {"mean": float(np.mean(ratios)), "most": max(ratios), "least": min(ratios)},
            "slower_by_0.1_percent": [m["number"] for (m, _), r in zip(both, ratios, strict=True) if r > 1.001],
            "plan_cpu_s": {
                "ours": sum(m["plan_cpu_s"] for m, _ in both),
                "other": sum(o["plan_cpu_s"] for _, o in both),
            },
            "refused_by_us_alone": [m["number"] for m, o in (p for p in pairs) if "refused" in m and "step_s" in o],
            "stopped_in_other": [m["number"] for m, o in (p for p in pairs) if "stopped" in o],
        }
    return result


def benchmark(asked: argparse.Namespace) -> dict[str, Any]:
    from evenload.benchmarks.frame import machine

    count = min(QUICK, asked.settings) if asked.quick else asked.settings
    pairs = list(planned(range(asked.first, asked.first + count), asked.against, asked.limit_s))
    return {"predicted": True, "machine": machine(), "first": asked.first, **summary(pairs), "answers": pairs}


def table(result: dict[str, Any]) -> Any:
    from evenload.commands.tables.show import grid

    return grid("drawn settings (predicted)", ("", ""), [row for row in result.items() if row[0] != "answers"])


if __name__ == "__main__":
    if "--worker" in sys.argv:  # another version may have no frame
        work(float(sys.argv[-1]))
    else:
        from evenload.benchmarks.frame import main, options

        asked = options(__doc__, settings=300, first=0, against=Path, limit_s=120.0, quick=False)
        main(asked, benchmark, table)
