"""Recipes from files, overrides and dictionaries.

Trailing ``a.b=value`` words override a file; values are read as YAML. Unknown keys, wrong types and impossible
combinations raise an EvenloadError that names the key, what was found and the nearest key that exists.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ..errors import EvenloadError, nearest, shorten, shown
from ..input import reading
from ..input.validation import Fault, first_fault
from .rules import refuse_impossible
from .schema import Recipe, schema_type


def load(path: str | Path, overrides: Iterable[str] = ()) -> Recipe:
    """Read a recipe and apply ``a.b=value`` overrides. Raises EvenloadError."""
    what = f"the recipe {shorten(str(path))}"
    data = reading.read_yaml(path, what, "give the path of a YAML file")
    data = reading.mapping(data, what, "see recipes/quickstart.yaml")
    if isinstance(overrides, str) or not isinstance(overrides, Iterable):
        raise EvenloadError("overrides are no list", shown(overrides), 'give e.g. ["train.steps=100"]')
    for word in overrides:
        key, equals, value = word.partition("=") if isinstance(word, str) else ("", "", "")
        if not equals or not key:
            raise EvenloadError("an override is not of the form key=value", shown(word), "write e.g. train.steps=100")
        _set(data, key, reading.parse_yaml(value, f"the value of {shorten(key)}", "quote it"))
    return parse(data)


def changed(recipe: Recipe, changes: Mapping[str, Any]) -> Recipe:
    """The same recipe with dotted keys changed, validated again. Raises EvenloadError."""
    data = recipe.model_dump(mode="json")
    for key, value in changes.items():
        _set(data, key, value)
    return parse(data)


def parse(data: Mapping[str, Any]) -> Recipe:
    """Validate a recipe given as nested dictionaries. Raises EvenloadError."""
    schema = schema_type()
    try:
        recipe = schema.model_validate(data)
    except ValidationError as error:
        raise _explain(first_fault(error, schema)) from error
    refuse_impossible(recipe)
    return recipe


def _set(data: dict[str, Any], dotted: str, value: Any) -> None:
    *parents, last = dotted.split(".")
    if len(parents) >= reading.MOST_DEPTH:
        raise EvenloadError(
            f"{shorten(dotted)} cannot be set", f"{len(parents) + 1} names in one key", "see the schema"
        )
    for name in parents:
        below = data.setdefault(name, {})
        if below is None:
            below = data[name] = {}
        if not isinstance(below, dict):
            detail = f"{shorten(name)} is {shown(below)}"
            raise EvenloadError(f"{shorten(dotted)} cannot be set", detail, "override the whole value instead")
        data = below
    data[last] = value


def _explain(fault: Fault) -> EvenloadError:
    rest = f" (and {fault.more} more)" if fault.more else ""
    if fault.known is None:
        return EvenloadError(f"{fault.key} is not valid{rest}", fault.value, fault.says)
    *above, last = fault.path
    where = shorten(".".join(above)) or "the recipe"
    detail = shorten(f"{fault.key} = {fault.value}")
    return EvenloadError(f"{where} has no key {shown(last)}{rest}", detail, nearest(last, fault.known))
