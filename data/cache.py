"""What is expensive to find out about a data file is found out once and kept among the user's other caches.

The folder is ``$EVENLOAD_CACHE``, else ``$XDG_CACHE_HOME/evenload``, else ``~/.cache/evenload``. An entry's name is a
hash of the files' paths, sizes and modification times and of whatever else shaped it, so that a changed file never
meets a stale entry. Entries appear whole (written aside, then renamed); processes that need the same one, of other
machines too where they share the folder, wait for the first. One that dies blocks nobody, since the kernel, or the file
server, frees its lock; the next one takes away what it had written.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ..core.errors import EvenloadError

log = logging.getLogger(__name__)

_NEWS_S = 5.0
Arrays = dict[str, NDArray[np.int64]]


def cache_dir() -> Path:
    """The folder of all entries; it need not exist."""
    if own := os.environ.get("EVENLOAD_CACHE"):
        return Path(os.path.expanduser(own))
    return Path(os.path.expanduser(os.environ.get("XDG_CACHE_HOME") or "~/.cache")) / "evenload"


def key_of(files: Sequence[Path], *parts: str) -> str:
    """The name of an entry made from ``files`` as they are now and from ``parts``."""
    digest = hashlib.blake2b(digest_size=16)
    for path in files:
        stat = path.stat()
        digest.update(f"{path.resolve()}\0{stat.st_size}\0{stat.st_mtime_ns}\0".encode("utf-8", "surrogateescape"))
    digest.update("\0".join(parts).encode())
    return digest.hexdigest()


def cached_arrays(key: str, build: Callable[[], Arrays]) -> Arrays:
    """The arrays that ``build`` makes, from the cache where they are there and whole.

    A cache that cannot be written is no obstacle: a warning, and the arrays are built again next time.
    """
    path = cache_dir() / f"{key}.npz"
    if (cached := _load(path)) is not None:
        return cached
    built: Arrays | None = None

    def write(aside: Path) -> None:
        nonlocal built
        built = build()
        with open(aside, "wb") as stream:
            np.savez(stream, **built)  # type: ignore[arg-type]  # numpy's stub mistakes names for its own flag

    try:
        with _locked(path):
            if (cached := _load(path)) is not None:
                return cached
            if path.exists():
                log.warning("%s is damaged; it is made again", path)
            _write_whole(path, write)
    except OSError as error:
        log.warning("cannot keep what was read of the data (%s); it will be read again next time", error)
    return built if built is not None else build()


def cached_file(key: str, suffix: str, write: Callable[[Path], None]) -> Path:
    """The file that ``write`` makes at the path it is given; raises `EvenloadError` where there is no room for it."""
    path = cache_dir() / f"{key}{suffix}"
    try:
        if not path.exists():
            with _locked(path):
                if not path.exists():
                    _write_whole(path, write)
    except OSError as error:
        do = "set EVENLOAD_CACHE to a folder with room"
        raise EvenloadError(f"cannot write into the cache {cache_dir()}", str(error), do) from error
    return path


def cached_folder(key: str, write: Callable[[Path], None]) -> Path:
    """The folder that ``write`` fills, which is there whole or not at all; raises as `cached_file`."""

    def fill(aside: Path) -> None:
        aside.unlink()
        aside.mkdir()
        write(aside)

    return cached_file(key, "", fill)


def _load(path: Path) -> Arrays | None:
    """The arrays of a whole entry, else None. Needs no lock: entries appear whole."""
    try:
        with np.load(path, allow_pickle=False) as archive:
            return {name: archive[name] for name in archive.files}
    except Exception:  # a damaged entry fails in numpy, zipfile or zlib; it is made again
        return None


def _write_whole(path: Path, write: Callable[[Path], None]) -> None:
    handle, name = tempfile.mkstemp(prefix=path.stem, suffix=".part", dir=path.parent)
    os.close(handle)
    try:
        write(Path(name))
        os.replace(name, path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(name) if os.path.isdir(name) else os.unlink(name)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the entry's lock. File systems without locks go on without: then an entry may be made twice, never torn."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lock_path = path.with_suffix(".lock")
    with open(lock_path, "a") as lock:
        if _acquire(lock.fileno(), path):
            _clear(path)
        try:
            yield
        finally:
            # Unlinked while held: whoever waits for this file looks for the finished entry next.
            with contextlib.suppress(OSError):
                lock_path.unlink()


def _clear(path: Path) -> None:
    """Take away what writers of the entry that were killed have left; the caller holds its lock."""
    for part in path.parent.glob(f"{path.stem}*.part"):
        with contextlib.suppress(OSError):
            shutil.rmtree(part) if part.is_dir() else part.unlink()


def _acquire(descriptor: int, path: Path) -> bool:
    """Wait for the lock; whether the file system has given it."""
    with contextlib.suppress(OSError):
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            # Ranks that open the same data wait a moment for the first of them, which is no news.
            said = threading.Timer(_NEWS_S, log.info, ("another process is preparing %s; waiting for it", path))
            said.start()
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            said.cancel()
        return True
    return False
