"""The support table, written from the rows: ``python -m evenload.patches.support > docs/support.md``."""

from __future__ import annotations

from collections.abc import Iterable

from . import cpu_bridge, deepspeed, megatron, megatron_fixes
from .row import Patch

_SECTIONS = (
    ("The CPU bridge", cpu_bridge),
    ("Megatron-Core's faults", megatron_fixes),
    ("Megatron-Core loops", megatron),
    ("DeepSpeed scripts", deepspeed),
)
"""Modules that offer ``rows()``; their docstrings open the sections."""

_HEAD = """# What evenload patches

Written by `python -m evenload.patches.support` from the rows in `patches/`; do not edit by hand.

A row is applied only to a version that it supports, only if the symbol still has the parameters that the row counts
on, and together with its batch or not at all. Taking it off puts back the very object that was found. Nothing is
patched by importing evenload. Code that evenload's integrations own is not patched: this is for scripts that we cannot
edit, and for machines without CUDA.
"""


def all_rows() -> tuple[Patch, ...]:
    """Every row of evenload, section by section."""
    return tuple(row for _, module in _SECTIONS for row in module.rows())


def document() -> str:
    """The whole of ``docs/support.md``; needs neither torch nor a trainer."""
    sections = [
        f"## {title}\n\n{(module.__doc__ or '').strip()}\n\n{_table(module.rows())}" for title, module in _SECTIONS
    ]
    return "\n".join([_HEAD, *sections])


def _table(rows: Iterable[Patch]) -> str:
    lines = ["| row | symbol | supports | only where | why |", "|---|---|---|---|---|"]
    for row in rows:
        symbols = "<br>".join(f"`{path}`" for path in (row.target, *row.aliases))
        where = " and ".join(
            [*([f"`{row.when.__name__}`"] if row.when else []), *(["it is absent"] if row.fills_gap else [])]
        )
        lines.append(f"| {row.name} | {symbols} | {row.supports.replace('|', '/')} | {where} | {row.why} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(document(), end="")
