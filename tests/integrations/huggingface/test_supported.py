"""Trainers that cannot be planned are refused by name, before the first forward; others are left as they are."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from evenload.core.errors import EvenloadError
from evenload.integrations.unmodified import planned_runs

pytestmark = pytest.mark.slow  # imports Transformers' Trainer

ROWS = [{"input_ids": [5, 6, 7, 8][:n], "labels": [5, 6, 7, 8][:n]} for n in (4, 2, 3, 4)]


@pytest.fixture(scope="module")
def classes() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    kinds = {"Trainer": Trainer, "Arguments": TrainingArguments}
    return SimpleNamespace(LlamaConfig=LlamaConfig, LlamaForCausalLM=LlamaForCausalLM, **kinds)


def switched_on() -> Any:
    from evenload.api import load_plugins
    from evenload.core.recipe import recipe as recipes
    from evenload.patches.session import enabled

    load_plugins()
    plugins = {"packing": {"enabled": True, "max_tokens": 64}}
    return enabled(recipes.parse({"trainer": "transformers", "plugins": plugins}))


def collate(rows: list[Any]) -> dict[str, Any]:
    import torch

    most = max(len(row["input_ids"]) for row in rows)
    pad = {"input_ids": 0, "labels": -100}
    batch = {k: torch.tensor([row[k] + [v] * (most - len(row[k])) for row in rows]) for k, v in pad.items()}
    return {**batch, "attention_mask": (batch["labels"] != -100).long()}


def train(classes: Any, folder: Any, kind: str = "Trainer", config: Any = None, **more: Any) -> Any:
    """A planned run of two steps; the Trainer."""
    shape = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = classes.LlamaForCausalLM(classes.LlamaConfig(vocab_size=11, pad_token_id=0, **shape, **(config or {})))
    own = {"max_steps": 2, "per_device_train_batch_size": 2, "report_to": "none", "save_strategy": "no"}
    arguments = classes.Arguments(str(folder), use_cpu=True, disable_tqdm=True, **own | more)
    trainer = getattr(classes, kind)(model, arguments, train_dataset=ROWS, data_collator=collate)
    with switched_on():
        trainer.train()
    return trainer


REFUSED = {
    "noise": ({"neftune_noise_alpha": 5.0}, "neftune_noise_alpha = 5.0", "neftune"),
    "compiled": ({"torch_compile": True}, "torch_compile", "torch_compile=False"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused_with_what_to_change(classes, tmp_path, name):
    more, found, do = REFUSED[name]
    with pytest.raises(EvenloadError) as refusal:
        train(classes, tmp_path, **more)
    assert found in refusal.value.found
    assert do in refusal.value.do


def test_a_sound_trainer_trains_and_is_as_it_was_afterwards(classes, tmp_path):
    from transformers import Trainer

    before = vars(Trainer)["training_step"], vars(Trainer)["get_batch_samples"]
    trainer = train(classes, tmp_path)
    assert trainer.state.global_step == 2
    assert (vars(Trainer)["training_step"], vars(Trainer)["get_batch_samples"]) == before
    assert trainer.model.config._attn_implementation != "evenload"
    assert "backward" not in vars(trainer.accelerator)


def test_a_loop_of_accelerate_says_that_nothing_is_planned(caplog, monkeypatch):
    import torch
    from accelerate import Accelerator

    monkeypatch.setattr(planned_runs, "_idle", set())  # said once a process
    accelerator, weight = Accelerator(cpu=True), torch.ones(1, requires_grad=True)
    with switched_on():
        accelerator.backward(weight.sum())
        accelerator.backward(weight.sum())
    said = [record.message for record in caplog.records if "nothing is planned" in record.message]
    assert len(said) == 1
    assert "Accelerate" in said[0]
    assert weight.grad == 2
