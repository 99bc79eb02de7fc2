"""Scripts of TRL and Accelerate that nobody edited, on a rehearsed GPU: with evenload the same comes out."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from .conftest import TESTS, module_at
from .seen import each_step, seen_in

pytestmark = [pytest.mark.slow, pytest.mark.cuda]

RECIPE = "trainer: transformers\nplugins: {packing: {enabled: true, max_tokens: 1024}}\n"
STEPS = 3
COMMON = (
    "--seed 1 --disable_tqdm True --report_to none --save_strategy no --learning_rate 1e-3 --logging_steps 1 "
    f"--per_device_train_batch_size 2 --gradient_accumulation_steps 2 --lr_scheduler_type constant --max_steps {STEPS}"
).split()
CASES: dict[str, tuple[str, tuple[str, ...], float]] = {
    "TRL in bf16": ("trl_sft_script.py", ("--bf16", "True"), 2e-2),
    "TRL in float32": ("trl_sft_script.py", ("--bf16", "False", "--optim", "sgd"), 1e-5),
    "Accelerate": ("accelerate_script.py", ("--gradient-accumulation-steps", "2", "--max-steps", str(STEPS)), 5e-5),
}
"""A script, what its user asks for, and the largest relative difference of a loss: Adam's first steps divide rounding
by the roots of tiny squares, plain descent does not."""
READ = "Event.synchronize at integrations/transformers/planning.py:_read"
WAITS = {
    "trl_sft_script.py": {READ: (1, "the batches of a step, which come on devices: nobody can plan without lengths")},
    "accelerate_script.py": {
        READ: (2, "a batch, which is planned when it comes"),
        "tolist at integrations/transformers/pack_loss.py:PackLoss._taken": (2, "what the loop made of the loss"),
    },
}
"""Waits of ours in a step of two batches, and what each is for."""
ONCE = "_WithoutDropout"
"""In the first step alone, in which packs are proven."""


@pytest.fixture(scope="module")
def assets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("assets")
    module_at("hosts/assets.py").make(folder, ("llama",))
    return folder


def planted(folder: Path, recipe: str) -> str:
    """What a rank reads from its environment, and what switches evenload on."""
    lines = [
        "import os, datasets",
        f"os.environ['HOSTS_OUT'] = {str(folder / 'history.json')!r}",
        f"datasets.config.HF_DATASETS_CACHE = {str(folder / 'datasets')!r}",
    ]
    if recipe:
        (folder / "recipe.yaml").write_text(recipe)
        lines.append(f"import evenload; evenload.enable({str(folder / 'recipe.yaml')!r})")
    return "\n".join(lines)


@pytest.mark.parametrize("case", CASES)
def test_a_script_trains_as_without_evenload(
    case: str, forge: Callable[[str], Any], assets: Path, tmp_path: Path
) -> None:
    script, words, near = CASES[case]
    model, data = str(assets / "models" / "llama"), str(assets / "data")
    if script.startswith("trl"):
        words = ("--model_name_or_path", model, "--dataset_name", f"{data}/completions", *COMMON, *words)
    else:
        words = ("--model", model, "--data", f"{data}/text", *words)
    losses = {}
    for name, recipe in (("stock", ""), ("planned", RECIPE)):
        folder = tmp_path / name
        folder.mkdir()
        more = ("--output_dir", str(folder / "out")) if script.startswith("trl") else ()
        path = TESTS / "hosts" / "scripts" / script
        done = forge("cuda+huggingface").run(folder, (*words, *more), 2, planted(folder, recipe), path)
        assert done.returncode == 0, done.stderr[-3000:]
        seen = seen_in(done.outputs)
        seen.check()
        for waits, to_device in zip(seen.waits, seen.to_device, strict=True):
            ours = {what: round(n) for what, n in each_step(waits, STEPS).items() if ONCE not in what}
            assert ours == ({} if name == "stock" else {what: n for what, (n, _) in WAITS[script].items()})
            copies = [what for what in each_step(to_device, STEPS) if ONCE not in what]
            blocking = [what for what in copies if what.startswith("waits")]
            assert not blocking, "the host waits for what it sends to the device"
        losses[name] = [row["loss"] for row in json.loads((folder / "history.json").read_text()) if "loss" in row]
    assert len(losses["stock"]) == STEPS
    assert losses["planned"] == pytest.approx(losses["stock"], rel=near)
