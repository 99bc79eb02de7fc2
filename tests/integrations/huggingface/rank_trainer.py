"""What the ranks of a test world run: every function here is a case of test_trainer.py."""

from __future__ import annotations

import os
import tempfile
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import deepspeed
import numpy as np
import torch
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType
from evenload.core.errors import RankError
from evenload.core.plan.step_plan import as_lengths
from evenload.core.recipe import recipe as recipes
from evenload.integrations.deepspeed.engine.engine import prepare_deepspeed
from evenload.integrations.transformers import planning
from evenload.integrations.transformers import trainer as planned_trainer
from evenload.integrations.unmodified import planned_loop
from evenload.patches.session import enabled
from evenload.runtime.attributes import with_attributes
from evenload.runtime.world import agreement
from evenload.runtime.world.agreement import everyone, rank_and_size
from evenload.runtime.world.world import init_world
from torch.nn.functional import cross_entropy
from torch.utils.data import SequentialSampler
from transformers import (
    EarlyStoppingCallback,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

VOCAB = 97
RATE = 100.0
"""Large, so that a float32 weight of 1 moves by more than its rounding."""
RECIPE = {"trainer": "transformers", "plugins": {"packing": {"enabled": True, "max_tokens": 64}}}


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


class Keep(TrainerCallback):
    """The gradients right before the update, whole."""

    def __init__(self) -> None:
        self.gradients: dict[str, torch.Tensor] = {}

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        for name, parameter in model.named_parameters():
            gradient = parameter.grad
            if gradient is None:  # of layers that a tower's model has and nobody asks
                continue
            whole = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
            self.gradients[name.removeprefix("module.")] = whole.detach().clone()


@contextmanager
def _fsdp_on_cpus() -> Any:
    """Accelerate 1.15 takes FSDP for plain data parallelism where there is no GPU, without a word."""
    decide = AcceleratorState.__init__

    def with_fsdp(self: Any, *words: Any, fsdp_plugin: Any = None, **options: Any) -> None:
        decide(self, *words, fsdp_plugin=fsdp_plugin, **options)
        if fsdp_plugin is not None:
            self.distributed_type, self.fsdp_plugin = DistributedType.FSDP, fsdp_plugin
            PartialState._shared_state["distributed_type"] = DistributedType.FSDP

    AcceleratorState.__init__ = with_fsdp
    try:
        yield
    finally:
        AcceleratorState.__init__ = decide


def _ds_config(zero: int) -> dict[str, Any]:
    prepare_deepspeed()
    auto = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
    own = {"zero_optimization": {"stage": zero}, "zero_allow_untested_optimizer": True}
    return {**dict.fromkeys(auto, "auto"), **own}


def collate(rows: list[Any]) -> dict[str, torch.Tensor]:
    most = max(len(row["input_ids"]) for row in rows)

    def padded(key: str, value: int) -> torch.Tensor:
        return torch.tensor([row[key] + [value] * (most - len(row[key])) for row in rows])

    for row in rows:
        row["attention_mask"] = [1] * len(row["input_ids"])
    return {k: padded(k, v) for k, v in (("input_ids", 0), ("labels", -100), ("attention_mask", 0))}


def samples_of(lengths: Any, masked: bool = False) -> list[dict[str, list[int]]]:
    """A sample of each length; ``masked``: the first half of it is a prompt without loss, and of five samples one
    carries loss at every second token only, and one nowhere."""
    rows = []
    for number, length in enumerate(lengths):
        tokens = np.random.default_rng(number).integers(1, VOCAB, int(length)).tolist()
        labels = np.array(tokens)
        if masked:
            labels[: len(tokens) // 2] = -100
            if number % 5 >= 3:
                labels[:: 2 if number % 5 == 4 else 1] = -100
        rows.append({"input_ids": tokens, "labels": labels.tolist()})
    return rows


def train(rows: list[Any], size: int, zero: int | None = None, **more: Any) -> tuple[float, dict[str, torch.Tensor]]:
    """One optimizer step over all rows, one row in a micro-batch: its loss and gradients.

    ``zero``: under DeepSpeed of this stage, in float32, where the gradient is what SGD takes off the weights.
    """
    if zero is not None:
        more |= {"deepspeed": _ds_config(zero), "learning_rate": RATE, "lr_scheduler_type": "constant"}
    AcceleratorState._reset_state(reset_partial_state=True)
    os.environ["ACCELERATE_USE_DEEPSPEED"] = os.environ["ACCELERATE_USE_FSDP"] = "false"
    keep, count = Keep(), -(-len(rows) // size)
    rows = rows + [{"input_ids": [1], "labels": [-100]}] * (count * size - len(rows))
    arguments = {"output_dir": tempfile.mkdtemp(), "use_cpu": True, "max_steps": 1, "max_grad_norm": 0.0, "seed": 1}
    arguments |= {"per_device_train_batch_size": 1, "gradient_accumulation_steps": count, "logging_steps": 1}
    arguments |= {"report_to": "none", "save_strategy": "no", "disable_tqdm": True, "optim": "sgd", **more}
    made = TrainingArguments(**arguments)
    model = build_model() if zero is None else build_model().float()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    with _fsdp_on_cpus() if "fsdp" in more else nullcontext():
        trainer = InOrder(model, made, train_dataset=rows, data_collator=collate, callbacks=[keep] * (zero is None))
    trainer.train()
    wanted = "DeepSpeedEngine" if zero is not None else "FSDP" if "fsdp" in more else "DistributedDataParallel"
    assert type(trainer.model_wrapped).__name__.startswith(wanted), type(trainer.model_wrapped)
    if zero is not None:
        with deepspeed.zero.GatheredParameters(list(model.parameters()), enabled=zero == 3):
            keep.gradients = {name: (before[name] - p.detach()) / RATE for name, p in model.named_parameters()}
    return trainer.state.log_history[0]["loss"], keep.gradients


@contextmanager
def planned(plan: Any) -> Any:
    """Inside, the Trainer runs this plan, samples without targets included."""
    chain = SimpleNamespace(plan=lambda lengths: _for(plan, lengths), links=(), work_s=lambda _: 0.0)
    with (
        with_attributes(planned_trainer, chain_of=lambda *_, **__: chain),
        with_attributes(planned_loop, report_step=lambda *_, **__: None),
        with_attributes(planned_loop.PlannedLoop, numbers={}),  # predicted by the costs of a chain
        with_attributes(planning, _is_computed=lambda row: True),
        enabled(recipes.parse(RECIPE)),
    ):
        yield


def _for(plan: Any, lengths: Any) -> Any:
    """The plan for its own sequences and for the samples of one token behind them, which fill the micro-batches."""
    extra = len(lengths) - len(plan.lengths)
    assert lengths[: len(plan.lengths)].tolist() == list(plan.lengths)
    return plan if not extra else replace(plan, lengths=as_lengths([*plan.lengths, *lengths[-extra:]]))


def exactness(load: Any, names: list[str], file: str, masked: bool = False, **more: Any) -> dict[str, Any]:
    """Errors of every plan against the same Trainer without evenload."""
    size = _join()
    found: dict[str, Any] = {}
    references: dict[Any, Any] = {}
    for name in names:
        plan = plan_named(load(file), name)
        rows, key = samples_of(plan.lengths, masked), tuple(plan.lengths)
        if key not in references:
            references[key] = train(rows, size, **more)
        loss, wanted = references[key]
        with planned(plan):
            own_loss, gradients = train(rows, size, **more)
        found[name] = {"loss": abs(own_loss - loss) / loss, "grad": relative_error(gradients, wanted)}
    return found


def by_recipe(load: Any, lengths: list[int], plugins: Any, masked: bool = False, **more: Any) -> dict[str, Any]:
    """The same for the plans of a recipe's plugins, and what they were."""
    size, rows, plans = _join(), samples_of(lengths, masked), []
    loss, wanted = train(rows, size, **more)
    recipe = recipes.parse({**RECIPE, "plugins": plugins})
    report = {"report_step": lambda _, chain, plan, **__: plans.append(plan)}
    embed, ran = torch.nn.Embedding.forward, []
    noting = {"forward": lambda own, ids: ran.append(ids.numel()) or embed(own, ids)}
    with with_attributes(planned_loop, **report), with_attributes(torch.nn.Embedding, **noting), enabled(recipe):
        own_loss, gradients = train(rows, size, **more)
    (plan,) = plans
    shared = sum(len(m.ranks) > 1 for m in plan.micro_batches)
    made = {"cut": len(plan.cut), "shared": shared, "micro_batches": len(plan.micro_batches)}
    made["ran"] = ran[-len(plan.of_rank(rank_and_size()[0])) :]
    return {"loss": abs(own_loss - loss) / loss, "grad": relative_error(gradients, wanted), **made}


def unlike_recipes(load: Any) -> str:
    """What this rank reads whose recipe has another cap than its neighbour's, and that no roll call has compared."""
    size, rank = _join(), rank_and_size()[0]
    plugins = {"packing": {"enabled": True, "max_tokens": 64 * (rank + 1)}}
    try:
        with enabled(recipes.parse({**RECIPE, "plugins": plugins})), with_attributes(agreement, before_first=None):
            train(samples_of([61, 5, 17, 33, 9, 50, 3, 40]), size)
    except RankError as error:
        return str(error)
    return "no error"


def unchanged(load: Any) -> dict[str, Any]:
    """What a run leaves behind, stock and planned: evaluation, best model, early stopping, checkpoints, resuming."""
    size, rows = _join(), samples_of([9, 30, 4, 17, 25, 8, 40, 12, 6, 21, 33, 5, 14, 28, 7, 19])
    recipe = recipes.parse({**RECIPE, "plugins": {"packing": {"enabled": True, "max_tokens": 32}}})
    stock = _left_behind(rows, size)
    with enabled(recipe):
        planned_run = _left_behind(rows, size)
    return {"stock": stock, "planned": planned_run}


def _left_behind(rows: list[Any], size: int) -> dict[str, Any]:
    """The state and the files of a run that stops early, and of one that resumes it in the middle of an epoch."""
    AcceleratorState._reset_state(reset_partial_state=True)
    os.environ["ACCELERATE_USE_DEEPSPEED"] = os.environ["ACCELERATE_USE_FSDP"] = "false"
    (folder,) = {one for one in everyone(tempfile.mkdtemp() if rank_and_size()[0] == 0 else None) if one}
    arguments = {"output_dir": folder, "use_cpu": True, "num_train_epochs": 6, "learning_rate": 0.05, "seed": 1}
    arguments |= {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 1, "logging_steps": 1}
    arguments |= {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2}
    arguments |= {"load_best_model_at_end": True, "metric_for_best_model": "eval_loss", "save_total_limit": 40}
    arguments |= {"include_num_input_tokens_seen": "all", "report_to": "none", "disable_tqdm": True}

    def trainer() -> Any:
        stop = EarlyStoppingCallback(early_stopping_patience=2, early_stopping_threshold=0.05)
        data = {"train_dataset": rows, "eval_dataset": rows[::3], "data_collator": collate}
        return Trainer(build_model(), TrainingArguments(**arguments), callbacks=[stop], **data)

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


def _join() -> int:
    """Join the test world as Accelerate expects it, which takes the process group that is there; its size."""
    world = init_world()
    rank = str(world.rank)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "RANK": rank, "LOCAL_RANK": rank}
    os.environ["WORLD_SIZE"] = os.environ["LOCAL_WORLD_SIZE"] = str(world.size)
    return world.size


def plan_named(module: Any, name: str) -> Any:
    """``random 7``, or a function of the module with its arguments."""
    if hasattr(module, "named"):
        return module.named(name)
    kind, *words = name.split()
    return module.random_plan(int(words[0])) if kind == "random" else getattr(module, kind)(*words)


def relative_error(gradients: Any, wanted: Any) -> float:
    """Largest ||a - b|| / ||b|| over parameters; the names are equal."""
    assert gradients.keys() == wanted.keys()
    assert wanted
    return max(float((gradients[n] - w).norm() / w.norm()) for n, w in wanted.items())
