"""The best setting for lengths on so many ranks: batches as training draws them, the search, and a recipe of the best.

    evenload search RECIPE --lengths FILE --nproc 64

Told to stop, or interrupted, it answers with what it knows, and by how much anything else could be faster.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from ...core.errors import EvenloadError, refuse_first, shorten, shown
from ...core.input import reading
from ...core.machine import cluster as clusters
from ...core.plan.step_plan import as_lengths
from ...core.planning.chain import PlanChain
from ...core.planning.setting import Setting, costs_of
from ...core.recipe.recipe import RECIPES, Recipe
from ...core.recipe.sizes import shape_of
from ...core.recipe.traits import trainer_called
from ...training.adapting import PlannedTenants, adapter_training
from ...training.drawing import refuse_short_data
from ...training.experts.replay import loads_of_model, mean_imbalance
from ...training.forecast.forecast import look_ahead
from ...training.forecast.samples import ForecastSamples, GivenLengths, samples_of
from ...training.pictures import draw
from ...training.progress import Progress, silent
from .answer import Result, answer, by_hand, distinct, ranked, said
from .best_first import SearchState, beside, best_first
from .measured import Correction, Train, measured, refuse_unmeasurable, rows_of, trained
from .replicas import deployed
from .space import Choice, Known, SearchBatch, Space, space_of


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
    loads: Path | None = None,
    measure: int = 0,
    train: Train = trained,
    enough: Enough = Enough(),  # noqa: B008
    out: Path | None = None,
    report: Path | None = None,
    progress: Progress = silent,
) -> Result:
    """The documented result of ``search --json``. Raises EvenloadError.

    Args:
        lengths: a file, or int64 [K] in tokens; of domains by name. Of a recipe with tenants files by tenant, none:
            their own data.
        ranks: numbers of devices, each searched by itself.
        pins: ``key=value`` each, axes that are not searched.
        steps: global batches that every setting is planned for.
        memory_gib: of a device, in place of the recipe's.
        loads: a file that ``log.loads`` named: how unevenly tokens go to experts.
        measure: so many of the best settings are trained a few steps here, by ``train``, and all are ranked again with
            the costs that their steps bear out.
        out: gets a recipe of the best setting of the last of ``ranks``.
        report: gets a page of its steps.
    """
    for path in (out, _costs_beside(out)) if out and measure else (out,):
        there = "--out is there already", shorten(str(path)), "choose another name"
        refuse_first((path is not None and path.exists(), *there))
    if measure:
        refuse_unmeasurable(recipe, ranks)
    recipe = recipe if memory_gib is None else recipe.changed({"memory_gib": memory_gib})
    source = _source_of(recipe, lengths)
    asked = _Asked(recipe, source, _known(recipe, source, loads), _pins(pins), steps, enough, progress)
    rows, best, correction = list[Result](), recipe, None
    for count in ranks:
        begin, measures = time.perf_counter(), list[Result]()
        space, state, first_s = asked.searched(count, asked.known)
        if measure and state.best:
            taken, correction = measured(distinct(ranked(state))[:measure], train, progress)
            space, state, _ = asked.searched(count, partial(_corrected, asked.known, correction))
            measures = rows_of(taken, correction)
        times = {"first_answer_s": first_s, "search_s": time.perf_counter() - begin}
        best = state.best.choice.recipe if state.best else best
        replicas = asked.replicas(state.best.choice, state.best.mean_s) if state.best and recipe.adapts else None
        rows.append({**answer(state, space, asked.weights), **times, "measured": measures, "replicas": replicas})
    if out is not None:
        _write(best, out, correction)
    if report is not None and rows[-1]["rows"]:
        shared = loads if best.parallel.ep > 1 else None
        draw(look_ahead(best, lengths, steps, ranks[-1], loads=shared, record=True), report=report)
    front = [{"ranks": row["ranks"], **row["rows"][0]} for row in rows if row["rows"]]
    return {**rows[-1], "out": None if out is None else str(out), "front": front if len(rows) > 1 else []}


def _source_of(recipe: Recipe, lengths: GivenLengths | Mapping[str, Any]) -> ForecastSamples | PlannedTenants:
    """What the batches are drawn from."""
    if recipe.adapts:
        return adapter_training(recipe).tenants(recipe, lengths)
    samples = samples_of(recipe, lengths if isinstance(lengths, (Path, Mapping)) else as_lengths(lengths))
    refuse_short_data(recipe, samples.lengths, "there are fewer {} than one global batch", "")
    return samples


def _known(recipe: Recipe, source: ForecastSamples | PlannedTenants, path: Path | None) -> Known:
    """What the planners know besides lengths: adapters of tenants, and the loads of experts of a file."""
    recorded = None if path is None else loads_of_model(recipe, path)
    imbalances: dict[tuple[int, str], float] = {}

    def known(setting: Recipe, chain: PlanChain) -> PlanChain:
        chain = chain if isinstance(source, ForecastSamples) else source.adapted(chain)
        if recorded is None or chain.context.layout.ep == 1:
            return chain
        key = chain.context.layout.ep, str([config for _, config in chain.of_layers])
        if key not in imbalances:
            imbalances[key] = mean_imbalance(setting, chain, recorded)
        costs = chain.context.costs.model_copy(update={"expert_imbalance": imbalances[key]})
        return replace(chain, context=replace(chain.context, costs=costs))

    return known


class _Asked(NamedTuple):
    """What is searched, whatever the number of devices."""

    recipe: Recipe
    source: ForecastSamples | PlannedTenants
    known: Known
    pins: dict[str, Any]
    steps: int
    enough: Enough
    progress: Progress

    @property
    def weights(self) -> int:
        """How many weights the model has."""
        return shape_of(self.recipe.model).parameters

    def replicas(self, best: Choice, one_shape_s: float) -> dict[str, Any] | None:
        """What replicas of unlike shapes would take, of the first batch, next to the best setting's one shape."""
        ranks, lengths = best.chain.context.layout.world_size, self._batches(best)[0].lengths
        return deployed(best.recipe, ranks, lengths, self.known, one_shape_s)

    def _batches(self, choice: Choice) -> list[SearchBatch]:
        """The first global batches as training draws them."""
        if isinstance(self.source, ForecastSamples):
            draws = iter(self.source.drawing(choice.recipe, choice.chain), None)
        else:
            draws = self.source.draws(PlanChain.of_recipe(choice.recipe, choice.chain.context.layout))
        return [
            SearchBatch(as_lengths(draw.lengths), None if draw.tenants is None else as_lengths(draw.tenants))
            for draw in islice(draws, self.steps)
        ]

    def searched(self, ranks: int, known: Known) -> tuple[Space, SearchState, float | None]:
        """The settings, what is known of them when the search ends, and after how many seconds a first could run."""
        begin, first_s = time.perf_counter(), None
        space, weights = space_of(self.recipe, ranks, self.pins, known), self.weights
        batches = self._batches(space.choices[0])
        space = space.settled(batches[0], known)
        states = best_first(space.choices, batches)
        state = next(states)
        with suppress(KeyboardInterrupt):
            for planned, state in enumerate(states, 1):
                passed_s, best = time.perf_counter() - begin, state.best
                first_s = passed_s if first_s is None and best else first_s
                words = f"{best.mean_s:.4g} s, {said(best.choice.values)}, gap {state.gap:.1%}" if best else "none fits"
                self.progress("search", planned, None, words)
                if best and (state.gap <= self.enough.gap or passed_s > self.enough.seconds):
                    break
            others = beside(state, batches, lambda layout: by_hand(layout, weights))
            while time.perf_counter() - begin < self.enough.seconds and next(others, None):
                self.progress("search", len(state.played), None, "layouts of the table of rules")
        return space, state, first_s


