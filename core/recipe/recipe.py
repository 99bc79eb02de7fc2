"""The recipe: one YAML file that says what to train, on which trainer, and which plugins even its load.

    model:   {num_layers: 4, hidden_size: 256, num_attention_heads: 8}
    data:    {source: python-stdlib, max_length: 8192}
    plugins: {packing: {enabled: true, max_tokens: 8192}}

Trailing ``a.b=value`` words override it; values are read as YAML. Unknown keys, wrong types and impossible
combinations raise an EvenloadError that names the key, what was found and the nearest key that exists. Recipes that
come with evenload go by their names: ``gpu-node`` is recipes/gpu-node.yaml wherever one stands.
"""

from __future__ import annotations

import ast
import inspect
import os
import textwrap
from collections.abc import Iterable, Mapping
from copy import deepcopy
from functools import cached_property, lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, Field, ValidationError, create_model

from .. import registry
from ..errors import EvenloadError, nearest, shorten, shown
from ..input import reading
from ..input.bounds import RANKS, Amount, whole_number
from ..input.validation import OneOf, refused, sections_in
from ..machine.layout import Layout
from ..policies import KINDS, ChosenPolicy, Kind
from .elsewhere import ELSEWHERE
from .pretrained import DECIDED, with_pretrained
from .rules import refuse_impossible
from .sections import (
    Checkpoint,
    Data,
    DeepSpeed,
    Generate,
    Log,
    Megatron,
    Model,
    Parallel,
    Planner,
    Safety,
    Section,
    Sparse,
    Train,
)
from .sparse import idle_of_sparse
from .stages import stage_layers
from .traits import TRAINERS

P = TypeVar("P", bound=registry.Plugin)

ROOT = Path(__file__).parent.parent.parent
RECIPES = ROOT / "recipes"


