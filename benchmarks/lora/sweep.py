"""A sweep with halving against all its trials run to their end: the winner of each, and what each takes. Measured.

    python benchmarks/lora/sweep.py [FILE] [key=value ...] [--repeats 1] [--json] [--out FILE]

FILE is a tenant with a ``sweep`` (recipes/sweeps/importlib.yaml: eight trials); ``key=value`` changes keys of it, such
as ``train.steps=32``. *Halving* is ``evenload train lora`` with this file, whose worse half of trials ends at each
rung. *Full* is the same command with a file for each trial: all eight train to their end, in company, too. The winner
has the lowest held-out loss. *Train* is the sum of all steps, planning that was waited for and all; *in all* is the
whole command: start, evaluations, adapters written.
"""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from evenload.benchmarks.frame import RECIPES, command, main, options
from evenload.commands.tables.show import grid
from evenload.core.input import reading
from evenload.core.input.format import seconds
from evenload.plugins.lora.sweeps.trials import HALVE_EVERY, sweep_of
from evenload.plugins.lora.tenant_file import Tenant

HALVING, FULL = "halving", "full"
FILE = RECIPES / "sweeps" / "importlib.yaml"


def changed(fields: dict[str, Any], words: list[str]) -> dict[str, Any]:
    """The tenant's file with other values; a value is read as YAML."""
    fields = json.loads(json.dumps(fields))
    for word in words:
        dotted, _, value = word.partition("=")
        *above, last = dotted.split(".", 1 if dotted.startswith("sweep.") else -1)
        section = fields
        for key in above:
            section = section.setdefault(key, {})
        section[last] = reading.parse_yaml(value, word)
    return fields


def write_trials(fields: dict[str, Any], name: str, folder: Path) -> list[str]:
    """A file for each trial of the sweep; their names."""
    trials = sweep_of(name, Tenant.model_validate(fields)).trials
    for trial in trials:
        text = yaml.safe_dump(trial.tenant.model_dump(mode="json", exclude_unset=True, by_alias=True), sort_keys=False)
        (folder / f"{trial.name}.yaml").write_text(text)
    return [trial.name for trial in trials]


def run(folder: Path) -> dict[str, Any]:
    """Train the tenants of a folder by the command; what it says, with its seconds in all."""
    begin = time.perf_counter()
    words = (f"plugins.lora.tenants={folder / 'tenants'}", f"plugins.lora.out={folder / 'out'}")
    return {**command("train", "lora", *words), "all_s": time.perf_counter() - begin}


def measured(fields: dict[str, Any], name: str, variant: str) -> dict[str, Any]:
    """One run of one variant."""
    with tempfile.TemporaryDirectory() as path:
        folder = Path(path)
        (folder / "tenants").mkdir()
        if variant == HALVING:
            (folder / "tenants" / f"{name}.yaml").write_text(yaml.safe_dump(fields, sort_keys=False))
        else:
            write_trials(fields, name, folder / "tenants")
        result = run(folder)
    best = {tenant["name"]: tenant["best"] for tenant in result["tenants"]}
    first = result["sweeps"][0]["winner"] if variant == HALVING else min(best, key=lambda trial: best[trial])
    return {
        "winner": first,
        "loss": best[first],
        "steps": sum(tenant["step"] for tenant in result["tenants"]),
        "tokens": sum(tenant["tokens"] for tenant in result["tenants"]),
        "train_s": sum(row["step_s"] for row in result["steps"]),
        "all_s": result["all_s"],
        "best": best,
    }


def benchmark(file: Path, words: list[str], repeats: int) -> dict[str, Any]:
    """Both variants, alternating."""
    fields = changed(reading.read_yaml(file, str(file), "give a tenant with a sweep"), words)
    name, runs = file.stem, list[dict[str, Any]]()
    for repeat in range(repeats):
        order = [HALVING, FULL] if repeat % 2 == 0 else [FULL, HALVING]
        runs.append({variant: measured(fields, name, variant) for variant in order})
    return {"file": file.name, "halve_every": fields["sweep"].get(HALVE_EVERY), "runs": runs}


def table(result: dict[str, Any]) -> Any:
    runs, rows = result["runs"], []
    for variant in (HALVING, FULL):
        own = [run[variant] for run in runs]
        times = [seconds(float(np.median([run[key] for run in own]))) for key in ("train_s", "all_s")]
        winners = ", ".join(dict.fromkeys(run["winner"] for run in own))
        rows.append([variant, winners, f"{own[0]['loss']:.4f}", str(own[0]["steps"]), *times])
    ratio, whole = (np.median([run[FULL][key] / run[HALVING][key] for run in runs]) for key in ("train_s", "all_s"))
    note = f"halving has a speedup of {ratio:.2f}x, start and evaluations with it {whole:.2f}x"
    head = ("", "winner", "held-out loss", "steps of trials", "train", "in all")
    return grid(f"sweep of {result['file']}, measured", head, rows, note)


def asked_for(asked: Any) -> dict[str, Any]:
    file, *words = asked.words if asked.words and "=" not in asked.words[0] else [FILE, *asked.words]
    return benchmark(Path(file), words, asked.repeats)


if __name__ == "__main__":
    main(options(__doc__, words=..., repeats=1), asked_for, table)