def _corrected(known: Known, correction: Correction, recipe: Recipe, chain: PlanChain) -> PlanChain:
    return correction.of(known(recipe, chain))


def _pins(words: Sequence[str]) -> dict[str, Any]:
    """The pinned values by their axes. Raises EvenloadError."""
    pins: dict[str, Any] = {}
    for word in words:
        key, sign, text = word.partition("=")
        if not (key and sign and text):
            raise EvenloadError("a pin is not of the form key=value", shown(word), "write e.g. --pin parallel.tp=1")
        pins[key] = reading.parse_yaml(text, f"the value of {shorten(key)}", "quote it")
    return pins


def _costs_beside(out: Path) -> Path:
    """Where costs go that steps bear out, next to the recipe that names them."""
    return out.with_name(f"{out.stem}.costs.yaml")


def _write(recipe: Recipe, path: Path, correction: Correction | None) -> None:
    """The recipe as YAML, below what says the same elsewhere; refitted costs next to it. Raises EvenloadError."""
    texts = dict[Path, str]()
    if correction is not None:
        setting, beside = Setting.of_recipe(recipe), _costs_beside(path)
        costs = correction.of_costs(costs_of(setting, clusters.load(recipe.cluster, RECIPES / "clusters")))
        texts[beside] = yaml.safe_dump(costs.model_dump(exclude_none=True), sort_keys=False, width=118)
        recipe = recipe.changed({"costs": str(beside)})
    says = [f"# {line}" for line in trainer_called(recipe.trainer).says(recipe)]
    text = yaml.safe_dump(recipe.model_dump(mode="json", exclude_unset=True), sort_keys=False)
    texts[path] = "\n".join([*says, text])
    for one, text in texts.items():
        try:
            one.write_text(text, encoding="utf-8")
        except OSError as error:
            detail = f"{shorten(str(one))}: {error.strerror}"
            raise EvenloadError("the recipe cannot be written", detail, "choose another --out") from error
