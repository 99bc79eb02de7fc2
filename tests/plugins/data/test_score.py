"""What `evenload score` refuses before a rank starts, and what it leaves out of the recipe."""

import fcntl
import json

import pytest
from evenload.api import load_plugins
from evenload.core.errors import EvenloadError
from evenload.core.recipe.recipe import parse
from evenload.plugins.data.score import asked
from evenload.runtime.files import LOCK

load_plugins()
DOMAINS = {name: {"source": "python-docstrings"} for name in "ab"}


RECIPE = """
trainer: megatron
model: {num_layers: 2, hidden_size: 32, num_attention_heads: 4, num_query_groups: 2}
data: {source: rows.jsonl, max_length: 64}
parallel: {dp: 1}
train: {steps: 1, global_batch_size: 4, dtype: fp64}
plugins: {packing: {enabled: true, max_tokens: 64}}
"""
KILLED = """
import os, signal
from evenload.plugins.data.reference import LossFiles
write = LossFiles.write
def dying(files, sample, losses):
    write(files, sample, losses)
    os.kill(os.getpid(), signal.SIGKILL)
LossFiles.write = dying
"""
HASTY = "import evenload.runtime.world.folder_lock as module; module.WAIT_S = 0.1"


@pytest.mark.slow
def test_a_folder_has_one_writer_and_one_that_was_killed_keeps_nobody_out(tmp_path, forged):
    rows = [json.dumps({"text": f"{word} {n} " * (n % 5 + 1)}) for n, word in enumerate(["one", "tea", "idea"] * 4)]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    (tmp_path / "r.yaml").write_text(RECIPE)
    assert forged(tmp_path, "train", "r.yaml", "checkpoint.dir=kept").returncode == 0

    def scored(out, planted=""):
        return forged(tmp_path, "score", "r.yaml", "--checkpoint", "kept", "--out", out, planted=planted)

    assert scored("out", KILLED).returncode != 0
    assert {path.name for path in (tmp_path / "out").iterdir()} == {LOCK, "unfinished.json", "all.npy"}
    with (tmp_path / "out" / LOCK).open("a") as lock:
        fcntl.lockf(lock, fcntl.LOCK_EX)
        second = scored("out", HASTY)
    assert (second.returncode, "another run writes into out" in second.stderr) == (2, True)
    assert scored("out").returncode == scored("alone").returncode == 0
    assert (tmp_path / "out" / "all.npy").read_bytes() == (tmp_path / "alone" / "all.npy").read_bytes()


def test_policies_of_data_have_no_part_in_it(tmp_path):
    data = {"enabled": True, "reference": "nowhere", "mix": {"policy": "doremi"}}
    recipe = parse({"data": {"domains": DOMAINS}, "plugins": {"data": data}})
    with pytest.raises(EvenloadError, match="nothing has trained"):
        asked(recipe, tmp_path / "out", None)
    with pytest.raises(EvenloadError, match="there is no checkpoint in"):
        asked(recipe, tmp_path / "out", tmp_path)
    (tmp_path / "taken").write_text("")
    with pytest.raises(EvenloadError, match="is not empty"):
        asked(recipe, tmp_path, tmp_path)
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "evenload.json").write_text("{}")
    out = tmp_path / "out"
    out.mkdir()
    for name, text in {LOCK: "", "unfinished.json": '{"data": {"a": ""}}', "a.npy": "", "b.npy": ""}.items():
        (out / name).write_text(text)
    with pytest.raises(EvenloadError, match="is not empty") as caught:
        asked(recipe, out, tmp_path / "kept")
    assert caught.value.found == "1 entries, such as b.npy"
    (out / "b.npy").unlink()
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(EvenloadError, match="is no folder"):
        asked(recipe, tmp_path / "loop", tmp_path / "kept")
    scored, folder = asked(recipe, out, tmp_path / "kept")
    assert folder == tmp_path / "kept"
    assert scored.data_policy("mix") is None
    assert scored.data.domains == recipe.data.domains
