"""Files that users name, or that others write at once: refused before work starts, whole or not there afterwards."""

from __future__ import annotations

import gzip
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import IO, NamedTuple

from ..core.errors import EvenloadError
from ..core.registry import load_plugins


class Picture(NamedTuple):
    """What an option of the command line has drawn of steps."""

    module: str
    """Its ``write(forecast, path)`` draws; it is imported when somebody asks for the picture."""
    suffixes: tuple[str, ...]
    """How the names of its files end."""
    needs: str = ""
    """A package that no installation need have."""


PICTURES = {"trace": Picture("evenload.training.pictures.trace", (".json", ".json.gz"))}
"""By the options that ask for them; a plugin puts its own in."""


def refuse_pictures(**paths: Path | None) -> None:
    """Raise EvenloadError for a picture that cannot be written, by option: to be asked before any work is done."""
    load_plugins()
    for option, path in paths.items():
        if path is None:
            continue
        if option not in PICTURES:
            do = "install the plugin that draws it, or leave the option out"
            raise EvenloadError(f"nobody draws what --{option} asks for", f"drawn: {', '.join(PICTURES)}", do)
        picture = PICTURES[option]
        refuse_path(path, f"--{option}", picture.suffixes)
        if picture.needs:
            try:
                import_module(picture.needs)
            except ImportError as error:
                do = f"pip install {picture.needs}"
                raise EvenloadError(f"--{option} needs {picture.needs}", str(error), do) from error


def refuse_path(path: Path, option: str, suffixes: tuple[str, ...]) -> None:
    """Raise EvenloadError unless a picture may be written there; ``suffixes``: how its name may end."""
    if not path.name.lower().endswith(suffixes):
        do = f"end its name with {' or '.join(suffixes)}"
        raise EvenloadError(f"{option} writes another kind of file", str(path), do)
    folder = path.absolute().parent
    if not os.path.isdir(folder):
        raise EvenloadError(f"there is no folder for {option}", str(path), f"make it first: mkdir -p {path.parent}")
    odd = os.path.exists(path) and not os.path.isfile(path)
    if odd or not os.access(folder, os.W_OK):
        fault = f"{path} is not a regular file" if odd else f"{folder} is not writable"
        raise EvenloadError(f"{option} cannot be written", fault, f"choose another {option}")


@contextmanager
def refusing_unwritable(name: str, path: Path) -> Iterator[None]:
    """An OSError inside is said of the setting of that name: an EvenloadError."""
    try:
        yield
    except OSError as error:
        do = "give a path that can be written"
        raise EvenloadError(f"{name} cannot be written", f"{path}: {error.strerror or error}", do) from error


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """A file next to ``path`` to write to, which takes its place at the end. Raises EvenloadError."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        yield part
        os.replace(part, path)
    except OSError as error:
        detail = f"{path}: {error.strerror or error}"
        raise EvenloadError("the file cannot be written", detail, "choose another folder") from error
    finally:
        with suppress(OSError):  # gone already, or its name is too long for the file system
            part.unlink()


def open_text(part: Path, path: Path) -> IO[str]:
    """Open ``part`` for writing, compressed where the name of ``path`` says so."""
    if path.name.lower().endswith(".gz"):
        return gzip.open(part, "wt", encoding="utf-8", errors="backslashreplace", compresslevel=5)
    return part.open("w", encoding="utf-8", errors="backslashreplace")


def write_whole(path: Path, text: str) -> None:
    """Write a file that is there whole or not at all; a link or a pipe in its place is replaced. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(".aside")
    aside.unlink(missing_ok=True)
    with open(aside, "x") as file:
        file.write(text)
    os.replace(aside, path)
