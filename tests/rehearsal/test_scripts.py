"""Programs that nobody edited, and whole runs, on a rehearsed GPU: stock ends, with evenload the same comes out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from .seen import each_step, seen_in

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "tests" / "scripts"
ON = "trainer: {trainer}\nplugins: {{packing: {{enabled: true, max_tokens: 128}}}}\n"
SMALL = ("model.num_layers=1", "model.hidden_size=32", "model.num_attention_heads=4", "data.max_length=256")
SHORT = (*SMALL, "model.num_query_groups=2", "train.global_batch_size=8", "train.dtype=bf16")

FIRST = {"_local_scalar_dense at integrations/megatron/unmodified/running/objective.py:refuse_loss"}
"""Waits of the first step alone, in which the loop's loss is looked at."""
READS = {
    "Event.synchronize at integrations/transformers/planning.py:_read": "batches come on devices",
    "_local_scalar_dense at integrations/transformers/proof.py:_WithoutDropout.__torch_function__": "once, before all",
}
"""Waits of ours in a Trainer: one a step, for the update before it, since nobody can plan before lengths are known."""


def enabling(folder: Path, trainer: str) -> str:
    """What switches evenload on in every rank, as ``evenload run`` does."""
    recipe = folder / "recipe.yaml"
    recipe.write_text(ON.format(trainer=trainer))
    return f"import evenload; evenload.enable({str(recipe)!r})"


@pytest.mark.parametrize(
    "layout", [pytest.param(("--overlap",), id="dp2"), pytest.param(("--pp", "2"), id="pp2", marks=pytest.mark.cuda)]
)
def test_a_loop_of_megatron(forge: Any, tmp_path: Path, layout: tuple[str, ...]) -> None:
    results = {}
    for name, planted in (("stock", ""), ("planned", enabling(tmp_path, "megatron"))):
        (tmp_path / name).mkdir()
        words = ("--out", str(tmp_path / name), "--dtypes", "fp32", *layout)
        script = SCRIPTS / "megatron_script.py"
        done = forge("cuda+megatron").run(tmp_path / name, words, 2, planted, script)
        assert done.returncode == 0, done.stderr[-3000:]
        seen = seen_in(done.outputs)
        seen.check()
        for waits, to_device in zip(seen.waits, seen.to_device, strict=True):
            assert not each_step(waits, 3).keys() - FIRST, "the loop waits for its loss and its norm; we for nothing"
            assert not [what for what in each_step(to_device, 3) if what.startswith("waits")]
        results[name] = [torch.load(tmp_path / name / f"fp32.rank{rank}.pt", map_location="cpu") for rank in range(2)]
    for stock, planned in zip(results["stock"], results["planned"], strict=True):
        assert planned["shapes"] != stock["shapes"], "nothing was planned"
        for (loss, tokens), (wanted, wanted_tokens) in zip(planned["losses"], stock["losses"], strict=True):
            assert loss == pytest.approx(wanted, rel=1e-6)
            assert tokens == wanted_tokens


@pytest.mark.cuda
def test_a_script_of_transformers(forge: Any, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    text = (SCRIPTS / "trainer_script.py").read_text()
    assert "    use_cpu=True,\n" in text
    script.write_text(text.replace("    use_cpu=True,\n", "    bf16=True,\n    logging_steps=1,\n"))
    losses = {}
    for name, planted in (("stock", ""), ("planned", enabling(tmp_path, "transformers"))):
        done = forge("cuda+huggingface").run(tmp_path, (str(tmp_path / name),), 2, planted, script)
        assert done.returncode == 0, done.stderr[-3000:]
        assert "came to its end" in done.stdout
        seen = seen_in(done.outputs)
        seen.check()
        for waits in seen.waits:
            ours = each_step(waits, 2)
            assert not ours.keys() - READS.keys()
            assert name == "stock" or min(ours.values()) == 1
        state = json.loads((tmp_path / name / "checkpoint-2" / "trainer_state.json").read_text())
        losses[name] = [row["loss"] for row in state["log_history"] if "loss" in row]
    assert losses["planned"] == pytest.approx(losses["stock"], rel=2e-2)


@pytest.mark.cuda
@pytest.mark.parametrize("recipe", ["slices", "pipeline", "moe", "deepspeed"])
def test_verify(forge: Any, tmp_path: Path, recipe: str) -> None:
    trainer = "deepspeed" if recipe == "deepspeed" else "megatron"
    small = (*SHORT[:-1], "train.dtype=fp32", "model.num_layers=2")
    arguments = ("verify", str(ROOT / "recipes" / f"{recipe}.yaml"), *small, "--steps", "1", "--json")
    done = forge(f"cuda+{trainer}").run(tmp_path, arguments, 2)
    assert done.returncode == 0, done.stderr[-3000:] + done.stdout[-2000:]
    seen_in(done.outputs).check()


@pytest.mark.cuda
def test_a_run_that_is_resumed(forge: Any, tmp_path: Path) -> None:
    arguments = (
        "train",
        str(ROOT / "recipes" / "slices.yaml"),
        *SHORT,
        "checkpoint.dir=runs/one",
        "checkpoint.every=1",
    )
    run = forge("cuda+megatron").run
    for steps in (1, 2):
        done = run(tmp_path, (*arguments, f"train.steps={steps}"), 2)
        assert done.returncode == 0, done.stderr[-3000:]
        seen_in(done.outputs).check()
    assert "resumed" in done.stderr + done.stdout
