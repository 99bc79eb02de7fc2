"""The trials of a sweep: one tenant's file with lists of values becomes a tenant for each of their combinations.

    sweep: {train.lr: [1e-4, 2e-4], adapter.r: [8, 16], halve_every: 50}

in ``acme.yaml`` means acme.lr=1e-4.r=8, acme.lr=1e-4.r=16, acme.lr=2e-4.r=8 and acme.lr=2e-4.r=16, in this order: the
last key changes fastest. What is compared must be comparable, so keys of ``evaluate`` and the length of training are
the same for all trials, and other data only go with an evaluation that all of them share.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple

from pydantic import ValidationError

from ....core.errors import EvenloadError, nearest, refuse_first, shorten, shown
from ....core.input.bounds import TOKENS, whole_number
from ....core.input.validation import first_fault
from ..tenant_file import Tenant, refuse_unmixed

MOST_TRIALS = 256
"""Of one sweep; each has a folder, an adapter and two moments of it."""
HALVE_EVERY = "halve_every"

_SECTIONS = ("data", "adapter", "train")
_ALIKE = ("train.steps", "train.epochs", "data.validation")
"""The same for all trials, and so not to be swept."""
_OF_START = ("adapter.r", "adapter.target_modules", "adapter.rank_pattern")
"""What an adapter that goes on has already."""
_LONGEST_VALUE, _LONGEST_NAME = 40, 180
"""Characters in a file's name, for which systems have room for 255."""


class Trial(NamedTuple):
    """One combination of a sweep."""

    name: str
    """Of the tenant that it is, and of its folder."""
    values: Mapping[str, Any]
    """What was tried, by dotted key."""
    tenant: Tenant
    """The file of the sweep with these values, and without the sweep."""


class Sweep(NamedTuple):
    """A sweep as its file asks for it."""

    name: str
    trials: tuple[Trial, ...]
    halve_every: int | None
    """Steps of a trial between two rungs; None: every trial runs to its end."""


def sweep_of(name: str, tenant: Tenant) -> Sweep:
    """The trials of a tenant that has a ``sweep``. Raises EvenloadError, naming the tenant."""
    assert tenant.sweep is not None
    values = {key: value for key, value in tenant.sweep.items() if key != HALVE_EVERY}
    _refuse_keys(name, tenant, values)
    for key, tried in values.items():
        if not isinstance(tried, (list, tuple)) or not tried:
            what = f"tenant {name}: sweep.{key} is not a list of values to try"
            raise EvenloadError(what, shown(tried), f"write e.g. {key}: [A, B]")
    if (count := math.prod(len(tried) for tried in values.values())) > MOST_TRIALS:
        detail = " x ".join(f"{len(tried)} of {key}" for key, tried in values.items())
        do = "try fewer values, or sweep one key after the other"
        raise EvenloadError(f"tenant {name}: a sweep has at most {MOST_TRIALS} trials", f"{count}: {detail}", do)
    halve_every = _halve_every(name, tenant)
    trials = tuple(_trials(name, tenant, values))
    _refuse_twins(name, trials)
    return Sweep(name, trials, halve_every)


def refuse_late_rung(name: str, halve_every: int | None, steps: int) -> None:
    """Raise EvenloadError where no rung comes before the last step."""
    if halve_every is not None and halve_every >= steps:
        what = f"tenant {name}: the first rung of the sweep comes after its trials have ended"
        detail = f"sweep.halve_every {halve_every}, steps {steps}"
        raise EvenloadError(
            what, detail, "lower sweep.halve_every below the steps, or leave it out: no trial then ends"
        )


def _refuse_keys(name: str, tenant: Tenant, values: Mapping[str, Any]) -> None:
    known = set(_keys()) - set(_ALIKE)
    scored = tenant.evaluate is not None
    if not values:
        do = "name keys of this file with lists of values: sweep: {train.lr: [1.0e-4, 2.0e-4]}"
        raise EvenloadError(f"tenant {name}: the sweep tries nothing", shown(dict(tenant.sweep or {})), do)
    for key in values:
        section = key.partition(".")[0]
        refuse_first(
            (
                key in _ALIKE or section == "evaluate",
                f"tenant {name}: sweep.{key} would make trials that cannot be compared",
                "all trials train equally long and are scored on the same samples",
                f"take it out of the sweep, and set {key} for all of them",
            ),
            (
                key not in known,
                f"tenant {name}: sweep has no key {shown(key)}",
                f"sweep.{key}",
                nearest(key, {*known, HALVE_EVERY}),
            ),
            (
                section == "data" and not scored,
                f"tenant {name}: trials on other data have no loss in common",
                f"sweep.{key}, evaluate null",
                "name samples that all trials are scored on: evaluate: {source: FILE}",
            ),
            (
                tenant.start is not None and key in _OF_START,
                f"tenant {name}: an adapter that goes on keeps its rank and targets",
                f"sweep.{key}, from: {shorten(str(tenant.start))}",
                "take one of the two out",
            ),
        )


