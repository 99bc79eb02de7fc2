"""Sphinx with MyST: ``make site`` builds the pages into build/site. They read well raw, too."""

project = "evenload"
extensions = ["myst_parser"]
html_theme = "alabaster"
source_suffix = {".md": "markdown"}
exclude_patterns = ["_build"]
myst_heading_anchors = 3
