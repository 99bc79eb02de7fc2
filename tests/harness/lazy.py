"""Modules that tests import when they run, not when they are collected."""

from __future__ import annotations

from importlib import import_module
from typing import Any

LATE = {"deepspeed", "matplotlib", "megatron.core", "peft", "tensorboard", "tensordict", "transformers", "trl"}
"""Packages that no test file imports while it is collected: together they take as long as everything else there."""
TOO_SOON: dict[str, str] = {}
"""Those of them that are imported all the same, and the file during whose collection; see conftest.py."""


class LazyModule:
    """``peft = LazyModule("peft")`` in place of ``import peft``: imported at the first ``peft.name``.

    `monkeypatch` replaces nothing in it: it takes the module's attribute by name, ``"peft.name"``.
    """

    __slots__ = ("_name",)

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_mock_name":  # pytest asks all that a file has
            raise AttributeError(name)
        return getattr(import_module(self._name), name)
