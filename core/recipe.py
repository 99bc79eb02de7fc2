"""The recipe: one YAML file that says what to train, on which trainer, and which plugins even its load.

    model:   {num_layers: 4, hidden_size: 256, num_attention_heads: 8}
    data:    {source: python-stdlib, max_length: 8192}
    plugins: {packing: {enabled: true, max_tokens: 8192}}

Trailing ``a.b=value`` words override it; values are read as YAML. Unknown keys, wrong types and impossible
combinations raise an EvenloadError that names the key, what was found and the nearest key that exists.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, Field, ValidationError, create_model

from . import registry
from .errors import EvenloadError, nearest
from .feasible import refuse_impossible
from .layout import Layout
from .sections import (
    Checkpoint,
    Data,
    DeepSpeed,
    Log,
    Megatron,
    Model,
    Parallel,
    Planner,
    Safety,
    Section,
    Train,
)


class Recipe(Section):
    """The whole recipe; see the module for its form."""

    trainer: Literal["megatron", "deepspeed"] = "megatron"
    model: Model = Model()
    data: Data = Data()
    parallel: Parallel = Parallel()
    train: Train = Train()
    checkpoint: Checkpoint = Checkpoint()
    log: Log = Log()
    planner: Planner = Planner()
    safety: Safety = Safety()
    megatron: Megatron = Megatron()
    deepspeed: DeepSpeed = DeepSpeed()
    cluster: str = "local"
    """A name in recipes/clusters or a YAML file."""
    costs: str = "auto"
    """A name in recipes/costs, a YAML file, or auto: counted from the model's shape and the cluster's rate."""
    plugins: Any = Field(default_factory=dict)

    def enabled(self) -> tuple[registry.Plugin, ...]:
        """The enabled plugins in the order in which they plan."""
        return tuple(p for p in registry.registered() if self.config_of(p.name).enabled)

    def config_of(self, name: str) -> registry.PluginConfig:
        config: registry.PluginConfig = getattr(self.plugins, name)
        return config

    @cached_property
    def min_world_size(self) -> int:
        p = self.parallel
        return p.tp * p.pp * p.cp * (p.dp or 1)

    def layout(self, world_size: int | None = None) -> Layout:
        p = self.parallel
        return Layout.of_world(world_size or self.min_world_size, tp=p.tp, pp=p.pp, cp=p.cp, ep=p.ep, dp=p.dp)

    def changed(self, changes: Mapping[str, Any]) -> Recipe:
        """The same recipe with dotted keys changed, validated again."""
        data = self.model_dump(mode="json")
        for key, value in changes.items():
            _set(data, key, value)
        return parse(data)


def schema_type() -> type[Recipe]:
    """Recipe with the sections of all registered plugins under ``plugins``."""
    sections: dict[str, Any] = {p.name: (p.config, p.config()) for p in registry.registered()}
    plugins = create_model("Plugins", __base__=Section, **sections)
    return create_model("Recipe", __base__=Recipe, plugins=(plugins, plugins()), __doc__=Recipe.__doc__)


def json_schema() -> dict[str, Any]:
    """The JSON Schema of a recipe, for editors; committed as docs/recipe.schema.json."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema_type().model_json_schema()}


def load(path: str | Path, overrides: Iterable[str] = ()) -> Recipe:
    """Read a recipe and apply ``a.b=value`` overrides. Raises EvenloadError."""
    file = Path(path)
    try:
        data = yaml.safe_load(file.read_text())
    except OSError as error:
        raise EvenloadError(
            f"the recipe {file} cannot be read", str(error.strerror), "give the path of a YAML file"
        ) from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise EvenloadError(f"the recipe {file} is not YAML", str(error), "mend the file") from error
    if not isinstance(data, dict):
        raise EvenloadError(f"the recipe {file} holds no mapping", type(data).__name__, "see recipes/quickstart.yaml")
    for word in overrides:
        key, equals, value = word.partition("=")
        if not equals or not key:
            raise EvenloadError("an override is not of the form key=value", repr(word), "write e.g. train.steps=100")
        try:
            _set(data, key, yaml.safe_load(value))
        except yaml.YAMLError as error:
            raise EvenloadError(f"the value of {key} is not YAML", repr(value), "quote it") from error
    return parse(data)


def parse(data: Mapping[str, Any]) -> Recipe:
    """Validate a recipe given as nested dictionaries. Raises EvenloadError."""
    schema = schema_type()
    try:
        recipe = schema.model_validate(data)
    except ValidationError as error:
        raise _explain(error, schema) from error
    refuse_impossible(recipe)
    return recipe


def _set(data: dict[str, Any], dotted: str, value: Any) -> None:
    *parents, last = dotted.split(".")
    for name in parents:
        below = data.setdefault(name, {})
        if below is None:
            below = data[name] = {}
        if not isinstance(below, dict):
            raise EvenloadError(f"{dotted} cannot be set", f"{name} is {below!r}", "override the whole value instead")
        data = below
    data[last] = value


def _explain(error: ValidationError, schema: type[BaseModel]) -> EvenloadError:
    """The first fault of a pydantic report, in our three parts."""
    fault = error.errors()[0]
    path = [str(part) for part in fault["loc"]]
    name, more = ".".join(path), error.error_count() - 1
    rest = f" (and {more} more)" if more else ""
    if fault["type"] == "extra_forbidden":
        parent: Any = schema
        for part in path[:-1]:
            parent = parent.model_fields[part].annotation
        where = ".".join(path[:-1]) or "the recipe"
        return EvenloadError(
            f"{where} has no key '{path[-1]}'{rest}",
            f"{name} = {fault['input']!r}",
            nearest(path[-1], parent.model_fields),
        )
    return EvenloadError(f"{name} is not valid{rest}", f"{fault['input']!r}", fault["msg"])
