"""What the ranks of a test world run: families under the real Trainer, stock and planned."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any

import families
import numpy as np
import torch
from evenload.integrations.transformers import trainer as planned_trainer
from evenload.runtime.attributes import with_attributes
from evenload.runtime.world.agreement import rank_and_size
from torch.nn.functional import cross_entropy
from trainer_runs import NO_PACKS, Gradients, Keep, arguments, collate, error_of, forget_layout, planned_by, recipe
from transformers import T5Config, T5ForConditionalGeneration, Trainer, TrainingArguments

FAMILIES: dict[str, dict[str, Any]] = {
    "gemma3_text": {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
    "gemma2": {"sliding_window": 8},
    "gpt_oss": {"sliding_window": 8},
    "mistral": {"sliding_window": 8},
    "nemotron_h": {},
    "mamba": {},
    "bamba": {"attn_layer_indices": [1]},
    "gpt2": {"attn_pdrop": 0.5, "resid_pdrop": 0.0, "embd_pdrop": 0.0},
    "t5": {},
}
LENGTHS = (61, 5, 17, 33, 9, 90, 3, 40, 26, 11, 72, 7, 14, 2, 55, 21)
PLUGINS = {"packing": {"max_tokens": 256}}


def _model(family: str, dtype: str) -> Any:
    if family != "t5":
        return families.tiny(family, **FAMILIES[family]).to(getattr(torch, dtype))
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


def with_answers(rows: list[Any]) -> dict[str, torch.Tensor]:
    """A batch of an encoder-decoder whose answers begin with token 1."""
    batch = collate(rows)
    answers = batch["labels"].clamp(min=0)[:, :-1]
    return batch | {"decoder_input_ids": torch.nn.functional.pad(answers, (1, 0), value=1)}


class Counting(Trainer):
    slots = 0

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        self.slots += inputs["input_ids"].numel() * torch.is_grad_enabled()
        return super().compute_loss(model, inputs, *args, **kwargs)


def _train(
    model: Any, family: str, accumulate: int, left: bool = False, loss: Any = None, **more: Any
) -> tuple[float, Gradients, int]:
    """Loss and gradients of a step, and the slots that this rank computed."""
    forget_layout()
    count = len(LENGTHS) // rank_and_size()[1] // accumulate
    more |= {"per_device_train_batch_size": count, "gradient_accumulation_steps": accumulate}
    keep, collator = Keep(), with_answers if loss else partial(collate, left=left)
    data = {"train_dataset": rows_of(family), "data_collator": collator, "compute_loss_func": loss}
    trainer = Counting(model, TrainingArguments(**arguments(**more)), callbacks=[keep], **data)
    trainer.train()
    return trainer.state.log_history[0]["loss"], keep.updates[-1], trainer.slots


def errors(
    names: list[str],
    dtype: str = "float64",
    accumulate: int = 2,
    lora: bool = False,
    plugins: Any = None,
    mean: bool = False,
    no_packs: bool = False,
    **more: Any,
) -> dict[str, Any]:
    """Of each family the largest error of a gradient and of the loss against the stock Trainer's, and what was run.
    ``no_packs``: as if none were exact."""
    found = {}
    for family in names:
        model = _model(family, dtype)
        if lora:
            from peft import LoraConfig, get_peft_model

            model = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))
        weights = {name: value.clone() for name, value in model.state_dict().items()}
        own = more | ({"loss": _token_sum} if family == "t5" and not mean else {})
        refused = NO_PACKS if no_packs else {}
        with families.Wide() if dtype == "float64" else nullcontext():
            loss, wanted, stock_slots = _train(model, family, accumulate, **own)
            model.load_state_dict(weights)
            model.zero_grad()
            with with_attributes(planned_trainer, **refused), planned_by(recipe(**plugins or PLUGINS)) as seen:
                own_loss, gradients, slots = _train(model, family, accumulate, **own)
        found[family] = {
            "loss": abs(own_loss - loss) / loss,
            "grad": error_of(gradients, wanted),
            "slots": slots,
            "stock_slots": stock_slots,
            "padded": [plan.limits.padded for plan in seen.plans],
            "idle": seen.idle,
            "cut": sum(len(plan.cut) for plan in seen.plans),
            "shared": sum(bool(plan.shared) for plan in seen.plans),
        }
    return found
