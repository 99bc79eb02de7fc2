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

from .... import plugins  # noqa: F401  # importing them registers them
from ....core import registry
from ....core.errors import EvenloadError, nearest, shorten, shown
from ....core.input.validation import first_fault
from ....core.recipe import recipe as recipes
from ....core.recipe.families import families_with
from ....core.recipe.recipe import Recipe
from ....core.recipe.sizes import experts_in

KEY = "evenload"
"""The section's name in ds_config."""


class Section(BaseModel):
    """What the section holds besides the plugins."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    recipe: Path | None = None
    """A recipe file, relative to the working directory, for all that the section leaves out."""


def parse_section(data: Any) -> Section:
    """Validate the section. Raises EvenloadError: names the key, what was found and the nearest key that exists."""
    if not isinstance(data, Mapping):
        raise EvenloadError(
            f'ds_config: "{KEY}" is not an object', shown(data), '{"packing": {"enabled": true, "max_tokens": 8192}}'
        )
    fields: dict[str, Any] = {p.name: (p.config, p.config()) for p in registry.registered()}
    schema = create_model("EvenloadSection", __base__=Section, **fields)  # as ``plugins`` of a recipe
    try:
        return schema.model_validate(data)
    except ValidationError as error:
        fault = first_fault(error, schema)
        *above, last = (KEY, *fault.path)
        where = shorten(".".join(above))
        if fault.known is None:
            raise EvenloadError(f"ds_config: {where}.{shorten(last)} is not valid", fault.value, fault.says) from error
        hint = nearest(last, fault.known)
        raise EvenloadError(f"ds_config: {where} has no key {shown(last)}", fault.value, hint) from error


def recipe_of(section: Section | None, base: Recipe | None) -> Recipe | None:
    """The recipe that a script asks for: the section over its recipe file over `base`; None if it asks for nothing.
    Raises EvenloadError: the recipe file is missing or wrong."""
    if section is None:
        return base
    recipe = recipes.load(section.recipe) if section.recipe else base or recipes.parse({})
    chosen = section.model_dump(mode="json", exclude_unset=True, exclude={"recipe"})
    changes = {f"plugins.{name}.{key}": value for name, values in chosen.items() for key, value in values.items()}
    return recipe.changed(changes)


def for_engine(
    recipe: Recipe, model_config: Any, *, zero_stage: int, dtype: str, trainer: str = "deepspeed", ep: int = 1
) -> Recipe:
    """The recipe, with the trainer, precision and model shape of a live engine: what costs are counted from. ``ep``:
    ranks over which its experts are divided."""
    heads = getattr(model_config, "num_attention_heads", 1)
    groups = getattr(model_config, "num_key_value_heads", None) or heads
    if model_config.hidden_size % heads:
        # The width of K and V only shifts the linear cost a little; such a model is counted without grouped queries.
        heads = groups = 1
    return recipe.changed(
        {
            "trainer": trainer,
            "train.dtype": dtype,
            "deepspeed.zero_stage": zero_stage,
            "parallel": {"ep": ep},
            "model.num_layers": model_config.num_hidden_layers,
            "model.hidden_size": model_config.hidden_size,
            "model.num_attention_heads": heads,
            "model.num_query_groups": groups,
            "model.ffn_hidden_size": getattr(model_config, "intermediate_size", None),
            "model.vocab_size": model_config.vocab_size,
            **_family(model_config),
        }
    )


def _family(config: Any) -> dict[str, Any]:
    experts = experts_in(vars(config))
    if experts is None:
        gated = config.model_type not in ("gpt_neox", "gpt2")
        return {"model.family": families_with(lambda family: family.gated == gated)[0], "model.moe": None}
    return {
        "model.family": families_with(lambda family: family.experts == "some")[0],
        "model.moe": {
            "num_experts": experts.num_experts,
            "topk": experts.topk,
            # A shared expert costs what a routed one of its size does, and every token takes it.
            "ffn_hidden_size": experts.ffn_hidden_size + experts.shared_ffn_hidden_size // experts.topk,
            "every": max(1, round(config.num_hidden_layers / experts.num_layers)),
        },
    }
