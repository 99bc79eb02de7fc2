"""Sphinx with MyST: ``make site`` builds the pages into build/site. They read well raw, too."""

import re

project = "evenload"
extensions = ["myst_parser"]
html_theme = "furo"
html_title = "evenload"
html_show_copyright = False
html_static_path = ["_static"]
html_css_files = ["screens.css"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["_build"]
myst_heading_anchors = 3

_RESULT = re.compile(r"\[([^\]]+)\]\((\.\./benchmarks/results/\w+\.md)\)")


def setup(app):
    """Pages of benchmarks/results are no part of the site: its links to them download the file."""

    def downloading(_app, _page, source):
        source[0] = _RESULT.sub(r"{download}`\1 <\2>`", source[0])

    app.connect("source-read", downloading)