def _halve_every(name: str, tenant: Tenant) -> int | None:
    value = (tenant.sweep or {}).get(HALVE_EVERY)
    if value is None:
        return None
    do = "give the steps between two rungs"
    halve_every = whole_number(value, f"tenant {name}: sweep.{HALVE_EVERY}", TOKENS, do=do)
    if tenant.train.epochs is None:
        refuse_late_rung(name, halve_every, tenant.train.steps)
    if tenant.evaluate is not None and halve_every % tenant.evaluate.every:
        what = f"tenant {name}: trials are not evaluated where the sweep halves them"
        detail = f"sweep.{HALVE_EVERY} {halve_every}, evaluate.every {tenant.evaluate.every}"
        raise EvenloadError(what, detail, "make halve_every a multiple of evaluate.every")
    return halve_every


def _trials(name: str, tenant: Tenant, values: Mapping[str, Sequence[Any]]) -> Iterable[Trial]:
    document = tenant.model_dump(mode="json", by_alias=True, exclude_unset=True, exclude={"sweep"})
    words = _words(values)
    for places in product(*(range(len(tried)) for tried in values.values())):
        chosen = {key: values[key][place] for key, place in zip(values, places, strict=True)}
        parts = [words[key][place] for key, place in zip(values, places, strict=True)]
        yield Trial(".".join([name, *parts]), chosen, _with(name, document, chosen))


def _with(name: str, document: Mapping[str, Any], chosen: Mapping[str, Any]) -> Tenant:
    changed = {section: dict(value) if isinstance(value, Mapping) else value for section, value in document.items()}
    for key, value in chosen.items():
        section, _, field = key.partition(".")
        changed.setdefault(section, {})[field] = value
    try:
        tried = Tenant.model_validate(changed)
    except ValidationError as error:
        fault = first_fault(error, Tenant)
        what = f"tenant {name}: a value of sweep.{fault.key} is not valid"
        raise EvenloadError(what, fault.value, fault.says) from error
    refuse_unmixed(tried)
    return tried


def _words(values: Mapping[str, Sequence[Any]]) -> dict[str, list[str]]:
    """What each value of each key is called in names of trials: lr=2e-4, or train.lr=2e-4 where two keys end alike."""
    ends = [key.rpartition(".")[2] for key in values]
    words = {}
    for key, tried in values.items():
        end = key.rpartition(".")[2]
        texts = [_file_safe(value) for value in tried]
        if len(set(texts)) < len(texts) or max(map(len, texts)) > _LONGEST_VALUE:
            texts = [f"{place}-{text[:_LONGEST_VALUE]}" for place, text in enumerate(texts, 1)]
        words[key] = [f"{end if ends.count(end) == 1 else key}={text}" for text in texts]
    return words


def _file_safe(value: Any) -> str:
    text = "+".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
    is_number = re.fullmatch(r"[+-]?[0-9.]+(e[+-]?[0-9]+)?", text)
    return text if is_number else re.sub(r"[^A-Za-z0-9+_-]+", "_", text)


def _refuse_twins(name: str, trials: Sequence[Trial]) -> None:
    """Raise EvenloadError for two trials that are the same, and for names that no file can have."""
    for place, trial in enumerate(trials):
        if len(trial.name) > _LONGEST_NAME:
            do = "give the file a shorter name, or sweep fewer keys at once"
            raise EvenloadError(f"tenant {name}: the name of a trial is too long", shorten(trial.name), do)
        twin = next((other for other in trials[:place] if other.tenant == trial.tenant), None)
        if twin is not None:
            what, do = f"tenant {name}: two trials of the sweep are the same", "list every value once"
            raise EvenloadError(what, f"{twin.name} and {trial.name}", do)


def _keys() -> Iterable[str]:
    for section in _SECTIONS:
        for field in Tenant.model_fields[section].annotation.model_fields:  # type: ignore[union-attr]
            yield f"{section}.{field}"
