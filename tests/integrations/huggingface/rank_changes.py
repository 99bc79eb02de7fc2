"""What the ranks of a test world run: Trainers whose scripts change batches, steps and gradients on their way. Every
function here is a case of test_changes.py."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from typing import Any, ClassVar

import peft
import torch
from accelerate.state import AcceleratorState
from evenload.core.errors import EvenloadError
from evenload.integrations.transformers import trainer as planned_trainer
from evenload.integrations.unmodified import planned_loop
from evenload.patches.session import enabled
from evenload.runtime.attributes import with_attributes
from transformers import Trainer, TrainerCallback, TrainingArguments

LENGTHS = [9, 30, 4, 17, 25, 8, 40, 12, 6, 21, 33, 5, 14, 28, 7, 19]


class Changed(Trainer):
    """A Trainer of a script; the arguments of its run."""

    arguments: ClassVar[dict[str, Any]] = {}

    def _get_train_sampler(self, *_: Any) -> Any:
        return torch.utils.data.SequentialSampler(self.train_dataset)

    def start(self) -> None:
        self.train()


class LabelsOfAStep(Changed):
    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        inputs["labels"] = inputs["labels"].masked_fill(inputs["input_ids"] % 7 == 0, -100)
        return super().training_step(model, inputs, num_items_in_batch)


class IdsInPlace(Changed):
    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        tokens = inputs["input_ids"]
        tokens[(tokens % 5 == 0) & (inputs["attention_mask"] == 1)] = 5
        return super().training_step(model, inputs, num_items_in_batch)


class OtherBatch(Changed):
    """A curriculum: rows are cut short, in a dictionary of the script's own."""

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        short = {key: value[:, :12] for key, value in inputs.items()}
        return super().training_step(model, short, num_items_in_batch)


class PassedOver(Changed):
    """Of three batches the one in the middle is not trained on."""

    arguments: ClassVar[dict[str, Any]] = {"gradient_accumulation_steps": 3, "per_device_train_batch_size": 1}
    seen = 0

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        self.seen += 1
        if self.seen % 3 == 2:
            return torch.zeros(())
        return super().training_step(model, inputs, num_items_in_batch)


class LastPassedOver(PassedOver):
    seen = 2


class MaskedAfterCounting(Changed):
    def get_batch_samples(self, *args: Any) -> Any:
        batches, num_items = super().get_batch_samples(*args)
        for batch in batches:
            batch["labels"][:, 12:] = -100
        return batches, num_items


class OwnDivisor(Changed):
    def get_batch_samples(self, *args: Any) -> Any:
        batches, num_items = super().get_batch_samples(*args)
        return [{key: value[:, :20] for key, value in batch.items()} for batch in batches], num_items * 2


class DivisorOfEachBatch(Changed):
    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        return super().training_step(model, inputs, (inputs["labels"] != -100).sum() * 4)


class Prepared(Changed):
    """Labels that are masked by row, where batches are brought to the device."""

    def _prepare_inputs(self, inputs: Any) -> Any:
        inputs = super()._prepare_inputs(inputs)
        labels = inputs["labels"].clone()
        labels[:, :4] = -100
        return inputs | {"labels": labels}


class OneObjectTwice(Changed):
    """Two batches over and over, each twice in a step."""

    arguments: ClassVar[dict[str, Any]] = {"gradient_accumulation_steps": 4}

    def get_train_dataloader(self) -> Any:
        pair = [self.data_collator([dict(self.train_dataset[i]) for i in rows]) for rows in ((0, 1), (2, 3))]
        return pair * 4


class OneObjectChanged(OneObjectTwice):
    """The same, with one more label masked at each of its turns."""

    turn = 0

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        self.turn += 1
        inputs["labels"][:, self.turn] = -100
        return super().training_step(model, inputs, num_items_in_batch)


class TwiceInAStep(Changed):
    """Each batch is trained on twice."""

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        first = super().training_step(model, inputs, num_items_in_batch)
        return first + super().training_step(model, inputs, num_items_in_batch)


class OwnStep(Changed):
    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        loss = self.compute_loss(model, self._prepare_inputs(inputs), num_items_in_batch=num_items_in_batch)
        self.accelerator.backward(loss)
        return loss.detach()


class Counting(Changed):
    """A loss that is Trainer's own, and a counter."""

    calls = 0

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        return super().compute_loss(*args, **kwargs)


