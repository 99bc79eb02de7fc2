"""`evenload check`: one step of a command that nobody edited, what it says, and that nothing is updated."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

SCRIPTS = Path(__file__).parents[1] / "scripts"
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def evenload(*words: object) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "CUDA_VISIBLE_DEVICES": ""}
    if "lo" in (name for _, name in socket.if_nameindex()):
        env["GLOO_SOCKET_IFNAME"] = "lo"
    command = [sys.executable, "-m", "evenload", *map(str, words)]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=250, check=False)


@pytest.fixture
def deepspeed_script(tmp_path):
    """The words that start the script on two ranks."""
    settings = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2, "gradient_clipping": 0.0}
    (tmp_path / "ds.json").write_text(json.dumps({**settings, "zero_allow_untested_optimizer": True}))
    return [*TORCHRUN, SCRIPTS / "deepspeed_script.py", "--ds-config", tmp_path / "ds.json", "--out", tmp_path]


def recipe(folder: Path, trainer: str, max_tokens: int) -> Path:
    path = folder / "recipe.yaml"
    path.write_text(f"trainer: {trainer}\nplugins: {{packing: {{enabled: true, max_tokens: {max_tokens}}}}}\n")
    return path


def test_a_step_of_deepspeed_is_checked_and_nothing_is_trained(tmp_path, deepspeed_script):
    done = evenload("check", recipe(tmp_path, "deepspeed", 160), "--json", "--", *deepspeed_script)
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


def test_a_step_of_megatron_is_checked_and_nothing_is_trained(tmp_path):
    words = (SCRIPTS / "megatron_script.py", "--out", tmp_path, "--dtypes", "fp64")
    done = evenload("check", recipe(tmp_path, "megatron", 128), "--", *TORCHRUN, *words)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "planned: 1 step of Megatron-Core with packing" in done.stdout
    assert "first step, Megatron-Core, 2 data-parallel ranks" in done.stdout
    assert "samples, tokens" in done.stdout
    assert not list(tmp_path.glob("*.pt")), "the script came to its end"


def test_a_refusal_is_one_message_for_all_ranks(tmp_path, deepspeed_script):
    """As that of ``evenload run``: see tests/hosts/test_messages.py."""
    done = evenload("check", recipe(tmp_path, "deepspeed", 8), "--", *deepspeed_script)
    assert done.returncode == 2
    message, *_ = [line for line in done.stderr.splitlines() if line.startswith("evenload: ")]
    assert done.stderr.count(message) == 1
    assert "EvenloadError" not in done.stderr
    assert "exitcode  : 2" in done.stderr
    assert "refused: " in done.stdout


def test_a_loop_that_nobody_knows_is_ended_before_its_update(tmp_path):
    script = tmp_path / "own_loop.py"
    script.write_text(
        "import transformers, torch\nw = torch.nn.Parameter(torch.ones(2))\n"
        "w.sum().backward()\ntorch.optim.AdamW([w]).step()\nprint('updated')\n"
    )
    done = evenload("check", recipe(tmp_path, "deepspeed", 160), "--json", "--", sys.executable, script)
    assert done.returncode == 1, done.stderr
    result = json.loads(done.stdout)
    assert (result["verdict"], result["step"]) == ("nothing planned", None)
    assert "no loop that evenload knows" in result["idle"][0]["why"]
    assert "updated" not in done.stderr
    done = evenload("run", recipe(tmp_path, "deepspeed", 160), "--", sys.executable, script)
    assert (done.returncode, done.stdout) == (0, "updated\n")
    last = done.stderr.splitlines()[-1]
    assert last.startswith("evenload: warning: nothing was planned: a process imported ")
    assert "give deepspeed.initialize the data set as training_data=" in last


def test_a_command_with_an_error_of_its_own_has_failed(tmp_path):
    code = "import megatron.core; 1 / 0"
    done = evenload("check", recipe(tmp_path, "megatron", 128), "--json", "--", sys.executable, "-c", code)
    result = json.loads(done.stdout)
    assert (done.returncode, result["verdict"]) == (1, "failed")
    assert result["says"].startswith("the command ended with exit code 1 before its first planned step")


def test_a_step_of_the_trainer_is_checked_under_its_own_launcher(tmp_path):
    launcher = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch", "--multi_gpu", "--num_machines"]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    words = [*launcher, 1, "--mixed_precision", "no", "--dynamo_backend", "no", "--num_processes", 2]
    words += ["--main_process_port", port, SCRIPTS / "trainer_script.py", tmp_path]
    done = evenload("check", recipe(tmp_path, "transformers", 64), "--json", "--", *words)
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout)
    assert (result["verdict"], result["says"]) == ("planned", "1 step of Transformers' Trainer with packing")
    assert (result["step"]["ranks"], result["step"]["samples"]) == (2, 8)
    assert result["step"]["padded_tokens"] == 0 < result["step"]["stock_padded_tokens"]
    assert not list(tmp_path.glob("checkpoint*"))
    assert "came to its end" not in done.stderr
