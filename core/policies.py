"""What a policy of data is: which samples, in what proportion, with what weight, as a pure function of a state.

    start(of, settings)          -> state, answer        before the first step
    step(state, seen, settings)  -> state, answer        of what a step has shown, summed over all ranks

A state is what JSON holds and nothing else, so that a checkpoint has it whole: `stepped` sends every state through
JSON, and a run that goes on computes with the numbers of one that was resumed. What a policy sees are sums that are the
same on every rank and in every order of ranks and micro-batches (`seen_domains`: rounded once).

| kind   | of             | seen        | answer                          |
|---|---|---|---|
| mix    | DomainsToMix   | SeenDomains | Proportions                     |
| select | Pool           | Pool        | numbers of samples [take]       |
| weight | SeenSamples    | SeenSamples | weights of the samples [S]      |

One that raises, or answers what is none (not finite, negative, another count, nothing at all), changes nothing: state
and answer stay (a selection is what was drawn, weights are 1), and a warning says so every time.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from pydantic import ValidationError

from .aliases import Floats, Ints
from .errors import EvenloadError, nearest, shorten
from .input.validation import Frozen, refused

logger = logging.getLogger("evenload")

Kind = Literal["mix", "select", "weight"]
KINDS: tuple[Kind, ...] = ("mix", "select", "weight")
State = Mapping[str, Any]
"""What JSON holds: mappings with names, lists, texts, integers and finite numbers."""


class DomainsToMix(NamedTuple):
    """The domains of a mixture, names ascending."""

    names: tuple[str, ...]
    shares: tuple[float, ...]
    """[K] what the recipe wants of each, above 0; they add up to 1."""
    samples: tuple[int, ...]
    """[K] of the data."""


class SeenDomains(NamedTuple):
    """What steps have shown of every domain, summed over all ranks."""

    losses: Floats
    """float64 [K] sums of token losses, in nats."""
    targets: Ints
    """int64 [K] tokens that carry loss; 0: nothing was drawn of it."""
    samples: Ints
    """int64 [K]"""
    excess: Floats | None = None
    """float64 [K] sums over tokens of max(loss - loss of the reference model, 0); None: nothing knows them."""

    def at(self, places: Sequence[int]) -> SeenDomains:
        """The sums of some of the domains alone."""
        own = np.array(places, dtype=np.int64)
        excess = None if self.excess is None else self.excess[own]
        return SeenDomains(self.losses[own], self.targets[own], self.samples[own], excess)

    def plus(self, more: SeenDomains) -> SeenDomains:
        """The sums of both, of domains that are the same."""
        excess = None if self.excess is None or more.excess is None else self.excess + more.excess
        counts = self.targets + more.targets, self.samples + more.samples
        return SeenDomains(self.losses + more.losses, *counts, excess)


class Proportions(NamedTuple):
    """What a mix policy answers to what it has seen."""

    shares: tuple[float, ...]
    """[K] of what is drawn of each domain; they add up to 1."""
    objective: tuple[float, ...] | None = None
    """[K] by which the mean token losses of the domains are added up; None: each token counts 1."""


class Pool(NamedTuple):
    """Candidates to select from, in any order, and what is known of them."""

    numbers: Ints
    """int64 [N] of the samples."""
    take: int
    seed: int = 0
    update: int = 0
    """Selections before this one."""
    losses: Floats | None = None
    """[N] mean token loss of each now."""
    reference: Floats | None = None
    """[N] the same of another model."""
    gradients: Floats | None = None
    """[N, k] projected (`plugins.data.projection`); for `cluster_less` [R, k], of its state's representatives."""
    query_gradients: Floats | None = None
    """[M, k] of validation samples."""
    tasks: Ints | None = None
    """[M] the task of each of these; None: all are of one."""
    embeddings: Floats | None = None
    """[N, d]"""
    queries: Floats | None = None
    """[M, d] embeddings of what is wanted."""


