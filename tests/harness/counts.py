"""What a rank counts while it runs: process groups made, hosts opened, references computed."""

from __future__ import annotations

import functools
import sys
import time
from collections import Counter
from collections.abc import Callable
from types import FunctionType
from typing import Any

COUNTED = {"open_host": "hosts", "reference": "references"}
"""Functions of the product by name, and what a call of one counts as."""

_COUNTS: Counter[str] = Counter()
_REPORTED: Counter[str] = Counter()


def count_calls() -> None:
    """Count the calls of `COUNTED` from now on, wherever such a function was imported by name."""
    replace_functions(lambda function: _counting(function) if function.__name__ in COUNTED else function)


def replace_functions(new: Callable[[FunctionType], Any]) -> None:
    """Give every module of evenload what `new` makes of its functions."""
    made: dict[FunctionType, Any] = {}
    for module in [module for name, module in sys.modules.items() if name.partition(".")[0] == "evenload"]:
        for name, value in list(vars(module).items()):
            if isinstance(value, FunctionType):
                replacement = made.setdefault(value, new(value))
                if replacement is not value:
                    setattr(module, name, replacement)


def _counting(function: FunctionType) -> Any:
    @functools.wraps(function)
    def counted(*args: Any, **kwargs: Any) -> Any:
        _COUNTS[COUNTED[function.__name__]] += 1
        return function(*args, **kwargs)

    return counted


def since_last_report() -> dict[str, float]:
    """CPU seconds of this process and all that it counted since the last call."""
    from torch.distributed import distributed_c10d

    _COUNTS["groups"] = getattr(distributed_c10d._world, "group_count", 0)
    _COUNTS["cpu_s"] = time.process_time()  # type: ignore[assignment]
    report = {name: value - _REPORTED[name] for name, value in _COUNTS.items() if value != _REPORTED[name]}
    _REPORTED.clear()
    _REPORTED.update(_COUNTS)
    return report


def begin() -> None:
    """In a new process: nothing was reported yet."""
    _REPORTED.clear()
