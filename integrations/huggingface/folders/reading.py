"""A Hugging Face folder of weights, read by slice: a rank opens only what it holds.

    config.json, model.safetensors                                   or
    config.json, model-00001-of-00003.safetensors ..., model.safetensors.index.json

with generation_config.json and the tokenizer's files next to them. Files are mapped into memory piece by piece: a read
takes what it returns and one piece.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ....core.errors import EvenloadError, nearest, shorten
from ....core.input import reading
from ....runtime.files import disk_is_full

CONFIG = "config.json"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_BLOCKS, _BLOCK_BYTES = 16, 4096
"""Of each file that a fingerprint reads."""
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_MAPPED_BYTES = 1 << 24
"""Of a file that is mapped at once, or one row."""
_COMPARED_ROWS = 4096
"""Of two tensors that are compared at once."""
_DO = "give a folder that transformers' save_pretrained wrote, with safetensors"


class _Entry(NamedTuple):
    file: str
    shape: tuple[int, ...]
    dtype: str


class WeightFolder:
    """The tensors of a folder by name; nothing stays open or in memory but their names, shapes and dtypes."""

    def __init__(self, path: Path, config: dict[str, Any], entries: Mapping[str, _Entry]) -> None:
        self.path, self.config = path, config
        self._entries = entries

    @classmethod
    def open(cls, path: Path) -> WeightFolder:
        """Read config, index and the heads of all files.

        Raises EvenloadError: there is no config.json or no safetensors, a shard of the index is missing or damaged, or
        a tensor is not in the shard that the index names.
        """
        name = shorten(str(path))
        if not path.is_dir():
            raise EvenloadError(f"there is no folder of weights {name}", "no such folder", _DO)
        config = reading.mapping(reading.read_json(path / CONFIG, f"{CONFIG} of {name}", _DO), CONFIG, _DO)
        if not reading.is_file(path / INDEX):
            return cls(path, config, _heads(path, SINGLE))
        index = reading.mapping(reading.read_json(path / INDEX, INDEX, _DO), INDEX, _DO)
        places = reading.mapping(index.get("weight_map"), f"weight_map of {INDEX}", _DO)
        heads = {file: _heads(path, file) for file in sorted(set(map(str, places.values())))}
        for tensor, file in places.items():
            if tensor not in heads[str(file)]:
                detail = f"{tensor} is not in {file}, where {INDEX} has it"
                raise EvenloadError(
                    f"the weights in {name} are incomplete", detail, "restore the folder from its origin"
                )
        return cls(path, config, {tensor: heads[str(file)][tensor] for tensor, file in places.items()})

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all tensors, sorted."""
        return tuple(sorted(self._entries))

    @property
    def files(self) -> list[Path]:
        """Its config.json, and the files of its tensors, sorted."""
        return [self.path / CONFIG, *(self.path / file for file in sorted({e.file for e in self._entries.values()}))]

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def shape(self, name: str) -> tuple[int, ...]:
        """Raises EvenloadError where there is no such tensor."""
        return self._entry(name).shape

    def dtype(self, name: str) -> torch.dtype:
        """Raises EvenloadError where there is no such tensor, or its type cannot be trained."""
        entry = self._entry(name)
        if entry.dtype not in _DTYPES:
            do = f"give weights in {', '.join(_DTYPES)}: quantized ones cannot be trained"
            raise EvenloadError(f"{name} of {self.path} is of a type that is not read", entry.dtype, do)
        return _DTYPES[entry.dtype]

    def require(self, name: str, shape: tuple[int, ...]) -> None:
        """Raises EvenloadError where the tensor is missing or has another shape."""
        if self.shape(name) != tuple(shape):
            detail = f"{list(self.shape(name))} in {self.path}, {list(shape)} by its {CONFIG}"
            raise EvenloadError(f"the tensor {name} has another shape than the model", detail, _DO)

    def read(self, name: str, rows: slice | None = None, columns: slice | None = None) -> Tensor:
        """A tensor, or these rows (of its first axis) and columns (of its second) of it; contiguous, on the CPU, in the
        dtype that it has in the file. Raises EvenloadError where it cannot be read."""
        dtype, shape, file = self.dtype(name), self.shape(name), self._entry(name).file
        if not shape:
            with failures_of_file(file), safe_open(self.path / file, framework="pt") as opened:
                return opened.get_tensor(name).clone()  # type: ignore[no-any-return]
        first, stop, _ = (rows or slice(None)).indices(shape[0])
        cut = () if columns is None else (columns,)
        widths = [len(range(*part.indices(size))) for part, size in zip(cut, shape[1:], strict=False)]
        out = torch.empty(stop - first, *widths, *shape[1 + len(widths) :], dtype=dtype)
        at_once = max(1, _MAPPED_BYTES // max(1, prod(shape[1:]) * dtype.itemsize))
        for start in range(first, stop, at_once):
            piece = slice(start, min(start + at_once, stop))
            # What is mapped stays in memory until the file is closed.
            with failures_of_file(file), safe_open(self.path / file, framework="pt") as opened:
                out[start - first : piece.stop - first] = opened.get_slice(name)[(piece, *cut)]
        return out

    def fingerprint(self) -> bytes:
        """16 bytes, equal for equal folders: a hash of names, shapes and dtypes and of `_BLOCKS` pieces of each file.

        Raises EvenloadError where a file cannot be read.
        """
        digest = hashlib.blake2b(repr(sorted(self._entries.items())).encode(), digest_size=16)
        for file in self.files[1:]:
            with failures_of_file(file.name), file.open("rb") as opened:
                size = opened.seek(0, os.SEEK_END)
                for block in range(_BLOCKS):
                    opened.seek(size * block // _BLOCKS)
                    digest.update(opened.read(_BLOCK_BYTES))
        return digest.digest()

    def _entry(self, name: str) -> _Entry:
        if name not in self._entries:
            raise EvenloadError(f"{self.path} has no tensor {name}", nearest(name, self._entries), _DO)
        return self._entries[name]


def refuse_unlike(folder: WeightFolder, read: Callable[[str, slice], Tensor], name: str, other: str, rows: int) -> None:
    """Raise EvenloadError where a folder has two tensors for what the model has once, and they differ.

    Args:
        read: gives some rows of a tensor.
        rows: of both.
    """
    for start in range(0, rows, _COMPARED_ROWS):
        block = slice(start, start + _COMPARED_ROWS)
        if not torch.equal(read(name, block), read(other, block)):
            detail = f"{name} and {other} of {shorten(str(folder.path))} differ"
            do = f"set tie_word_embeddings to false in its {CONFIG}"
            raise EvenloadError("the model has one weight where its folder has two", detail, do)


def _heads(path: Path, file: str) -> dict[str, _Entry]:
    """What a file of safetensors says that it holds. Raises EvenloadError where it is missing or damaged."""
    if Path(file).name != file or not reading.is_file(path / file):
        detail = f"there is no {shorten(file)}"
        raise EvenloadError(f"the weights in {shorten(str(path))} are incomplete", detail, _DO)
    with failures_of_file(file), safe_open(path / file, framework="pt") as opened:
        slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
        return {name: _Entry(file, tuple(part.get_shape()), part.get_dtype()) for name, part in slices.items()}


@contextmanager
def failures_of_file(name: str, do: str = _DO) -> Iterator[None]:
    """What the system or safetensors raises about a file, as an EvenloadError; a full disk by that name."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        what, detail = shorten(name), shorten(str(error))
        if disk_is_full(error):
            raise EvenloadError(f"{what} was not written: the disk is full", detail, "free space on it") from error
        raise EvenloadError(f"{what} cannot be read or written", detail, do) from error
