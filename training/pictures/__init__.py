"""Pictures of steps that `plan` predicted or `train` measured: a trace for Perfetto, a plot, a page to read."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from ..files import refuse_path

if TYPE_CHECKING:
    from ..forecast.forecast import Forecast


def refuse(**paths: Path | None) -> None:
    """Raise EvenloadError for a picture that cannot be written, by kind: to be asked before any work is done."""
    for kind, path in paths.items():
        if path is not None:
            refuse_path(path, kind)
    if paths.get("plot") is not None:
        from .plot import refuse_without_matplotlib

        refuse_without_matplotlib()


def draw(forecast: Forecast, **paths: Path | None) -> None:
    """Write the pictures asked for, each by the module of its kind. Raises EvenloadError, with nothing written if a
    path cannot work."""
    refuse(**paths)
    for kind, path in paths.items():
        if path is not None:
            import_module(f".{kind}", __name__).write(forecast, path)
