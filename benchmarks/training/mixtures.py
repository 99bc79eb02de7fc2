"""Do shares that follow losses help? Policies of `plugins.data` over default proportions, equal tokens, several seeds.

    python benchmarks/training/mixtures.py [--seeds 3] [--steps 160] [--policies odm,ado] [--quick]
                                           [--json] [--out FILE]

A small Llama (2 layers of 96, Megatron-Core, float32, one rank) on six packages of Python's own library as domains.
Each is cut into samples of 256 bytes, of which every eighth is held out (64 of these are scored), so a step
has as many tokens under any shares.
DataFlex's claim for its mixers is a better perplexity at equal tokens than default proportions.

    default      shares as large as the domains
    uniform      the same share for each: the strongest simple choice where all domains count alike
    temperature  sizes to the power of 1 / 2
    odm, ado     by losses, from default proportions on; ado fits after a quarter of the steps, then every eighth

Every policy runs under the same seeds, of weights and of orders. A loss is that of all held-out samples of a domain
after the last step; "mean" is that of the domains' losses, "worst" the largest. Differences are from ``default`` at the
same seed. A gain counts as one where each seed has it and its mean is larger than the spread: the standard deviation
between seeds of that figure under ``default``.
"""

from __future__ import annotations

import json
import math
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from evenload.benchmarks.frame import Row, command, main, options
from evenload.commands.tables.show import grid
from rich.console import Group

DOMAINS = ("asyncio", "email", "encodings", "html", "pydoc_data", "tkinter")
SAMPLE, BATCH = 256, 16
HELD_OUT, MOST_HELD_OUT = 8, 64
DEFAULT = "default"
MODEL = {"family": "llama", "num_layers": 2, "hidden_size": 96, "num_attention_heads": 4, "vocab_size": 256}

Losses = dict[str, float]
"""By domain, after the last step."""


