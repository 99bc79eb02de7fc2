"""What the ranks of a test world run: Trainers whose scripts change batches, steps and gradients on their way."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from itertools import count
from typing import Any, ClassVar

import peft
import torch
from rank_trainer import InOrder, build_model, samples_of
from torch.nn.functional import pad
from torch.nn.utils import parametrizations
from trainer_runs import Keep, arguments, collate, forget_layout
from transformers import Trainer, TrainerCallback, TrainingArguments
from variants import Ran, Variants

LENGTHS = [9, 30, 4, 17, 25, 8, 40, 12, 6, 21, 33, 5, 14, 28, 7, 19]


class Changed(InOrder):
    """A Trainer of a script, the arguments of its run, its collate function and what it does to its model."""

    arguments: ClassVar[dict[str, Any]] = {}
    collate: Callable[[list[Any]], Any] = staticmethod(collate)
    change: Callable[[Any], Any] = staticmethod(lambda model: model)

    def start(self) -> None:
        self.train()


def run(kind: type[Changed]) -> Ran:
    """Two or three updates; gradients are 0 where they are no numbers."""
    forget_layout()
    own: dict[str, Any] = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_steps": 2}
    own |= {"learning_rate": 0.1} | kind.arguments
    data = {"train_dataset": samples_of(LENGTHS, masked=True), "data_collator": kind.collate}
    keep, model = Keep(), kind.change(build_model())
    trainer = kind(model, TrainingArguments(**arguments(**own)), callbacks=[keep], **data)
    trainer.start()
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    return Ran(losses, [{key: g.nan_to_num() for key, g in gradients.items()} for gradients in keep.updates])


script = Variants(run, max_tokens=64)


def of_kind(kind: str) -> dict[str, dict[str, Any]]:
    return script.of_kind(kind)


@script.planned(2, gradient_accumulation_steps=1)
class IdsInPlace(Changed):
    def training_step(self, model: Any, inputs: Any, *num_items: Any) -> Any:
        tokens = inputs["input_ids"]
        tokens[(tokens % 5 == 0) & (inputs["attention_mask"] == 1)] = 5
        return super().training_step(model, inputs, *num_items)


@script.planned(2, gradient_accumulation_steps=1)
class OtherBatch(Changed):
    """A curriculum: rows are cut short, in a dictionary of the script's own."""

    def training_step(self, model: Any, inputs: Any, *num_items: Any) -> Any:
        return super().training_step(model, {key: value[:, :12] for key, value in inputs.items()}, *num_items)


@script.stays(
    "the script's own code runs between the batches of a step",
    gradient_accumulation_steps=3,
    per_device_train_batch_size=1,
)
class PassedOver(Changed):
    """Of three batches the one in the middle is not trained on."""

    seen = 0

    def training_step(self, *of_step: Any) -> Any:
        self.seen += 1
        return torch.zeros(()) if self.seen % 3 == 2 else super().training_step(*of_step)


@script.refused(
    "batches of a planned step did not come to Trainer.training_step",
    gradient_accumulation_steps=3,
    per_device_train_batch_size=1,
)
class LastKeptBack(Changed):
    def get_batch_samples(self, *args: Any) -> Any:
        batches, num_items = super().get_batch_samples(*args)
        return batches[:2], num_items


@script.stays("the script's own code runs between the batches of a step")
class ZeroedBetween(Changed):
    """By a callback, of one rank alone: what a rank may do to itself is no other's affair, but the plan is."""

    def start(self) -> None:
        class Zeroes(TrainerCallback):
            def on_substep_end(self, *_: Any, model: Any = None, **__: Any) -> None:
                model.zero_grad()

        if torch.distributed.get_rank():
            self.add_callback(Zeroes)
        self.train()


class HookedLater(Changed):
    """From its second step on a layer adds the mean over its row."""

    def start(self) -> None:
        class Hooks(TrainerCallback):
            def on_step_begin(self, *of_step: Any, model: Any = None, **_: Any) -> None:
                if of_step[1].global_step == 1:
                    model.get_input_embeddings().register_forward_hook(lambda *of: of[2] + of[2].mean(1, keepdim=True))

        self.add_callback(Hooks)
        self.train()


def normed(model: Any) -> Any:
    """Power iterations of every forward stay in buffers."""
    parametrizations.spectral_norm(model.model.layers[0].mlp.up_proj)
    return model.double()


