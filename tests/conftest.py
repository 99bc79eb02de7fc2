"""Test worlds: real gloo processes that live as long as a test module, so that it pays for importing torch once."""

from __future__ import annotations

import inspect
import json
import os
import pickle
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

# A busy machine is no failure: nothing here is timed. Draws are the same from run to run, so that a tree that passed
# passes again; `make explore` draws anew.
_UNTIMED = hypothesis.settings(deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.register_profile("explore", _UNTIMED)
hypothesis.settings.register_profile("again", _UNTIMED, derandomize=True)
hypothesis.settings.load_profile("again")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Where workers share the files, those that take long come first: short ones fill the end."""
    if hasattr(config, "workerinput"):
        long = {item.path for item in items if item.get_closest_marker("slow")}
        items.sort(key=lambda item: item.path not in long)


_CHILD = Path(__file__).with_name("world_child.py")


class TestWorld:
    """`size` processes over a file store; `run` gives each the same case and collects their results."""

    __test__ = False

    def __init__(self, size: int, folder: Path) -> None:
        self._size, self._folder, self._number = size, folder, 0
        env = {**os.environ, "OMP_NUM_THREADS": "1", "RANK": "0", "WORLD_SIZE": str(size)}
        if "lo" in (name for _, name in socket.if_nameindex()):
            env["GLOO_SOCKET_IFNAME"] = "lo"
        self._logs = [folder / f"log.{rank}" for rank in range(size)]
        self._processes = [
            subprocess.Popen(
                [sys.executable, str(_CHILD), str(folder), str(rank), str(size)],
                stdin=subprocess.PIPE,
                stdout=log.open("wb"),
                stderr=subprocess.STDOUT,
                env={**env, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            )
            for rank, log in enumerate(self._logs)
        ]

    def run(self, function: Callable[..., Any], *arguments: Any, timeout_s: float = 200.0) -> list[Any]:
        """What `function(*arguments)` returned on each rank.

        Args:
            function: of the top level of a test module. It finds the process group initialised.
            arguments: must survive JSON; the results must survive pickle.

        Raises:
            AssertionError: a rank raised, died or took too long; holds the ranks' tracebacks or logs.
        """
        self._number += 1
        case = [self._number, inspect.getfile(function), function.__name__, arguments]
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(json.dumps(case).encode() + b"\n")
            process.stdin.flush()
        answers: dict[int, tuple[bool, Any]] = {}
        patience = time.monotonic() + timeout_s
        while len(answers) < self._size:
            for rank in set(range(self._size)) - set(answers):
                path = self._folder / f"answer.{self._number}.{rank}"
                if path.exists():
                    answers[rank] = pickle.loads(path.read_bytes())
                elif self._processes[rank].poll() is not None:
                    answers[rank] = False, f"exit code {self._processes[rank].returncode}\n{self._tail(rank)}"
            if any(not ok for ok, _ in answers.values()):
                patience = min(patience, time.monotonic() + 2.0)
            if time.monotonic() > patience:
                break
            time.sleep(0.005)
        failed = {rank: text for rank, (ok, text) in answers.items() if not ok}
        late = sorted(set(range(self._size)) - set(answers))
        if failed or late:
            self.close(kill=True)
            texts = [f"--- rank {rank} ---\n{text}" for rank, text in failed.items()]
            texts += [f"--- rank {rank} did not answer ---\n{self._tail(rank)}" for rank in late]
            raise AssertionError(f"{function.__name__} failed\n" + "\n".join(texts))
        return [answers[rank][1] for rank in range(self._size)]

    @property
    def lives(self) -> bool:
        return all(process.poll() is None for process in self._processes)

    def close(self, kill: bool = False) -> None:
        for process in self._processes:
            assert process.stdin is not None
            if kill:
                process.kill()
            process.stdin.close()
        for process in self._processes:
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _tail(self, rank: int) -> str:
        return self._logs[rank].read_text(errors="replace")[-4000:]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[int], TestWorld]]:
    """`world(4).run(function, *arguments)` gives the list of results of 4 ranks.

    A world is started when it is first asked for, serves the whole module, and is replaced when a case broke it.
    """
    worlds: dict[int, TestWorld] = {}

    def get(size: int) -> TestWorld:
        if size not in worlds or not worlds[size].lives:
            worlds[size] = TestWorld(size, tmp_path_factory.mktemp(f"world{size}"))
        return worlds[size]

    yield get
    for one in worlds.values():
        one.close()
