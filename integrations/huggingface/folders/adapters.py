"""Adapters in PEFT's folders: adapter_config.json and adapter_model.safetensors, which `peft` opens and writes.

Inside evenload a tensor is called ``<linear layer>.lora_A`` ([r, in]) or ``.lora_B`` ([out, r]); in the file it is
``base_model.model.<linear layer>.lora_A.weight``.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from ....core.errors import EvenloadError, shorten
from ....core.input import reading
from ....core.recipe.adapter import Adapter
from ....runtime.files import sync
from .adapter_config import ADAPTER_CONFIG, SAVED_BY_PEFT, read_config, write_config
from .reading import failures_of_file

ADAPTER_MODEL, PICKLED = "adapter_model.safetensors", "adapter_model.bin"
_PREFIX, _SUFFIX = "base_model.model.", ".weight"
_HALVES = ("lora_A", "lora_B")
_RESTORE = "restore the folder from its origin"


def write_adapter(folder: Path, adapter: Adapter, weights: Mapping[str, Tensor], base: str | None) -> None:
    """Write an adapter so that `peft` opens it; one that is there is replaced, other files of the folder stay.

    Whatever interrupts it, a reader afterwards meets the adapter before, the new one, or a folder that lacks a file.

    Args:
        weights: by names as in the module's docstring, in the dtype that they shall have.
        base: name or folder of the model that it belongs to; PEFT's ``base_model_name_or_path``.

    Raises EvenloadError: a file cannot be written, with a word of its own for a full disk; peft is not installed.
    """
    folder = folder.expanduser().absolute()
    aside = folder / ".adapter.tmp"
    with failures_of_file(str(folder), SAVED_BY_PEFT):
        is_new = not folder.exists()
        shutil.rmtree(aside, ignore_errors=True)
        try:
            aside.mkdir(parents=True)
            write_config(aside, adapter, base)
            tensors = {
                f"{_PREFIX}{name}{_SUFFIX}": tensor.detach().cpu().contiguous() for name, tensor in weights.items()
            }
            save_file(tensors, aside / ADAPTER_MODEL, metadata={"format": "pt"})
            for path in (aside / ADAPTER_CONFIG, aside / ADAPTER_MODEL, aside):
                sync(path)
            _put_in_place(aside, folder)
        except BaseException:
            shutil.rmtree(folder if is_new else aside, ignore_errors=True)
            raise


def _put_in_place(aside: Path, folder: Path) -> None:
    """Change the tensors of an adapter with the same config in one go; else they are gone while the config changes."""
    config = folder / ADAPTER_CONFIG
    if not (config.exists() and config.read_bytes() == (aside / ADAPTER_CONFIG).read_bytes()):
        (folder / ADAPTER_MODEL).unlink(missing_ok=True)
    for name in (ADAPTER_CONFIG, ADAPTER_MODEL):
        os.replace(aside / name, folder / name)
    aside.rmdir()
    sync(folder)


def read_adapter(folder: Path) -> tuple[Adapter, dict[str, Tensor]]:
    """The adapter of a PEFT folder and its tensors, on the CPU in the dtype of the file.

    Raises EvenloadError: a file is missing or damaged, the adapter is of a kind that evenload does not train, or the
    tensors are not those that the config describes.
    """
    name = shorten(str(folder))
    if not reading.is_file(folder / ADAPTER_MODEL):
        detail = f"{PICKLED}, a pickle" if reading.is_file(folder / PICKLED) else f"no {ADAPTER_MODEL}"
        raise EvenloadError(f"{name} holds no adapter", detail, SAVED_BY_PEFT)
    failures = failures_of_file(f"{ADAPTER_MODEL} of {name}", SAVED_BY_PEFT)
    with failures, safe_open(folder / ADAPTER_MODEL, framework="pt") as opened:
        tensors = {key: opened.get_tensor(key).clone() for key in opened.keys()}  # noqa: SIM118
    pairs = sorted(key for key in tensors if _is_half(key))
    layers = list(dict.fromkeys(_short(key).rpartition(".")[0] for key in pairs))
    adapter = read_config(folder, layers)
    for key in sorted(tensors.keys() - set(pairs)):
        do = "train an adapter of linear layers alone: no embeddings, no magnitudes, no modules of its own"
        raise EvenloadError(f"the adapter in {name} has a tensor that is not half of a low-rank pair", key, do)
    weights = {_short(key): tensors[key] for key in pairs}
    _refuse_unlike_config(name, adapter, layers, weights)
    return adapter, weights


def refuse_other_base(
    weights: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, int]], targets: Iterable[str] = ()
) -> None:
    """Raise EvenloadError, naming the first tensor, where an adapter does not belong to a model.

    Args:
        shapes: of the weights [out, in] of all linear layers of the model, by their names.
        targets: those that the adapter must have tensors for.
    """
    what = "the adapter was trained on another base"
    do = f"give the model that base_model_name_or_path of its {ADAPTER_CONFIG} names, or leave the adapter out"
    for name, tensor in weights.items():
        layer, _, half = name.rpartition(".")
        if layer not in shapes:
            raise EvenloadError(what, f"{name}: the model has no linear layer of that name", do)
        is_first = half == _HALVES[0]
        size, wanted = tensor.shape[1 if is_first else 0], shapes[layer][1 if is_first else 0]
        if size != wanted:
            side = "takes" if is_first else "gives"
            raise EvenloadError(
                what, f"{name} is {list(tensor.shape)}: the model's layer {side} {wanted}, not {size}", do
            )
    for layer in targets:
        if f"{layer}.{_HALVES[0]}" not in weights:
            raise EvenloadError(what, f"{layer}.{_HALVES[0]} is missing, and the model has this layer", do)


def _is_half(key: str) -> bool:
    return key.startswith(_PREFIX) and key.endswith(tuple(f".{half}{_SUFFIX}" for half in _HALVES))


def _short(key: str) -> str:
    return key.removeprefix(_PREFIX).removesuffix(_SUFFIX)


def _refuse_unlike_config(name: str, adapter: Adapter, layers: list[str], weights: Mapping[str, Tensor]) -> None:
    """Raise EvenloadError unless the tensors are finite pairs of the ranks and layers that the config says."""
    if not layers:
        raise EvenloadError(f"the adapter in {name} has no tensor", f"{ADAPTER_MODEL} is empty", SAVED_BY_PEFT)
    for layer in [layer for layer in layers if layer not in set(adapter.targets(layers))]:
        detail = f"{layer}, of target_modules {', '.join(adapter.target_modules)}"
        raise EvenloadError(f"the adapter in {name} has a layer that its config does not name", detail, _RESTORE)
    for layer in layers:
        for axis, half in enumerate(_HALVES):
            tensor, rank = weights.get(f"{layer}.{half}"), adapter.rank_of(layer)
            if tensor is None:
                raise EvenloadError(f"the adapter in {name} is incomplete", f"{layer} has no {half}", _RESTORE)
            if tensor.dim() != 2 or tensor.shape[axis] != rank:
                detail = f"{layer}.{half} is {list(tensor.shape)}, its rank by {ADAPTER_CONFIG} is {rank}"
                raise EvenloadError(f"the adapter in {name} has another rank than its config says", detail, _RESTORE)
            if not (tensor.is_floating_point() and bool(torch.isfinite(tensor).all())):
                detail = f"{layer}.{half}, of type {str(tensor.dtype).removeprefix('torch.')}"
                raise EvenloadError(f"the adapter in {name} has values that are not finite", detail, _RESTORE)
