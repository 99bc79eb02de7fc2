"""The watchdog's client of the job's store, whose calls may never come back, and how to wait for what may not.

A TCPStore whose server is frozen (a stopped process, a lost node, a suspended machine) keeps its clients in the call
for ever: `set`, `get`, `check` and `compare_set` block in recv, and no timeout of the store's covers them (torch 2.13:
still there after 11 s with a timeout of 2 s). They do release the interpreter lock, so another thread can count what
came back.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

from torch.distributed import Store  # type: ignore[attr-defined]

Result = TypeVar("Result")


class StoreLostError(Exception):
    """A call of the store failed: whoever holds it is gone."""


class StoreClient:
    """Keys and values of a job. Every method raises StoreLostError, or blocks while the server does not answer.
    ``connect``: makes the store; called with the first method, since it may block as well."""

    def __init__(self, connect: Callable[[], Store]) -> None:
        self._connect = connect
        self._store: Store | None = None
        self.answers = 0
        """Calls that came back."""

    def set(self, key: str, value: str) -> None:
        self._call("set", key, value)

    def get(self, key: str) -> bytes | None:
        """None where nobody has set the key."""
        value: bytes | None = self._call("get", key) if self._call("check", [key]) else None
        return value

    def claim(self, key: str, value: str) -> bytes:
        """Set the key if nobody has; what it then holds."""
        kept: bytes = self._call("compare_set", key, "", value)
        return kept

    def count(self, key: str, by: int) -> int:
        """Add to a counter; its sum."""
        total: int = self._call("add", key, by)
        return total

    def _call(self, method: str, *arguments: Any) -> Any:
        try:
            if self._store is None:
                self._store = self._connect()
            answer = getattr(self._store, method)(*arguments)
        except (RuntimeError, OSError) as error:
            raise StoreLostError(f"{type(error).__name__}: {error}") from error
        self.answers += 1
        return answer


def read_all(store: Store, keys: list[str]) -> list[str]:
    """The values of these keys; empty where nobody has set one."""
    if store.has_extended_api() and store.check(keys):  # type: ignore[attr-defined]
        return [value.decode() for value in store.multi_get(keys)]
    return [store.get(key).decode() if store.check([key]) else "" for key in keys]


def within(limit_s: float, act: Callable[[], Result]) -> Result | None:
    """What `act` returns, or None if that takes longer or fails; `act` may go on meanwhile.

    For the way out of a process: neither a store, a full pipe nor a dead disk may hold it up.
    """
    results: list[Result] = []

    def run() -> None:
        with suppress(Exception):
            results.append(act())

    thread = threading.Thread(target=run, name="evenload-watchdog-bounded", daemon=True)
    thread.start()
    thread.join(limit_s)
    return results[0] if results else None