@script.stays("at the last step, a loss with another divisor than the number of targets of the whole batch")
class SquaredLater(Changed):
    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        loss, outputs = super().compute_loss(*args, **{**kwargs, "return_outputs": True})
        loss = loss**2 if self.state.global_step == 1 else loss
        return (loss, outputs) if kwargs.get("return_outputs") else loss


@script.planned(2)
class MaskedAfterCounting(Changed):
    def get_batch_samples(self, *args: Any) -> Any:
        batches, num_items = super().get_batch_samples(*args)
        for batch in batches:
            batch["labels"][:, 12:] = -100
        return batches, num_items


@script.planned(2)
class OwnDivisor(Changed):
    def get_batch_samples(self, *args: Any) -> Any:
        batches, num_items = super().get_batch_samples(*args)
        return [{key: value[:, :20] for key, value in batch.items()} for batch in batches], num_items * 2


@script.stays("the batches of one step are not divided by one number", gradient_accumulation_steps=1)
class DivisorOfEachBatch(Changed):
    def training_step(self, model: Any, inputs: Any, *_: Any) -> Any:
        return super().training_step(model, inputs, (inputs["labels"] != -100).sum() * 4)


@script.planned(2)
class Prepared(Changed):
    """Labels that are masked by row, where batches are brought to the device."""

    def _prepare_inputs(self, inputs: Any) -> Any:
        inputs = super()._prepare_inputs(inputs)
        labels = inputs["labels"].clone()
        labels[:, :4] = -100
        return inputs | {"labels": labels}


@script.planned(2, gradient_accumulation_steps=4)
class OneObjectTwice(Changed):
    """Two batches over and over, each twice in a step."""

    def get_train_dataloader(self) -> Any:
        pair = [self.data_collator([dict(self.train_dataset[i]) for i in rows]) for rows in ((0, 1), (2, 3))]
        return pair * 4


@script.planned(2, gradient_accumulation_steps=1)
class OneObjectChanged(OneObjectTwice):
    """The same, a step each, with one more label masked at each of its turns."""

    turn = 0

    def training_step(self, model: Any, inputs: Any, *num_items: Any) -> Any:
        self.turn += 1
        inputs["labels"][:, self.turn] = -100
        return super().training_step(model, inputs, *num_items)


@script.planned(2, gradient_accumulation_steps=1)
class TwiceInAStep(Changed):
    """Each batch is trained on twice: once by its plan."""

    def training_step(self, *of_step: Any) -> Any:
        return super().training_step(*of_step) + super().training_step(*of_step)


@script.stays("does not call Trainer.training_step", gradient_accumulation_steps=1)
class OwnStep(Changed):
    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        loss = self.compute_loss(model, self._prepare_inputs(inputs), num_items_in_batch=num_items_in_batch)
        self.accelerator.backward(loss)
        return loss.detach()


@script.planned(2)
class MeansOfBatches(Changed):
    """The mean of each batch, as Axolotl takes it: the model is thought to take no number of targets."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.model_accepts_loss_kwargs = False


@script.stays("the model's forward does not compute its loss by its loss function", label_smoothing_factor=0.1)
class SmoothMeans(MeansOfBatches):
    pass


@script.planned(2, average_tokens_across_devices=False)
class DivisorOfEachRank(Changed):
    pass


@script.planned(2)
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


@script.planned(2, per_device_train_batch_size=1, gradient_accumulation_steps=4)
class KeptLogitsOfRows(KeptLogits):
    """One row a batch: logits before each target, and of the last token."""

    def _prepare_inputs(self, inputs: Any) -> Any:
        inputs = Trainer._prepare_inputs(self, inputs)
        is_target = inputs["labels"][0] != -100
        is_target[0] = False
        labels = pad(inputs["labels"][:, is_target], (1, 0), value=-100)
        return inputs | {"labels": labels, "logits_to_keep": pad(is_target[1:], (0, 1), value=True)}


@script.stays("ValueError: rows of 13 tokens and more")
class RaisesOnShortRows(Changed):
    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        if inputs["input_ids"].shape[1] < 13:
            raise ValueError("rows of 13 tokens and more")
        return super().compute_loss(model, inputs, *args, **kwargs)


@script.stays("the model or its loss cannot run a pack (LookupError: no loss")
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


@script.stays("a batch with return_dict", remove_unused_columns=False)
class OtherKeysOnARank(Changed):
    @staticmethod
    def collate(rows: list[Any]) -> Any:
        return collate(rows) | ({"return_dict": True} if torch.distributed.get_rank() else {})


@script.refused("batches are changed inside Trainer.training_step")
class ChangedBehind(Changed):
    """A loss that is Trainer's own, of a batch that is changed before it, from the second step on."""

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        if self.state.global_step:
            inputs = inputs | {"position_ids": torch.arange(inputs["input_ids"].shape[1])[None]}
        return super().compute_loss(model, inputs, *args, **kwargs)


