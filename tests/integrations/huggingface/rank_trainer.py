"""What the ranks of a test world run: every function here is a case of test_trainer.py."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import deepspeed
import numpy as np
import torch
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType
from evenload.core.errors import RankError
from evenload.core.plan.step_plan import as_lengths
from evenload.integrations.deepspeed.engine.engine import prepare_deepspeed
from evenload.integrations.transformers import planning
from evenload.integrations.transformers import trainer as planned_trainer
from evenload.integrations.unmodified import planned_loop
from evenload.patches.session import enabled
from evenload.runtime.attributes import with_attributes
from evenload.runtime.world import agreement
from evenload.runtime.world.agreement import everyone, rank_and_size
from torch.nn.functional import cross_entropy
from torch.utils.data import SequentialSampler
from trainer_runs import Gradients, Keep, arguments, collate, error_of, forget_layout, planned_by, recipe
from transformers import EarlyStoppingCallback, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

VOCAB = 97
RATE = 100.0
"""Large, so that a float32 weight of 1 moves by more than its rounding."""


def double_loss(logits: Any, labels: Any, num_items_in_batch: Any = None, shift_labels: Any = None, **_: Any) -> Any:
    """`ForCausalLMLoss` without its cast to float32, which bounds what a float64 run can show."""
    if shift_labels is None:
        shift_labels = torch.nn.functional.pad(labels, (0, 1), value=-100)[..., 1:]
    total = cross_entropy(logits.flatten(0, 1), shift_labels.flatten(), ignore_index=-100, reduction="sum")
    return total / ((shift_labels != -100).sum() if num_items_in_batch is None else num_items_in_batch)


def build_model() -> Any:
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "max_position_embeddings": 2048}
    config = LlamaConfig(vocab_size=VOCAB, num_attention_heads=4, num_key_value_heads=4, pad_token_id=0, **shape)
    model = LlamaForCausalLM(config).double()
    model.loss_function = double_loss
    return model


class InOrder(Trainer):
    """Samples come in the order of the dataset, so that a plan can be written for them."""

    def _get_train_sampler(self, *_: Any) -> Any:
        return SequentialSampler(self.train_dataset)


def _fsdp_on_cpus() -> Any:
    """Accelerate 1.15 takes FSDP for plain data parallelism where there is no GPU, without a word."""
    decide = AcceleratorState.__init__

    def with_fsdp(self: Any, *words: Any, fsdp_plugin: Any = None, **options: Any) -> None:
        decide(self, *words, fsdp_plugin=fsdp_plugin, **options)
        if fsdp_plugin is not None:
            self.distributed_type, self.fsdp_plugin = DistributedType.FSDP, fsdp_plugin
            PartialState._shared_state["distributed_type"] = DistributedType.FSDP

    return patch.object(AcceleratorState, "__init__", with_fsdp)


def _ds_config(zero: int) -> dict[str, Any]:
    prepare_deepspeed()
    auto = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
    own = {"zero_optimization": {"stage": zero}, "zero_allow_untested_optimizer": True}
    return {**dict.fromkeys(auto, "auto"), **own}


def samples_of(lengths: Any, masked: bool = False, trunk: int = 0) -> list[dict[str, list[int]]]:
    """A sample of each length; ``masked``: the first half of it is a prompt without loss, and of five samples one
    carries loss at every second token only, and one nowhere; ``trunk``: tokens that all begin with."""
    rows = []
    alike = np.random.default_rng(len(lengths)).integers(1, VOCAB, trunk).tolist()
    for number, length in enumerate(lengths):
        tokens = np.random.default_rng(number).integers(1, VOCAB, int(length)).tolist()
        tokens = [*alike, *tokens[trunk:]][: int(length)]
        labels = np.array(tokens)
        if masked:
            labels[: len(tokens) // 2] = -100
            if number % 5 >= 3:
                labels[:: 2 if number % 5 == 4 else 1] = -100
        rows.append({"input_ids": tokens, "labels": labels.tolist()})
    return rows


@contextmanager
def embedded_tokens() -> Iterator[list[int]]:
    """The number of tokens of each forward inside."""
    embed, ran = torch.nn.Embedding.forward, list[int]()
    with with_attributes(torch.nn.Embedding, forward=lambda own, ids: ran.append(ids.numel()) or embed(own, ids)):
        yield ran


def train(rows: list[Any], zero: int | None = None, **more: Any) -> tuple[float, Gradients]:
    """One optimizer step over all rows, one row in a micro-batch: its loss and gradients; `zero` as in `step_of`."""
    size = rank_and_size()[1]
    rows = rows + [{"input_ids": [1], "labels": [-100]}] * (-len(rows) % size)
    more |= {"per_device_train_batch_size": 1, "gradient_accumulation_steps": len(rows) // size}
    return step_of(build_model, zero, more, train_dataset=rows, data_collator=collate)


def step_of(build: Callable[[], Any], zero: int | None, own: dict[str, Any], **data: Any) -> tuple[float, Gradients]:
    """Loss and gradients of one step of a model under the Trainer with these arguments and these data.

    ``zero``: under DeepSpeed of this stage, in float32, where the gradient is what SGD takes off the weights.
    """
    forget_layout()
    keep, model = Keep(), build()
    if zero is not None:
        model = model.float()
        own |= {"deepspeed": _ds_config(zero), "learning_rate": RATE, "lr_scheduler_type": "constant"}
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    with _fsdp_on_cpus() if "fsdp" in own else nullcontext():
        trainer = InOrder(model, TrainingArguments(**arguments(**own)), callbacks=[keep] * (zero is None), **data)
    trainer.train()
    wanted = "DeepSpeedEngine" if zero is not None else "FSDP" if "fsdp" in own else "DistributedDataParallel"
    assert type(trainer.model_wrapped).__name__.startswith(wanted), type(trainer.model_wrapped)
    loss = trainer.state.log_history[0]["loss"]
    if zero is None:
        return loss, keep.updates[-1]
    with deepspeed.zero.GatheredParameters(list(model.parameters()), enabled=zero == 3):
        return loss, {name: (before[name] - p.detach()) / RATE for name, p in model.named_parameters()}


@contextmanager
def planned(plan: Any) -> Iterator[None]:
    """Inside, the Trainer runs this plan, samples without targets included."""
    caps = SimpleNamespace(max_tokens=256, padded=False)
    chain = SimpleNamespace(plan=lambda lengths: _for(plan, lengths), links=(), work_s=lambda _: 0.0, caps=caps)
    with (
        with_attributes(planned_trainer, chain_of=lambda *_, **__: chain),
        with_attributes(planned_loop, report_step=lambda *_, **__: None),
        with_attributes(planned_loop.LoopSession, numbers={}),  # predicted by the costs of a chain
        with_attributes(planning, _is_computed=lambda row: True),
        enabled(recipe(packing={"max_tokens": 64})),
    ):
        yield


def _for(plan: Any, lengths: Any) -> Any:
    """The plan for its own sequences and for the samples of one token behind them, which fill the micro-batches."""
    extra = len(lengths) - len(plan.lengths)
    assert lengths[: len(plan.lengths)].tolist() == list(plan.lengths)
    return plan if not extra else replace(plan, lengths=as_lengths([*plan.lengths, *lengths[-extra:]]))


def exactness(names: list[str], file: str, masked: bool = False, **more: Any) -> dict[str, Any]:
    """Errors of every plan of a file against the same Trainer without evenload."""
    found: dict[str, Any] = {}
    references: dict[Any, Any] = {}
    for name in names:
        plan = import_module(file).plan_of(name)
        rows, key = samples_of(plan.lengths, masked), tuple(plan.lengths)
        if key not in references:
            references[key] = train(rows, **more)
        with planned(plan):
            found[name] = _errors(train(rows, **more), references[key])
    return found


def _errors(own: tuple[float, Gradients], wanted: tuple[float, Gradients]) -> dict[str, float]:
    return {"loss": abs(own[0] - wanted[0]) / wanted[0], "grad": error_of(own[1], wanted[1])}


def by_recipes(
    lengths: list[int], recipes: list[Any], masked: bool = False, trunk: int = 0, **more: Any
) -> list[dict[str, Any]]:
    """The same for the plan of each recipe, of which the plugins are given, and what was planned."""
    rows = samples_of(lengths, masked, trunk)
    wanted = train(rows, **more)
    return [_by_recipe(rows, wanted, recipe(**plugins), **more) for plugins in recipes]


def _by_recipe(rows: list[Any], wanted: tuple[float, Gradients], own: Any, **more: Any) -> dict[str, Any]:
    with planned_by(own) as seen, embedded_tokens() as ran:
        errors = _errors(train(rows, **more), wanted)
    (plan,) = seen.plans
    shared = sum(len(m.ranks) > 1 for m in plan.micro_batches)
    made = {"cut": len(plan.cut), "shared": shared, "micro_batches": len(plan.micro_batches)}
    return {**errors, **made, "ran": ran[-len(plan.of_rank(rank_and_size()[0])) :]}


def unlike_recipes() -> str:
    """What this rank reads whose recipe has another cap than its neighbour's, and that no roll call has compared."""
    own = recipe(packing={"max_tokens": 64 << rank_and_size()[0]})
    try:
        with enabled(own), with_attributes(agreement, before_first=None):
            train(samples_of([61, 5, 17, 33, 9, 50, 3, 40]))
    except RankError as error:
        return str(error)
    return "no error"


