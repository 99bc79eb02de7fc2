"""The examples of mixtures in loops that are not ours: killed and gone on with, each step has the same samples."""

from __future__ import annotations

import email
import json
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import evenload
import pytest

pytestmark = pytest.mark.slow
EXAMPLES = Path(evenload.__file__).parent / "examples" / "mixture"
LOOPS = {"torch": "torch", "deepspeed": "deepspeed", "trainer": "huggingface", "megatron": "megatron"}
"""Of each example the forge that has imported its trainer."""
STEPS, BATCH = 6, 16
EMAIL = sum(path.stat().st_size for path in Path(email.__path__[0]).glob("*.py")) // 64
"""Samples of the first domain."""
KILLED = """
import json, os
dumps, rows = json.dumps, []
def dying(row, *args, **kwargs):
    if isinstance(row, dict) and "numbers" in row:
        rows.append(row["step"])
        if row["step"] == 3:
            os._exit(9)
    return dumps(row, *args, **kwargs)
json.dumps = dying
"""
"""Ends every rank inside its fourth step, behind the checkpoint of two steps."""


def steps_of(out: Path) -> dict[int, list[int]]:
    """The samples of each step over all ranks, of the run that trained it last."""
    steps: dict[int, dict[str, list[list[int]]]] = {}
    for path in sorted(out.glob("rank*.jsonl")):
        for row in map(json.loads, path.read_text().splitlines()):
            steps.setdefault(row["step"], {}).setdefault(path.name, []).append(row["numbers"])
    return {step: sorted(chain(*chain(*by_rank.values()))) for step, by_rank in steps.items()}


def told(out: Path) -> dict[int, list[int]]:
    """What a run has trained on so far; then its logs go, so that the next one begins new ones."""
    steps = steps_of(out)
    for path in out.glob("rank*.jsonl"):
        path.unlink()
    return steps


@pytest.mark.parametrize("loop", LOOPS)
def test_a_loop_that_is_killed_goes_on_with_the_same_samples(
    loop: str, tmp_path: Path, scripted: Callable[..., Any]
) -> None:
    script = EXAMPLES / f"{loop}_loop.py"

    def run(out: str, ranks: int, *, planted: str = "") -> dict[int, list[int]]:
        done = scripted(LOOPS[loop], tmp_path, script, tmp_path / out, STEPS, ranks=ranks, planted=planted)
        assert done.returncode == (9 if planted else 0), done.stderr[-3000:]
        return told(tmp_path / out)

    whole = run("whole", 2)
    assert list(whole) == list(range(STEPS))
    assert all(len(set(numbers)) == BATCH for numbers in whole.values())
    assert len(set(chain(*whole.values()))) == STEPS * BATCH, "no sample twice"
    drawn = [sum(number < EMAIL for number in numbers) for numbers in whole.values()]
    assert drawn[:4] == [4] * 4, "of the first domain, one to three"
    assert drawn[4:] == [12] * 2 if loop != "torch" else drawn[4] != 4, "and then by other shares"
    killed = run("killed", 1, planted=KILLED)
    assert killed == {step: whole[step] for step in range(3)}
    again = run("killed", 1)
    assert again == {step: whole[step] for step in range(2, STEPS)}, "on one rank, from the last checkpoint on"
