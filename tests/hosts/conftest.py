"""Scripts of users on two ranks: `hosts` starts them from a forge, `assets` is what they train on."""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from harness.forge import free_port

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

import launching  # noqa: E402


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
    folder = tmp_path_factory.mktemp("assets")
    import_module("assets").make(folder)
    return folder


@pytest.fixture(scope="session")
def forged_launch(forge: Callable[[str], Any], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """`launching.launch` by torchrun with the imports done already; rank 1 may be left without evenload."""
    home = {"HF_HOME": str(tmp_path_factory.mktemp("huggingface"))}  # data that one script has read are read

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
        door = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        group = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", **door}
        shared = launching.environment(folder) | home | group | (variables or {})
        start, rank_script = forge("huggingface").start, HERE / "forged_rank.py"
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
    """``forged_run(script, words, recipe=None, variables={})``: a script of this folder, each time in a new folder.

    `recipe`: its text, under which the script is planned.
    """
    numbers = itertools.count()

    def run(script: str, words: Sequence[object], recipe: str = "", variables: Any = None, **more: Any) -> Any:
        place = tmp_path / f"run{next(numbers)}"
        (tmp_path / "recipe.yaml").write_text(recipe)
        planned = tmp_path / "recipe.yaml" if recipe else None
        return forged_launch(launching.SCRIPTS / script, words, place, planned, variables, **more)

    return run
