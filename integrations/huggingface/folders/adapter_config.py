"""``adapter_config.json`` of a PEFT folder: an `Adapter`, or the name of what evenload does not do."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ....core.errors import EvenloadError, shorten, shown
from ....core.input import reading
from ....core.input.validation import described
from ....core.recipe.adapter import ALL_LINEAR, Adapter

ADAPTER_CONFIG = "adapter_config.json"
SAVED_BY_PEFT = "give a folder that save_pretrained of a PEFT model with LoRA wrote, with safetensors"

_FIELDS = tuple(Adapter.model_fields)
_CHOICES = ("exclude_modules", "layers_to_transform", "layers_pattern")
"""Settings that narrow down target_modules; what they come to is seen in the tensors."""
_WITHOUT_EFFECT = (
    *("auto_mapping", "base_model_name_or_path", "revision", "peft_version", "inference_mode"),
    *("megatron_core", "qalora_group_size", "loftq_config", "eva_config", "corda_config", "lora_ga_config"),
)
"""On an adapter whose tensors are there and whose base is as it was published."""
_ALLOWED: Mapping[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "task_type": (None, "CAUSAL_LM"),
    "bias": ("none",),
    # Other first values come with changes of the base's weights, or with a half that stays as it was drawn.
    "init_lora_weights": (True, False, "gaussian", "eva", "orthogonal"),
}


def read_config(folder: Path, layers: Iterable[str]) -> Adapter:
    """The adapter that a folder of PEFT describes.

    Args:
        layers: names of the linear layers that the folder has tensors for.

    Raises EvenloadError: the file is missing or damaged, or describes what evenload does not train.
    """
    name = f"{ADAPTER_CONFIG} of {shorten(str(folder))}"
    document = reading.read_json(folder / ADAPTER_CONFIG, name, SAVED_BY_PEFT)
    fields = reading.mapping(document, name, SAVED_BY_PEFT)
    _refuse_others(fields, name)
    known = {key: fields[key] for key in _FIELDS if fields.get(key) is not None}
    targets = known.get("target_modules")
    if any(fields.get(key) for key in _CHOICES) or not (targets == ALL_LINEAR or isinstance(targets, list)):
        known["target_modules"] = list(layers)
    return described(known, Adapter, f"{name} is no adapter", SAVED_BY_PEFT)


def write_config(folder: Path, adapter: Adapter, base: str | None) -> None:
    """Let PEFT write its file. Raises EvenloadError where it is not installed, and OSError."""
    if find_spec("peft") is None:
        raise EvenloadError("adapters are written by PEFT, which is not installed", "no peft", "pip install peft")
    from peft import LoraConfig

    config = LoraConfig(
        **{key: getattr(adapter, key) for key in ("r", "lora_dropout", "use_rslora")},
        lora_alpha=_whole(adapter.lora_alpha),
        rank_pattern=dict(adapter.rank_pattern),
        alpha_pattern={key: _whole(alpha) for key, alpha in adapter.alpha_pattern.items()},
        task_type="CAUSAL_LM",
        base_model_name_or_path=base,
        inference_mode=True,
    )
    targets = adapter.target_modules
    config.target_modules = targets if targets == ALL_LINEAR else list(targets)  # in our order: PEFT makes a set
    config.save_pretrained(str(folder))


def _refuse_others(fields: Mapping[str, Any], name: str) -> None:
    for key, allowed in _ALLOWED.items():
        if key in fields and not _among(fields[key], allowed):
            do = f"train an adapter with {key} {' or '.join(shown(value) for value in allowed)}"
            raise EvenloadError(f"{name} is of another kind than evenload trains", f"{key}: {shown(fields[key])}", do)
    for key in sorted(fields.keys() - {*_FIELDS, *_CHOICES, *_WITHOUT_EFFECT, *_ALLOWED}):
        if fields[key]:
            do = f"train an adapter without {shorten(key)}"
            raise EvenloadError(f"{name} has what evenload does not do", f"{key}: {shown(fields[key])}", do)


def _among(value: Any, allowed: Collection[Any]) -> bool:
    """Equal to one of them and of its type: 1 is not True."""
    return any(type(value) is type(one) and value == one for one in allowed)


def _whole(alpha: float) -> float:
    """As an integer where it is one: PEFT's type, which other readers check."""
    return int(alpha) if alpha.is_integer() else alpha
