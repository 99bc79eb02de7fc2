"""Programs that nobody edited, on a rehearsed GPU: stock ends, with evenload the same comes out, and nothing waits."""

import json

import pytest
import torch

from .conftest import TESTS, enabling, module_at
from .test_recipes import RECIPES

pytestmark = pytest.mark.slow

SCRIPTS = TESTS / "scripts"
FIRST = "unmodified/running/objective.py:refuse_loss"
"""Waits in the first step alone, in which the loop's loss is looked at."""
ONCE = "_WithoutDropout"
"""In the first step alone, in which packs are proven."""
READ = "Event.synchronize at integrations/transformers/planning.py:_read"
"""The wait of ours in a Trainer, one a step, for the update before it: nobody can plan before lengths are known."""


def recipe(folder, trainer, max_tokens=128):
    path = folder / "recipe.yaml"
    path.write_text(f"trainer: {trainer}\nplugins: {{packing: {{enabled: true, max_tokens: {max_tokens}}}}}\n")
    return path


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
def test_a_loop_of_megatron(rehearse, tmp_path, layout, dtype, near):
    results = {}
    for name, planted in (("stock", ""), ("planned", enabling(recipe(tmp_path, "megatron")))):
        out = tmp_path / name
        words = ("--out", str(out), "--dtypes", dtype, *layout)
        _, seen = rehearse("megatron", words, planted=planted, place=out, script=SCRIPTS / "megatron_script.py")
        assert not any(seen.waits_of_ours(3, FIRST)), "the loop waits for its loss and its norm; we for nothing"
        seen.check_copies(3)
        results[name] = [torch.load(out / f"{dtype}.rank{rank}.pt", map_location="cpu") for rank in range(2)]
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


def with_deepspeed(folder, script, **more):
    """The words and the script of a run of DeepSpeed's loop."""
    folder.mkdir(exist_ok=True)
    (folder / "ds.json").write_text(json.dumps(DS_CONFIG | more))
    words = (str(script), "--ds-config", str(folder / "ds.json"), "--out", str(folder))
    return words, SCRIPTS / "run_with_evenload.py"


@pytest.mark.cuda
def test_another_batch_is_refused_before_the_update_of_deepspeed(forge, tmp_path):
    script, moved = tmp_path / "script.py", "        loss = engine(**batch).loss\n"
    text = (SCRIPTS / "deepspeed_script.py").read_text()
    assert moved in text
    script.write_text(text.replace(moved, f"        batch['input_ids'][0, 0] += 1\n{moved}"))
    words, runner = with_deepspeed(tmp_path, script)
    done = forge("cuda+deepspeed").run(tmp_path, words, 2, "", runner)
    assert done.returncode != 0
    assert "other input_ids in micro-batch 1 of the step" in done.stderr


@pytest.mark.cuda
def test_a_script_of_deepspeed_in_fp16_with_its_scaler(rehearse, tmp_path):
    """As in float32; each stage but 0, whose engine trains in float32 where the config does not say otherwise."""
    results = {}
    for name, more in (("fp32", {}), ("fp16", {"fp16": {"enabled": True, "initial_scale_power": 10}})):
        out = tmp_path / name
        words, runner = with_deepspeed(out, SCRIPTS / "deepspeed_script.py", **more)
        done, seen = rehearse("deepspeed", (*words, "--stages", "1", "2", "3"), place=out, script=runner)
        assert "RESTORED" in done.stdout
        assert not any(seen.waits_of_ours(9)), "what was planned has come with DeepSpeed's own waits"
        seen.check_copies(9)
        results[name] = [torch.load(out / f"stage{stage}.rank0.pt", map_location="cpu") for stage in (1, 2, 3)]
    for half, single in zip(results["fp16"], results["fp32"], strict=True):
        assert half["steps"] == single["steps"] == 3
        assert half["losses"] == pytest.approx(single["losses"], rel=5e-3)
        assert half["evaluation"] == pytest.approx(single["evaluation"], rel=5e-3)


