"""What a case must leave as it found it in a process that others use after it."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Iterator
from types import FunctionType, ModuleType
from typing import Any

WATCHED = ("evenload", "megatron", "deepspeed", "torch.distributed", "torch.nn.functional", "transformers.trainer")
"""Packages and modules whose functions and methods are compared."""

Place = tuple[str, str]


class Found:
    """Functions, environment and settings of a process before a case; `left` says what is other afterwards.

    Modules that a case is the first to import are watched from its end on.
    """

    def __init__(self) -> None:
        self._functions: dict[Place, Any] = {}
        self._modules: set[str] = set()
        self._watch_new_modules()
        self._environment, self._folder = dict(os.environ), os.getcwd()
        self._settings = _settings()

    def left(self) -> list[str]:
        """What the case has replaced or set, in words. The environment, in which hosts set variables, is as before."""
        changed = [
            f"{holder}.{name} is replaced"
            for (holder, name), function in self._functions.items()
            if _current(holder, name) is not function
        ]
        self._watch_new_modules()
        if self._environment != dict(os.environ):
            os.environ.clear()
            os.environ.update(self._environment)
        os.chdir(self._folder)
        for (name, before), after in zip(self._settings.items(), _settings().values(), strict=True):
            if before != after:
                changed.append(f"{name} is {after}, was {before}")
        return changed

    def _watch_new_modules(self) -> None:
        for name, module in list(sys.modules.items()):
            if name not in self._modules and name.startswith(WATCHED) and isinstance(module, ModuleType):
                self._modules.add(name)
                self._functions.update(_functions_of(name, module))


def _functions_of(name: str, module: ModuleType) -> Iterator[tuple[Place, Any]]:
    """Functions of a module and methods of its own classes, by where they are found."""
    for attribute, value in list(vars(module).items()):
        if isinstance(value, FunctionType):
            yield (name, attribute), value
        elif isinstance(value, type) and value.__module__ == name and value.__qualname__ == attribute:
            for method, entry in list(vars(value).items()):
                if isinstance(entry, (FunctionType, staticmethod, classmethod, property)):
                    yield (f"{name}:{attribute}", method), entry


def _current(holder: str, name: str) -> Any:
    module, _, kind = holder.partition(":")
    found: Any = sys.modules.get(module)
    found = getattr(found, kind, None) if kind else found
    return vars(found).get(name) if found is not None else None


def _settings() -> dict[str, Any]:
    import torch

    return {
        "gradient mode": torch.is_grad_enabled(),
        "default dtype": torch.get_default_dtype(),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
    }


def seed_generators() -> None:
    """Every case begins with generators in the same state, whatever the one before it has drawn."""
    import numpy as np
    import torch

    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


def generators() -> tuple[Any, ...]:
    """The states of the process's generators, to be compared."""
    import numpy as np
    import torch

    return random.getstate(), np.random.get_state()[1].tobytes(), torch.get_rng_state().numpy().tobytes()
