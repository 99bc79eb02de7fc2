"""Pictures of steps that `plan` predicted or `train` measured: a trace for Perfetto, and what plugins draw."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from ..files import PICTURES, refuse_pictures

if TYPE_CHECKING:
    from ..forecast.forecast import Forecast


def draw(forecast: Forecast, **paths: Path | None) -> None:
    """Write the pictures asked for, each by the module of its row. Raises EvenloadError, with nothing written if a path
    cannot work."""
    refuse_pictures(**paths)
    for option, path in paths.items():
        if path is not None:
            import_module(PICTURES[option].module).write(forecast, path)
