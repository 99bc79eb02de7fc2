"""evenload's numbers reach the trackers that the host has, and nothing else of its logs changes."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from evenload.api import load_plugins
from evenload.core.plan.step_plan import as_lengths
from evenload.core.planning.chain import PlanChain
from evenload.core.recipe.recipe import parse
from evenload.integrations.megatron.unmodified.writers import MegatronSession
from evenload.integrations.unmodified.planned_loop import LoopSession
from evenload.runtime.world import agreement

SCRIPT = Path(__file__).parents[1] / "scripts" / "trainer_script.py"
NAMES = {"step_s", "plan_s", "predicted_s", "predicted_imbalance", "predicted_bubble_frac", "padding_frac"}
LENGTHS = as_lengths([60, 50, 30, 20, 20, 10, 10, 10])


def loop_of(kind: type[LoopSession] = LoopSession) -> LoopSession:
    load_plugins()
    agreement.before_first = None
    recipe = parse({"plugins": {"packing": {"enabled": True, "max_tokens": 64}}})
    return kind(name="a loop", planners=PlanChain.of_recipe(recipe, recipe.layout(1)))


def test_a_loop_has_the_numbers_of_its_last_reported_step() -> None:
    loop = loop_of()
    assert not loop.numbers
    loop.report(loop.plan(LENGTHS))
    assert set(loop.numbers) == {f"evenload/{name}" for name in NAMES - {"step_s"}}
    loop.report(loop.plan(LENGTHS))
    assert set(loop.numbers) == {f"evenload/{name}" for name in NAMES}
    assert loop.numbers["evenload/step_s"] > 0
    assert loop.numbers["evenload/predicted_imbalance"] >= 1


def test_megatron_s_writers_get_them_as_often_as_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for the module of Megatron-LM, which no index has."""
    loop = loop_of(MegatronSession)
    loop.report(loop.plan(LENGTHS))
    scalars: list[tuple[str, float, int]] = []
    logged: list[tuple[dict[str, float], int]] = []
    args = SimpleNamespace(curr_iteration=0, tensorboard_log_interval=2)
    board = SimpleNamespace(add_scalar=lambda *row: scalars.append(row))
    project = SimpleNamespace(log=lambda *row: logged.append(row))
    module = SimpleNamespace(
        get_args=lambda: args, get_tensorboard_writer=lambda: board, get_wandb_writer=lambda: project
    )
    monkeypatch.setitem(sys.modules, "megatron.training.global_vars", module)
    for args.curr_iteration in range(4):
        loop.report(loop.plan(LENGTHS))
    assert [step for _, step in logged] == [2, 4]
    assert {(name, step) for name, _, step in scalars} == {(f"evenload/{name}", s) for name in NAMES for s in (2, 4)}
    board = None  # other ranks have none
    loop.report(loop.plan(LENGTHS))
    assert len(logged) == 2


@pytest.mark.slow
def test_a_trainer_s_tensorboard_gets_them_and_its_own_logs_stay(scripted: Callable[..., Any], tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    script, printed, scalars = tmp_path / "train.py", [], []
    script.write_text(SCRIPT.read_text().replace('report_to="none"', 'report_to="tensorboard", logging_steps=1'))
    for switched_on in ("", "import evenload; evenload.enable('hf-trainer')"):
        folder = tmp_path / ("planned" if switched_on else "stock")
        board = f"import os; os.environ['TENSORBOARD_LOGGING_DIR'] = {str(folder / 'board')!r}\n"
        done = scripted("huggingface", tmp_path, script, folder, planted=board + switched_on)
        assert done.returncode == 0, done.stderr[-2000:]
        logs = [re.sub(r"'(train_\w+|grad_norm)': [^,}]+", "", row) for row in done.stdout.splitlines()]
        printed.append([row for row in logs if "'loss'" in row or "evenload" in row])
        history = json.loads(next(folder.glob("checkpoint-2/trainer_state.json")).read_text())["log_history"]
        assert not [key for row in history for key in row if "evenload" in key]
        boards = accumulator.EventAccumulator(str(next(folder.rglob("events.*")).parent))
        boards.Reload()
        scalars.append(set(boards.Tags()["scalars"]))
    assert printed[0] == printed[1] != []
    assert scalars[1] - scalars[0] == {f"train/evenload/{name}" for name in NAMES}
    assert not scalars[0] - scalars[1]
