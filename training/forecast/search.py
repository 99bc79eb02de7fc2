"""The best setting for lengths on so many ranks: batches as training draws them, the search, and a recipe of the best.

    evenload search RECIPE --lengths FILE --nproc 64

Told to stop, or interrupted, it answers with what it knows, and by how much anything else could be faster.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from ...core.errors import EvenloadError, refuse_first, shorten, shown
from ...core.input import reading
from ...core.plan.step_plan import Lengths, as_lengths
from ...core.recipe.recipe import Recipe
from ...core.recipe.sizes import shape_of
from ...core.recipe.traits import trainer_called
from ...core.search.answer import Result, answer, by_hand, said
from ...core.search.best_first import SearchState, best_first
from ...core.search.space import Space, space_of
from ..drawing import refuse_short_data
from ..progress import Progress, silent
from .samples import ForecastSamples, GivenLengths, samples_of


class Enough(NamedTuple):
    """When a search ends before the best is proven."""

    gap: float = 0.005
    """Nothing else can be faster by more than this share of the step."""
    seconds: float = 300.0


def search(
    recipe: Recipe,
    lengths: GivenLengths | Mapping[str, GivenLengths],
    ranks: Sequence[int],
    pins: Sequence[str] = (),
    *,
    steps: int = 1,
    memory_gib: float | None = None,
    enough: Enough = Enough(),  # noqa: B008
    out: Path | None = None,
    progress: Progress = silent,
) -> Result:
    """The documented result of ``search --json``. Raises EvenloadError.

    Args:
        lengths: a file, or int64 [K] in tokens; of domains by name.
        ranks: numbers of devices, each searched by itself.
        pins: ``key=value`` each, axes that are not searched.
        steps: global batches that every setting is planned for.
        memory_gib: of a device, in place of the cluster's.
        out: gets a recipe of the best setting of the last of ``ranks``.
    """
    refuse_first(
        (recipe.adapts, "a search is of one model", "plugins.lora.enabled true", "see `evenload plan` for tenants"),
        (out is not None and out.exists(), "--out is there already", shorten(str(out)), "choose another name"),
    )
    pinned = _pins(pins)
    samples = samples_of(recipe, lengths if isinstance(lengths, (Path, Mapping)) else as_lengths(lengths))
    refuse_short_data(recipe, samples.lengths, "there are fewer {} than one global batch", "")
    weights, rows, best = shape_of(recipe.model).parameters, list[Result](), recipe
    for count in ranks:
        begin = time.perf_counter()
        space = space_of(recipe, count, pinned, memory_gib)
        state, first_s = _searched(space, _batches(recipe, samples, space, steps), weights, enough, progress)
        took_s = time.perf_counter() - begin
        rows.append({**answer(state, space, weights), "first_answer_s": first_s, "search_s": took_s})
        best = state.best.choice.recipe if state.best else best
    if out is not None:
        _write(best, out)
    front = [{"ranks": row["ranks"], **row["rows"][0]} for row in rows if row["rows"]]
    return {**rows[-1], "out": None if out is None else str(out), "front": front if len(rows) > 1 else []}


def _searched(
    space: Space, batches: Sequence[Lengths], weights: int, enough: Enough, progress: Progress
) -> tuple[SearchState, float | None]:
    """What is known when the search ends, and after how many seconds a first setting could run."""
    begin, first_s = time.perf_counter(), None
    states = best_first(space.choices, batches, lambda layout: by_hand(layout, weights))
    state = next(states)
    with suppress(KeyboardInterrupt):
        for planned, state in enumerate(states, 1):
            passed_s, best = time.perf_counter() - begin, state.best
            first_s = passed_s if first_s is None and best else first_s
            words = f"{best.mean_s:.4g} s, {said(best.choice.values)}, gap {state.gap:.1%}" if best else "none fits yet"
            progress("search", planned, None, words)
            if best and (state.gap <= enough.gap or passed_s > enough.seconds):
                break
    return state, first_s


def _batches(recipe: Recipe, samples: ForecastSamples, space: Space, steps: int) -> list[Lengths]:
    """The first global batches as training draws them."""
    drawing = samples.drawing(recipe, space.choices[0].chain)
    return [as_lengths(drawing().lengths) for _ in range(steps)]


def _pins(words: Sequence[str]) -> dict[str, Any]:
    """The pinned values by their axes. Raises EvenloadError."""
    pins: dict[str, Any] = {}
    for word in words:
        key, sign, text = word.partition("=")
        if not (key and sign and text):
            raise EvenloadError("a pin is not of the form key=value", shown(word), "write e.g. --pin parallel.tp=1")
        pins[key] = reading.parse_yaml(text, f"the value of {shorten(key)}", "quote it")
    return pins


def _write(recipe: Recipe, path: Path) -> None:
    """The recipe as YAML, below what says the same elsewhere. Raises EvenloadError."""
    says = [f"# {line}" for line in trainer_called(recipe.trainer).says(recipe)]
    text = yaml.safe_dump(recipe.model_dump(mode="json", exclude_unset=True), sort_keys=False)
    try:
        path.write_text("\n".join([*says, text]), encoding="utf-8")
    except OSError as error:
        detail = f"{shorten(str(path))}: {error.strerror}"
        raise EvenloadError("the recipe cannot be written", detail, "choose another --out") from error
