"""The shipped recipe of tenants: three train, one of them stops early, one joins; peft opens what they leave."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from evenload.core.recipe.pretrained import folder_of
from evenload.core.recipe.recipe import RECIPES, file_of
from evenload.plugins.lora.verb import standing
from harness.cases import full

pytestmark = pytest.mark.slow

LATER = f"""
import shutil
from evenload.plugins.lora import loop
_train = loop.TenantLoop._train
def train(self, planned):
    if self.step == 9 and self._job.is_rank0:
        shutil.copy({str(RECIPES / "tenants" / "later" / "logging.yaml")!r}, "recipes/tenants")
    _train(self, planned)
loop.TenantLoop._train = train
"""


@full
def test_one_joins_one_stops_early_and_peft_opens_all_of_them(tmp_path, forged):
    peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    (tmp_path / "recipes").mkdir()
    shutil.copytree(RECIPES / "tenants", tmp_path / "recipes" / "tenants")
    shutil.copy(file_of("lora"), tmp_path / "r.yaml")
    done = forged(tmp_path, "train", "r.yaml", "log.jsonl=log.jsonl", "--json", planted=LATER)
    assert done.returncode == 0, done.stderr[-3000:]
    assert not json.loads(done.stdout)["refused"]
    out = tmp_path / "runs" / "lora"
    status = {row["name"]: row for row in standing(out)["tenants"]}
    ended = {name: (row["state"], row["step"]) for name, row in status.items()}
    stopped = ended.pop("multiprocessing")
    assert ended == {"asyncio": ("done", 80), "email": ("done", 60), "logging": ("done", 40)}
    assert stopped[0] == "stopped"
    assert stopped[1] < 80
    steps = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    joined = [row["step"] for row in steps if isinstance(row.get("tenants"), dict) and "logging" in row["tenants"]]
    assert 9 < joined[0] <= 11
    for name in ("asyncio", "email", "logging"):
        losses = [json.loads(line).get("loss") for line in (out / name / "metrics.jsonl").read_text().splitlines()]
        losses = [loss for loss in losses if loss is not None]
        assert sum(losses[-5:]) < sum(losses[:5]) - 0.5
    base = transformers.AutoModelForCausalLM.from_pretrained(folder_of(Path("tiny-llama")))
    tokens = torch.arange(40)[None]
    plain = base(tokens).logits.detach()
    for name, folder in [(name, "last") for name in status] + [("multiprocessing", "best")]:
        model = peft.PeftModel.from_pretrained(base, out / name / folder)
        assert not torch.allclose(model(tokens).logits, plain, atol=1e-3)
        base = model.unload()
