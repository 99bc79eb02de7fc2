"""No rank hangs: heartbeats, who is behind, how a job ends with one message."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .watchdog import Watchdog

__all__ = ["Watchdog"]


def __getattr__(name: str) -> Any:
    if name != "Watchdog":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .watchdog import Watchdog

    return Watchdog