class Recipe(Section):
    """The whole recipe; see the module for its form."""

    trainer: Annotated[str, OneOf(TRAINERS)] = "megatron"
    """transformers: Hugging Face's Trainer under DDP, FSDP or DeepSpeed, in scripts of your own (`evenload run`)."""
    model: Model = Model()
    data: Data = Data()
    parallel: Parallel = Parallel()
    train: Train = Train()
    checkpoint: Checkpoint = Checkpoint()
    generate: Generate = Generate()
    sparse: Sparse = Sparse()
    log: Log = Log()
    planner: Planner = Planner()
    safety: Safety = Safety()
    megatron: Megatron = Megatron()
    deepspeed: DeepSpeed = DeepSpeed()
    cluster: str = "local"
    """A name in recipes/clusters or a YAML file."""
    memory_gib: Amount | None = None
    """Of a device [GiB], as plans may fill it; null: the cluster's."""
    costs: str = "auto"
    """A name in recipes/costs, a YAML file, or auto: counted from the model's shape and the cluster's rate."""
    plugins: Any = Field(default_factory=dict)

    def enabled(self) -> tuple[registry.Plugin, ...]:
        """The enabled plugins in the order in which they plan."""
        return tuple(p for p in registry.registered() if self.config_of(p.name).enabled)

    def enabled_of(self, kind: type[P]) -> tuple[P, ...]:
        """The enabled plugins of one kind in the order in which they plan."""
        return tuple(p for p in self.enabled() if isinstance(p, kind))

    def deciding(self, what: registry.Decision) -> str:
        """The first enabled plugin that decides this; empty: none does."""
        return next((p.name for p in self.enabled() if what in p.decides), "")

    def config_of(self, name: str) -> registry.PluginConfig:
        config: registry.PluginConfig = getattr(self.plugins, name)
        return config

    def idle(self) -> list[str]:
        """Messages about plugins that are disabled though their sections ask for something, and about sparse scoring
        without effect."""
        off = [plugin for plugin in registry.registered() if plugin not in self.enabled()]
        said = (self.config_of(plugin.name).idle() for plugin in off)
        return [*filter(None, said), *idle_of_sparse(self)]

    @property
    def sharded_experts(self) -> bool:
        """Whether an enabled plugin wants experts cut over their group."""
        of_layers = self.enabled_of(registry.LayerPlugin)
        return any(p.shards_experts is not None and p.shards_experts(self.config_of(p.name)) for p in of_layers)

    @property
    def adapting(self) -> str:
        """The enabled plugin that trains adapters of tenants, while the model stays as it is; empty: none does."""
        return next((p.name for p in self.enabled_of(registry.SlicePlugin) if p.adapts is not None), "")

    @property
    def trees(self) -> bool:
        """Whether what samples begin with in common may be computed once: where no loss is one of all tokens of a batch
        or of a sample, and none of a trunk is taken down by sample or rounded to float32 in a float64 run."""
        moe = self.model.moe
        if moe and (moe.z_loss or moe.sequence_aux_loss or moe.batch_aux_loss):
            return False
        if self.data.loss_on == "all" and (self.train.dtype == "fp64" or any(map(self.data_policy, KINDS))):
            return False
        return any(getattr(self.config_of(plugin.name), "trees", False) for plugin in self.enabled())

    @property
    def trees_asked(self) -> str:
        """The key by which trees are asked for; empty: they are left as they are by default, or off."""
        configs = ((plugin.name, self.config_of(plugin.name)) for plugin in self.enabled())
        asked = (name for name, one in configs if "trees" in one.model_fields_set and getattr(one, "trees", False))
        return next((f"plugins.{name}.trees" for name in asked), "")

    @property
    def adapts(self) -> bool:
        """Whether adapters of tenants are trained, and the model stays as it is."""
        return bool(self.adapting)

    def data_policy(self, kind: Kind) -> ChosenPolicy | None:
        """By what shares of domains, samples or their weights follow what steps show; None: by nothing."""
        of_data = self.enabled_of(registry.DataPlugin)
        chosen = (p.chooses(self.config_of(p.name), kind) for p in of_data if p.chooses is not None)
        return next(filter(None, chosen), None)

    @property
    def v_shape(self) -> bool:
        """Whether each device of a pipeline has two stages, in a V."""
        return any(getattr(self.config_of(p.name), "v_shape", False) for p in self.enabled())

    @cached_property
    def of_replicas(self) -> tuple[Recipe, ...]:
        """The recipe of each replica by itself; this one alone where it names no replicas. Raises EvenloadError."""
        return tuple(self._of_replica(number) for number in range(len(self.parallel.replicas or ()))) or (self,)

    @property
    def ranks_of_replicas(self) -> tuple[int, ...]:
        """Numbers of ranks, one a replica; none where the recipe names no replicas."""
        return tuple(one.num_ranks for one in self.parallel.replicas or ())

    def _of_replica(self, number: int) -> Recipe:
        own = (self.parallel.replicas or ())[number].model_dump(mode="json", exclude_none=True)
        elsewhere = {"cluster": "cluster", "costs": "costs", "zero_stage": "deepspeed.zero_stage"}
        changes: dict[str, Any] = {place: own.pop(key) for key, place in elsewhere.items() if key in own}
        try:
            return self.changed({"parallel": own, **changes})
        except EvenloadError as error:
            raise EvenloadError(f"parallel.replicas, replica {number}: {error.what}", error.found, error.do) from error

    @cached_property
    def min_world_size(self) -> int:
        if self.parallel.replicas:
            return sum(self.ranks_of_replicas)
        p = self.parallel
        return p.tp * p.pp * p.cp * (p.dp or -(-p.ep // p.cp))

    def refuse_replicas(self) -> None:
        """Raise EvenloadError for replicas, where they can be neither planned nor run together."""
        if replicas := self.parallel.replicas:
            what, detail = "only `evenload train` and `verify` run replicas", f"parallel.replicas of {len(replicas)}"
            raise EvenloadError(what, detail, "give parallel.tp, pp and dp of one of them in its place")

    def layout(self, world_size: int | None = None) -> Layout:
        """Layout of ``world_size`` processes; None: of the fewest that ``parallel.*`` needs. Raises EvenloadError, also
        where replicas have layouts of their own."""
        self.refuse_replicas()
        p = self.parallel
        wanted = self.min_world_size if world_size is None else world_size
        size = whole_number(wanted, "the number of processes", RANKS)
        layers = stage_layers(self.model, p)
        return Layout.of_world(size, tp=p.tp, pp=p.pp, cp=p.cp, ep=p.ep, dp=p.dp, v_shape=self.v_shape, layers=layers)

    def changed(self, changes: Mapping[str, Any]) -> Recipe:
        """A copy of the recipe with dotted keys changed, validated again."""
        data = self.model_dump(mode="json", exclude_unset=True)
        for key, value in changes.items():
            _set(data, key, value)
        return parse(data)


def schema_type() -> type[Recipe]:
    """Recipe with the sections of all registered plugins under ``plugins``."""
    return _with_sections(tuple((plugin.name, plugin.config) for plugin in registry.registered()))


@lru_cache(maxsize=8)
def _with_sections(configs: tuple[tuple[str, type[registry.PluginConfig]], ...]) -> type[Recipe]:
    sections: dict[str, Any] = {name: (config, config()) for name, config in configs}
    plugins = create_model("Plugins", __base__=Section, **sections)
    return create_model("Recipe", __base__=Recipe, plugins=(plugins, plugins()), __doc__=Recipe.__doc__)


def json_schema() -> dict[str, Any]:
    """The JSON Schema of a recipe, for editors; committed as docs/recipe.schema.json."""
    model = schema_type()
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", **model.model_json_schema()}
    _describe_fields(schema, model, schema["$defs"])
    return schema


def _describe_fields(schema: dict[str, Any], model: type[BaseModel], defs: dict[str, Any]) -> None:
    """Write the docstrings of a model's fields, and of those of its sections, into its JSON Schema.

    For the schema alone: to read them as classes are made costs every command 35 ms.
    """
    texts = {name: text for cls in reversed(model.__mro__) for name, text in _docstrings(cls).items()}
    for name, field in model.model_fields.items():
        if name in texts:
            schema["properties"][name]["description"] = texts[name]
        for section in sections_in(field.annotation):
            _describe_fields(defs[section.__name__], section, defs)


def _docstrings(cls: type) -> dict[str, str]:
    """By field the text below it; none of a class that no file holds."""
    if not issubclass(cls, BaseModel) or cls is BaseModel:
        return {}
    try:
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    except OSError:
        return {}
    body = tree.body if isinstance(tree, ast.ClassDef) else []
    return {
        ast.unparse(field.target): inspect.cleandoc(ast.literal_eval(text.value))
        for field, text in pairwise(body)
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr)
    }


def load(path: str | Path, overrides: Iterable[str] = ()) -> Recipe:
    """Read a recipe, given by its file or the name of a shipped one, and apply ``a.b=value`` overrides. Raises
    EvenloadError."""
    what = f"the recipe {shorten(str(path))}"
    do = f"give the path of a YAML file, or the name of a shipped recipe; {nearest(str(path), shipped())}"
    data = reading.read_yaml(file_of(path), what, do)
    return parse_with(reading.mapping(data, what, "see recipes/quickstart.yaml"), overrides)


def parse_with(data: Mapping[str, Any], overrides: Iterable[str]) -> Recipe:
    """A recipe given as nested dictionaries, with ``a.b=value`` overrides. Raises EvenloadError."""
    if isinstance(overrides, str) or not isinstance(overrides, Iterable):
        raise EvenloadError("overrides are no list", shown(overrides), 'give e.g. ["train.steps=100"]')
    words, changed = list(overrides), deepcopy(dict(data))
    if any(isinstance(word, str) and word.startswith("model.weights=") for word in words):
        _forget(changed, DECIDED)
    for word in words:
        key, equals, value = word.partition("=") if isinstance(word, str) else ("", "", "")
        if not equals or not key:
            raise EvenloadError("an override is not of the form key=value", shown(word), "write e.g. train.steps=100")
        _set(changed, key, reading.parse_yaml(value, f"the value of {shorten(key)}", "quote it"))
    return parse(changed)


ANY_OTHER = "; any other must be installed"
"""Ends what is said of a plugin that there is not."""


def parse(data: Mapping[str, Any]) -> Recipe:
    """Validate a recipe given as nested dictionaries. Raises EvenloadError."""
    recipe = _validated(data)
    if recipe.model.weights is not None:
        recipe = _validated(with_pretrained(data, recipe.model.weights, recipe.trainer))
    refuse_impossible(recipe)
    return recipe


def _validated(data: Mapping[str, Any]) -> Recipe:
    schema = schema_type()
    try:
        return schema.model_validate(data)
    except ValidationError as error:
        raise refused(error, schema, "the recipe", ELSEWHERE, {"plugins": ANY_OTHER}) from error


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


def _forget(data: dict[str, Any], fields: Iterable[str]) -> None:
    """Leave out what a recipe says of a model in whose place the command line puts a folder."""
    if isinstance(model := data.get("model"), dict):
        data["model"] = {name: value for name, value in model.items() if name not in fields}


def shipped() -> dict[str, Path]:
    """The files of the recipes that come with evenload, by name."""
    return {path.stem: path for path in sorted(RECIPES.glob("*.yaml"))}


def file_of(recipe: str | Path) -> str | Path:
    """The file of a recipe that is given by its path or by the name of one that comes with evenload; a file of that
    name goes first. Outside a checkout ``recipes/NAME.yaml`` is the shipped one, too."""
    names = {str(path.relative_to(ROOT)): path for path in shipped().values()} | shipped()
    return names[str(recipe)] if str(recipe) in names and not os.path.isfile(recipe) else recipe


def place_of(path: Path) -> Path:
    """The place that a recipe names: below where one stands, or else what comes with evenload under that name."""
    return ROOT / path if not path.exists() and (ROOT / path).exists() else path
