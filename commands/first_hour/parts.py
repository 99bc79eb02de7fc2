"""The parts of the first hour: each a command with a time limit of its own; one that fails is said, the others go on.

What is known goes into a folder after every part, so what is cut short keeps it: ``page.md`` to send back as an issue,
``result.json`` with all that the commands printed, and ``costs.yaml``, the cost model of this card.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from ... import __version__
from ...api import load_recipe
from ...core.errors import EvenloadError, refuse_first
from ...core.input.format import to_json
from ...training.files import refusing_unwritable, whole
from ...training.launching.launch import is_rank
from ...training.progress import Progress
from .limited import run_limited
from .page import page

STEPS = 13
"""Of a run against stock, at most."""


class TimedPart(NamedTuple):
    """One thing to find out, by a command ``python3 ARGUMENTS`` that may take so long."""

    name: str
    arguments: tuple[str, ...]
    limit_s: float


def first_hour(
    recipe: Path | None, overrides: Sequence[str], folder: Path, limit_s: float, progress: Progress
) -> dict[str, Any]:
    """Run all parts and write the folder; ``well``: all ended well. Raises EvenloadError where there is no GPU."""
    table, ends = parts(recipe, overrides, num_gpus(), folder), time.monotonic() + limit_s
    with refusing_unwritable("--out", folder):
        folder.mkdir(parents=True, exist_ok=True)
    result: dict[str, Any] = {"evenload": __version__, "out": str(folder), "parts": {}}
    for number, part in enumerate(table):
        progress("doctor --gpu", number, len(table), part.name)
        left_s = max(0.0, ends - time.monotonic())
        result["parts"][part.name] = run_limited(part.arguments, min(part.limit_s, left_s), Path.cwd())
        result["well"] = all(row["exit_code"] == 0 for row in result["parts"].values())
        for name, text in (("result.json", to_json(result)), ("page.md", page(result))):
            with whole(folder / name) as file:
                file.write_text(text)
    progress("doctor --gpu", len(table), len(table), str(folder / "page.md"))
    return result


def num_gpus() -> int:
    """How many GPUs are here. Raises EvenloadError for none; starts nothing on them."""
    do = "run it on a machine with an NVIDIA GPU; without --gpu doctor says what is installed"
    if find_spec("torch") is None:
        raise EvenloadError("there is no torch to ask for a GPU", "no package torch", do)
    import torch

    built = f"CUDA {torch.version.cuda}" if torch.version.cuda else "no CUDA"
    refuse_first(
        (is_rank(), "doctor --gpu starts its ranks itself", "RANK and WORLD_SIZE are set", "start it without torchrun"),
        (not torch.cuda.is_available(), "there is no GPU here", f"torch {torch.__version__}, built for {built}", do),
    )
    return torch.cuda.device_count()


def parts(recipe: Path | None, overrides: Sequence[str], gpus: int, folder: Path) -> list[TimedPart]:
    """In order of what is missed most; without a recipe the quickstart runs, and the model of gpu-node is profiled."""
    small, large = ("quickstart", "gpu-node") if recipe is None else (str(recipe), str(recipe))
    chosen = load_recipe(small, overrides)
    degrees = chosen.parallel
    copies = max(1, min(degrees.dp or gpus, gpus // (degrees.tp * degrees.pp * degrees.cp)))
    alone = ("checkpoint.dir=null", "train.export=null", f"parallel.dp={copies}")

    def own(module: str) -> tuple[str, ...]:
        return "-P", "-m", f"evenload.commands.first_hour.{module}"

    def verb(name: str, of: str, *more: str) -> tuple[str, ...]:
        return "-P", "-m", "evenload", name, of, *overrides, *more, "--json"

    steps = f"train.steps={min(STEPS, chosen.train.steps)}"
    looked_at = (small, *overrides) if recipe else ()
    return [
        TimedPart("devices", own("devices"), 60),
        TimedPart("installed", ("-P", "-m", "evenload", "doctor", *looked_at, "--json"), 60),
        TimedPart("kernels", own("kernels"), 120),
        TimedPart("verify", verb("verify", small, *alone, "train.dtype=fp32", "--steps", "1"), 120),
        TimedPart("train", verb("train", small, *alone, "train.dtype=bf16", steps, "--against", "stock"), 180),
        TimedPart("profile", verb("profile", large, "--nproc", str(gpus), "--out", str(folder / "costs.yaml")), 240),
    ]
