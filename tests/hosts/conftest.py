"""Scripts of users on two ranks: `hosts` starts them from a forge, `assets` is what they train on."""

from __future__ import annotations

import importlib.util
import itertools
import socket
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest


def load(name: str) -> ModuleType:
    """A module of this folder: there is no package to find it in."""
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


launching = load("launching")


def ends(ranks: Sequence[Any], limit_s: float = 120.0, grace_s: float = 20.0) -> list[int]:
    """Exit codes of the ranks; after one has failed the others have `grace_s` to end by themselves."""
    deadline = time.monotonic() + limit_s
    while any(rank.poll() is None for rank in ranks):
        if any(rank.returncode for rank in ranks):
            deadline = min(deadline, time.monotonic() + grace_s)
        if time.monotonic() > deadline:
            for rank in ranks:
                rank.end()
        time.sleep(0.02)
    return [rank.returncode for rank in ranks]


@pytest.fixture(scope="session")
def assets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of tiny models and ragged data."""
    folder = tmp_path_factory.mktemp("assets")
    load("assets").make(folder)
    return folder


@pytest.fixture(scope="session")
def forged_launch(forge: Callable[[str], Any]) -> Callable[..., Any]:
    """`launching.launch` by torchrun with the imports done already; rank 1 may be left without evenload."""

    def launch(
        script: Path,
        arguments: Sequence[object],
        folder: Path,
        recipe: Path | None = None,
        variables: dict[str, str] | None = None,
        limit_s: float = 120.0,
        one_sided: bool = False,
    ) -> Any:
        folder.mkdir(exist_ok=True)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        group = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        shared = launching.environment(folder) | group | (variables or {})
        start, rank_script = forge("huggingface").start, Path(__file__).with_name("forged_rank.py")
        ranks = [
            start(rank_script, planned, script, *arguments, environment={**shared, "RANK": k, "LOCAL_RANK": k})
            for k, planned in (("0", recipe or ""), ("1", "" if recipe is None or one_sided else recipe))
        ]
        codes = ends(ranks, limit_s)
        (folder / "output.txt").write_text("".join(rank.output for rank in ranks))
        return launching.read_run(folder, max(codes, key=abs))

    return launch


@pytest.fixture
def forged_run(forged_launch: Callable[..., Any], tmp_path: Path) -> Callable[..., Any]:
    """``forged_run(script, words, recipe=None, variables={})``: a script of this folder, each time in a new folder."""
    numbers = itertools.count()

    def run(
        script: str,
        words: Sequence[object],
        recipe: Path | None = None,
        variables: dict[str, str] | None = None,
        **more: Any,
    ) -> Any:
        place = tmp_path / f"run{next(numbers)}"
        return forged_launch(launching.SCRIPTS / script, words, place, recipe, variables, **more)

    return run
