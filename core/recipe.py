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
from typing import Annotated, Any, Literal

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    create_model,
)

from . import registry
from .errors import EvenloadError, nearest
from .layout import Layout


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)


class Model(Section):
    """The transformer to build. Names are Megatron's."""

    family: Literal["llama", "gpt", "qwen2", "qwen3"] = "llama"
    """llama: RMSNorm, SwiGLU, no biases. gpt: LayerNorm, GELU, biases. All use rotary positions."""
    num_layers: PositiveInt = 4
    hidden_size: PositiveInt = 256
    num_attention_heads: PositiveInt = 8
    num_query_groups: PositiveInt | None = None
    """Key-value heads (GQA); null means one per attention head."""
    ffn_hidden_size: PositiveInt | None = None
    """Null means 4x hidden (gpt) or 8/3x hidden rounded up to 64 (the gated families)."""
    vocab_size: PositiveInt | None = None
    """Null means the tokenizer's, rounded up to a multiple of 128 x tp."""
    rotary_base: PositiveFloat = 10000.0
    config: Path | None = None
    """A Hugging Face config.json to build instead (trainer: deepspeed); the fields above are then ignored."""

    @property
    def gated(self) -> bool:
        return self.family != "gpt"

    @property
    def kv_heads(self) -> int:
        return self.num_query_groups or self.num_attention_heads

    @property
    def ffn_size(self) -> int:
        if self.ffn_hidden_size:
            return self.ffn_hidden_size
        return -(-8 * self.hidden_size // 3 // 64) * 64 if self.gated else 4 * self.hidden_size


class Data(Section):
    """Where samples come from."""

    source: str = "python-stdlib"
    """python-stdlib, a .jsonl file, a Megatron .bin/.idx prefix, or a Hugging Face dataset on disk (arrow, parquet)."""
    tokenizer: str = "bytes"
    """bytes, or the path of a `tokenizers` JSON file."""
    text_key: str = "text"
    max_length: Annotated[int, Field(ge=2)] = 8192
    """Tokens of the longest sample that is kept whole."""
    long_samples: Literal["split", "truncate", "drop"] = "split"
    """What happens to longer ones; the count is reported."""
    min_length: Annotated[int, Field(ge=2)] = 2


class Parallel(Section):
    """Degrees of parallelism; dp null takes what the number of processes leaves."""

    tp: PositiveInt = 1
    pp: PositiveInt = 1
    cp: PositiveInt = 1
    ep: PositiveInt = 1
    dp: PositiveInt | None = None


class Train(Section):
    steps: PositiveInt = 20
    global_batch_size: PositiveInt = 64
    """Samples per optimizer step, over all ranks."""
    micro_batch_size: PositiveInt = 1
    """Samples per micro-batch of the stock plan, padded to the longest of them (no plugin enabled)."""
    dtype: Literal["fp32", "bf16", "fp64"] = "fp32"
    seed: NonNegativeInt = 1234
    lr: PositiveFloat = 1e-3
    min_lr: NonNegativeFloat = 0.0
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: NonNegativeInt = 0
    weight_decay: NonNegativeFloat = 0.0
    clip_grad: NonNegativeFloat = 1.0
    """Global gradient norm; 0 switches clipping off."""


class Checkpoint(Section):
    dir: Path | None = None
    """Null saves nothing."""
    every: PositiveInt = 50
    keep: PositiveInt = 2
    resume: bool = True
    """Continue from the last good checkpoint in ``dir`` if there is one."""


class Log(Section):
    tensorboard: Path | None = None
    """Folder for TensorBoard scalars under ``evenload/``."""
    every: PositiveInt = 1
    jsonl: Path | None = None
    """File that gets one JSON object a step, with the numbers of the step's samples."""


class Planner(Section):
    budget_ms: PositiveFloat = 2000.0
    """How long a step may wait for its plan before the next simpler planner takes over."""
    background: bool = True
    """Plan one step ahead in a thread; false plans in line (for debugging)."""


class Safety(Section):
    stuck_s: PositiveFloat = 300.0
    """A job in which no rank makes progress for this long is ended with one message that names the rank."""
    gone_s: PositiveFloat = 15.0
    """A rank whose heartbeat stops for this long is taken for dead."""
    collective_timeout_s: PositiveFloat = 1800.0


class Megatron(Section):
    distributed_optimizer: bool = True
    overlap_grad_reduce: bool = False


class DeepSpeed(Section):
    zero_stage: Literal[0, 1, 2, 3] = 1
    config: dict[str, Any] = {}
    """Further ds_config keys; what evenload must own (batch sizes, precision, clipping) is refused here."""


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
    plugins: Any = {}

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
    _refuse_impossible(recipe)
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


def _refuse_impossible(recipe: Recipe) -> None:
    """Combinations that no trainer can run, found before any rank starts."""
    model, p, train = recipe.model, recipe.parallel, recipe.train
    registry.refuse_clashes(plugin.name for plugin in recipe.enabled())
    rules: list[tuple[bool, str, str, str]] = [
        (
            model.hidden_size % model.num_attention_heads != 0,
            "model.num_attention_heads does not divide model.hidden_size",
            f"{model.num_attention_heads} heads, hidden size {model.hidden_size}",
            "choose a number of heads that divides the hidden size",
        ),
        (
            model.num_attention_heads % model.kv_heads != 0,
            "model.num_query_groups does not divide model.num_attention_heads",
            f"{model.kv_heads} groups, {model.num_attention_heads} heads",
            "choose a number of groups that divides the number of heads",
        ),
        (
            model.num_attention_heads % p.tp != 0 or model.kv_heads % p.tp != 0,
            "parallel.tp does not divide the attention heads",
            f"tp {p.tp}, {model.num_attention_heads} heads in {model.kv_heads} query groups",
            "choose a tp that divides both",
        ),
        (
            model.ffn_size % p.tp != 0,
            "parallel.tp does not divide model.ffn_hidden_size",
            f"tp {p.tp}, ffn_hidden_size {model.ffn_size}",
            "choose a tp that divides it",
        ),
        (
            model.num_layers % p.pp != 0,
            "parallel.pp does not divide model.num_layers",
            f"pp {p.pp}, {model.num_layers} layers",
            "choose a pp that divides the number of layers",
        ),
        (
            recipe.trainer == "deepspeed" and (p.tp > 1 or p.pp > 1),
            "trainer deepspeed runs data-parallel here",
            f"tp {p.tp}, pp {p.pp}",
            "use trainer: megatron for tensor or pipeline parallelism",
        ),
        (
            recipe.trainer == "deepspeed" and train.dtype == "fp64",
            "DeepSpeed's engine cannot train in float64",
            "train.dtype fp64",
            "use fp32, or trainer: megatron for float64 proofs",
        ),
        (
            train.global_batch_size < (p.dp or 1) * p.cp,
            "train.global_batch_size is smaller than the number of data-parallel ranks",
            f"{train.global_batch_size} samples, {(p.dp or 1) * p.cp} ranks",
            "raise it, or lower parallel.dp",
        ),
        (
            recipe.data.min_length > recipe.data.max_length,
            "data.min_length is larger than data.max_length",
            f"{recipe.data.min_length} > {recipe.data.max_length}",
            "lower data.min_length",
        ),
    ]
    for broken, what, found, do in rules:
        if broken:
            raise EvenloadError(what, found, do)