def policies(steps: int) -> dict[str, Row | None]:
    """``plugins.data.mix`` of every policy that runs here; None: the shares of the domains hold."""
    fits = {"skip_steps": steps // 16, "warmup_steps": max(4, steps // 4), "every": max(1, steps // 8)}
    return {
        DEFAULT: None,
        "uniform": None,
        "temperature": {"policy": "temperature", "settings": {"tau": 2.0}},
        "odm": {"policy": "odm", "settings": {"warmup_steps": steps // 16}},
        "ado": {"policy": "ado", "settings": fits},
    }


def written(folder: Path) -> dict[str, int]:
    """Files of samples of every domain, to train on and held out; how many there are to train on."""
    counts = {}
    for name in DOMAINS:
        paths = sorted((Path(sysconfig.get_path("stdlib")) / name).rglob("*.py"))
        # Tokens of "bytes" are 0 .. 255; samples are told as ids, so that a cut may fall anywhere.
        body = b"\n".join(path.read_bytes() for path in paths)
        samples = [list(body[at : at + SAMPLE]) for at in range(0, len(body) - SAMPLE + 1, SAMPLE)]
        for kind, held_out in (("train", False), ("held_out", True)):
            rows = [{"input_ids": ids} for at, ids in enumerate(samples) if (at % HELD_OUT == 0) == held_out]
            rows = spread(rows, MOST_HELD_OUT) if held_out else rows
            (folder / f"{name}.{kind}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
            counts[name] = len(rows) if not held_out else counts[name]
    return counts


def spread(rows: list[Row], most: int) -> list[Row]:
    """At most so many of them, from the first to the last."""
    return [rows[at] for at in sorted({*np.linspace(0, len(rows) - 1, most).astype(int).tolist()})]


def recipe_of(folder: Path, counts: dict[str, int], name: str, mix: Row | None, seed: int, steps: int) -> Row:
    """The recipe of a run."""
    share = {domain: 1.0 if name == "uniform" else float(count) for domain, count in counts.items()}
    domains = {d: {"source": str(folder / f"{d}.train.jsonl"), "share": share[d]} for d in counts}
    held_out = {d: str(folder / f"{d}.held_out.jsonl") for d in counts}
    plugins: Row = {"packing": {"enabled": True, "max_tokens": SAMPLE * BATCH}}
    if mix is not None:
        plugins["data"] = {"enabled": True, "mix": mix}
    train = {"steps": steps, "global_batch_size": BATCH, "seed": seed, "lr": 3e-3, "lr_schedule": "cosine"}
    return {
        "trainer": "megatron",
        "model": MODEL,
        "data": {
            "max_length": SAMPLE,
            "domains": domains,
            "validation": {"domains": held_out, "every": steps},
        },
        "train": {**train, "dtype": "fp32", "warmup_steps": steps // 16},
        "plugins": plugins,
    }


def trained(folder: Path, recipe: Row) -> Row:
    """What ``train --json`` says of a recipe on one rank."""
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe))
    return command("train", path, "--nproc", 1, EVENLOAD_CACHE=str(folder))


def run(name: str, mix: Row | None, seed: int, steps: int, folder: Path, counts: dict[str, int]) -> Row:
    """A row: losses by domain after the last step, and what was drawn of each over all steps."""
    result = trained(folder, recipe_of(folder, counts, name, mix, seed, steps))
    last = result["validation"][-1]["domains"]
    drawn = {d: sum(row["domains"].get(d, {"samples": 0})["samples"] for row in result["steps"]) for d in counts}
    return {
        "policy": name,
        "seed": seed,
        "tokens": sum(row["tokens"] for row in result["steps"]),
        "losses": {d: last[d]["loss"] for d in counts},
        "drawn": {d: drawn[d] / (steps * BATCH) for d in counts},
    }


def figures(losses: Losses) -> Losses:
    """The losses of the domains, their mean and the largest."""
    return {**losses, "mean": float(np.mean(list(losses.values()))), "worst": max(losses.values())}


def summary(rows: list[Row]) -> list[Row]:
    """A row a policy: each figure's mean over seeds, its difference from default proportions, and whether it is one."""
    by: dict[str, dict[int, Losses]] = {}
    for row in rows:
        by.setdefault(row["policy"], {})[row["seed"]] = figures(row["losses"])
    base = by[DEFAULT]
    keys = [*rows[0]["losses"], "mean", "worst"]
    spread = {key: float(np.std([one[key] for one in base.values()], ddof=1)) if len(base) > 1 else 0.0 for key in keys}
    out = []
    for name, seeds in by.items():
        apart = {key: np.array([seeds[seed][key] - base[seed][key] for seed in base if seed in seeds]) for key in keys}
        out.append(
            {
                "policy": name,
                "seeds": len(seeds),
                "loss": {key: float(np.mean([one[key] for one in seeds.values()])) for key in keys},
                "difference": {key: float(apart[key].mean()) for key in keys},
                "verdict": {key: verdict(apart[key], spread[key]) for key in keys},
                "spread": spread,
            }
        )
    return out


def verdict(apart: Any, spread: float) -> str:
    """Of differences of a loss by seed: better or worse where all seeds agree and the mean is over the spread."""
    if len(apart) < 2 or abs(apart.mean()) <= spread or not (np.sign(apart) == np.sign(apart[0])).all():
        return "none"
    return "better" if apart[0] < 0 else "worse"


def benchmark(seeds: int, steps: int, names: list[str]) -> Row:
    """All policies under all seeds, the seeds outermost, so that a run that is ended early has whole ones."""
    asked = {name: mix for name, mix in policies(steps).items() if name == DEFAULT or name in names}
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        counts = written(folder)
        rows = []
        for seed in range(1, seeds + 1):
            for name, mix in asked.items():
                rows.append(run(name, mix, seed, steps, folder, counts))
                losses = figures(rows[-1]["losses"])
                print(f"seed {seed}, {name}: mean {losses['mean']:.4f}, worst {losses['worst']:.4f}", file=sys.stderr)
    return {"steps": steps, "samples": counts, "rows": rows, "policies": summary(rows)}


def table(result: Row) -> Group:
    """Perplexities by policy, and what was drawn."""
    keys = list(result["policies"][0]["loss"])
    marks = {"better": " +", "worse": " -", "none": ""}
    perplexities = [
        (row["policy"], *(f"{math.exp(row['loss'][key]):.3f}{marks[row['verdict'][key]]}" for key in keys))
        for row in result["policies"]
    ]
    spread = ", ".join(f"{key} {value:.4f}" for key, value in result["policies"][0]["spread"].items())
    said = f"+ better, - worse than default beyond the spread of its seeds, in nats: {spread}"
    shares = [
        (name, *(f"{np.mean([r['drawn'][d] for r in result['rows'] if r['policy'] == name]):.1%}" for d in DOMAINS))
        for name in dict.fromkeys(row["policy"] for row in result["rows"])
    ]
    tokens = f"{result['rows'][0]['tokens']:,} tokens, {result['policies'][0]['seeds']} seeds"
    return Group(
        grid(f"perplexity of held-out samples after {tokens}", ("", *keys), perplexities, said),
        grid("drawn", ("", *DOMAINS), shares),
    )


def asked_for(asked: Any) -> Row:
    if asked.quick:
        return benchmark(1, 4, ["odm"])
    return benchmark(asked.seeds, asked.steps, asked.policies or list(policies(asked.steps)))


if __name__ == "__main__":
    main(options(__doc__, seeds=3, steps=160, policies=[], quick=False), asked_for, table)
