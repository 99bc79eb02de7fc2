"""Losses of every token by another model, on disk: what steps are compared with, without a second model in memory.

    FOLDER/DOMAIN.npy        float32 [tokens of the domain's samples, one after the other]; 0 where no target is
    FOLDER/reference.json    {"data": {DOMAIN: fingerprint}}; named unfinished.json until all is written

Where attention left blocks of keys out, it also has what losses are off by (`core.sparse_error`), under "sparse".

Data that are no mixture are the one domain ``all``. A reference of more domains than a run has serves it, too.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...core.aliases import Floats, Ints
from ...core.errors import EvenloadError, shorten
from ...core.input import reading
from ...data.content import are_same
from ...data.mixed import MixedSource
from ...data.sources import Source, targets_of

NAME, UNFINISHED = "reference.json", "unfinished.json"
_DO = "write one with `evenload score RECIPE --out FOLDER`, for the data of this recipe"


class LossPlaces:
    """Where the losses of a source's samples stand."""

    def __init__(self, source: Source) -> None:
        self.parts = source.parts if isinstance(source, MixedSource) else {"all": source}
        """The domains of a mixture, or the one source, by name."""
        self.tokens = {name: int(part.lengths.sum()) for name, part in self.parts.items()}
        sizes = [len(part.lengths) for part in self.parts.values()]
        self._firsts = np.cumsum(sizes) - sizes
        self._starts = [np.cumsum(part.lengths) - part.lengths for part in self.parts.values()]
        self._lengths = source.lengths

    def of(self, sample: int) -> tuple[str, slice]:
        """The domain of a sample, and its tokens among those of the domain."""
        part = int(np.searchsorted(self._firsts, sample, side="right")) - 1
        start = int(self._starts[part][sample - self._firsts[part]])
        return list(self.parts)[part], slice(start, start + int(self._lengths[sample]))


class ReferenceLosses:
    """The losses of the samples of a source in a folder. Raises EvenloadError where the folder has none of them."""

    def __init__(self, folder: Path, source: Source) -> None:
        what = f"the losses of a reference in {shorten(str(folder))}"
        if not reading.is_file(folder / NAME):
            raise EvenloadError(f"{what} are not there, or not whole", f"no {NAME}", _DO)
        written = reading.mapping(reading.read_json(folder / NAME, what, _DO), what, _DO)
        known, self.sparse = written.get("data"), written.get("sparse")
        self._places, self._targets = LossPlaces(source), targets_of(source)
        self._arrays: dict[str, NDArray[Any]] = {}
        for name, part in self._places.parts.items():
            own = known.get(name) if isinstance(known, dict) else None
            if not are_same(own, part.fingerprint, what):
                detail = f"of {name} it knows {shorten(str(own))}, the data are {part.fingerprint}"
                raise EvenloadError(f"{what} are of other data", detail, _DO)
            self._arrays[name] = _opened(folder / f"{name}.npy", self._places.tokens[name], what)

    def of(self, sample: int) -> Floats:
        """float64 [length] of the tokens of a sample as targets."""
        name, tokens = self._places.of(sample)
        return np.asarray(self._arrays[name][tokens], dtype=np.float64)

    def means(self, samples: Ints) -> Floats:
        """float64 [S] mean token loss of each of these samples."""
        sums = np.array([self.of(sample).sum() for sample in samples.tolist()])
        means: Floats = sums / np.maximum(self._targets[samples], 1)
        return means


def left_unfinished(folder: Path) -> set[str]:
    """Names of what a score that was ended has left in a folder."""
    try:
        known = reading.mapping(reading.read_json(folder / UNFINISHED, UNFINISHED, ""), UNFINISHED, "").get("data")
    except EvenloadError:
        return set()
    names = {UNFINISHED, *(f"{name}.npy" for name in known)} if isinstance(known, dict) else set()
    return {path.name for path in folder.iterdir() if path.name in names and path.is_file() and not path.is_symlink()}


class LossFiles:
    """The files of a folder, to be filled; those that are `left_unfinished` there are removed."""

    def __init__(self, folder: Path, source: Source) -> None:
        self._folder, self._places = folder, LossPlaces(source)
        folder.mkdir(parents=True, exist_ok=True)
        for name in left_unfinished(folder):
            (folder / name).unlink()
        data = {name: part.fingerprint for name, part in self._places.parts.items()}
        self._known: dict[str, Any] = {"data": data}
        (folder / UNFINISHED).write_text(json.dumps(self._known, indent=1))
        self._arrays = {
            name: np.lib.format.open_memmap(folder / f"{name}.npy", "w+", np.float32, (tokens,))
            for name, tokens in self._places.tokens.items()
        }

    def write(self, sample: int, losses: Floats) -> None:
        """Losses [length] of the tokens of a sample as targets."""
        name, tokens = self._places.of(sample)
        self._arrays[name][tokens] = losses

    def finish(self, sparse: Mapping[str, Any] | None = None) -> int:
        """Say that all are written, and of which data; bytes of them. ``sparse``: what they are off by, if they are."""
        for one in self._arrays.values():
            one.flush()
        if sparse is not None:
            (self._folder / UNFINISHED).write_text(json.dumps({**self._known, "sparse": sparse}, indent=1))
        os.replace(self._folder / UNFINISHED, self._folder / NAME)
        return sum(one.nbytes for one in self._arrays.values())


def _opened(path: Path, tokens: int, what: str) -> NDArray[Any]:
    losses = numbers_in(path, what)
    if losses.shape != (tokens,) or losses.dtype != np.float32:
        detail = f"{path.name} has {losses.dtype} {list(losses.shape)}, the data {tokens} tokens"
        raise EvenloadError(f"{what} are damaged", detail, _DO)
    return losses


def numbers_in(path: Path, what: str) -> NDArray[Any]:
    """A .npy of floating-point numbers, mapped into memory. Raises EvenloadError."""
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise EvenloadError(f"{what} cannot be read", shorten(f"{path}: {error}"), "give a .npy file") from error
    if not isinstance(array, np.ndarray) or array.dtype.kind != "f":
        detail = f"{path}: {getattr(array, 'dtype', 'several arrays')}"
        raise EvenloadError(f"{what} cannot be read", detail, "give a .npy of floating-point numbers")
    return array
