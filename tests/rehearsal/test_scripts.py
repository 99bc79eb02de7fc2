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
READ = "Event.synchronize at integrations/transformers/planning.py:_read"
"""The wait of ours in a Trainer, one a step, for the update before it: nobody can plan before lengths are known."""
ONCE = "_WithoutDropout"
"""In the first step alone, in which packs are proven."""


def enabling(folder: Path, trainer: str) -> str:
    """What switches evenload on in every rank, as ``evenload run`` does."""
    recipe = folder / "recipe.yaml"
    recipe.write_text(ON.format(trainer=trainer))
    return f"import evenload; evenload.enable({str(recipe)!r})"


@pytest.mark.parametrize(
    ("layout", "dtype", "near"),
    [
        pytest.param(("--overlap",), "fp32", 1e-6, id="dp2"),
        pytest.param(("--pp", "2"), "fp32", 1e-6, id="pp2", marks=pytest.mark.cuda),
        pytest.param(("--overlap",), "bf16", 1e-2, id="bf16", marks=pytest.mark.cuda),
        pytest.param(("--overlap",), "fp16", 1e-3, id="fp16 with its scaler", marks=pytest.mark.cuda),
        pytest.param(("--pp", "2"), "fp16", 1e-3, id="fp16, pp2", marks=pytest.mark.cuda),
    ],
)
def test_a_loop_of_megatron(forge: Any, tmp_path: Path, layout: tuple[str, ...], dtype: str, near: float) -> None:
    results = {}
    for name, planted in (("stock", ""), ("planned", enabling(tmp_path, "megatron"))):
        (tmp_path / name).mkdir()
        words = ("--out", str(tmp_path / name), "--dtypes", dtype, *layout)
        script = SCRIPTS / "megatron_script.py"
        done = forge("cuda+megatron").run(tmp_path / name, words, 2, planted, script)
        assert done.returncode == 0, done.stderr[-3000:]
        seen = seen_in(done.outputs)
        seen.check()
        for waits, to_device in zip(seen.waits, seen.to_device, strict=True):
            assert not each_step(waits, 3).keys() - FIRST, "the loop waits for its loss and its norm; we for nothing"
            assert not [what for what in each_step(to_device, 3) if what.startswith("waits")]
        results[name] = [
            torch.load(tmp_path / name / f"{dtype}.rank{rank}.pt", map_location="cpu") for rank in range(2)
        ]
    for stock, planned in zip(results["stock"], results["planned"], strict=True):
        assert planned["shapes"] != stock["shapes"], "nothing was planned"
        for (loss, tokens), (wanted, wanted_tokens) in zip(planned["losses"], stock["losses"], strict=True):
            assert loss == pytest.approx(wanted, rel=near)
            assert tokens == wanted_tokens


DS_CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 2,
    "zero_allow_untested_optimizer": True,
    "evenload": {"packing": {"enabled": True, "max_tokens": 160}},
}
HALF = {"fp16": {"enabled": True, "initial_scale_power": 10}}


@pytest.mark.cuda
def test_another_batch_is_refused_before_the_update_of_deepspeed(forge: Any, tmp_path: Path) -> None:
    script, moved = tmp_path / "script.py", "        loss = engine(**batch).loss\n"
    text = (SCRIPTS / "deepspeed_script.py").read_text()
    assert moved in text
    script.write_text(text.replace(moved, f"        batch['input_ids'][0, 0] += 1\n{moved}"))
    (tmp_path / "ds.json").write_text(json.dumps(DS_CONFIG))
    words = (str(script), "--ds-config", str(tmp_path / "ds.json"), "--out", str(tmp_path))
    done = forge("cuda+deepspeed").run(tmp_path, words, 2, "", SCRIPTS / "run_with_evenload.py")
    assert done.returncode != 0
    assert "other input_ids in micro-batch 1 of the step" in done.stderr


@pytest.mark.cuda
def test_a_script_of_deepspeed_in_fp16_with_its_scaler(forge: Any, tmp_path: Path) -> None:
    """As in float32; each stage but 0, whose engine trains in float32 where the config does not say otherwise."""
    results = {}
    for name, more in (("fp32", {}), ("fp16", HALF)):
        out = tmp_path / name
        out.mkdir()
        (out / "ds.json").write_text(json.dumps(DS_CONFIG | more))
        words = (str(SCRIPTS / "deepspeed_script.py"), "--ds-config", str(out / "ds.json"), "--out", str(out))
        words = (*words, "--stages", "1", "2", "3")
        done = forge("cuda+deepspeed").run(out, words, 2, "", SCRIPTS / "run_with_evenload.py")
        assert done.returncode == 0, done.stderr[-3000:]
        assert "RESTORED" in done.stdout
        seen = seen_in(done.outputs)
        seen.check()
        for waits, to_device in zip(seen.waits, seen.to_device, strict=True):
            assert not each_step(waits, 9), "what was planned has come with DeepSpeed's own waits"
            assert not [what for what in each_step(to_device, 9) if what.startswith("waits")]
        results[name] = [torch.load(out / f"stage{stage}.rank0.pt", map_location="cpu") for stage in (1, 2, 3)]
    for half, single in zip(results["fp16"], results["fp32"], strict=True):
        assert half["steps"] == single["steps"] == 3
        assert half["losses"] == pytest.approx(single["losses"], rel=5e-3)
        assert half["evaluation"] == pytest.approx(single["evaluation"], rel=5e-3)


@pytest.mark.cuda
@pytest.mark.parametrize("half", ["bf16", "fp16"])
def test_a_script_of_transformers(forge: Any, tmp_path: Path, half: str) -> None:
    script = tmp_path / "script.py"
    text = (SCRIPTS / "trainer_script.py").read_text()
    assert "    use_cpu=True,\n" in text
    script.write_text(text.replace("    use_cpu=True,\n", f"    {half}=True,\n    logging_steps=1,\n"))
    losses = {}
    for name, planted in (("stock", ""), ("planned", enabling(tmp_path, "transformers"))):
        done = forge("cuda+huggingface").run(tmp_path, (str(tmp_path / name),), 2, planted, script)
        assert done.returncode == 0, done.stderr[-3000:]
        assert "came to its end" in done.stdout
        seen = seen_in(done.outputs)
        seen.check()
        for waits in seen.waits:
            ours = {what: n for what, n in each_step(waits, 2).items() if ONCE not in what}
            assert ours == ({} if name == "stock" else {READ: 1})
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
