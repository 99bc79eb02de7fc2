"""A Hugging Face folder of weights, written within a bound of memory, and whole or not at all."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from ....core.input import reading
from ....runtime.files import refuse_taken, sync
from .reading import CONFIG, INDEX, SINGLE, failures_of_file

SHARD_BYTES = 1 << 28
"""Of a file that is written, and so of what the writing rank gathers before it writes; a larger tensor has its own."""

_CARRIED = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)


class FolderWriter:
    """Writes a folder next to ``out`` and renames it when all of it is on disk; without `close`, nothing stays behind.

    Args:
        out: not there, or an empty folder; see `refuse_taken`.
        config: of the model, as config.json has it; its ``dtype`` becomes that of the first tensor.
        carried_from: the folder whose generation_config.json and tokenizer's files come along, if any.
        shard_bytes: of a file, and of what is kept in memory.
        confirm: called when all of it is on disk, before it has its name; what it raises leaves no folder.
    """

    def __init__(
        self,
        out: Path,
        config: Mapping[str, Any],
        carried_from: Path | None,
        shard_bytes: int = SHARD_BYTES,
        confirm: Callable[[], object] = lambda: None,
    ) -> None:
        refuse_taken(out)
        self.out = out.expanduser().absolute()
        self.num_tensors = 0
        self.num_bytes = 0
        self._config = dict(config)
        self._carried_from = carried_from
        self._shard_bytes = shard_bytes
        self._confirm = confirm
        self._aside = self.out.with_name(f".{self.out.name}.evenload.tmp")
        self._waiting: dict[str, Tensor] = {}
        self._shards: list[list[str]] = []

    def __enter__(self) -> FolderWriter:
        with failures_of_file(str(self.out)):
            shutil.rmtree(self._aside, ignore_errors=True)
            self._aside.mkdir(parents=True)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        try:
            if kind is None:
                self._commit()
        finally:
            shutil.rmtree(self._aside, ignore_errors=True)

    def add(self, name: str, tensor: Tensor) -> None:
        """Take a whole tensor, in the dtype that it shall have; it must not change until it is written.

        Raises EvenloadError where a file cannot be written, with a word of its own for a full disk.
        """
        if not self.num_tensors:
            key = "torch_dtype" if "torch_dtype" in self._config else "dtype"
            self._config[key] = str(tensor.dtype).removeprefix("torch.")
        if self._waiting and sum(t.nbytes for t in self._waiting.values()) + tensor.nbytes > self._shard_bytes:
            self._flush()
        self._waiting[name] = tensor.detach().cpu().contiguous()
        self.num_tensors, self.num_bytes = self.num_tensors + 1, self.num_bytes + tensor.nbytes

    def _flush(self) -> None:
        with failures_of_file(str(self.out)):
            save_file(self._waiting, self._shard(len(self._shards)), metadata={"format": "pt"})
        self._shards.append(list(self._waiting))
        self._waiting = {}

    def _shard(self, number: int) -> Path:
        """A file whose final name is not known until the last one is written."""
        return self._aside / f"shard{number}.safetensors"

    def _commit(self) -> None:
        self._flush()
        with failures_of_file(str(self.out)):
            self._name_shards()
            _write_json(self._aside / CONFIG, self._config)
            for name in _CARRIED if self._carried_from else ():
                assert self._carried_from is not None
                if reading.is_file(self._carried_from / name):
                    shutil.copyfile(self._carried_from / name, self._aside / name)
            for path in [*self._aside.iterdir(), self._aside]:
                sync(path)
        self._confirm()
        with failures_of_file(str(self.out)):
            os.rename(self._aside, self.out)
            sync(self.out.parent)

    def _name_shards(self) -> None:
        """As transformers names them: one file alone, or numbered ones with an index."""
        count = len(self._shards)
        names = [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)] if count > 1 else [SINGLE]
        for number, name in enumerate(names):
            os.rename(self._shard(number), self._aside / name)
        if count > 1:
            places = {tensor: name for name, tensors in zip(names, self._shards, strict=True) for tensor in tensors}
            index = {"metadata": {"total_size": self.num_bytes}, "weight_map": dict(sorted(places.items()))}
            _write_json(self._aside / INDEX, index)


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")
