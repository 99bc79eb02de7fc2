"""Sphinx with MyST: ``make site`` builds the pages into build/site. They read well raw, too."""

project = "evenload"
extensions = ["myst_parser"]
html_theme = "alabaster"
html_theme_options = {"page_width": "1200px", "show_powered_by": False}
html_show_copyright = False
html_static_path = ["_static"]
html_css_files = ["screens.css"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["_build"]
myst_heading_anchors = 3
