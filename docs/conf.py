"""Sphinx: ``pip install sphinx myst-parser furo && sphinx-build docs docs/_build``. The pages also read well raw."""

project = "evenload"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "furo"
source_suffix = {".md": "markdown"}
exclude_patterns = ["_build"]
