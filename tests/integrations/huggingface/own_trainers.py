"""Models, losses and Trainers of a script's own, of which the first step measures whether packs are exact."""

from __future__ import annotations

import random
from copy import deepcopy
from itertools import count
from typing import Any

import torch
from families import TWO_MICRO_BATCHES, rows
from torch.nn.functional import cross_entropy
from trainer_runs import Keep, arguments, collate
from transformers import (
    DataCollatorWithFlattening,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForTokenClassification,
    Trainer,
    TrainingArguments,
)

SIZES = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
OF_CLASSES = {"num_labels": 96, "classifier_dropout": 0.0}
CONFIG = LlamaConfig(**SIZES, **OF_CLASSES, max_position_embeddings=256, pad_token_id=0, initializer_range=0.25)


def loss_of(logits: Any, labels: Any, **more: Any) -> Any:
    return cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100, **more)


class OwnPositions(LlamaForCausalLM):
    def forward(self, input_ids=None, attention_mask=None, labels=None, position_ids=None, **more):  # type: ignore[no-untyped-def]
        position_ids = torch.arange(input_ids.shape[1])[None] ** 2
        return super().forward(input_ids, attention_mask, position_ids, labels=labels, **more)


class CountedPositions(LlamaForCausalLM):
    """Counts positions on from the mask of its rows, and reads one rotary table for the longest of them."""

    def __init__(self, config: LlamaConfig) -> None:
        rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
        changed = {"rope_parameters": rope, "max_position_embeddings": 64}
        super().__init__(LlamaConfig(**{**config.to_dict(), **changed}))

    def forward(self, input_ids=None, attention_mask=None, labels=None, position_ids=None, **more):  # type: ignore[no-untyped-def]
        counted = None if attention_mask is None else (attention_mask.cumsum(-1) - 1).clamp(min=0)
        return super().forward(input_ids, attention_mask, counted, labels=labels, **more)


class MeansOfRows(LlamaForCausalLM):
    def forward(self, input_ids=None, attention_mask=None, labels=None, position_ids=None, **more):  # type: ignore[no-untyped-def]
        more.pop("shift_labels", None)
        num_items = more.pop("num_items_in_batch")
        out = super().forward(input_ids, attention_mask, position_ids, **more)
        out.loss = loss_of(out.logits, labels) * labels.shape[0] / num_items
        return out


class WeightPenalty(LlamaForCausalLM):
    def forward(self, input_ids=None, attention_mask=None, labels=None, position_ids=None, **more):  # type: ignore[no-untyped-def]
        out = super().forward(input_ids, attention_mask, position_ids, labels=labels, **more)
        out.loss = out.loss + 1e-2 * sum(p.pow(2).sum() for p in self.parameters())
        return out


class Logs(Trainer):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.counted, self.seen = 0, []

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        self.counted += 1
        self.seen.append(1)
        self.log({"calls": float(self.counted)})
        return super().compute_loss(*args, **kwargs)


class Means(Trainer):
    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        labels = inputs.pop("labels")
        return loss_of(model(**inputs).logits, labels)


class ByRows(Trainer):
    def compute_loss(self, model: Any, inputs: Any, num_items_in_batch: Any = None, **_: Any) -> Any:
        loss = super().compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)
        return loss * inputs["input_ids"].shape[0] / 4


class ShiftedBefore(Trainer):
    """Labels of x and y, whose first place carries loss."""

    def compute_loss(self, model: Any, inputs: Any, num_items_in_batch: Any = None, **_: Any) -> Any:
        labels = inputs.pop("labels")
        logits = model(**inputs).logits
        return cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum") / (
            num_items_in_batch
        )


class Far(LlamaForCausalLM):
    """Embeddings after the 64th token are scaled; no row of the script is as long."""

    def forward(self, input_ids: Any, attention_mask: Any = None, labels: Any = None, **more: Any) -> Any:
        embedded = self.model.embed_tokens(input_ids)
        far = torch.cat([embedded[:, :64], 1.5 * embedded[:, 64:]], 1)
        return super().forward(inputs_embeds=far, attention_mask=attention_mask, labels=labels, **more)