@script.planned(2)
class Interrupted(Changed):
    """A notebook: someone stops it in the middle of a step, and training begins again."""

    prepared = 0

    def _prepare_inputs(self, inputs: Any) -> Any:
        self.prepared += 1
        if self.prepared == 2:
            raise KeyboardInterrupt
        return super()._prepare_inputs(inputs)

    def start(self) -> None:
        with suppress(KeyboardInterrupt):
            self.train()
        self.train()


@script.planned(1, learning_rate=0.0)
class TargetlessStep(Changed):
    def get_train_dataloader(self) -> Any:
        own, number = self.data_collator, count()

        def collated(rows: list[Any]) -> Any:
            batch = own(rows)
            return batch | ({"labels": torch.full_like(batch["labels"], -100)} if next(number) in (2, 3) else {})

        self.data_collator = collated
        return super().get_train_dataloader()


def hooked_later() -> dict[str, Any]:
    return script.compared(HookedLater)


def masked(gradient: Any) -> Any:
    return gradient * (gradient.new_ones(gradient.shape).cumsum(0) % 2)


def clamped(gradient: Any) -> Any:
    return gradient.clamp(-1e-3, 1e-3)


def hooked(hook: Any) -> Any:
    def change(model: Any) -> Any:
        for parameter in model.parameters():
            parameter.register_hook(hook)
        return model

    return change


def prompted(model: Any) -> Any:
    torch.manual_seed(1)
    model = peft.get_peft_model(model, peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)).double()
    torch.nn.init.normal_(next(p for p in model.parameters() if p.requires_grad))
    return model


def adapted(model: Any, **config: Any) -> Any:
    torch.manual_seed(1)
    return peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", r=4, **config)).double()


def with_saved_embeddings(model: Any) -> Any:
    """PEFT trains copies of the embeddings and the head, in modules of its own around them."""
    return adapted(model, target_modules=["q_proj"], modules_to_save=["embed_tokens", "lm_head"])


def adapted_by_older(model: Any) -> Any:
    """PEFT before 0.21 calls the model's method, past hooks of the module."""
    model = adapted(model, target_modules="all-linear", init_lora_weights=False)
    model.base_model.forward = model.base_model.model.forward
    return model


def without_words(model: Any) -> Any:
    """Its forward takes no keyword arguments but these."""
    own = type(model)

    def forward(self: Any, input_ids: Any = None, attention_mask: Any = None, labels: Any = None) -> Any:
        return own.forward(self, input_ids=input_ids, attention_mask=attention_mask, labels=labels)

    model.__class__ = type("WithoutWords", (own,), {"forward": forward})
    return model


def halved(model: Any) -> Any:
    def halve(parameter: Any) -> None:
        parameter.grad.mul_(0.5)

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(halve)
    return model


NOT_LINEAR = "a hook on a parameter changes gradients, and not in proportion to them"
for mark, name, change in (
    (script.planned(1), "MaskingHooks", hooked(masked)),
    (script.planned(2), "SavedEmbeddings", with_saved_embeddings),
    (script.planned(2), "OlderAdapters", adapted_by_older),
    (script.stays(NOT_LINEAR), "ClampingHooks", hooked(clamped)),
    (script.stays(NOT_LINEAR), "HalvingHooks", halved),
    (script.stays("a buffer that a forward in training mode changes"), "SpectralNorm", normed),
    (script.stays("TypeError"), "ForwardWithoutWords", without_words),
    (script.stays("PromptTuningConfig"), "PromptTuning", prompted),
):
    mark(type(name, (Changed,), {"change": staticmethod(change)}))