class SeenSamples(NamedTuple):
    """The samples of a global batch, of all ranks."""

    losses: Floats
    """[S] sums of token losses."""
    targets: Ints
    """[S]"""
    column: Floats | None = None
    """[S] a number that stands in the data."""
    domains: Ints | None = None
    """[S] place of each one's domain."""
    shares: Floats | None = None
    """[K] by which the domains are drawn."""
    vectors: Floats | None = None
    """[S, d] sums over tokens of place x last hidden state, which add up over slices."""
    anchors: Floats | None = None
    """[A, d] such vectors of what is wanted; None: those of the state hold."""


class DataPolicy(NamedTuple):
    """A row of a plugin's table of policies; see the module."""

    start: Callable[[Any, Any], tuple[State, Any]]
    step: Callable[[State, Any, Any], tuple[State, Any]]
    settings: type[Frozen] = Frozen
    needs: tuple[str, ...] = ()
    """Fields of what is seen that it cannot do without, of those that may be None."""
    same_pool: bool = False
    """It selects from the same samples in every update."""
    gradients_of: Callable[[State | None, Ints], Ints] = lambda _, numbers: numbers
    """Numbers of the samples whose gradients it wants, by its state (None: before its start) and those of the pool."""
    outcome: Callable[[State], Sequence[float]] | None = None
    """Shares [K] that it has found for a later run; None: it looks for none."""


class ChosenPolicy(NamedTuple):
    """A policy with its settings."""

    kind: Kind
    name: str
    policy: DataPolicy
    settings: Frozen
    every: int = 1
    """Steps that are summed up before it is asked, or that train on one selection."""
    pool: int | None = None
    """Samples that are drawn for each one that a selection takes; None: it selects from all."""
    files: Mapping[str, Path] = {}
    """Where fields of what it sees are read from, by their names."""


def chosen_policy(kind: Kind, name: str, settings: Mapping[str, Any], known: Mapping[str, DataPolicy]) -> ChosenPolicy:
    """The policy of a name with settings as a recipe has them. Raises EvenloadError."""
    if name not in known:
        raise EvenloadError(f"there is no {kind} policy {shorten(name)!r}", f"{kind}.policy", nearest(name, known))
    schema = known[name].settings
    try:
        return ChosenPolicy(kind, name, known[name], schema.model_validate(dict(settings)))
    except ValidationError as error:
        raise refused(error, schema, f"the {kind} policy '{name}'") from error


def started(chosen: ChosenPolicy, of: Any) -> tuple[State, Any]:
    """State and answer before the first step. Raises EvenloadError where ``of`` lacks what the policy needs."""
    if chosen.kind != "mix":
        _refuse_lacking(chosen, of)
    state, answer = chosen.policy.start(of, chosen.settings)
    return _through_json(state), _CHECKS[chosen.kind](answer, of)


def stepped(chosen: ChosenPolicy, state: State, seen: Any, last: Any) -> tuple[State, Any]:
    """State and answer after a step; where the policy fails, loudly, the state that there was and ``last``. Raises
    EvenloadError where nothing knows what the policy needs."""
    _refuse_lacking(chosen, seen)
    try:
        new, answer = chosen.policy.step(state, seen, chosen.settings)
        checked = _CHECKS[chosen.kind](answer, last if chosen.kind == "mix" else seen)
        return _through_json(new), checked
    except Exception as error:  # of whoever wrote it
        text = "the %s policy '%s' failed, and %s: %s: %s"
        logger.warning(text, chosen.kind, chosen.name, _GOES_ON[chosen.kind], type(error).__name__, error)
        return state, last


def seen_domains(
    num: int,
    domain: Ints,
    losses: Floats,
    targets: Ints,
    excess: Floats | None = None,
    weights: Floats | None = None,
) -> SeenDomains:
    """Sums by domain, float64, of sequences in any order: each is rounded once, so that none depends on the order.

    ``domain``, ``losses``, ``targets``, ``excess`` [S]: place of each sequence's domain among ``num``, its sum of token
    losses, its target tokens, and its sum over tokens of the excess over the reference model's loss. ``weights`` [S]:
    what the weights add up to by which token losses are multiplied; None: each is 1. A domain's losses are then its
    targets times their weighted mean, and a domain whose weights add up to nothing has shown nothing.
    """
    owned = [domain == place for place in range(num)]
    counts = np.array([[targets[own].sum(), own.sum()] for own in owned], dtype=np.int64).reshape(num, 2)
    factors = np.ones(num)
    if weights is not None:
        totals = np.array([math.fsum(weights[own]) for own in owned])
        counts[:, 0] *= totals > 0
        factors = np.divide(counts[:, 0], totals, out=np.zeros(num), where=totals > 0)
    sums, more = (
        np.array([math.fsum(values[own]) for own in owned]) * factors
        for values in (losses, losses if excess is None else excess)
    )
    return SeenDomains(sums, counts[:, 0], counts[:, 1], None if excess is None else more)


