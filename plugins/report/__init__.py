"""Report: where does the time of a step go, rank by rank and planner by planner? A page to read, and a plot."""

from ...training.files import PICTURES, Picture

PICTURES["plot"] = Picture("evenload.plugins.report.plot", (".png",), needs="matplotlib")
PICTURES["report"] = Picture("evenload.plugins.report.page", (".html", ".htm"))
