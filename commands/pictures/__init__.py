"""Pictures of what `plan` found: a trace for Perfetto, a plot, a page to read. Everything in them is predicted."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..plan import Outlook


def draw(outlook: Outlook, *, trace: Path | None = None, plot: Path | None = None, report: Path | None = None) -> None:
    """Write the pictures asked for. Raises EvenloadError, before anything is written if a path cannot work."""
    from .files import refuse

    asked = {"--trace": trace, "--plot": plot, "--report": report}
    suffixes = {"--trace": (".json", ".json.gz"), "--plot": (".png",), "--report": (".html", ".htm")}
    for option, path in asked.items():
        if path is not None:
            refuse(path, option, suffixes[option])
    if trace is not None:
        from .outlook import about, tracks_of
        from .trace import write_trace

        write_trace(trace, tracks_of(outlook), about(outlook))
    if report is not None:
        from .report import write_report

        write_report(outlook, report)