@pytest.mark.cuda
@pytest.mark.parametrize("half", ["bf16", "fp16"])
def test_a_script_of_transformers(rehearse, tmp_path, half):
    script, on_cpu = tmp_path / "script.py", "    use_cpu=True,\n"
    text = (SCRIPTS / "trainer_script.py").read_text()
    assert on_cpu in text
    script.write_text(text.replace(on_cpu, f"    {half}=True,\n    logging_steps=1,\n"))
    losses = {}
    for name, planted in (("stock", ""), ("planned", enabling(recipe(tmp_path, "transformers")))):
        done, seen = rehearse("huggingface", (str(tmp_path / name),), planted=planted, script=script)
        assert "came to its end" in done.stdout
        assert seen.waits_of_ours(2, ONCE) == [{} if name == "stock" else {READ: 1}] * 2
        state = json.loads((tmp_path / name / "checkpoint-2" / "trainer_state.json").read_text())
        losses[name] = [row["loss"] for row in state["log_history"] if "loss" in row]
    assert losses["planned"] == pytest.approx(losses["stock"], rel=2e-2)


STEPS = 3
COMMON = (
    "--seed 1 --disable_tqdm True --report_to none --save_strategy no --learning_rate 1e-3 --logging_steps 1 "
    f"--per_device_train_batch_size 2 --gradient_accumulation_steps 2 --lr_scheduler_type constant --max_steps {STEPS}"
).split()
OF_TRAINERS = {
    "TRL in bf16": ("trl_sft_script.py", ("--bf16", "True"), 2e-2),
    "TRL in float32": ("trl_sft_script.py", ("--bf16", "False", "--optim", "sgd"), 1e-5),
    "Accelerate": ("accelerate_script.py", ("--gradient-accumulation-steps", "2", "--max-steps", str(STEPS)), 5e-5),
}
"""A script, what its user asks for, and the largest relative difference of a loss: Adam's first steps divide rounding
by the roots of tiny squares, plain descent does not."""
WAITS = {
    "trl_sft_script.py": {READ: 1},  # the batches of a step, which come on devices: nobody can plan without lengths
    # A batch, which is planned when it comes, and what the loop made of the loss.
    "accelerate_script.py": {READ: 2, "tolist at integrations/transformers/pack_loss.py:PackLoss._taken": 2},
}
"""Waits of ours in a step of two batches."""


@pytest.fixture(scope="module")
def assets(tmp_path_factory):
    folder = tmp_path_factory.mktemp("assets")
    module_at("hosts/assets.py").make(folder, ("llama",))
    return folder


@pytest.mark.cuda
@pytest.mark.parametrize("case", OF_TRAINERS)
def test_a_script_of_trl_or_accelerate(case, rehearse, assets, tmp_path):
    script, words, near = OF_TRAINERS[case]
    model, data = str(assets / "models" / "llama"), str(assets / "data")
    if script.startswith("trl"):
        own = ("--model_name_or_path", model, "--dataset_name", f"{data}/completions", "--output_dir", "out", *COMMON)
    else:
        own = ("--model", model, "--data", f"{data}/text")
    losses = {}
    for name, on in (("stock", ""), ("planned", enabling(recipe(tmp_path, "transformers", 1024)))):
        folder = tmp_path / name
        planted = (
            f"import os, datasets\nos.environ['HOSTS_OUT'] = {str(folder / 'history.json')!r}\n"
            f"datasets.config.HF_DATASETS_CACHE = {str(folder / 'datasets')!r}\n{on}"
        )
        path = TESTS / "hosts" / "scripts" / script
        _, seen = rehearse("huggingface", (*own, *words), planted=planted, place=folder, script=path)
        for ours in seen.waits_of_ours(STEPS, ONCE):
            assert {what: round(n) for what, n in ours.items()} == ({} if name == "stock" else WAITS[script])
        seen.check_copies(STEPS, ONCE)
        losses[name] = [row["loss"] for row in json.loads((folder / "history.json").read_text()) if "loss" in row]
    assert len(losses["stock"]) == STEPS
    assert losses["planned"] == pytest.approx(losses["stock"], rel=near)


@pytest.mark.cuda
@pytest.mark.parametrize("name", ["slices", "pipeline", "moe", "deepspeed"])
def test_verify(rehearse, name):
    small = ("hidden_size=32", "num_attention_heads=4", "num_query_groups=2", "num_layers=2")
    words = ("data.max_length=256", "train.global_batch_size=8", "train.dtype=fp32", "--steps", "1", "--json")
    sizes = [f"model.{word}" for word in small]
    trainer = "deepspeed" if name == "deepspeed" else "megatron"
    rehearse(trainer, ("verify", str(RECIPES / f"{name}.yaml"), *sizes, *words))
