"""The support table, written from the rows: ``python -m evenload.patches.support > docs/support.md``."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable
from typing import Any

from . import audit, cpu_bridge, deepspeed, megatron, megatron_fixes, ranks, transformers
from .passed import PASSED
from .row import Patch

_SECTIONS = (
    ("The CPU bridge", cpu_bridge),
    ("Megatron-Core's faults", megatron_fixes),
    ("Megatron-Core loops", megatron),
    ("DeepSpeed scripts", deepspeed),
    ("Scripts of Transformers' Trainer", transformers),
    ("All scripts", ranks),
    ("Scripts whose batches are judged", audit),
)
"""Modules that offer ``rows()``; their docstrings open the sections."""

_LIST: dict[str, Any] = {"subsequent_indent": "  ", "break_long_words": False, "break_on_hyphens": False}
"""How an entry is wrapped."""

_HEAD = """# What evenload patches

This page gives every symbol of a trainer that evenload may wrap, with its versions and its reason. Use it when two
programs patch the same trainer, or when `evenload doctor` names a row.

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
        f"## {title}\n\n{(module.__doc__ or '').strip()}\n\n{_entries(module.rows())}" for title, module in _SECTIONS
    ]
    return "\n".join([_HEAD, _passed(), *sections])


def _passed() -> str:
    """A table with a row for each version of a host that is tested."""
    rows = (f"| {row.host} | {row.version} | {row.day} | `make {row.command}` |" for row in PASSED)
    head = ("## Tested versions", "", "| host | version | last passed | by |", "|---|---|---|---|")
    return "\n".join([*head, *rows]) + "\n"


def _entries(rows: Iterable[Patch]) -> str:
    """A list with an entry for each row: its name, versions, symbols and reason."""
    return "\n".join(line for row in rows for line in _entry(row)) + "\n"


def _entry(row: Patch) -> list[str]:
    where = [*([f"`{row.when.__name__}`"] if row.when else []), *(["it is absent"] if row.fills_gap else [])]
    versions = f"{row.supports}; only {row.only} needs it" if row.only else row.supports
    condition = f", where {' and '.join(where)}" if where else ""
    symbols = ", ".join(f"`{path}`" for path in (row.target, *row.aliases))
    return textwrap.wrap(f"- **{row.name}** ({versions}{condition}): {symbols}. {row.why}", 118, **_LIST)


if __name__ == "__main__":
    print(document(), end="")
