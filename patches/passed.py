"""The versions of each host that are tested, with the day on which they last passed: a table of ``docs/support.md``."""

from __future__ import annotations

from typing import NamedTuple


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
    HostVersion("axolotl", "0.19.0", "axolotl", "test-hosts", "2026-11-26"),
    HostVersion("ms-swift", "4.6.0", "swift", "test-hosts", "2026-11-29"),
    HostVersion("ray", "2.60.0", "ray", "test-hosts", "2026-11-26"),
)
