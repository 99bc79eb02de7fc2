"""The page of `doctor --gpu`, on a terminal."""

from __future__ import annotations

from rich.markdown import Markdown

from ..first_hour.page import page
from .show import Result


def table(result: Result) -> Markdown:
    return Markdown(page(result))
