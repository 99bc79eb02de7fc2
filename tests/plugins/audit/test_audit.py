"""`evenload audit`: what it says of a command that nobody edited, its exit codes, and that nothing is updated."""

import json
import sys
from pathlib import Path

import pytest
from harness.cases import full
from harness.commands import TORCHRUN, command
from harness.without import needs

pytestmark = pytest.mark.usefixtures("on_cpus")

SCRIPTS = Path(__file__).parents[2] / "scripts"
LOOP = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM
sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "vocab_size": 64}
model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=1, initializer_range=0.3, **sizes))
optimizer = torch.optim.AdamW(model.parameters())
tokens = torch.randint(1, 64, (1, 24))
positions = torch.cat([torch.arange(9), torch.arange(15)])[None]
labels = tokens.masked_fill(positions == 0, -100)
mask = torch.ones_like(tokens)
model(input_ids=tokens, labels=labels, position_ids=positions, attention_mask=mask).loss.backward()
optimizer.step()
print("updated")
"""


@pytest.fixture
def recipe(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text("trainer: transformers\nplugins: {packing: {enabled: true, max_tokens: 64}}\n")
    return path


@full
@pytest.mark.slow
def test_a_right_script_of_two_ranks_is_right_and_nothing_is_trained(tmp_path, recipe):
    done = command(tmp_path, "audit", recipe, "--json", "--", *TORCHRUN, SCRIPTS / "trainer_script.py", tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout)
    step = result["step"]
    assert (result["verdict"], step["ranks"], step["micro_batches"], step["samples"]) == ("right", 2, [2, 2], 8)
    assert step["busiest_over_mean"] >= 1.0
    assert step["padding_frac"] > 0
    assert "came to its end" not in done.stderr
    assert not list(tmp_path.glob("checkpoint*"))


@pytest.mark.slow
def test_a_wrong_script_is_wrong_before_its_update(tmp_path, recipe):
    (tmp_path / "loop.py").write_text(LOOP)
    done = command(tmp_path, "audit", recipe, "--", sys.executable, tmp_path / "loop.py")
    assert done.returncode == 1, done.stderr[-3000:]
    said = " ".join(done.stdout.split())
    assert (
        "wrong: token 0 of sample 1 of micro-batch 0 on rank 0 (row 0, slots 9 to 23): attention looks across" in said
    )
    assert "updated" not in done.stdout + done.stderr


@needs("packing")
def test_what_cannot_be_judged_is_a_wrong_request(tmp_path, recipe):
    done = command(tmp_path, "audit", recipe, "--", sys.executable, "-c", "1 / 0")
    assert done.returncode == 2
    assert "nothing judged: the command ended with exit code 1 before its first update" in done.stdout
    done = command(tmp_path, "audit", "quickstart", "--", sys.executable, "-c", "pass")
    assert done.returncode == 2
    assert "do: write trainer: deepspeed or transformers" in done.stderr
    done = command(tmp_path, "audit", recipe, "--border", "x", "--", sys.executable, "-c", "pass")
    assert done.returncode == 2
    assert "--border" in done.stderr
