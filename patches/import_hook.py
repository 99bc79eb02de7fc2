"""Runs a callback right after a module's body, before the importer sees the module.

Patching the defining module at that moment means that every ``from module import name`` copies the patched name.
Libraries ask `importlib.util.find_spec` whether a host exists long before anybody imports it, so a find is not an
import: the finder stays until the body has run, or until it is cancelled. wrapt has import hooks too; they cannot be
cancelled, so a session that is switched off would leave them behind, and this is by hand.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class ImportHook(MetaPathFinder):
    """Calls ``after_import(name)`` once for every watched module; on ``sys.meta_path`` only while it watches any."""

    def __init__(self, after_import: Callable[[str], None]) -> None:
        self._after_import = after_import
        self._watched: set[str] = set()

    def watch(self, name: str) -> None:
        """Call back when ``name`` has been imported; it must not be loaded yet."""
        if not self._watched:
            sys.meta_path.insert(0, self)
        self._watched.add(name)

    def cancel(self, name: str) -> None:
        """Stop watching ``name``; unknown names are fine."""
        if name in self._watched:
            self._watched.remove(name)
            if not self._watched:
                sys.meta_path.remove(self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in self._watched:
            return None
        # Those in front of us have been asked already, and a second hook like ours would ask us in turn.
        for finder in sys.meta_path[sys.meta_path.index(self) + 1 :]:
            spec = finder.find_spec(fullname, path, target)
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _LoaderThenCallback(spec.loader, self._ran)
                return spec
        return None

    def _ran(self, name: str) -> None:
        # A spec handed out earlier may be run after its watch was cancelled.
        if name in self._watched:
            self.cancel(name)
            self._after_import(name)


class _LoaderThenCallback(Loader):
    """The real loader, put back before the module's body runs, plus the callback after it."""

    def __init__(self, loader: Loader, ran: Callable[[str], None]) -> None:
        self._loader, self._ran = loader, ran

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        self._ran(module.__spec__.name)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)
