"""Found by every Python process that `evenload run` has started: switches evenload on when a trainer is imported.

PYTHON_EVENLOAD holds the recipe and the names of packages (`core/recipe/carried.py` writes it); the first of them that
is imported is the trainer's.

This folder is on PYTHONPATH for that command's processes alone. Nothing but the standard library runs here, so a
process that never imports the trainer (torchrun's agent, a shell's helper) is left as it is. The user's own
sitecustomize, which this one hides, is run first.
"""

import base64
import json
import os
import sys
import zlib
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import module_from_spec
from types import ModuleType
from typing import Any

_HERE = os.path.dirname(os.path.abspath(__file__))


def _run_hidden() -> None:
    """Take this folder off the path and run the sitecustomize that would have been found without it."""
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry or ".") != _HERE]
    spec = PathFinder.find_spec("sitecustomize", sys.path)
    if spec is not None and spec.loader is not None:
        module = sys.modules["sitecustomize"] = module_from_spec(spec)
        spec.loader.exec_module(module)


class _Starter(MetaPathFinder):
    """Enables the recipe right before the trainer's first line; a mere look for its spec does nothing."""

    def __init__(self, content: dict[str, Any]) -> None:
        self._names, self._content = content["before"], content

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in self._names or self not in sys.meta_path:
            return None
        for finder in sys.meta_path[sys.meta_path.index(self) + 1 :]:
            spec = finder.find_spec(fullname, path, target)
            if spec is not None:
                if spec.loader is not None:
                    self._start_before(spec.loader)
                return spec
        return None

    def _start_before(self, loader: Any) -> None:
        run = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            del loader.exec_module
            if self in sys.meta_path:
                sys.meta_path.remove(self)
                self._start(module.__name__)
            run(module)

        loader.exec_module = exec_module

    def _start(self, trainer: str) -> None:
        folder = os.environ.get("EVENLOAD_STARTED")
        if folder and os.path.isdir(folder):
            open(os.path.join(folder, str(os.getpid())), "w").close()
        try:
            evenload = import_module("evenload")
        except ImportError as error:
            raise ImportError(
                f"evenload run: evenload is not installed for {sys.executable}, which imports {trainer}"
            ) from error
        import_module("evenload.integrations.unmodified.planned_runs").watch_process()
        import_module("evenload.api").load_plugins()
        evenload.enable(import_module("evenload.core.recipe.carried").recipe_in(self._content))


def _content() -> dict[str, Any] | None:
    text = os.environ.get("PYTHON_EVENLOAD")
    try:
        return json.loads(zlib.decompress(base64.urlsafe_b64decode(text))) if text else None
    except (ValueError, zlib.error):
        print("evenload: PYTHON_EVENLOAD is not what evenload has written; nothing is switched on", file=sys.stderr)
        return None


_run_hidden()
if (content := _content()) is not None:
    sys.meta_path.insert(0, _Starter(content))