class MeansOfBatches(Changed):
    """The mean of each batch, as Axolotl takes it: the model is thought to take no number of targets."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.model_accepts_loss_kwargs = False


class MeansWithPenalty(MeansOfBatches):
    def compute_loss(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        loss = super().compute_loss(model, *args, **kwargs)
        penalty = 1e-2 * sum(p.pow(2).sum() for p in model.parameters())
        return (loss[0] + penalty, loss[1]) if isinstance(loss, tuple) else loss + penalty


class SmoothMeans(MeansOfBatches):
    arguments: ClassVar[dict[str, Any]] = {"label_smoothing_factor": 0.1}


class DivisorOfEachRank(Changed):
    arguments: ClassVar[dict[str, Any]] = {"average_tokens_across_devices": False}


class KeptLogits(Changed):
    """Logits of the answers alone, as ms-swift has them: labels are cut to these, and the model's mean is weighed."""

    def _prepare_inputs(self, inputs: Any) -> Any:
        inputs = super()._prepare_inputs(inputs)
        kept = inputs["labels"].shape[1] - int((inputs["labels"] != -100).int().argmax(-1).min()) + 1
        return inputs | {"labels": inputs["labels"][:, -kept:], "logits_to_keep": kept, "compute_loss_func": None}

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        inputs.pop("compute_loss_func", None)
        outputs = model(**inputs)
        targets = (inputs["labels"][:, 1:] != -100).sum().double()
        mean = outputs.loss if targets else outputs.logits.sum() * 0
        loss = mean * (targets / num_items_in_batch) * self.accelerator.num_processes
        return (loss, outputs) if return_outputs else loss


class KeptLogitsOfRows(KeptLogits):
    """One row a batch: logits before each target, and of the last token."""

    arguments: ClassVar[dict[str, Any]] = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4}

    def _prepare_inputs(self, inputs: Any) -> Any:
        inputs = Trainer._prepare_inputs(self, inputs)
        is_target = inputs["labels"][0] != -100
        is_target[0] = False
        labels = torch.nn.functional.pad(inputs["labels"][:, is_target], (1, 0), value=-100)
        return inputs | {"labels": labels, "logits_to_keep": torch.nn.functional.pad(is_target[1:], (0, 1), value=True)}


class RaisesOnShortRows(Changed):
    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        if inputs["input_ids"].shape[1] < 13:
            raise ValueError("rows of 13 tokens and more")
        return super().compute_loss(model, inputs, *args, **kwargs)


class RaisesAnyhow(Changed):
    """A loss that a script mends after it has raised."""

    mended = False

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        if not self.mended:
            raise LookupError("no loss")
        return super().compute_loss(*args, **kwargs)

    def start(self) -> None:
        try:
            self.train()
        except LookupError:
            self.mended = True
            self.train()


class OtherKeysOnARank(Changed):
    arguments: ClassVar[dict[str, Any]] = {"remove_unused_columns": False}


class ChangedBehind(Changed):
    """A loss that is Trainer's own, of a batch that is changed before it, from the second step on."""

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        if self.state.global_step:
            inputs = inputs | {"position_ids": torch.arange(inputs["input_ids"].shape[1])[None]}
        return super().compute_loss(model, inputs, *args, **kwargs)


class Interrupted(Changed):
    """A notebook: a callback raises in the middle of a step, and training begins again."""

    def start(self) -> None:
        class Raises(TrainerCallback):
            def on_substep_end(self, *_: Any, **__: Any) -> None:
                raise KeyboardInterrupt

        self.add_callback(Raises)
        try:
            self.train()
        except KeyboardInterrupt:
            self.remove_callback(Raises)
        self.train()


class Named(Changed):
    arguments: ClassVar[dict[str, Any]] = {"remove_unused_columns": False}


def _named(collate: Any) -> Any:
    return lambda rows: collate(rows) | {"sample_ids": torch.arange(len(rows))}


def _one_sided(collate: Any) -> Any:
    """Rank 1 has an entry more, which the model reads."""
    one_more = torch.distributed.get_rank() == 1
    return lambda rows: collate(rows) | ({"return_dict": True} if one_more else {})


def _targetless(collate: Any) -> Any:
    """The second step of a run has no target."""
    calls: list[int] = []

    def collated(rows: list[Any]) -> Any:
        calls.append(1)
        batch = collate(rows)
        return batch | ({"labels": torch.full_like(batch["labels"], -100)} if len(calls) in (3, 4) else {})

    return collated


def _hooked(hook: Any) -> Callable[[Any], Any]:
    def change(model: Any) -> Any:
        for parameter in model.parameters():
            parameter.register_hook(hook)
        return model

    return change


def _zeroed_after(model: Any) -> Any:
    def zero(parameter: Any) -> None:
        parameter.grad.mul_(0.5)

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(zero)
    return model


def _prompted(model: Any) -> Any:
    torch.manual_seed(1)
    model = peft.get_peft_model(model, peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)).double()
    torch.nn.init.normal_(next(p for p in model.parameters() if p.requires_grad))
    return model


def _adapted_by_older(model: Any) -> Any:
    """PEFT before 0.21 calls the model's method, past hooks of the module."""
    torch.manual_seed(1)
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules="all-linear", init_lora_weights=False)
    model = peft.get_peft_model(model, config).double()
    model.base_model.forward = model.base_model.model.forward
    return model


