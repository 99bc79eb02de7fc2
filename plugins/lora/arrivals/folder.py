"""The folder of tenants, as rank 0 sees it: which files have come, changed or gone since it last looked.

A file counts when two looks have found it alike, so that nobody reads one that is being written; those that are there
at the start count at once. What is wrong with a tenant stands next to its file, in ``NAME.error``, until it is mended.
"""

from __future__ import annotations

import logging
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from ....core.errors import EvenloadError, shorten
from ....core.input import reading
from ....training.files import write_whole

logger = logging.getLogger("evenload")

SUFFIX, ERROR = ".yaml", ".error"
STOP = "stop"
"""A file of this name ends the job after the step that runs, as if every tenant had left; it is removed."""
_Stamp = tuple[int, int, int]
_AT_ONCE = 50
"""Files that come between two steps, at most; those that are there at the start come all."""
_REST, _LONG_REST, _QUICK_S = 20.0, 200.0, 5e-3
"""A look that takes longer than the last is followed by so many times its CPU seconds without one: by the first where
files come and go, by the second where none does; files that change in their places are noticed after that."""


class Came(NamedTuple):
    """A file that is new, or other than it was."""

    name: str
    text: str
    error: EvenloadError | None = None
    """Why it could not be read."""


class News(NamedTuple):
    """What has happened in the folder."""

    came: tuple[Came, ...] = ()
    gone: tuple[str, ...] = ()
    stop: bool = False

    def __bool__(self) -> bool:
        return bool(self.came or self.gone or self.stop)


class Folder:
    """See the module. Only rank 0 has one."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._known: dict[str, _Stamp] = {}
        self._seen: dict[str, _Stamp] | None = None
        self._warned: set[str] = set()
        self._looked_s = self._cost_s = 0.0
        self._changed_ns = 0
        self._unsettled = False
        self._full = False

    def look(self) -> News:
        """What has happened since the last look; nothing, while the folder itself cannot be read."""
        if self._rests():
            return News(stop=self._stopped())
        begin_s, self._looked_s = time.thread_time(), time.monotonic()
        with suppress(OSError):
            self._changed_ns = os.stat(self.path).st_mtime_ns
        try:
            stamps = self._stamps()
        except EvenloadError as error:
            self._warn_once(str(error))
            return News()
        self._cost_s = max(0.0, time.thread_time() - begin_s - _QUICK_S)
        before, most = (stamps, None) if self._seen is None else (self._seen, _AT_ONCE)
        self._seen = stamps
        gone = tuple(name for name in self._known if name not in stamps)
        settled = {name: stamp for name, stamp in stamps.items() if before.get(name) == stamp}
        fresh = [name for name, stamp in settled.items() if self._known.get(name) != stamp][:most]
        self._full = len(fresh) == most
        self._unsettled = self._full or len(settled) < len(stamps)
        came = tuple(self._read(name) for name in fresh)
        self._known = {name: stamp for name, stamp in self._known.items() if name in stamps}
        self._known |= {name: settled[name] for name in fresh}
        for name in gone:
            self.clear(name)
        return News(came, gone, self._stopped())

    def _rests(self) -> bool:
        """Whether to do without a look: once after a full one, so that somebody trains in between, and for long in a
        folder that nobody has touched."""
        changed, full, self._full = self._unsettled, self._full, False
        with suppress(OSError):
            changed |= os.stat(self.path).st_mtime_ns != self._changed_ns
        return full or time.monotonic() < self._looked_s + (_REST if changed else _LONG_REST) * self._cost_s

    def _stopped(self) -> bool:
        """Whether somebody has put the file that ends the job there; it is taken out."""
        path = self.path / STOP
        if not reading.is_file(path):
            if path.is_dir():
                self._warn_once(f"{STOP} is a folder and ends nothing: a file of this name ends the job")
            return False
        with suppress(OSError):
            path.unlink()
        return True

    def complain(self, name: str, error: EvenloadError) -> None:
        """Write what is wrong with a tenant next to its file."""
        try:
            write_whole(self.path / f"{name}{ERROR}", f"{error}\n")
        except OSError as failed:
            logger.warning("%s%s cannot be written: %s", name, ERROR, failed.strerror)
        logger.warning("the tenant %s is left out: %s", shorten(name), error)

    def clear(self, name: str) -> None:
        """Nothing is wrong with a tenant, or not any more."""
        with suppress(OSError):
            (self.path / f"{name}{ERROR}").unlink(missing_ok=True)

    @property
    def names(self) -> list[str]:
        """Names of the tenants whose files are there now. Raises EvenloadError where there is no such folder."""
        return list(self._stamps())

    def _stamps(self) -> dict[str, _Stamp]:
        """What tells a file from the one that it was, by name, in the order of names."""
        stamps = {}
        try:
            with os.scandir(self.path) as entries:
                for entry in sorted(entries, key=lambda entry: entry.name):
                    name = entry.name.removesuffix(SUFFIX)
                    if name and name != entry.name and not name.startswith("."):
                        with suppress(FileNotFoundError):
                            status = _status(entry)
                            stamps[name] = (status.st_mtime_ns, status.st_size, status.st_ino)
                    elif entry.name.endswith(".yml"):
                        self._warn_once(f"{shorten(entry.name)} is not a tenant: a tenant's file ends in {SUFFIX}")
        except OSError as error:
            what = f"the folder of tenants {shorten(str(self.path))} cannot be read"
            raise EvenloadError(what, error.strerror or "", "name a folder in plugins.lora.tenants") from error
        return stamps

    def _read(self, name: str) -> Came:
        path = self.path / f"{name}{SUFFIX}"
        try:
            content = reading.read_bytes(path, reading.YAML_BYTES, f"the tenant {shorten(name)}", "give a YAML file")
            return Came(name, content.decode("utf-8"))
        except EvenloadError as error:
            return Came(name, "", error)
        except UnicodeDecodeError as error:
            detail = shorten(f"no UTF-8: {error}")
            return Came(name, "", EvenloadError(f"the tenant {shorten(name)} is not YAML", detail, "save it as UTF-8"))

    def _warn_once(self, text: str) -> None:
        if text not in self._warned:
            self._warned.add(text)
            logger.warning("%s", text)


def _status(entry: os.DirEntry[str]) -> os.stat_result:
    """Status of the file that an entry means; of the entry itself where it leads in a circle, or nobody may look."""
    try:
        return entry.stat()
    except FileNotFoundError:
        raise
    except OSError:
        return entry.stat(follow_symlinks=False)
