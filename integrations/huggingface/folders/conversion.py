"""Between the tensors of a Hugging Face folder and the parameters of Transformers' model, one parameter at a time.

Folders name and cut tensors as a model was published, Transformers computes with others: the experts of a layer are a
tensor each in the one and rows of one parameter in the other. Transformers converts both ways for a whole model at
once; here its own rules and operations run for what one rank wants of one parameter.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    MergeModulelist,
    PrefixChange,
    WeightConverter,
    WeightRenaming,
    apply_converters,
    dot_natural_key,
    rename_source_key,
    revert_weight_conversion,
)

from ....core.errors import EvenloadError, shorten
from .reading import WeightFolder, refuse_unlike

log = logging.getLogger("evenload")

Sources = list[tuple[str, str | None]]
"""Names in the folder, and of each the pattern of the converter that takes it."""

_DO = "restore the folder from its origin, or give the config.json that belongs to its weights"


class ModelWeights:
    """What a folder has for each parameter and buffer of a model, which may be on the meta device.

    Raises EvenloadError: the folder lacks a tensor of the model, or has it in another shape.
    """

    def __init__(self, folder: WeightFolder, model: Any) -> None:
        self._folder, self._model = folder, model
        mapping = get_model_conversion_mapping(model)
        renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
        self._converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
        state = model.state_dict(keep_vars=True)
        sources: dict[str, Sources] = {}
        unknown = []
        for key in sorted(folder.names, key=dot_natural_key):
            name, pattern = rename_source_key(key, renamings, self._converters, model.base_model_prefix, state)
            if name not in state:
                name, pattern = rename_source_key(key, [], [], model.base_model_prefix, state)
            if name in state:
                sources.setdefault(name, []).append((key, pattern))
            else:
                unknown.append(key)
        # As Transformers leaves it: what was not needed to read the folder is not undone when it is written.
        model._weight_conversions = [entry for entry in mapping if entry.was_used()]
        self._sources: dict[str, tuple[str, Sources]] = {}
        """By a parameter's name: that of the first one that its converter makes, and the tensors that this takes."""
        self._require_all(sources, state)
        if unknown:
            log.warning("%s: %d tensors have no place in the model: %s", folder.path, len(unknown), shorten(unknown[0]))

    def __contains__(self, name: str) -> bool:
        return name in self._sources

    def read(self, name: str, rows: slice | None = None) -> Tensor:
        """A parameter or buffer, or these of its rows, on the CPU in the folder's dtype."""
        first, sources = self._sources[name]
        if sources[0][1] is None:
            return self._folder.read(sources[0][0], rows)
        if rows is not None and all(self._is_row(pattern) for _, pattern in sources):
            return self._convert(first, self._of_rows(sources, rows))[name]
        whole = self._convert(first, [(key, pattern, self._folder.read(key)) for key, pattern in sources])[name]
        return whole if rows is None else whole[rows]

    def _require_all(self, by_name: Mapping[str, Sources], state: Mapping[str, Tensor]) -> None:
        """Fill in `_sources`; see the class for what is raised."""
        for first, sources in by_name.items():
            if sources[0][1] is None:
                self._folder.require(sources[0][0], tuple(state[first].shape))
                self._sources[first] = first, sources[:1]
                continue
            for name, shape in self._shapes(first, sources).items():
                if name in state and shape != tuple(state[name].shape):
                    detail = f"{list(shape)} from {len(sources)} tensors, {list(state[name].shape)} by its config.json"
                    raise EvenloadError(f"the tensor {name} has another shape than the model", detail, _DO)
                self._sources[name] = first, sources
        present: dict[int, str] = {}
        for name in (name for name in state if name in self._sources):
            if (first := present.setdefault(id(state[name]), name)) != name:
                refuse_unlike(self._folder, self.read, first, name, self._num_rows(first))
        missing = [name for name in state if id(state[name]) not in present]
        if missing:
            what = f"{shorten(str(self._folder.path))} lacks tensors of the model"
            raise EvenloadError(what, f"{len(missing)} parameters have none: {', '.join(missing[:3])}", _DO)

    def _num_rows(self, name: str) -> int:
        return self._folder.shape(self._sources[name][1][0][0])[0]

    def _shapes(self, first: str, sources: Sources) -> dict[str, tuple[int, ...]]:
        """Shapes of what a converter would make; nothing is read."""
        empty = [
            (key, pattern, torch.empty(self._folder.shape(key), dtype=self._folder.dtype(key), device="meta"))
            for key, pattern in sources
        ]
        try:
            return {name: tuple(tensor.shape) for name, tensor in self._convert(first, empty).items()}
        except Exception as error:  # torch raises many kinds for parts that do not fit together
            detail = f"{len(sources)} tensors from {sources[0][0]} on: {shorten(str(error) or type(error).__name__)}"
            raise EvenloadError(f"the tensor {first} cannot be assembled", detail, _DO) from error

    def _convert(self, first: str, parts: Sequence[tuple[str, str | None, Tensor]]) -> dict[str, Tensor]:
        converter = deepcopy(self._converter_of(parts[0][1]))
        for key, pattern, tensor in parts:
            converter.add_tensor(first, key, pattern, tensor)
        converted = converter.convert(first, model=self._model, config=self._model.config)
        return {name: tensor[0] if isinstance(tensor, list) else tensor for name, tensor in converted.items()}

    def _converter_of(self, pattern: str | None) -> Any:
        return next(entry for entry in self._converters if pattern in entry.source_patterns)

    def _is_row(self, pattern: str | None) -> bool:
        """Whether the tensors of a pattern are rows of the parameter, one each."""
        first = self._converter_of(pattern).operations[0]
        return isinstance(first, MergeModulelist) and first.dim == 0

    def _of_rows(self, sources: Sources, rows: slice) -> list[tuple[str, str | None, Tensor]]:
        wanted = []
        for pattern in dict.fromkeys(pattern for _, pattern in sources):
            keys = [key for key, other in sources if other == pattern]
            wanted += [(key, pattern, self._folder.read(key)) for key in keys[rows]]
        return wanted


def exported_groups(model: Any) -> list[tuple[str, ...]]:
    """The parameters and persistent buffers of a model by name, each once; together those that a folder has in one
    tensor."""
    known = getattr(model, "_weight_conversions", None)
    if known is None:
        whole = get_model_conversion_mapping(model, add_legacy=False)
        known = [entry for entry in whole if not isinstance(entry, PrefixChange)]
    converters = [entry.reverse_transform() for entry in reversed(known)]
    converters = [entry for entry in converters if isinstance(entry, WeightConverter)]
    groups: dict[str, list[str]] = {}
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:  # tied ones are written once
            seen.add(id(tensor))
            groups.setdefault(apply_converters(name, converters)[0], []).append(name)
    return [tuple(names) for names in groups.values()]


def as_in_folder(model: Any, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a group of `exported_groups` as a folder has them, by the folder's names."""
    yield from revert_weight_conversion(model, dict(tensors)).items()
