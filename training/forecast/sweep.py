"""What-if: the same lengths planned under every combination of a few settings, one row each, the best marked.

    --sweep parallel.cp=1,2,4,8 --sweep cluster=a100,h200

Words multiply; values are read as YAML. A combination that cannot be planned becomes a row that says why. All times are
predicted.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from ...core.errors import EvenloadError, nearest, shorten, shown
from ...core.input import reading
from ...core.recipe.recipe import Recipe
from ...data.lengths import read_lengths
from ..progress import Progress, silent
from .forecast import Forecast, PlannedStep, look_ahead
from .samples import GivenLengths

MOST = 200
"""Combinations of one sweep; each is planned and simulated with all its baselines."""

Settings = dict[str, Any]
Result = dict[str, Any]


def sweep(
    recipe: Recipe,
    words: list[str],
    lengths: GivenLengths | Mapping[str, GivenLengths],
    steps: int,
    nproc: int | None,
    files: Mapping[str, Path | None],
    progress: Progress = silent,
) -> Result:
    """Plan every combination of the words' values. Raises EvenloadError for a bad word, or if nothing can be planned.

    Args:
        words: ``key=a,b,c`` each, dotted keys of the recipe.
        lengths: as of `plan`.
        steps: global batches a combination.
        nproc: ranks of every combination, so that all have the same machines: ``parallel.dp`` takes what the other
            degrees leave unless it is swept. None: the fewest that each needs; then compare per rank.
        files: options that name a file of one setting; none can be given.
        progress: told of each combination.
    """
    for option, path in files.items():
        if path is not None:
            do = f"leave {option} out (--json has all rows), or plan the setting you choose without --sweep"
            raise EvenloadError(f"{option} shows one setting, --sweep plans many", f"{option} {path}", do)
    axes = axes_of(recipe, words)
    all_lengths = read_lengths(lengths) if isinstance(lengths, Path) else lengths
    combinations = [dict(zip(axes, values, strict=True)) for values in product(*axes.values())]
    rows: list[Result] = []
    progress("sweep", 0, len(combinations), "")
    for settings in combinations:
        changes = settings if nproc is None or "parallel.dp" in settings else {"parallel.dp": None, **settings}
        try:
            row = _row(look_ahead(recipe.changed(changes), all_lengths, steps, nproc))
        except EvenloadError as error:
            row = {"error": vars(error).copy()}
        rows.append({"settings": settings, **row})
        progress("sweep", len(rows), len(combinations), said(settings))
    if all("error" in row for row in rows):
        first = rows[0]["error"]
        detail = f"{said(rows[0]['settings'])}: {first['what']} ({first['found']})"
        do = first["do"] or "sweep other values"
        raise EvenloadError(f"none of the {len(rows)} combinations can be planned", detail, do)
    return {"predicted": True, "steps": steps, "keys": list(axes), "rows": rows, "best": best_of(rows)}


def axes_of(recipe: Recipe, words: Iterable[str]) -> dict[str, list[Any]]:
    """The values of every key, in the order given. Raises EvenloadError."""
    axes: dict[str, list[Any]] = {}
    for word in words:
        key, _, text = word.partition("=")
        values: Any = None
        if key and text.strip(" ,"):
            values = reading.parse_yaml(f"[{text}]", f"the list of values of {shorten(key)}", "quote them")
        if not isinstance(values, list):
            form = "write e.g. --sweep parallel.cp=1,2,4"
            raise EvenloadError("a sweep is not of the form key=a,b,c", shown(word), form)
        _refuse_unknown(recipe, key)
        if key in axes:
            raise EvenloadError(f"{key} is swept twice", shown(word), "put all its values into one --sweep")
        if any(value in values[:place] for place, value in enumerate(values)):
            raise EvenloadError(f"a value of {key} is given twice", shown(text), "give each once")
        axes[key] = values
    count = prod(map(len, axes.values()))
    if count > MOST:
        product = " x ".join(str(len(values)) for values in axes.values())
        raise EvenloadError(f"a sweep plans at most {MOST} combinations", f"{product} = {count}", "sweep fewer values")
    return axes


def _refuse_unknown(recipe: Recipe, key: str) -> None:
    node: Any = recipe
    path = ""
    for name in key.split("."):
        if isinstance(node, dict):
            if not any(isinstance(value, BaseModel) for value in node.values()):
                return  # free form, such as deepspeed.config
            if name not in node:
                raise EvenloadError(f"{path} has no key '{name}'", shown(key), nearest(name, node))
            node, path = node[name], f"{path}.{name}"
            continue
        if not isinstance(node, BaseModel):
            raise EvenloadError(f"{path} has no keys below it", shown(key), "sweep its value")
        fields = type(node).model_fields
        if name not in fields:
            raise EvenloadError(f"{path or 'the recipe'} has no key '{name}'", shown(key), nearest(name, fields))
        node, path = getattr(node, name), f"{path}.{name}".lstrip(".")


def _row(forecast: Forecast) -> Result:
    context, own = forecast.chain.context, [step.ours for step in forecast.steps]
    layout, memory_bytes = context.layout, context.cluster.memory_bytes
    num_tokens = sum(one.plan.num_tokens for one in own)
    total_s = sum(one.outcome.step_s for one in own)
    peak_bytes = max(one.peak_bytes for one in own)
    keys = ("imbalance", "bubble_frac", "exposed_frac")
    means = {key: float(sum(getattr(one.outcome, key) for one in own)) / len(own) for key in keys}
    return {
        "world_size": layout.world_size,
        "layout": vars(layout),
        "cluster": context.cluster.name,
        "step_s": total_s / len(own),
        "tokens_per_s": num_tokens / total_s,
        "tokens_per_s_per_rank": num_tokens / total_s / layout.world_size,
        **means,
        "peak_bytes": peak_bytes,
        "memory_bytes": memory_bytes,
        "fits": peak_bytes <= memory_bytes,
        "trains": layout.cp == 1,
        "strongest_baseline": _strongest(forecast.steps, total_s),
        "plan_s": sum(step.plan_s for step in forecast.steps) / len(own),
    }


def _strongest(steps: tuple[PlannedStep, ...], ours_s: float) -> Result:
    """The fastest baseline among those that planned every step with the settings, and what evenload gains over it."""
    totals = {
        name: sum(step.baselines[name].outcome.step_s for step in steps)
        for name in steps[0].baselines
        if not any(step.baselines[name].ignores for step in steps)
    }
    name = min(totals, key=lambda name: totals[name])
    return {"name": name, "gain": totals[name] / ours_s}


def best_of(rows: list[Result]) -> int | None:
    """The row of most tokens a second and rank among those that fit, then of fewest bytes; None if none fits. One that
    is predicted only ranks after all that can be trained."""
    fitting = [place for place, row in enumerate(rows) if row.get("fits")]
    fitting = [place for place in fitting if rows[place]["trains"]] or fitting
    return min(fitting, key=lambda i: (-rows[i]["tokens_per_s_per_rank"], rows[i]["peak_bytes"]), default=None)


def said(settings: Settings) -> str:
    """The settings as one would type them."""
    return " ".join(f"{key}={written(value)}" for key, value in settings.items())


def written(value: Any) -> str:
    """A value as YAML has it, shortened."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    return shorten(value) if isinstance(value, str) else shown(value)