class Drawing(LlamaForCausalLM):
    def forward(self, input_ids: Any, attention_mask: Any = None, labels: Any = None, **more: Any) -> Any:
        random.random()
        return super().forward(input_ids, attention_mask, labels=labels, **more)


class Noisy(LlamaForCausalLM):
    def forward(self, input_ids: Any, attention_mask: Any = None, labels: Any = None, **more: Any) -> Any:
        embedded = self.model.embed_tokens(input_ids)
        noisy = embedded + 0.1 * torch.randn_like(embedded)
        return super().forward(inputs_embeds=noisy, attention_mask=attention_mask, labels=labels, **more)


class Tables(torch.nn.Module):
    """Embeddings that are a sum of two tables, and have no ``weight``."""

    def __init__(self, *tables: Any) -> None:
        super().__init__()
        self.tables = torch.nn.ModuleList(tables)

    def forward(self, input_ids: Any) -> Any:
        return self.tables[0](input_ids) + self.tables[1](input_ids)


class TwoTables(LlamaForCausalLM):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model.embed_tokens = Tables(self.model.embed_tokens, torch.nn.Embedding(96, 32))


class Reference(Trainer):
    """A penalty where the model leaves its own beginning, also at a first token that is a label."""

    def __init__(self, model: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(model, *args, **kwargs)
        self.first = deepcopy(model).requires_grad_(False)

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        outputs = model(**inputs, num_items_in_batch=num_items_in_batch)
        with torch.no_grad():
            wanted = self.first(**{key: value for key, value in inputs.items() if key != "labels"}).logits
        apart = (outputs.logits - wanted).square().sum(-1)
        loss = outputs.loss + (apart * (inputs["labels"] != -100)).sum() / num_items_in_batch
        return (loss, outputs) if return_outputs else loss


class WarmingUp(Trainer):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.calls = count(1)

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        loss, outputs = super().compute_loss(*args, **{**kwargs, "return_outputs": True})
        loss = loss * min(1.0, next(self.calls) / 8)
        return (loss, outputs) if kwargs.get("return_outputs") else loss


class Cached(Trainer):
    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        return super().compute_loss(model, {**inputs, "use_cache": True}, *args, **kwargs)


def without_targets(rows: Any) -> Any:
    batch = collate(rows)
    return {**batch, "labels": torch.full_like(batch["labels"], -100)}


def flattened(rows: Any) -> Any:
    """Rows side by side, with positions that start again."""
    plain = [{key: torch.as_tensor(row[key]).tolist() for key in ("input_ids", "labels")} for row in rows]
    return DataCollatorWithFlattening(return_tensors="pt")(plain)


def sum_of_tokens(out: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
    return loss_of(out.logits, labels, reduction="sum") / num_items_in_batch


MODELS = {
    "classes of tokens": LlamaForTokenClassification,
    "positions of its own": OwnPositions,
    "positions counted by the mask": CountedPositions,
    "means of rows": MeansOfRows,
    "weight penalty": WeightPenalty,
    "far places": Far,
    "random": Drawing,
    "noisy": Noisy,
    "two tables": TwoTables,
}
TRAINERS = {
    "logs": Logs,
    "means": Means,
    "flattened, cached": Cached,
    "by rows": ByRows,
    "shifted before": ShiftedBefore,
    "reference": Reference,
    "warming up": WarmingUp,
}
COLLATE = {"flattened": flattened, "no targets": without_targets}
OLDER = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}}


def trainer(kind: str = "", *callbacks: Any) -> Any:
    """A Trainer of one step, stock but for `kind`, whose gradients its `kept` has."""
    torch.manual_seed(0)
    model, keep = MODELS.get(kind, LlamaForCausalLM)(CONFIG).double(), Keep()
    own = TrainingArguments(**arguments(**TWO_MICRO_BATCHES, **(OLDER if kind == "older checkpoints" else {})))
    loss = sum_of_tokens if kind == "loss function" else None
    data = {
        "train_dataset": rows(),
        "data_collator": COLLATE.get(kind.split(",")[0], collate),
        "callbacks": [keep, *callbacks],
    }
    made = TRAINERS.get(kind, Trainer)(model, own, compute_loss_func=loss, **data)
    made.kept = keep
    return made
