"""The stages of `run.sh`: each a command with a time limit of its own; one that fails is recorded, the others run.

    python3 -P stages.py --site FOLDER [--out result.json] [--limit seconds] [--dry-run]

The first is `evenload doctor --gpu`, whose page is copied next to the JSON file. That file is rewritten after every
stage, so a run that is cut short keeps what it had. A stage's entry holds its command, exit code, seconds, and what it
printed: one JSON object, or the end of the text.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent.parent
LIMIT_S = 465.0
"""All stages together; under eight minutes with start and end."""
FIRST_HOUR_S = 180
TAIL = 6000
"""Characters kept of what pip says."""
SMALL = ["model.num_layers=2", "model.hidden_size=512", "model.num_attention_heads=8", "model.ffn_hidden_size=null"]
ONE = ["parallel.dp=1"]


class Stage(NamedTuple):
    """One command. ``folder``: where below the work folder it writes a page and a cost model."""

    name: str
    arguments: tuple[str, ...]
    limit_s: float
    in_root: bool = False
    folder: str = ""


def stages() -> list[Stage]:
    """In order of what is missed most if time runs out."""
    recipe = str(ROOT / "recipes" / "gpu-node.yaml")

    def verb(name: str, *more: str) -> tuple[str, ...]:
        return ("-P", "-m", "evenload", name, recipe, *ONE, *more, "--json")

    def verify(trainer: str, dtype: str) -> tuple[str, ...]:
        cut = ("train.global_batch_size=8", "data.max_length=4096", "plugins.packing.max_tokens=8192")
        return verb("verify", f"trainer={trainer}", f"train.dtype={dtype}", *SMALL, *cut)

    def bench(trainer: str, batch: int, tokens: int) -> tuple[str, ...]:
        length = (f"data.max_length={tokens}", f"plugins.packing.max_tokens={tokens}")
        size = (f"train.global_batch_size={batch}", "train.steps=3")
        return verb("bench", f"trainer={trainer}", *length, *size, "--against", "stock,in_order")

    def script(name: str, tokens: int, limit_s: int) -> Stage:
        path = str(ROOT / "benchmarks" / "gpu" / f"{name}.py")
        options = ("--tokens", str(tokens), "--limit", str(limit_s - 20))
        return Stage(f"{name} {tokens}", ("-P", path, "--json", *options), limit_s)

    hour = ("--gpu", "--out", "hour", "--limit", str(FIRST_HOUR_S))
    return [
        Stage("first hour", ("-P", "-m", "evenload", "doctor", *hour, "--json"), FIRST_HOUR_S + 20, folder="hour"),
        Stage("tests", ("-P", "-m", "pytest", "-m", "gpu", "-q", *gpu_tests()), 110, in_root=True),
        Stage("attention", ("-P", str(ROOT / "benchmarks" / "gpu" / "attention.py"), "--json"), 50),
        Stage("experts", ("-P", str(ROOT / "benchmarks" / "gpu" / "experts.py"), "--json"), 40),
        Stage("adapters", ("-P", str(ROOT / "benchmarks" / "gpu" / "adapters.py"), "--json"), 40),
        Stage("decode", ("-P", str(ROOT / "benchmarks" / "gpu" / "decode.py"), "--json", "--limit", "30"), 110),
        script("transformer_engine", 4096, 60),
        script("slices", 65536, 100),
        script("chunks", 32768, 60),
        script("ring", 65536, 50),
        script("offload", 65536, 90),
        Stage("verify megatron fp32", verify("megatron", "fp32"), 45),
        Stage("verify megatron bf16", verify("megatron", "bf16"), 45),
        Stage("bench megatron bf16", bench("megatron", 16, 32768), 90),
        Stage("verify deepspeed fp32", verify("deepspeed", "fp32"), 45),
        Stage("bench deepspeed bf16", bench("deepspeed", 8, 16384), 75),
        script("slices", 262144, 240),
    ]


def gpu_tests() -> list[str]:
    """Test files with a GPU test; the others may import what a bare machine does not have."""
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    return [str(file.relative_to(ROOT)) for file in files if "pytest.mark.gpu" in file.read_text()]


def run(stage: Stage, limit_s: float, folder: Path) -> dict[str, Any]:
    """Run a stage and everything that it starts, for at most ``limit_s``."""
    from evenload.commands.first_hour.limited import run_limited  # what it needs may have been installed just now

    row = run_limited(stage.arguments, limit_s, ROOT if stage.in_root else folder)
    return row | {"command": row["command"].replace(str(ROOT) + "/", "")}


def lacking(wheels: Path) -> Iterator[Path]:
    """The wheels of distributions that this Python does not have."""
    for wheel in sorted(wheels.glob("*.whl")):
        try:
            metadata.version(wheel.name.split("-")[0])
        except metadata.PackageNotFoundError:
            yield wheel


def install(site: Path) -> dict[str, Any]:
    """Install what is lacking from the folder that WHEELS names."""
    folder = os.environ.get("WHEELS")
    missing = list(lacking(Path(folder))) if folder else []
    row: dict[str, Any] = {"wheels": [wheel.name for wheel in missing], "exit_code": 0}
    if missing:
        # What is there already must stay: no dependencies are resolved.
        quiet = ["--quiet", "--no-index", "--no-deps", "--no-compile", "--disable-pip-version-check"]
        command = [sys.executable, "-m", "pip", "install", *quiet, "--target", str(site), *map(str, missing)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=90)
        row |= {"exit_code": done.returncode, "stderr": done.stderr[-TAIL:]}
    return row


def card() -> dict[str, Any]:
    """Name and driver of the first GPU, as nvidia-smi says; empty where there is none."""
    try:
        query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
        done = subprocess.run(query, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return {}
    fields = [field.strip() for field in done.stdout.partition("\n")[0].split(",")]
    return dict(zip(("name", "driver", "memory"), fields, strict=True)) if len(fields) == 3 else {}


def costs_name(card_name: str) -> str:
    """``NVIDIA H200`` -> ``h200``: the preset's name under recipes/costs."""
    return re.sub(r"[^a-z0-9]+", "-", card_name.lower().replace("nvidia", "")).strip("-")


