"""Recipes that start from a Hugging Face folder (``model.weights``): the fields of ``model`` by its config.json.

A family of Transformers becomes one of ours where both compute the same; a config that asks for more than our fields
can say (another activation, rotary scaling, a window) is refused under a trainer with models of its own, and where the
trainer runs those of Transformers it stands in the place of ``model.config``, as that of a family that only they know.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import EvenloadError, nearest, shorten, shown
from ..input import reading
from ..input.bounds import SIZE, whole_number
from ..input.hub import or_download
from .families import FAMILIES, Family
from .traits import trainer_called, trainers_with

LLAMA3 = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
"""What is fixed besides the factor."""
DECIDED = (
    *("family", "num_layers", "hidden_size", "num_attention_heads", "num_query_groups", "head_dim"),
    *("ffn_hidden_size", "vocab_size", "rotary_base", "rope_scaling_factor", "norm_epsilon", "tied_embeddings"),
    *("moe", "config"),
)
"""Fields of ``model`` that a folder's config.json says."""


class Example(NamedTuple):
    """A model that recipes may name instead of a folder."""

    config: Mapping[str, Any]
    """What config.json of its folder says: enough to plan."""
    folder: Callable[[], Path]
    """The folder, made where it is not there yet."""


_examples: dict[str, Example] = {}


def register_model(name: str, example: Example) -> None:
    """Let recipes name a model instead of a folder."""
    _examples[name] = example


def folder_of(weights: Path) -> Path:
    """The folder that ``model.weights`` means. Raises EvenloadError for an example that cannot be made here."""
    example = _examples.get(str(weights))
    return example.folder() if example else weights


def with_pretrained(data: Mapping[str, Any], weights: Path, trainer: str) -> Mapping[str, Any]:
    """The data of a recipe, with the fields of ``model`` that the folder ``weights`` decides, or a registered model.

    Raises EvenloadError: the folder has no config.json, the recipe says otherwise than it, or its model cannot be built
    by the recipe's trainer.
    """
    path, model = weights / "config.json", data["model"]
    name = f"config.json of model.weights {shorten(str(weights))}"
    do = or_download("name a folder that save_pretrained has written", "model.weights", weights)
    example = _examples.get(str(weights))
    config = example.config if example else reading.mapping(reading.read_json(path, name, do), name, do)
    fields, fault = _read(config)
    if fault and not trainer_called(trainer).runs_any_model:
        what = f"the model of model.weights {shorten(str(weights))} cannot be built with trainer {trainer}"
        others = " or ".join(trainers_with(lambda one: one.runs_any_model))
        raise EvenloadError(what, fault, f"use trainer: {others}, which runs any causal model of Transformers")
    if fault:
        fields = {"config": str(path), "vocab_size": _size(config, "vocab_size")}
    _refuse_contradictions(model, fields, "model")
    if fields.get("moe"):
        fields["moe"] = {**(model.get("moe") or {}), **fields["moe"]}
    return {**data, "model": {**model, **fields}}


