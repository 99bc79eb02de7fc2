"""Pictures of steps that `plan` predicted or `train` measured: a trace for Perfetto, a plot, a page to read."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from .files import refuse_path

if TYPE_CHECKING:
    from ..plan import Outlook

SUFFIXES = {"trace": (".json", ".json.gz"), "plot": (".png",), "report": (".html", ".htm")}


def refuse(**paths: Path | None) -> None:
    """Raise EvenloadError for a picture that cannot be written, by kind: to be asked before any work is done."""
    for kind, path in paths.items():
        if path is not None:
            refuse_path(path, f"--{kind}", SUFFIXES[kind])
    if paths.get("plot") is not None:
        from .plot import refuse_without_matplotlib

        refuse_without_matplotlib()


def draw(outlook: Outlook, *, trace: Path | None = None, plot: Path | None = None, report: Path | None = None) -> None:
    """Write the pictures asked for. Raises EvenloadError, with nothing written if a path cannot work."""
    refuse(trace=trace, plot=plot, report=report)
    if trace is not None:
        from .outlook import about, tracks_of
        from .trace import write_trace

        write_trace(trace, tracks_of(outlook), about(outlook))
    if plot is not None:
        from .plot import write_plot

        write_plot(outlook, plot)
    if report is not None:
        from .report import write_report

        write_report(outlook, report)
