"""A plan in simulated time: when every pass of every rank and stage starts and ends."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .step import simulate

__all__ = ["simulate"]


def __getattr__(name: str) -> Any:
    if name != "simulate":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .step import simulate

    return simulate
