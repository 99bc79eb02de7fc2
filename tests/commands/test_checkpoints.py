"""The last good checkpoint survives whatever happens to the next one."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from evenload.commands import checkpoints
from evenload.core.errors import RankError


def write_bytes(directory: Path) -> None:
    (directory / "shard").write_bytes(b"x" * 1000)


def save(root: Path, step: int, write: object = write_bytes, keep: int = 2) -> Path:
    return checkpoints.save(root, step, {"order": step}, write, rank=0, keep=keep)  # type: ignore[arg-type]


def test_saves_are_found_pruned_and_replaced(tmp_path: Path) -> None:
    assert checkpoints.last_good(tmp_path) is None
    for step in (1, 2, 3):
        save(tmp_path, step)
    assert sorted(d.name for d in tmp_path.glob("step*")) == ["step00000002", "step00000003"]
    assert checkpoints.last_good(tmp_path) == tmp_path / "step00000003"
    assert checkpoints.read_state(tmp_path / "step00000003")["order"] == 3
    save(tmp_path, 3)
    save(tmp_path, 4, keep=1)
    assert [d.name for d in tmp_path.glob("step*")] == ["step00000004"]


def test_a_failing_writer_leaves_the_old_one(tmp_path: Path) -> None:
    save(tmp_path, 1)

    def fail(directory: Path) -> None:
        write_bytes(directory)
        raise OSError(28, "No space left on device")

    with pytest.raises(RankError, match="step00000002 was not written") as caught:
        save(tmp_path, 2, fail)
    assert "No space left" in caught.value.found
    assert "step00000001" in caught.value.do
    assert checkpoints.last_good(tmp_path) == tmp_path / "step00000001"
    save(tmp_path, 2)
    assert checkpoints.last_good(tmp_path) == tmp_path / "step00000002"


@pytest.mark.parametrize("damage", ["truncate", "remove", "manifest"])
def test_a_damaged_checkpoint_is_passed_over(tmp_path: Path, damage: str) -> None:
    save(tmp_path, 1)
    newest = save(tmp_path, 2)
    if damage == "truncate":
        (newest / "trainer" / "shard").write_bytes(b"x")
    elif damage == "remove":
        (newest / "trainer" / "shard").unlink()
    else:
        (newest / checkpoints.MANIFEST).write_text("{")
    assert checkpoints.last_good(tmp_path) == tmp_path / "step00000001"


CHILD = """
import sys
from pathlib import Path
from evenload.commands import checkpoints
root = Path(sys.argv[1])
good = checkpoints.last_good(root)
step = checkpoints.read_state(good)["step"] if good else 0
def write(directory):
    for k in range(4):
        (directory / f"shard{k}").write_bytes(b"x" * 200_000)
while True:
    step += 1
    checkpoints.save(root, step, {}, write, rank=0, keep=2)
    print(step, flush=True)
"""


@pytest.mark.slow
def test_kills_at_any_moment_never_tear_or_lose_a_checkpoint(tmp_path: Path) -> None:
    acknowledged = 0
    delays = random.Random(5)
    for _ in range(6):
        child = subprocess.Popen([sys.executable, "-c", CHILD, str(tmp_path)], stdout=subprocess.PIPE, text=True)
        assert child.stdout is not None
        child.stdout.readline()
        time.sleep(0.2 * delays.random())
        child.send_signal(signal.SIGKILL)
        said = child.communicate()[0].split()
        good = checkpoints.last_good(tmp_path)
        assert good is not None
        state = json.loads((good / checkpoints.MANIFEST).read_text())
        assert state["step"] >= max([acknowledged, *map(int, said)])
        acknowledged = state["step"]
