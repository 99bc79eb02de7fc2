"""What is asked of a rank of a world."""

from importlib import import_module
from typing import Any


def units_asked() -> list[Any]:
    """Runs on a rank: what it has asked of NCCL by now."""
    units: list[Any] = import_module("rehearsal.ledger").units
    return units
