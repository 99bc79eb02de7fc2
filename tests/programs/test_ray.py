"""Ray Train's workers, of one node and of two: evenload is on in all of them, or they end by one message.

Run by `make test-hosts`, in an environment of its own; elsewhere there is nothing to run.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import evenload
import pytest
from evenload.api import load_recipe
from evenload.commands.env import variables, variables_as

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(Path(sys.prefix).name != ".venv-ray", reason="run by `make test-hosts`"),
]
SCRIPT = Path(evenload.__file__).parent / "examples" / "ray" / "train.py"
RECIPE = "trainer: transformers\nplugins:\n  packing: {enabled: true, max_tokens: 512}\n"
ON_A_CLUSTER = """
import os, ray, runpy, sys, yaml
ray.init(address="auto", runtime_env=yaml.safe_load(open(sys.argv[2])) if sys.argv[2:] else None)
runpy.run_path(sys.argv[1], run_name="__main__")
"""
"""A script on a cluster that runs already; its second argument is what ``ray job submit --runtime-env`` takes."""
PORT = "26379"


def environment(**more: str) -> dict[str, str]:
    plain = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "0", "CUDA_VISIBLE_DEVICES": ""}
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0123456789abcdef" * 2}
    return plain | token | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"} | more


def local_address() -> str:
    from ray.util import get_node_ip_address

    return str(get_node_ip_address())


def ray(*words: str, **more: str) -> str:
    command = [sys.executable, "-m", "ray.scripts.scripts", *words]
    done = subprocess.run(command, env=environment(**more), capture_output=True, text=True, timeout=120, check=True)
    return done.stdout


def ended(folder: Path, *words: object) -> tuple[int, str, float]:
    begin_s = time.monotonic()
    command = [sys.executable, *map(str, words)]
    done = subprocess.run(
        command, cwd=folder, env=environment(), capture_output=True, text=True, timeout=400, check=False
    )
    return done.returncode, done.stdout + done.stderr, time.monotonic() - begin_s


def losses(output: str) -> list[tuple[str, str]]:
    return list(dict.fromkeys(re.findall(r"'loss': '([\d.]+)', 'grad_norm': '([\d.]+)'", output)))


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[str, str]]:
    code, output, _ = ended(tmp_path_factory.mktemp("stock"), SCRIPT)
    assert code == 0, output[-4000:]
    assert len(losses(output)) == 4
    return losses(output)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    (tmp_path / "on_a_cluster.py").write_text(ON_A_CLUSTER)
    (tmp_path / "runtime_env.yaml").write_text(variables_as(load_recipe(tmp_path / "recipe.yaml"), "ray"))
    return tmp_path


@contextmanager
def cluster(**of_first: str) -> Iterator[None]:
    """Two nodes on this machine, one worker each; the first one's processes have these variables beside."""
    ray("stop", "--force")
    try:
        ray("start", "--head", "--port", PORT, "--num-cpus", "1", "--include-dashboard", "false", **of_first)
        ray("start", "--address", f"{local_address()}:{PORT}", "--num-cpus", "1")
        yield
    finally:
        ray("stop", "--force")


def test_run_reaches_the_workers_of_a_cluster_that_it_starts(stock: list[tuple[str, str]], folder: Path) -> None:
    code, output, _ = ended(folder, "-m", "evenload", "run", "recipe.yaml", "--", sys.executable, SCRIPT)
    assert code == 0, output[-4000:]
    assert "evenload: planned 4 steps of Transformers' Trainer with packing" in output
    assert losses(output) == stock


def test_workers_of_a_cluster_that_runs_already_are_reached_by_run_and_by_a_runtime_env(
    stock: list[tuple[str, str]], folder: Path
) -> None:
    script = ["on_a_cluster.py", SCRIPT]
    with cluster():
        by_run = ended(folder, "-m", "evenload", "run", "recipe.yaml", "--", sys.executable, *script)
        by_env = ended(folder, *script, "runtime_env.yaml")
    for code, output, _ in (by_run, by_env):
        assert code == 0, output[-4000:]
        assert losses(output) == stock
        planned = re.findall(r"pid=(\d+)\S* step 4: 16 samples in \d micro-batches", output)
        assert len({*planned}) == 2, output[-4000:]
    assert "evenload: planned 4 steps of Transformers' Trainer with packing" in by_run[1]


def test_half_a_cluster_ends_by_one_message_that_says_what_to_give_the_workers(folder: Path) -> None:
    with cluster(**variables(load_recipe(folder / "recipe.yaml"))):
        code, output, seconds = ended(folder, "on_a_cluster.py", SCRIPT)
    assert code == 1
    assert re.search(r"RankError: rank [01] of 2 runs without evenload", output), output[-4000:]
    assert "evenload env --export ray" in output
    print(f"ended after {seconds:.0f} s, the start of the workers and 15 s of waiting in them")