def keep(written: Path, name: str, out: Path) -> list[str]:
    """Copy the page next to the result; a fitted cost model, too, and to recipes/costs where that can be written."""
    copies = [(written / "page.md", out.with_suffix(".md"))]
    copies += [(written / "costs.yaml", folder / f"{name}.yaml") for folder in (out.parent, ROOT / "recipes" / "costs")]
    kept = []
    for source, target in copies:
        place = f"{target.parent.name}/{target.name}"
        try:
            shutil.copyfile(source, target)
            kept.append(place)
        except OSError as error:
            kept.append(f"{place}: {error.strerror}")
    return kept


def main() -> None:
    parser = argparse.ArgumentParser(description="Run every GPU test and benchmark; write one JSON file.")
    parser.add_argument("--site", type=Path, required=True, help="Folder on PYTHONPATH for what is installed.")
    default = Path(os.environ["OUT"]) / "gpu.json" if os.environ.get("OUT") else Path("gpu.json")
    parser.add_argument("--out", type=Path, default=default)
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="Seconds for everything.")
    parser.add_argument("--dry-run", action="store_true", help="Print the stages and end.")
    arguments = parser.parse_args()
    if arguments.dry_run:
        for stage in stages():
            print(f"{stage.name}, at most {stage.limit_s:.0f} s:\n    {shlex.join(['python3', *stage.arguments])}")
        return
    out = arguments.out.absolute()
    began = time.monotonic()
    report: dict[str, Any] = {"card": card(), "python": sys.version.split()[0], "stages": {}}
    with tempfile.TemporaryDirectory(prefix="evenload-gpu-") as folder:
        report["install"] = install(arguments.site)
        for stage in stages():
            left_s = arguments.limit - (time.monotonic() - began)
            print(f"{stage.name} ...", file=sys.stderr, flush=True)
            row: dict[str, Any] = {"skipped": "no time left"}
            if left_s > 5:
                row = run(stage, min(stage.limit_s, left_s), Path(folder))
            if stage.folder:
                name = costs_name(report["card"].get("name", "cpu")) or "card"
                row["kept"] = keep(Path(folder) / stage.folder, name, out)
            report["stages"][stage.name] = row
            report["wall_s"] = round(time.monotonic() - began, 1)
            out.write_text(json.dumps(report, indent=1))
            print(f"    exit code {row.get('exit_code')}, {row.get('wall_s', 0)} s", file=sys.stderr, flush=True)
    failed = [name for name, row in report["stages"].items() if row.get("exit_code") != 0]
    print(f"{out}: {len(report['stages']) - len(failed)} stages went well; failed: {failed or 'none'}", file=sys.stderr)


if __name__ == "__main__":
    main()