VARIANTS: dict[str, tuple[type[Changed], Callable[[Any], Any] | None, Callable[[Any], Any] | None]] = {
    "labels of a step": (LabelsOfAStep, None, None),
    "ids in place": (IdsInPlace, None, None),
    "other batch": (OtherBatch, None, None),
    "passed over": (PassedOver, None, None),
    "masked after counting": (MaskedAfterCounting, None, None),
    "own divisor": (OwnDivisor, None, None),
    "prepared": (Prepared, None, None),
    "one object twice": (OneObjectTwice, None, None),
    "one object changed": (OneObjectChanged, None, None),
    "twice in a step": (TwiceInAStep, None, None),
    "counting": (Counting, None, None),
    "interrupted": (Interrupted, None, None),
    "names of samples": (Named, _named, None),
    "targetless step": (Changed, _targetless, None),
    "masking hooks": (Changed, None, _hooked(lambda g: g * (g.new_ones(g.shape).cumsum(0) % 2))),
    "means of batches": (MeansOfBatches, None, None),
    "divisor of each rank": (DivisorOfEachRank, None, None),
    "kept logits": (KeptLogits, None, None),
    "kept logits of rows": (KeptLogitsOfRows, None, None),
    "older adapters": (Changed, None, _adapted_by_older),
    "own step": (OwnStep, None, None),
    "means with a penalty": (MeansWithPenalty, None, None),
    "smooth means": (SmoothMeans, None, None),
    "raises on short rows": (RaisesOnShortRows, None, None),
    "raises anyhow": (RaisesAnyhow, None, None),
    "other keys on a rank": (OtherKeysOnARank, _one_sided, None),
    "prompt tuning": (Changed, None, _prompted),
    "last passed over": (LastPassedOver, None, None),
    "divisor of each batch": (DivisorOfEachBatch, None, None),
    "changed behind": (ChangedBehind, None, None),
    "clamping hooks": (Changed, None, _hooked(lambda g: g.clamp(-1e-3, 1e-3))),
    "halving hooks": (Changed, None, _zeroed_after),
}
"""The Trainer, what stands around its collate function, what is done to its model."""


def variants(load: Any, names: list[str]) -> dict[str, dict[str, Any]]:
    """Errors of every variant against itself without evenload, steps that were planned, what was said and refused."""
    trainers = load("rank_trainer")
    trainers._join()
    return {name: _compared(trainers, name) for name in names}


def _compared(trainers: Any, name: str) -> dict[str, Any]:
    stock, steps, said = _run(trainers, name), [], []
    result = {"planned": steps, "said": said, "refused": None, "grad": None, "loss": None}

    def note(loop: str, chain: Any, *_: Any, **__: Any) -> None:
        steps.append("rows" if chain.caps.padded else "packs")

    try:
        with (
            with_attributes(planned_loop, report_step=note),
            with_attributes(planned_trainer, report_idle=lambda *words: said.append(" ".join(words))),
            enabled(trainers.recipes.parse(trainers.RECIPE)),
        ):
            own = _run(trainers, name)
    except EvenloadError as error:
        return result | {"refused": str(error)}
    pairs = zip(own[0], stock[0], strict=True)
    errors = [trainers.relative_error(a, b) for a, b in zip(own[1], stock[1], strict=True)]
    return result | {"grad": max(errors), "loss": max(abs(a - b) for a, b in pairs)}


class Keep(TrainerCallback):
    """The gradients right before each update."""

    def __init__(self) -> None:
        self.gradients: list[dict[str, torch.Tensor]] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        named = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        self.gradients.append({n: gradient.nan_to_num().clone() for n, gradient in named.items()})


def _run(trainers: Any, name: str) -> tuple[list[float], list[dict[str, torch.Tensor]]]:
    """Losses of a run of two or three updates, and the gradients before each."""
    kind, around, change = VARIANTS[name]
    AcceleratorState._reset_state(reset_partial_state=True)
    os.environ["ACCELERATE_USE_DEEPSPEED"] = os.environ["ACCELERATE_USE_FSDP"] = "false"
    arguments: ClassVar[dict[str, Any]] = {
        "output_dir": tempfile.mkdtemp(),
        "use_cpu": True,
        "max_steps": 2,
        "max_grad_norm": 0.0,
        "seed": 1,
    }
    arguments |= {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "logging_steps": 1}
    arguments |= {"report_to": "none", "save_strategy": "no", "disable_tqdm": True, "optim": "sgd"}
    arguments |= {"learning_rate": 0.0 if name == "targetless step" else 0.1, "logging_nan_inf_filter": True}
    keep, model = Keep(), trainers.build_model()
    own = TrainingArguments(**arguments | kind.arguments)
    data = {"train_dataset": trainers.samples_of(LENGTHS, masked=True), "callbacks": [keep]}
    collate = around(trainers.collate) if around else trainers.collate
    trainer = kind(change(model) if change else model, own, data_collator=collate, **data)
    trainer.start()
    return [row["loss"] for row in trainer.state.log_history if "loss" in row], keep.gradients
