"""`evenload check`: one step of a command that nobody edited, what it says, and that nothing is updated."""

import json
import sys
from pathlib import Path

import pytest
from harness.cases import full
from harness.commands import ACCELERATE, TORCHRUN, command
from harness.forge import free_port

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("on_cpus")]

SCRIPTS = Path(__file__).parents[1] / "scripts"


@pytest.fixture
def deepspeed_script(tmp_path):
    """The words that start the script on two ranks."""
    settings = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2, "gradient_clipping": 0.0}
    (tmp_path / "ds.json").write_text(json.dumps({**settings, "zero_allow_untested_optimizer": True}))
    return [*TORCHRUN, SCRIPTS / "deepspeed_script.py", "--ds-config", tmp_path / "ds.json", "--out", tmp_path]


def recipe(folder, trainer, max_tokens):
    path = folder / "recipe.yaml"
    path.write_text(f"trainer: {trainer}\nplugins: {{packing: {{enabled: true, max_tokens: {max_tokens}}}}}\n")
    return path


def test_a_step_of_deepspeed_is_checked_and_nothing_is_trained(tmp_path, deepspeed_script):
    done = command(tmp_path, "check", recipe(tmp_path, "deepspeed", 160), "--json", "--", *deepspeed_script)
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout)
    assert (result["verdict"], result["says"]) == ("planned", "1 step of DeepSpeed with packing")
    assert (result["refusals"], result["idle"]) == ([], [])
    (packing,) = result["plugins"]
    assert packing == {"name": "packing", "on": True, "refused": None, "gain": result["step"]["gain"]}
    step = result["step"]
    # One of the eight has no target, and no loss.
    assert (step["loop"], step["ranks"], step["samples"]) == ("DeepSpeed", 2, 7)
    assert sum(step["lengths"]) == step["tokens"]
    assert step["padded_tokens"] < step["stock_padded_tokens"]
    assert not list(tmp_path.glob("*.pt")), "the script came to its end"


@full
def test_a_step_of_megatron_is_checked_and_nothing_is_trained(tmp_path):
    words = (SCRIPTS / "megatron_script.py", "--out", tmp_path, "--dtypes", "fp64")
    done = command(tmp_path, "check", recipe(tmp_path, "megatron", 128), "--", *TORCHRUN, *words)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "planned: 1 step of Megatron-Core with packing" in done.stdout
    assert "first step, Megatron-Core, 2 data-parallel ranks" in done.stdout
    assert "samples, tokens" in done.stdout
    assert not list(tmp_path.glob("*.pt")), "the script came to its end"


@full
def test_what_cannot_fit_is_said_and_ends_before_the_update(tmp_path, deepspeed_script):
    done = command(tmp_path, "check", recipe(tmp_path, "deepspeed", 8), "--json", "--", *deepspeed_script)
    assert done.returncode == 1
    result = json.loads(done.stdout)
    assert (result["verdict"], result["refusals"]) == ("nothing planned", [])
    (idle,) = result["idle"]
    assert idle["loop"] == "DeepSpeed"
    assert "max_tokens" in idle["why"] + idle["do"]
    assert "EvenloadError" not in done.stderr
    assert not list(tmp_path.glob("*.pt")), "the script came to its end"


OWN_LOOP = """
import transformers, torch
w = torch.nn.Parameter(torch.ones(2))
w.sum().backward()
torch.optim.AdamW([w]).step()
print("updated")
"""


def test_a_loop_that_nobody_knows_is_ended_before_its_update(tmp_path):
    own_loop = (sys.executable, "-c", OWN_LOOP)
    done = command(tmp_path, "check", recipe(tmp_path, "deepspeed", 160), "--json", "--", *own_loop)
    assert done.returncode == 1, done.stderr
    result = json.loads(done.stdout)
    assert (result["verdict"], result["step"]) == ("nothing planned", None)
    assert "no loop that evenload knows" in result["idle"][0]["why"]
    assert "updated" not in done.stderr


@full
def test_a_loop_that_nobody_knows_is_run_as_it_is(tmp_path):
    done = command(tmp_path, "run", recipe(tmp_path, "deepspeed", 160), "--", sys.executable, "-c", OWN_LOOP)
    assert (done.returncode, done.stdout) == (0, "updated\n")
    last = done.stderr.splitlines()[-1]
    assert last.startswith("evenload: warning: nothing was planned: a process imported ")
    assert "give deepspeed.initialize the data set as training_data=" in last


def test_a_command_with_an_error_of_its_own_has_failed(tmp_path):
    code = "import transformers; 1 / 0"
    done = command(tmp_path, "check", recipe(tmp_path, "transformers", 128), "--json", "--", sys.executable, "-c", code)
    result = json.loads(done.stdout)
    assert (done.returncode, result["verdict"]) == (1, "failed")
    assert result["says"].startswith("the command ended with exit code 1 before its first planned step")


@full
def test_a_step_of_the_trainer_is_checked_under_its_own_launcher(tmp_path):
    words = (*ACCELERATE, "--main_process_port", free_port(), SCRIPTS / "trainer_script.py", tmp_path)
    done = command(tmp_path, "check", recipe(tmp_path, "transformers", 64), "--json", "--", *words)
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout)
    assert (result["verdict"], result["says"]) == ("planned", "1 step of Transformers' Trainer with packing")
    assert (result["step"]["ranks"], result["step"]["samples"]) == (2, 8)
    assert result["step"]["padded_tokens"] == 0 < result["step"]["stock_padded_tokens"]
    assert not list(tmp_path.glob("checkpoint*"))
    assert "came to its end" not in done.stderr
