"""Worlds: gloo ranks that run functions of test modules, one after the other."""

from __future__ import annotations

import inspect
import json
import pickle
import socket
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from .costs import add
from .forge import Forge
from .rank import Answer


class World:
    """`size` ranks over a file store, forked from a forge; `run` gives each the same case and collects the results."""

    def __init__(self, forge: Forge, size: int, folder: Path) -> None:
        self._forge, self._folder = forge, folder
        self._ranks: dict[int, Connection] = {}
        with tempfile.TemporaryDirectory(prefix="world-") as place, socket.socket(socket.AF_UNIX) as server:
            door = f"{place}/door"  # short: the name of a socket has at most 107 bytes
            server.bind(door)
            server.listen(size)
            server.settimeout(60)
            self._pids = forge.ask("world", {"folder": str(folder), "door": door, "size": size})
            while len(self._ranks) < size:
                connection = Connection(server.accept()[0].detach())
                self._ranks[connection.recv()] = connection
        self.active = True
        self._open_places: list[int] = []

    def run(self, function: Callable[..., Any], *arguments: Any, timeout_s: float = 200.0) -> list[Any]:
        """What `function(*arguments)` returned on each rank.

        Args:
            function: of the top level of a test module. It finds the process group initialised.
            arguments: must survive JSON; the results must survive pickle.

        Raises:
            AssertionError: a rank raised, died or took too long; holds the ranks' tracebacks or logs. Or one was not
                left as it was found.
        """
        case = json.dumps([inspect.getfile(function), function.__name__, arguments, self._open_places]).encode()
        for connection in self._ranks.values():
            connection.send_bytes(case)
        waiting = {connection: rank for rank, connection in self._ranks.items()}
        answers: dict[int, Answer] = {}
        failures: dict[int, str] = {}
        deadline = time.monotonic() + timeout_s
        while waiting and (ready := wait(list(waiting), max(0.0, deadline - time.monotonic()))):
            for connection in ready:
                rank = waiting.pop(connection)
                try:
                    answer = Answer(*pickle.loads(connection.recv_bytes()))
                except EOFError:
                    failures[rank] = f"the process ended\n{self._tail(rank)}"
                    continue
                add(answer.costs)
                answers[rank] = answer
                if not answer.ok:
                    failures[rank] = answer.value
            if failures:  # the others may wait for this rank
                deadline = min(deadline, time.monotonic() + 2.0)
        if failures or waiting:
            codes = self.close()
            texts = [f"--- rank {rank} ---\n{text}" for rank, text in failures.items()]
            texts += [f"--- rank {rank} did not answer ---\n{self._tail(rank)}" for rank in sorted(waiting.values())]
            raise AssertionError(f"{function.__name__} failed; exit codes {codes}\n" + "\n".join(texts))
        self._open_places = sorted({place for answer in answers.values() for place in answer.open_places})
        if left := {text for answer in answers.values() for text in answer.left}:
            self.close()  # the next case gets another
            raise AssertionError(
                f"{function.__name__} did not leave its ranks as it found them: " + "; ".join(sorted(left))
            )
        return [answers[rank].value for rank in sorted(answers)]

    def close(self) -> list[int]:
        """End the ranks; their exit codes."""
        self.active = False
        for connection in self._ranks.values():
            connection.close()
        return self._forge.ask("end", self._pids)

    def _tail(self, rank: int) -> str:
        return "".join((self._folder / f"{name}.{rank}").read_text(errors="replace")[-4000:] for name in ("out", "err"))


class WorldPool:
    """Worlds by trainer and size, for as long as pytest lives.

    One that a case has broken is replaced when it is next asked for. `MOST` are there at a time: the one that nobody
    has used for the longest time makes room.

    Args:
        fresh: give every case a world of its own.
    """

    MOST = 6

    def __init__(self, forge: Callable[[str], Forge], new_folder: Callable[[], Path], fresh: bool = False) -> None:
        self._forge, self._new_folder, self._fresh = forge, new_folder, fresh
        self._worlds: dict[tuple[str, int], World] = {}

    def get(self, trainer: str, size: int) -> World:
        """The world, which nobody else uses until the next call."""
        world = self._worlds.pop((trainer, size), None)
        if world is not None and world.active and self._fresh:
            world.close()
        if world is None or not world.active:
            if len(self._worlds) >= self.MOST:
                self._close(next(iter(self._worlds)))
            world = World(self._forge(trainer), size, self._new_folder())
        self._worlds[trainer, size] = world
        return world

    def close(self) -> None:
        for key in list(self._worlds):
            self._close(key)

    def _close(self, key: tuple[str, int]) -> None:
        world = self._worlds.pop(key)
        if world.active:
            world.close()
