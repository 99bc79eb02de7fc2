"""The recipe: one YAML file that says what to train, on which trainer, and which plugins even its load.

    model:   {num_layers: 4, hidden_size: 256, num_attention_heads: 8}
    data:    {source: python-stdlib, max_length: 8192}
    plugins: {packing: {enabled: true, max_tokens: 8192}}

`load` reads one, `rules` say which cannot run.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any, Literal

from pydantic import Field, create_model

from .. import registry
from ..input.bounds import RANKS, whole_number
from ..machine.layout import Layout
from .sections import Checkpoint, Data, DeepSpeed, Log, Megatron, Model, Parallel, Planner, Safety, Section, Train


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
        """Of ``world_size`` processes; None: of the fewest that ``parallel.*`` needs. Raises EvenloadError."""
        p = self.parallel
        wanted = self.min_world_size if world_size is None else world_size
        size = whole_number(wanted, "the number of processes", RANKS)
        return Layout.of_world(size, tp=p.tp, pp=p.pp, cp=p.cp, ep=p.ep, dp=p.dp)


def schema_type() -> type[Recipe]:
    """Recipe with the sections of all registered plugins under ``plugins``."""
    sections: dict[str, Any] = {p.name: (p.config, p.config()) for p in registry.registered()}
    plugins = create_model("Plugins", __base__=Section, **sections)
    return create_model("Recipe", __base__=Recipe, plugins=(plugins, plugins()), __doc__=Recipe.__doc__)


def json_schema() -> dict[str, Any]:
    """The JSON Schema of a recipe, for editors; committed as docs/recipe.schema.json."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema_type().model_json_schema()}