def objective_weights(objective: Sequence[float], domain: Ints, counts: Floats) -> Floats:
    """Weights w [S] by which  L = sum w l / sum w n  is the sum of the domains' mean losses, each times its objective.

    ``domain``, ``counts`` [S]: place of each sequence's domain, and its targets n, or what their own weights add up to.
    A domain that is not in the batch, or whose counts add up to nothing, is left out, and the objectives of the others
    are over their sum: the gradient is as large as that of a mean, whatever was drawn. Of all domains w adds up to the
    counts.
    """
    sums = np.array([math.fsum(counts[domain == place]) for place in range(len(objective))])
    there = sums > 0
    parts = np.where(there, objective, 0.0)
    factors = np.divide(parts, sums, out=np.zeros(len(sums)), where=there)
    weights: Floats = (factors * (math.fsum(sums[there]) / math.fsum(parts) if parts.any() else 0.0))[domain]
    return weights


def normalised(values: Any) -> tuple[float, ...]:
    """The values over their sum, which is above 0; summed in one order and rounded once."""
    total = math.fsum(values)
    return tuple(float(value) / total for value in values)


def _refuse_lacking(chosen: ChosenPolicy, seen: Any) -> None:
    lacking = [name for name in chosen.policy.needs if getattr(seen, name) is None]
    if lacking:
        what = f"the {chosen.kind} policy '{chosen.name}' needs what is not there"
        raise EvenloadError(what, f"no {', '.join(lacking)}", "give it, or take another policy")


def _through_json(state: State) -> State:
    kept: State = json.loads(json.dumps(state, allow_nan=False))
    return kept


def _proportions(answer: Any, like: Any) -> Proportions:
    answer = Proportions(*answer)
    lists = [values for values in answer if values is not None]
    if isinstance(like, Proportions) and (answer.objective is None) != (like.objective is None):
        raise ValueError("an objective in some steps alone")
    if not all(len(values) == len(like.shares) for values in lists):
        raise ValueError(f"{', '.join(str(len(values)) for values in lists)} shares for {len(like.shares)} domains")
    if not all(math.isfinite(value) and value >= 0 for values in lists for value in values):
        raise ValueError(f"a share that is none: {shorten(str(lists))}")
    if not all(math.fsum(values) > 0 for values in lists):
        raise ValueError("nothing of any domain")
    return Proportions(normalised(answer.shares), answer.objective and normalised(answer.objective))


def _selection(answer: Any, pool: Pool) -> Ints:
    numbers = np.asarray(answer)
    if numbers.shape != (pool.take,) or numbers.dtype.kind not in "iu" or len(np.unique(numbers)) != pool.take:
        raise ValueError(f"{shorten(repr(numbers))} are no {pool.take} samples, each once")
    if not np.isin(numbers, pool.numbers).all():
        raise ValueError("a sample that is not in the pool")
    return numbers.astype(np.int64)


def _weights(answer: Any, seen: SeenSamples) -> Floats:
    weights = np.asarray(answer, dtype=np.float64)
    if weights.shape != seen.losses.shape or not np.isfinite(weights).all():
        raise ValueError(f"{shorten(repr(weights))} are no weights of {len(seen.losses)} samples")
    if (weights < 0).any() or not weights.any():
        raise ValueError("weights below 0, or none above it")
    return weights


_GOES_ON = {
    "mix": "what it answered last goes on",
    "select": "samples go on as they are drawn",
    "weight": "the samples of the step count alike",
}
_CHECKS: dict[str, Callable[[Any, Any], Any]] = {"mix": _proportions, "select": _selection, "weight": _weights}
"""What makes an answer one, by kind. They raise where it is none."""
