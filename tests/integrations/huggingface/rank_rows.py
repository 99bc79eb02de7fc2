"""What the ranks of a test world run: families under the real Trainer, stock and planned."""

from __future__ import annotations

import os
import tempfile
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from accelerate.state import AcceleratorState
from evenload.core.errors import EvenloadError
from evenload.core.recipe import recipe as recipes
from evenload.integrations.transformers import trainer as planned_trainer
from evenload.integrations.unmodified import planned_loop, planned_runs
from evenload.patches.session import enabled
from evenload.runtime.attributes import with_attributes
from torch.nn.functional import cross_entropy
from transformers import T5Config, T5ForConditionalGeneration, Trainer, TrainerCallback, TrainingArguments

FAMILIES: dict[str, dict[str, Any]] = {
    "gemma3_text": {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
    "gemma2": {"sliding_window": 8},
    "gpt_oss": {"sliding_window": 8},
    "mistral": {"sliding_window": 8},
    "qwen3_next": {},
    "nemotron_h": {},
    "mamba": {},
    "mamba2": {"num_heads": 8, "head_dim": 8, "n_groups": 1},
    "bamba": {"attn_layer_indices": [1]},
    "gpt2": {"attn_pdrop": 0.5, "resid_pdrop": 0.0, "embd_pdrop": 0.0},
    "t5": {},
}
LENGTHS = (61, 5, 17, 33, 9, 90, 3, 40, 26, 11, 72, 7, 14, 2, 55, 21)
PLUGINS = {"packing": {"enabled": True, "max_tokens": 256}}


def _model(load: Any, family: str, dtype: str) -> Any:
    if family != "t5":
        return load("families").tiny(family, **FAMILIES[family]).to(getattr(torch, dtype))
    torch.manual_seed(0)
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "vocab_size": 96}
    model = T5ForConditionalGeneration(T5Config(**sizes, dropout_rate=0.0, decoder_start_token_id=1, pad_token_id=0))
    return model.to(getattr(torch, dtype))


def _token_sum(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
    total = cross_entropy(outputs.logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")
    return total / num_items_in_batch


def rows_of(family: str, lengths: Any = LENGTHS) -> list[dict[str, list[int]]]:
    """A sample of each length; in some only the second half counts. Of pairs every other one has a longer answer."""
    rows = []
    for number, length in enumerate(lengths):
        draw = np.random.default_rng(number)
        tokens, labels = draw.integers(3, 96, length), draw.integers(3, 96, 4 + (length * 3 if number % 2 else 1) % 50)
        if family != "t5":
            labels = np.where(np.arange(length) < (length // 2 if number % 3 else 1), -100, tokens)
        rows.append({"input_ids": tokens.tolist(), "labels": labels.tolist()})
    return rows


def collator(left: bool = False, answers: bool = False) -> Any:
    """``answers``: of an encoder-decoder whose answers begin with token 1."""

    def collate(rows: list[Any]) -> dict[str, torch.Tensor]:
        rows = [{**row, "attention_mask": [1] * len(row["input_ids"])} for row in rows]
        batch = {}
        for key, value in (("input_ids", 0), ("labels", -100), ("attention_mask", 0)):
            most = max(len(row[key]) for row in rows)
            padding = [[value] * (most - len(row[key])) for row in rows]
            parts = zip(padding, (row[key] for row in rows), strict=True)
            batch[key] = torch.tensor([pad + own if left else own + pad for pad, own in parts])
        if answers:
            labels = batch["labels"].clamp(min=0)
            batch["decoder_input_ids"] = torch.nn.functional.pad(labels[:, :-1], (1, 0), value=1)
        return batch

    return collate


class Gradients(TrainerCallback):
    """Right before the update, of all that has one."""

    def __init__(self) -> None:
        self.kept: dict[str, torch.Tensor] = {}

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        self.kept = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


class Counting(Trainer):
    """Counts the slots that its model computed."""

    slots = 0

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        hook = self.accelerator.unwrap_model(model).register_forward_pre_hook(self._count, with_kwargs=True)
        try:
            return super().training_step(model, inputs, num_items_in_batch)
        finally:
            hook.remove()

    def _count(self, model: Any, args: Any, kwargs: Any) -> None:
        self.slots += kwargs["input_ids"].numel()


def _train(model: Any, family: str, size: int, accumulate: int, **more: Any) -> Any:
    AcceleratorState._reset_state(reset_partial_state=True)
    os.environ["ACCELERATE_USE_DEEPSPEED"] = os.environ["ACCELERATE_USE_FSDP"] = "false"
    keep, left, loss = Gradients(), more.pop("left", False), more.pop("loss", None)
    count = len(LENGTHS) // size // accumulate
    arguments = {"output_dir": tempfile.mkdtemp(), "use_cpu": True, "max_steps": 1, "max_grad_norm": 0.0, "seed": 1}
    arguments |= {"per_device_train_batch_size": count, "gradient_accumulation_steps": accumulate, "logging_steps": 1}
    arguments |= {"report_to": "none", "save_strategy": "no", "disable_tqdm": True, "optim": "sgd", **more}
    data = {
        "train_dataset": rows_of(family),
        "data_collator": collator(left, answers=loss is not None),
        "callbacks": [keep],
    }
    data |= {"compute_loss_func": loss} if loss else {}
    trainer = Counting(model, TrainingArguments(**arguments), **data)
    trainer.train()
    return trainer.state.log_history[0]["loss"], keep.kept, trainer.slots


def errors(
    load: Any,
    families: list[str],
    dtype: str = "float64",
    accumulate: int = 2,
    lora: bool = False,
    plugins: Any = None,
    plan: Any = None,
    mean: bool = False,
    no_packs: bool = False,
    **more: Any,
) -> dict[str, Any]:
    """Of each family the largest error of a gradient and of the loss against the stock Trainer's, and what was run.
    ``no_packs``: as if none were exact."""
    rank_trainer = load("rank_trainer")
    size, found = rank_trainer._join(), {}
    for family in families:
        planned_runs._idle.clear()
        model = _model(load, family, dtype)
        if lora:
            from peft import LoraConfig, get_peft_model

            model = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))
        weights = {name: value.clone() for name, value in model.state_dict().items()}
        own = dict(more)
        own |= {"loss": _token_sum} if family == "t5" and not mean else {}
        plans: list[Any] = []
        report = {"report_step": lambda _, chain, plan, plans=plans, **__: plans.append(plan)}
        with load("families").Wide() if dtype == "float64" else nullcontext():
            loss, wanted, stock_slots = _train(model, family, size, accumulate, **own)
            model.load_state_dict(weights)
            model.zero_grad()
            recipe = recipes.parse({"trainer": "transformers", "plugins": plugins or PLUGINS})
            refused = {"packs_fault": lambda _: EvenloadError("no packs", "here", "")} if no_packs else {}
            with with_attributes(planned_loop, **report), with_attributes(planned_trainer, **refused), enabled(recipe):
                own_loss, gradients, slots = _train(model, family, size, accumulate, **own)
        largest = max(float(w.norm()) for w in wanted.values())
        grad = max(float((gradients[n] - w).norm()) / max(float(w.norm()), 1e-6 * largest) for n, w in wanted.items())
        one = {"loss": abs(own_loss - loss) / loss, "grad": grad, "slots": slots, "stock_slots": stock_slots}
        one |= {"padded": [plan.limits.padded for plan in plans], "idle": [idle.why for idle in planned_runs._idle]}
        one |= {"cut": sum(len(plan.cut) for plan in plans), "shared": sum(bool(plan.shared) for plan in plans)}
        found[family] = one
    return found
