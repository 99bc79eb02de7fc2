"""Read what others have pickled without running their code.

A pickle is a program: whoever wrote the file decides what runs where it is read. Trainers read their checkpoints with
``torch.load(weights_only=False)`` and ``pickle.load``. Inside `tensors_only` every ``torch.load`` of this process,
whatever its caller asks for, builds tensors, plain data and a few named classes of data, and refuses the rest;
`refuse_code` looks through a pickle in the same manner before something else reads it. Neither says anything about who
wrote a file.
"""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from ..core.errors import EvenloadError, shorten

FORCE = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
"""The variable by which torch overrules the argument ``weights_only`` of its callers."""


@contextmanager
def tensors_only(what: str, allowed: Sequence[Any], *, trust: bool) -> Iterator[None]:
    """Around everything that loads ``what``. Raises EvenloadError for a file that names something else; it was not run.

    Args:
        allowed: classes and functions beyond torch's own that files may name, all of them mere data.
        trust: load anything, as the trainer does by itself.
    """
    if trust:
        yield
        return
    before = os.environ.get(FORCE)
    os.environ[FORCE] = "1"
    try:
        with torch.serialization.safe_globals(list(allowed)):
            yield
    except pickle.UnpicklingError as error:
        raise _code_refused(what, _first_line(error)) from error
    finally:
        if before is None:
            del os.environ[FORCE]
        else:
            os.environ[FORCE] = before


def refuse_code(path: Path, allowed: Collection[str], *, trust: bool) -> None:
    """Raise EvenloadError if a pickle names anything but what is allowed, each by its full name. What the file builds
    is thrown away, so the allowed names must build mere data. Unreadable files are left to whoever reads them next."""
    if trust:
        return
    try:
        _DataOnly(io.BytesIO(path.read_bytes()), allowed).load()
    except _ForeignError as error:
        raise _code_refused(str(path), str(error)) from error
    except Exception:
        return


def _code_refused(what: str, detail: str) -> EvenloadError:
    return EvenloadError(
        f"{what} holds more than tensors and plain data",
        shorten(detail),
        "such a file runs code when it is loaded: if you know who wrote it, set checkpoint.trust=true",
    )


class _ForeignError(Exception):
    """A pickle names what is not allowed."""


class _DataOnly(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, allowed: Collection[str]) -> None:
        super().__init__(file)
        self._allowed = frozenset(allowed)

    def find_class(self, module: str, name: str) -> Any:
        full = f"{module}.{name}"
        if full not in self._allowed:
            raise _ForeignError(f"it names {full}")
        return super().find_class(module, name)


def _first_line(error: BaseException) -> str:
    """What torch says is in the way, without its advice."""
    lines = [line.strip() for line in str(error).splitlines() if "GLOBAL" in line or "global" in line.lower()]
    return (lines or str(error).splitlines() or [""])[0]
