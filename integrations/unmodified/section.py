"""The top-level ``"evenload": {...}`` section of a script's ds_config: a recipe's ``plugins``, plus ``"recipe"``.

    "evenload": {"packing": {"enabled": true, "max_tokens": 8192}}
    "evenload": {"recipe": "recipe.yaml", "packing": {"max_tokens": 4096}}

DeepSpeed accepts the section and ignores it. Where both a recipe file and the section name a value, the section wins.
Do not write "auto": accelerate tries to fill such values in by itself, in every section.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError, create_model

from ...core import registry
from ...core.errors import EvenloadError, nearest, shorten, shown
from ...core.input.validation import first_fault
from ...core.recipe import recipe as recipes
from ...core.recipe.recipe import Recipe

KEY = "evenload"
"""The section's name in ds_config."""


class EvenloadSection(BaseModel):
    """What the section holds besides the plugins."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    recipe: Path | None = None
    """A recipe file, relative to the working directory, for all that the section leaves out."""


def parse_section(data: Any) -> EvenloadSection:
    """Validate the section. Raises EvenloadError: names the key, what was found and the nearest key that exists."""
    if not isinstance(data, Mapping):
        raise EvenloadError(
            f'ds_config: "{KEY}" is not an object', shown(data), '{"packing": {"enabled": true, "max_tokens": 8192}}'
        )
    registry.load_plugins()
    fields: dict[str, Any] = {p.name: (p.config, p.config()) for p in registry.registered()}
    schema = create_model("EvenloadSection", __base__=EvenloadSection, **fields)  # as ``plugins`` of a recipe
    try:
        return schema.model_validate(data)
    except ValidationError as error:
        fault = first_fault(error, schema)
        *above, last = (KEY, *fault.path)
        where = shorten(".".join(above))
        if fault.known is None:
            raise EvenloadError(f"ds_config: {where}.{shorten(last)} is not valid", fault.value, fault.says) from error
        hint = nearest(last, fault.known) + recipes.ANY_OTHER * (len(fault.path) == 1)
        raise EvenloadError(f"ds_config: {where} has no key {shown(last)}", fault.value, hint) from error


def recipe_of(section: EvenloadSection | None, base: Recipe | None) -> Recipe | None:
    """The recipe that a script asks for: the section over its recipe file over `base`; None if it asks for nothing.
    Raises EvenloadError: the recipe file is missing or wrong."""
    if section is None:
        return base
    recipe = recipes.load(section.recipe) if section.recipe else base or recipes.parse({})
    chosen = section.model_dump(mode="json", exclude_unset=True, exclude={"recipe"})
    changes = {f"plugins.{name}.{key}": value for name, values in chosen.items() for key, value in values.items()}
    return recipe.changed(changes)
