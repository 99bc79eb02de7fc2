"""Trainers that cannot be planned stay as they are and say why; where plans are required they end."""

from __future__ import annotations

from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
from evenload.core.errors import EvenloadError
from evenload.integrations.unmodified import planned_runs

pytestmark = pytest.mark.slow  # imports Transformers' Trainer

ROWS = [{"input_ids": [5, 6, 7, 8][:n], "labels": [5, 6, 7, 8][:n]} for n in (4, 2, 3, 4)]


def train(families: Any, **more: Any) -> Any:
    """A planned run of two steps; the Trainer."""
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    shape = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=11, pad_token_id=0, **shape))
    own = import_module("trainer_runs").arguments(max_steps=2, per_device_train_batch_size=2, **more)
    trainer = Trainer(model, TrainingArguments(**own), train_dataset=ROWS, data_collator=families.collate)
    with families.planned():
        trainer.train()
    return trainer


@pytest.mark.parametrize(
    ("more", "found", "do"),
    [
        ({"neftune_noise_alpha": 5.0}, "neftune_noise_alpha = 5.0", "neftune"),
        ({"torch_compile": True}, "torch_compile", "torch_compile=False"),
    ],
    ids=str,
)
def test_it_stays_as_it_is_and_says_what_to_change(more, found, do, families, caplog, monkeypatch):
    monkeypatch.setattr(planned_runs, "_idle", set())  # said once a process
    assert train(families, **more).state.global_step == 2
    (said,) = [record.message for record in caplog.records if "nothing is planned" in record.message]
    assert found in said
    assert do in said


def test_where_plans_are_required_it_is_refused_with_what_to_change(families, monkeypatch):
    monkeypatch.setenv("PYTHON_EVENLOAD_REQUIRE", "1")
    with pytest.raises(EvenloadError, match="--require asks for plans") as refusal:
        train(families, neftune_noise_alpha=5.0)
    assert "neftune_noise_alpha = 5.0" in refusal.value.found
    assert "neftune" in refusal.value.do


def test_a_sound_trainer_trains_and_is_as_it_was_afterwards(families):
    from transformers import Trainer

    before = vars(Trainer)["training_step"], vars(Trainer)["get_batch_samples"]
    trainer = train(families)
    assert trainer.state.global_step == 2
    assert (vars(Trainer)["training_step"], vars(Trainer)["get_batch_samples"]) == before
    assert trainer.model.config._attn_implementation != "evenload"
    assert "backward" not in vars(trainer.accelerator)


def test_a_loop_of_accelerate_says_that_nothing_is_planned(families, caplog, monkeypatch):
    import torch
    from accelerate import Accelerator

    monkeypatch.setattr(planned_runs, "_idle", set())  # said once a process
    accelerator, weight = Accelerator(cpu=True), torch.ones(1, requires_grad=True)
    with families.planned():
        accelerator.backward(weight.sum())
        accelerator.backward(weight.sum())
    (said,) = [record.message for record in caplog.records if "nothing is planned" in record.message]
    assert "Accelerate" in said
    assert weight.grad == 2


@pytest.mark.parametrize(
    ("module", "known"),
    [("trl.trainer.sft_trainer", True), ("UnslothSFTTrainer", True), ("trl_sft", False), ("swift_train", False)],
)
def test_a_script_that_is_named_like_a_library_is_not_taken_for_it(module, known):
    from evenload.integrations.transformers.supported import own_step

    step = type("Own", (), {"training_step": lambda self: None})
    step.training_step.__module__ = module
    trainer = step()
    trainer.args = SimpleNamespace(gradient_accumulation_steps=2)
    trainer.callback_handler = SimpleNamespace(callbacks=[])
    assert (own_step(trainer) is None) == known
