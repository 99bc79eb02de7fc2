"""Commands on real trainers without paying for their imports each time: ranks are forks of a process that has them."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from evenload.face import load_recipe

Done = subprocess.CompletedProcess[str]


class Forge:
    """One process that has imported one trainer, and forks the ranks of one job after the other."""

    def __init__(self, trainer: str, folder: Path) -> None:
        self._folder, self._number = folder, 0
        clean = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
        script = Path(__file__).with_name("rank_forge.py")
        self._log = (folder / "log").open("wb")
        self._process = subprocess.Popen(
            [sys.executable, str(script), trainer],
            env={**clean, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )

    def run(self, place: Path, arguments: tuple[str, ...], ranks: int, planted: str, limit_s: float) -> Done:
        """Run ``evenload ARGUMENTS`` as so many ranks; stdout is rank 0's, stderr what all of them said."""
        outputs = self._folder / str(self._number)
        outputs.mkdir()
        (outputs / "planted.py").write_text(planted)
        self._number += 1
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        job = {"place": str(place), "arguments": arguments, "ranks": ranks, "port": port, "outputs": str(outputs)}
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({**job, "planted": bool(planted), "limit_s": limit_s}) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, (self._folder / "log").read_text()[-3000:]
        codes = json.loads(answer)
        code = next((c for c in sorted(codes, reverse=True) if c > 0), min(codes))
        said = "".join((outputs / f"err.{rank}").read_text() for rank in range(ranks))
        return Done(list(arguments), code, (outputs / "out.0").read_text(), said)

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()


Forged = Callable[..., Done]


@pytest.fixture(scope="session")
def forged(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forged]:
    """``forged(place, verb, recipe, key=value ..., planted=code)`` does what ``evenload`` does there, launcher aside.

    ``ranks``: of the job, else what the recipe's layout needs; ``planted`` is code that every rank runs first.
    """
    forges: dict[str, Forge] = {}

    def run(place: Path, *arguments: str, ranks: int = 0, planted: str = "", limit_s: float = 250) -> Done:
        overrides = [word for word in arguments[2:] if "=" in word and not word.startswith("-")]
        recipe = load_recipe(place / arguments[1], overrides)
        if recipe.trainer not in forges:
            forges[recipe.trainer] = Forge(recipe.trainer, tmp_path_factory.mktemp(f"forge_{recipe.trainer}"))
        return forges[recipe.trainer].run(place, arguments, ranks or recipe.min_world_size, planted, limit_s)

    yield run
    for forge in forges.values():
        forge.close()