def _read(config: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """The fields of ``model`` by a config.json, and what keeps them from saying all of it; empty where nothing does."""
    kind = config.get("model_type")
    known = {family.model_type: name for name, family in FAMILIES.items()}
    if kind not in [*known]:
        return {}, f"model_type {shown(kind)}; {nearest(str(kind), known)}"
    family = FAMILIES[known[kind]]
    return {"family": known[kind], **_fields_of(config, family)}, _fault_of(config, family)


def _fields_of(config: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """The fields of ``model`` that a config.json decides. Raises EvenloadError for one that lacks a size."""
    rope, said = _rope_of(config), {field: config.get(key) for field, key in family.keys.items()}
    sizes = ("num_layers", "hidden_size", "num_attention_heads", "ffn_hidden_size", "vocab_size")
    fields = {field: _size(config, family.keys[field]) for field in sizes}
    heads = fields["num_attention_heads"]
    return {
        **fields,
        "num_query_groups": said.get("num_query_groups") or heads,
        "head_dim": said.get("head_dim") or family.head_dim or max(1, fields["hidden_size"] // heads),
        "rotary_base": rope.get("rope_theta", family.rotary_base),
        "rope_scaling_factor": rope.get("factor") if rope["rope_type"] == "llama3" else None,
        "norm_epsilon": config.get(family.keys["norm_epsilon"], family.epsilon),
        "tied_embeddings": config.get(family.keys["tied_embeddings"], False),
        "moe": None if family.experts == "none" else _experts_of(config, family),
    }


def _size(config: Mapping[str, Any], key: str) -> int:
    return whole_number(config.get(key), f"{key} of the config.json of model.weights", SIZE, do="mend the file")


def _rope_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Rotary settings, which configs before Transformers 5 have at their top level."""
    scaling = config.get("rope_parameters") or config.get("rope_scaling")
    rope = dict(scaling) if isinstance(scaling, Mapping) else {}
    old = {"rope_theta": ("rope_theta", "rotary_emb_base"), "partial_rotary_factor": ("rotary_pct",)}
    for key, names in old.items():
        said = [config[name] for name in (key, *names) if config.get(name) is not None]
        if key not in rope and said:
            rope[key] = said[0]
    return {"rope_type": rope.pop("type", "default"), **rope}


def _experts_of(config: Mapping[str, Any], family: Family) -> dict[str, Any]:
    return {
        "num_experts": config.get("num_local_experts") or _size(config, "num_experts"),
        "topk": _size(config, "num_experts_per_tok"),
        "ffn_hidden_size": config.get(family.expert_size_key) or _size(config, family.keys["ffn_hidden_size"]),
        "shared_ffn_hidden_size": 0,
        "every": _every(_sparse_layers(config), _size(config, "num_hidden_layers")),
        "score": "softmax",
    }


def _sparse_layers(config: Mapping[str, Any]) -> list[int]:
    dense = _list(config, "mlp_only_layers")
    step = _size(config, "decoder_sparse_step") if config.get("decoder_sparse_step") else 1
    return [i for i in range(_size(config, "num_hidden_layers")) if i not in dense and (i + 1) % step == 0]


def _every(layers: list[int], count: int) -> int:
    """Every how many layers, from the first on, one has experts; ``layers`` of ``count`` have them."""
    return layers[1] if len(layers) > 1 else count


def _list(config: Mapping[str, Any], key: str) -> list[Any]:
    value = config.get(key)
    return value if isinstance(value, list) else []


def _fault_of(config: Mapping[str, Any], family: Family) -> str:
    """What a config asks for that our fields cannot say; empty where they say it all."""
    for key, (absent, ours) in family.fixed.items():
        if (value := config.get(key, absent)) != ours:
            return f"{key} {shown(value)}, where {shown(ours)} can be built"
    rope = _rope_of(config)
    if (part := rope.get("partial_rotary_factor", family.rotary_share)) != 1.0:
        return f"rotary positions of {shown(part)} of each head, where those of whole heads can be built"
    if rope["rope_type"] != "default" and {key: rope.get(key) for key in LLAMA3} != LLAMA3:
        return f"rope scaling {shown(rope)}, where {shown(LLAMA3)} can be built"
    if windows := [kind for kind in _list(config, "layer_types") if kind != "full_attention"]:
        return f"layers of type {shown(windows[0])}"
    layers, count = _sparse_layers(config), _size(config, "num_hidden_layers")
    if family.experts != "none" and layers != list(range(0, count, _every(layers, count))):
        return f"experts in layers {shown(layers)}, where every n-th layer from 0 on can have some"
    return ""


def _refuse_contradictions(model: Mapping[str, Any], fields: Mapping[str, Any], section: str) -> None:
    """Raise EvenloadError for the first field that the recipe sets to something else than its folder says."""
    for key, value in fields.items():
        own = model.get(key)
        if isinstance(own, Mapping) and isinstance(value, Mapping):
            _refuse_contradictions(own, value, f"{section}.{key}")
        elif own is not None and own != value:
            detail = f"{section}.{key} {shown(own)}; {shown(value)} by config.json"
            raise EvenloadError(
                f"{section}.{key} says otherwise than the folder model.weights", detail, "leave it out, or mend it"
            )
