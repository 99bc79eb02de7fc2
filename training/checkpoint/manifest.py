"""The manifest of a checkpoint: what it holds, by name, size and hash, and the state that a run goes on from.

    {"format": 2, "step": 50, <state>, "files": {"trainer/common.pt": [size, hash], ...}, "hash": hash of all the above}

Hashes (`runtime.files`) find every flipped bit, torn write and exchanged file, and prove nothing about who wrote them.
Format 1, of evenload before hashes, has sizes alone.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from ...core.errors import EvenloadError
from ...core.input import reading
from ...runtime.files import File

NAME = "evenload.json"
FORMAT = 2


class DamagedError(EvenloadError):
    """A checkpoint that is not what was written."""


@dataclass(frozen=True)
class Manifest:
    """The state of a run and the files of its checkpoint."""

    state: dict[str, Any]
    """What `checkpoints.save` was given, with ``step``."""
    files: Mapping[str, File]

    def to_json(self) -> dict[str, Any]:
        body = {"format": FORMAT, **self.state, "files": {name: [f.size, f.hash] for name, f in self.files.items()}}
        return {**body, "hash": _hash_of(body)}


def read(checkpoint: Path) -> Manifest:
    """The manifest of a checkpoint. Raises `DamagedError` for one that is missing, torn, changed, or of a later version
    of evenload."""
    try:
        data = reading.read_json(checkpoint / NAME, NAME, "")
    except EvenloadError as error:
        raise _damaged(checkpoint, f"{error.what}: {error.found}") from error
    if not isinstance(data, dict) or data.get("format") not in (1, FORMAT):
        version = data.get("format") if isinstance(data, dict) else type(data).__name__
        raise _damaged(checkpoint, f"{NAME} is of format {version!r:.80}, this version reads 1 and {FORMAT}")
    if data["format"] == FORMAT and data.pop("hash", None) != _hash_of(data):
        raise _damaged(checkpoint, f"{NAME} was changed after it was written")
    files = data.pop("files", None)
    known = isinstance(files, dict) and all(map(_is_file, files.values()))
    if not known or type(data.get("step")) is not int or data["step"] < 1:
        raise _damaged(checkpoint, f"{NAME} does not say which files of which step it lists")
    del data["format"]
    return Manifest(data, {name: File(row, "") if isinstance(row, int) else File(*row) for name, row in files.items()})


def _is_file(row: Any) -> bool:
    return type(row) is int or (isinstance(row, list) and [type(part) for part in row] == [int, str])


def _hash_of(body: Mapping[str, Any]) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(body, sort_keys=True).encode())


def _damaged(checkpoint: Path, text: str) -> DamagedError:
    return DamagedError(f"the checkpoint {checkpoint.name} is damaged", text, "take an older one, or restore it")
