"""Verbs that report what is there."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from ...core.errors import EvenloadError
from ...core.input.bounds import number_of_word
from .shared import AsJson, Overrides, load, show


def watch(
    folder: Annotated[Path, Argument(metavar="RUN", help="A run's log.jsonl, or the folder that has it.")],
    once: Annotated[bool, Option("--once", help="Show what there is, and end.")] = False,
    as_json: AsJson = False,
) -> None:
    """The last steps of a run as its log grows, on any machine and until the run ends; --json shows them once."""
    from ...training.run.watching import watch as work
    from ..tables.watch import shown_live

    with nullcontext(None) if once or as_json else shown_live() as live:
        result = work(folder, live)
    show("watch", result, as_json)


def doctor(
    recipe: Annotated[Path | None, Argument(metavar="[RECIPE]", help="Whose model and plugins to look at.")] = None,
    overrides: Overrides = None,
    gpu: Annotated[bool, Option("--gpu", help="Try this machine's GPUs out, in minutes, into --out.")] = False,
    out: Annotated[Path | None, Option("--out", help="With --gpu: a folder; default: evenload-gpu.")] = None,
    limit: Annotated[str, Option("--limit", metavar="S", help="With --gpu: seconds of all parts.")] = "900",
    as_json: AsJson = False,
) -> None:
    """What is installed and supported, which patches and attention kernels apply, what plugins do in which loop."""
    if not gpu:
        from ..doctor import doctor as work

        if out is not None:
            raise EvenloadError("doctor writes files about GPUs alone", f"--out {out}", "add --gpu, or drop --out")
        show("doctor", work(load(recipe, overrides) if recipe else None), as_json)
        return
    from rich.markdown import Markdown

    from ..first_hour.page import page
    from ..first_hour.parts import first_hour
    from ..tables.progress import progress_shown
    from ..tables.show import emit

    limit_s, folder = number_of_word(limit, "--limit", 86400), (out or Path("evenload-gpu")).absolute()
    with progress_shown() as progress:
        result = first_hour(recipe, overrides or (), folder, limit_s, progress)
    emit(result, as_json, lambda done: Markdown(page(done)))
    if not result["well"]:
        raise SystemExit(1)


def plugins(as_json: AsJson = False) -> None:
    """The registered plugins."""
    from ...api import load_plugins
    from ...core.registry import registered
    from ..tables.show import grid

    load_plugins()
    keys = ("name", "summary", "papers", "origin")
    rows = [{**{key: getattr(p, key) for key in keys}, "baselines": list(p.baselines.rows)} for p in registered()]
    cells = [(row["name"], row["summary"], "; ".join(row["papers"]), row["origin"]) for row in rows]
    table = grid("plugins", ("name", "what it does", "papers", "from"), cells)
    show("plugins", {"plugins": rows}, as_json, lambda _: table)


def recipes(as_json: AsJson = False) -> None:
    """The recipes that come with evenload; every command takes their names."""
    from ...core.recipe.recipe import shipped
    from ..tables.show import grid

    rows: list[dict[str, Any]] = []
    for name, path in shipped().items():
        one = load(path, None)
        ranks, enabled = one.min_world_size, [plugin.name for plugin in one.enabled()]
        rows.append({"name": name, "trainer": one.trainer, "ranks": ranks, "plugins": enabled, "path": str(path)})
    cells = [(row["name"], row["trainer"], row["ranks"], ", ".join(row["plugins"])) for row in rows]
    head = ("name", "trainer", "ranks at least", "plugins")
    table = grid("recipes", head, cells, "every command takes these names")
    show("recipes", {"recipes": rows}, as_json, lambda _: table)


def schema() -> None:
    """The JSON Schema of a recipe, for editors."""
    from ...api import load_plugins
    from ...core.recipe.recipe import json_schema

    load_plugins()
    print(json.dumps(json_schema(), indent=2))