def unchanged() -> dict[str, Any]:
    """What a run leaves behind, stock and planned: evaluation, best model, early stopping, checkpoints, resuming."""
    rows = samples_of([9, 30, 4, 17, 25, 8, 40, 12, 6, 21, 33, 5, 14, 28, 7, 19])
    stock = _left_behind(rows)
    with enabled(recipe(packing={"max_tokens": 32})):
        return {"stock": stock, "planned": _left_behind(rows)}


def _left_behind(rows: list[Any]) -> dict[str, Any]:
    """The state and the files of a run that stops early, and of one that resumes it in the middle of an epoch."""
    forget_layout()
    (folder,) = {one for one in everyone(tempfile.mkdtemp() if rank_and_size()[0] == 0 else None) if one}
    own = {"output_dir": folder, "num_train_epochs": 6, "max_steps": -1, "max_grad_norm": 1.0, "optim": "adamw_torch"}
    own |= {"per_device_train_batch_size": 2, "learning_rate": 0.05, "include_num_input_tokens_seen": "all"}
    own |= {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2}
    own |= {"load_best_model_at_end": True, "metric_for_best_model": "eval_loss", "save_total_limit": 40}

    def trainer() -> Any:
        stop = EarlyStoppingCallback(early_stopping_patience=2, early_stopping_threshold=0.05)
        data = {"train_dataset": rows, "eval_dataset": rows[::3], "data_collator": collate}
        return Trainer(build_model(), TrainingArguments(**arguments(**own)), callbacks=[stop], **data)

    first = trainer()
    first.train()
    resumed = trainer()
    resumed.train(resume_from_checkpoint=f"{folder}/checkpoint-2")
    weights = {name: p.detach().clone() for name, p in first.model.named_parameters()}
    files = sorted(str(path.relative_to(folder)) for path in Path(folder).rglob("*"))
    return {"first": _state(first), "resumed": _state(resumed), "weights": weights, "files": files}


def _state(trainer: Any) -> dict[str, Any]:
    state = trainer.state
    clocks = ("runtime", "per_second")
    history = [{k: v for k, v in row.items() if not any(word in k for word in clocks)} for row in state.log_history]
    kept = ("global_step", "epoch", "max_steps", "total_flos", "num_input_tokens_seen", "best_metric")
    best = Path(state.best_model_checkpoint).name
    return {"history": history, "best": best, **{name: getattr(state, name) for name in kept}}
