"""`evenload run`: exit codes, the startup folder, and who is left alone."""

import base64
import json
import os
import signal
import subprocess
import sys
import time
import zlib
from contextlib import contextmanager
from pathlib import Path

import pytest
from evenload.commands.env import STARTUP
from evenload.commands.run import run as run_command
from evenload.core.errors import EvenloadError
from harness.cases import full
from harness.commands import ACCELERATE, TORCHRUN, command
from harness.forge import free_port
from harness.without import needs

pytestmark = pytest.mark.usefixtures("on_cpus")

SCRIPTS = Path(__file__).parents[1] / "scripts"
QUIET = (
    "import sys, importlib.util as u; u.find_spec('megatron.core'); "
    "assert not {'evenload', 'torch', 'megatron.core'} & set(sys.modules)"
)


@pytest.fixture
def recipe(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text("trainer: megatron\nplugins: {packing: {enabled: true}}\n")
    return path


def start(recipe, *words):
    return command(recipe.parent, "run", recipe, "--", *words)


@pytest.mark.parametrize(
    ("code", "wanted"),
    [("pass", 0), ("raise SystemExit(3)", 3), ("1 / 0", 1), ("import os; os.kill(os.getpid(), 9)", 137)],
)
def test_the_exit_code_is_the_commands(recipe, capfd, code, wanted):
    before = signal.getsignal(signal.SIGTERM)
    assert run_command(recipe, [sys.executable, "-c", code]) == wanted
    last = capfd.readouterr().err.splitlines()[-1]
    assert last.startswith("evenload: warning: nothing was planned: no process")
    assert "imported megatron.core; nothing was switched on" in last
    assert signal.getsignal(signal.SIGTERM) is before


SIGNALLED = """
import os, signal, sys, time
def note(number, _):
    print(signal.Signals(number).name, flush=True)
    number == signal.SIGTERM and sys.exit(7)
for name in ("SIGUSR1", "SIGUSR2", "SIGHUP", "SIGINT", "SIGTERM"):
    signal.signal(getattr(signal, name), note)
print(os.getpid(), flush=True)
while True:
    time.sleep(0.02)
"""


@contextmanager
def signalled(recipe):
    """The command under `evenload run`, and its process id."""
    words = [sys.executable, "-m", "evenload", "run", recipe, "--", sys.executable, "-c", SIGNALLED]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, start_new_session=True) as run:
        yield run, int(run.stdout.readline())


def test_signals_reach_the_command(recipe):
    with signalled(recipe) as (run, _):
        for name in ("SIGUSR1", "SIGUSR2", "SIGHUP", "SIGINT", "SIGTERM"):
            run.send_signal(getattr(signal, name))
            assert run.stdout.readline().strip() == name
        assert run.wait(20) == 7


def test_a_command_ends_with_a_run_that_is_killed(recipe):
    with signalled(recipe) as (run, pid):
        run.kill()
        assert run.stdout.read() == "SIGTERM\n"
        while os.path.exists(f"/proc/{pid}") and Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z":
            time.sleep(0.05)  # it is about to end


@needs("packing")
def test_keys_in_front_of_the_command_change_the_recipe(recipe):
    show = (sys.executable, "-c", "import os; print(os.environ['PYTHON_EVENLOAD'])")
    (line,) = start(recipe, *show).stdout.splitlines()
    done = command(recipe.parent, "run", recipe, "plugins.packing.max_tokens=77", "--", *show)
    contents = [json.loads(zlib.decompress(base64.urlsafe_b64decode(one))) for one in (line, done.stdout)]
    own, changed = (content["recipe"]["plugins"]["packing"] for content in contents)
    assert changed == {**own, "max_tokens": 77}
    assert command(recipe.parent, "run", recipe, "plugins.packing.max_token=77", "--", *show).returncode == 2


def test_a_run_that_requires_plans_and_has_none_is_no_success(recipe, capfd):
    assert run_command(recipe, [sys.executable, "-c", "pass"], required=True) == 2
    assert run_command(recipe, [sys.executable, "-c", "raise SystemExit(3)"], required=True) == 3
    assert "nothing was planned" in capfd.readouterr().err


def test_a_wrong_request_is_refused(recipe):
    with pytest.raises(EvenloadError, match="no such command"):
        run_command(recipe, ["no-such-command"])
    with pytest.raises(EvenloadError, match="no such command"):
        run_command(recipe, [])
    with pytest.raises(EvenloadError, match="cannot be read"):
        run_command(recipe.with_name("absent.yaml"), [sys.executable])
    assert start(recipe, "no-such-command").returncode == 2


def test_settings_of_our_own_loop_are_said_to_have_no_effect(recipe, capfd):
    run_command(recipe, [sys.executable, "-c", "pass"])
    assert "no effect" not in capfd.readouterr().err
    recipe.write_text(
        "model: {num_layers: 3, num_attention_heads: 8}\ndata: {source: docs.jsonl, validation: {source: held.jsonl}}\n"
        "train: {lr: 1e-3, recompute: true, micro_batch_size: 2, steps: 4, seed: 1}\nlog: {every: 5}\n"
        "plugins: {packing: {enabled: true}}\nplanner: {budget_ms: 9}\n"
    )
    run_command(recipe, [sys.executable, "-c", "pass"])
    said = "model.num_layers, model.num_attention_heads, data.source, data.validation, train.lr, train.steps and 3 more"
    assert f"the recipe's {said} have no effect here" in capfd.readouterr().err.splitlines()[0]


def test_a_process_that_does_not_import_the_trainer_is_left_alone(recipe):
    done = start(recipe, sys.executable, "-c", QUIET)
    assert done.returncode == 0, done.stderr


def test_the_users_own_sitecustomize_runs_in_every_process(recipe, tmp_path, monkeypatch):
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.users_own = __file__\n")
    look = f"import sys; print(sys.users_own, {str(STARTUP)!r} in sys.path)"
    child = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {look!r}], check=True); {look}"
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    done = start(recipe, sys.executable, "-c", child)
    assert done.stdout.split() == [str(tmp_path / "sitecustomize.py"), "False"] * 2, done.stderr


@full
@pytest.mark.slow
def test_an_unmodified_script_of_the_trainer_is_planned_to_its_end_under_accelerate(tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("trainer: transformers\nplugins: {packing: {enabled: true, max_tokens: 64}}\n")
    script = (SCRIPTS / "trainer_script.py", tmp_path)
    done = start(recipe, *ACCELERATE, "--main_process_port", free_port(), *script)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("came to its end") == 2
    assert done.stderr.splitlines()[-1] == "evenload: planned 2 steps of Transformers' Trainer with packing"
    assert (tmp_path / "checkpoint-2").is_dir()


@full
@pytest.mark.slow
def test_a_failing_script_under_torchrun_gives_1(recipe, tmp_path):
    script = tmp_path / "fails.py"
    script.write_text("raise SystemExit(7)\n")
    done = start(recipe, *TORCHRUN[:-1], "1", script)
    assert done.returncode == 1
