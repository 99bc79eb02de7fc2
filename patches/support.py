"""The rows of patches and of tested versions as text, which ends ``docs/support.md``; and those versions."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable
from importlib import import_module
from typing import Any, NamedTuple

from ..core.registry import load_plugins
from ..core.verbs import VERBS
from . import cpu_bridge, deepspeed, megatron, megatron_fixes, ranks, transformers
from .row import Patch

_LIST: dict[str, Any] = {"subsequent_indent": "  ", "break_long_words": False, "break_on_hyphens": False}
"""How an entry is wrapped."""


class HostVersion(NamedTuple):
    """A host's version, the dependency group of pyproject.toml that names it, the make target, and the day (ISO)."""

    host: str
    version: str
    group: str
    command: str
    day: str


PASSED = (
    HostVersion("torch", "2.13.0", "tested", "test", "2026-11-29"),
    HostVersion("megatron-core", "0.16.1", "tested", "test", "2026-11-29"),
    HostVersion("megatron-core", "0.19.2", "newest", "check-newest", "2026-11-29"),
    HostVersion("deepspeed", "0.19.8", "tested", "test", "2026-11-29"),
    HostVersion("deepspeed", "0.19.6", "older", "test-older", "2026-11-29"),
    HostVersion("transformers", "5.23.0", "tested", "test", "2026-11-29"),
    HostVersion("transformers", "5.24.0", "today", "test-today", "2026-11-29"),
    HostVersion("accelerate", "1.15.0", "tested", "test", "2026-11-29"),
    HostVersion("peft", "0.21.2", "tested", "test", "2026-11-29"),
    HostVersion("trl", "1.16.0", "tested", "test", "2026-11-29"),
    HostVersion("trl", "1.14.2", "trl114", "test-today", "2026-11-29"),
    HostVersion("trl", "1.13.0", "trl113", "test-today", "2026-11-29"),
    HostVersion("llamafactory", "0.9.5", "llamafactory", "test-hosts", "2026-11-26"),
    HostVersion("axolotl", "0.21.0", "axolotl", "test-hosts", "2026-11-30"),
    HostVersion("ms-swift", "4.6.0", "swift", "test-hosts", "2026-11-29"),
    HostVersion("ray", "2.60.0", "ray", "test-hosts", "2026-11-26"),
)
"""With the day on which each last passed."""

_WRAPPED = """## What evenload wraps

Every symbol of a trainer that evenload may wrap, with its versions and its reason: for programs that patch the same
trainer, and for rows that `evenload doctor` names.

A row applies only to the versions that it supports, and only if the symbol still has the expected parameters; rows of
a batch apply together or not at all. Undoing a row puts back the very object that was there. Nothing is
patched by importing evenload. Code that evenload's integrations own is not patched: this is for scripts that we cannot
edit, and for machines without CUDA.
"""


def _sections() -> list[tuple[str, Any]]:
    """Titles and modules that offer ``rows()``, whose docstrings open the sections; verbs with such come last."""
    load_plugins()
    own = [verb for verb in VERBS.registered().values() if verb.rows]
    return [
        ("The CPU bridge", cpu_bridge),
        ("Megatron-Core's faults", megatron_fixes),
        ("Megatron-Core loops", megatron),
        ("DeepSpeed scripts", deepspeed),
        ("Scripts of Transformers' Trainer", transformers),
        ("All scripts", ranks),
        *((f"Scripts under `evenload {verb.name}`", import_module(verb.rows)) for verb in own),
    ]


def all_rows() -> tuple[Patch, ...]:
    """Every row of evenload, section by section."""
    return tuple(row for _, module in _sections() for row in module.rows())


def document() -> str:
    """The end of ``docs/support.md``, from its tested versions on; needs neither torch nor a trainer."""
    sections = [
        f"### {title}\n\n{(module.__doc__ or '').strip()}\n\n{_entries(module.rows())}" for title, module in _sections()
    ]
    return "\n".join([_passed(), _WRAPPED, *sections])


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
