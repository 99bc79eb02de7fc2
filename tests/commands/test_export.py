"""Models that leave evenload as Hugging Face folders: at the end of a run, and from a checkpoint on any layout."""

import json

import pytest
from evenload.core.errors import EvenloadError, refuse_first
from evenload.core.recipe.recipe import parse
from evenload.core.recipe.traits import trainer_called
from harness.cases import only_full
from harness.commands import command

pytestmark = pytest.mark.slow

RECIPE = """
trainer: {trainer}
model: {{num_layers: 2, hidden_size: 32, num_attention_heads: 4, num_query_groups: 2, vocab_size: 256}}
data: {{source: python-stdlib, max_length: 64}}
parallel: {{dp: 2}}
train: {{steps: 1, global_batch_size: 8, export: at_the_end}}
checkpoint: {{dir: kept}}
{more}
plugins: {{packing: {{enabled: true, max_tokens: 256}}}}
"""
UNKNOWN = {"family": "mixtral", "moe": {"num_experts": 4, "topk": 2, "score": "sigmoid"}}
MORE = {"deepspeed": "deepspeed: {zero_stage: 3}", "megatron": ""}
FULL = """
import resource, signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
import evenload.training.checkpoint.exporting as exporting
write = exporting._write
def limited(*arguments):
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
    write(*arguments)
exporting._write = limited
"""


# The second rank dies when the first has written everything, and either asks or has given the folder its name.
KILLED = """
import os, pathlib, signal, time
import evenload.training.checkpoint.exporting as exporting
first_error = exporting.first_error
def agree(error):
    if os.environ["RANK"] == "0":
        pathlib.Path("asked").touch()
    else:
        while not os.path.exists("asked") and not os.path.exists("out"):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
    return first_error(error)
exporting.first_error = agree
"""


@pytest.mark.parametrize(("trainer", "fails"), [("megatron", True), ("deepspeed", False), only_full("deepspeed", True)])
def test_a_model_leaves_at_the_end_and_from_a_checkpoint(trainer, fails, tmp_path, forge, forged):
    """Also where a full disk and a rank that is killed have ended an export before."""
    (tmp_path / "r.yaml").write_text(RECIPE.format(trainer=trainer, more=MORE[trainer]))

    def export(*words, planted=""):
        return forge(trainer).run(tmp_path, ("export", *words, "--json"), 2, planted, limit_s=250)

    trained = json.loads(forged(tmp_path, "train", "r.yaml", "--json").stdout)["export"]
    if fails:
        full = export("kept", "--out", "out", planted=FULL)
        assert (full.returncode, "Traceback" in full.stderr) == (1, False), full.stderr
        assert "the model was not exported" in full.stderr
        assert "the disk is full" in full.stderr
        assert not [*tmp_path.glob("out*")]
        killed = export("kept", "--out", "out", planted=KILLED)
        assert (killed.returncode != 0, (tmp_path / "out").exists()) == (True, False), killed.stderr
    done = json.loads(export("kept/step00000001", "--out", "out").stdout)
    assert (done["tensors"], done["files"], done["step"]) == (trained["tensors"], trained["files"], 1)
    for name in done["files"]:
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "at_the_end" / name).read_bytes()
    for words in (("export", "kept", "--out", "out"), ("train", "r.yaml")):
        refused = command(tmp_path, *words)
        assert refused.returncode == 2
        assert "is not empty" in refused.stderr
    missing = command(tmp_path, "export", "nowhere", "--out", "fresh")
    assert (missing.returncode, "there is no checkpoint" in missing.stderr) == (2, True)


def test_a_model_that_transformers_lacks_is_refused_before_the_run():
    data = {"trainer": "megatron", "model": UNKNOWN, "train": {"export": "out"}}
    rules = trainer_called("megatron").run_rules
    with pytest.raises(EvenloadError, match="cannot be exported"):
        refuse_first(*rules(parse(data)))
    refuse_first(*rules(parse({**data, "train": {}})))
