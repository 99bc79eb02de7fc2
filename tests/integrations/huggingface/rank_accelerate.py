"""What the ranks of a test world run: loops of Accelerate without a Trainer, as users write them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import GradientState
from own_trainers import flattened
from rank_changes import NOT_LINEAR, adapted_by_older, clamped, hooked, masked, prompted
from rank_trainer import build_model, double_loss, embedded_tokens, samples_of
from torch.utils.data import DataLoader
from trainer_runs import collate, forget_layout
from transformers import BloomConfig, BloomForCausalLM, MistralConfig, MistralForCausalLM
from variants import Ran, Variants

LENGTHS = [61, 5, 17, 33, 9, 50, 3, 40, 26, 11, 44, 7, 12, 30, 21, 8]

script = Variants(lambda loop: loop().run(), max_tokens=256)


def of_kind(kind: str) -> dict[str, dict[str, Any]]:
    return script.of_kind(kind)


@script.planned(3)
class Loop:
    """A plain loop over an epoch; the others change how it gets from a batch to a loss, or to an update."""

    accumulated = 2
    prepares_loader = True
    change: Callable[[Any], Any] = staticmethod(lambda model: model)

    def build(self) -> Any:
        return self.change(build_model())

    def samples(self) -> list[Any]:
        return samples_of(LENGTHS, masked=True)

    def collate(self, rows: list[Any]) -> dict[str, Any]:
        return collate(rows)

    def begin(self) -> None:
        forget_layout()
        GradientState._reset_state()
        self.accelerator = Accelerator(cpu=True, gradient_accumulation_steps=self.accumulated)
        rows, model = self.samples(), self.build()
        (model.get_base_model() if hasattr(model, "get_base_model") else model).loss_function = double_loss
        self.losses: list[float] = []
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
        own = rows[self.accelerator.process_index :: self.accelerator.num_processes]
        loader = DataLoader(rows if self.prepares_loader else own, 2, collate_fn=self.collate)
        self.held_out = DataLoader(rows[:4], batch_size=2, collate_fn=collate)
        self.model, self.optimizer, self.scheduler = self.accelerator.prepare(model, optimizer, scheduler)
        self.loader = self.accelerator.prepare(loader) if self.prepares_loader else loader
        self.model.train()

    def run(self) -> Ran:
        self.begin()
        self.epoch()
        return Ran(self.losses, [self.gradients])

    def loss(self, batch: Any) -> Any:
        return self.model(**batch).loss

    def epoch(self) -> None:
        for batch in self.loader:
            with self.accelerator.accumulate(self.model):
                self.backward(self.loss(batch))
                self.update()

    def backward(self, loss: Any) -> None:
        self.accelerator.backward(loss)
        self.losses.append(float(self.accelerator.gather(loss.detach()).mean()))

    def update(self) -> None:
        named = [(n.removeprefix("module."), p.grad) for n, p in self.model.named_parameters()]
        self.gradients = {name: gradient.clone() for name, gradient in named if gradient is not None}
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()


@script.planned(3)
class Evaluating(Loop):
    accumulated = 1

    def epoch(self) -> None:
        for batch in self.loader:
            self.model.train()
            self.backward(self.model(**batch).loss)
            self.update()
            self.model.eval()
            with torch.no_grad():
                self.losses += [float(self.model(**batch).loss) for batch in self.held_out]


class OneLength(Loop):
    def samples(self) -> list[Any]:
        return samples_of([24] * 8)


@script.planned(2)
class Resumed(Loop):
    def epoch(self) -> None:
        self.loader = self.accelerator.skip_first_batches(self.loader, 1)
        super().epoch()


@script.stays("its model is not in training mode")
class NotTraining(Loop):
    def begin(self) -> None:
        super().begin()
        self.model.eval()


@script.planned(3)
class UnpreparedLoader(Loop):
    prepares_loader = False


@script.planned(2)
class TwoLossesClipped(Loop):
    def epoch(self) -> None:
        batches = list(self.loader)
        for one, other in zip(batches[::2], batches[1::2], strict=True):
            self.backward(self.model(**one).loss / 2 + self.model(**other).loss / 3)
            self.accelerator.clip_grad_norm_(self.model.parameters(), 0.05)
            self.update()


@script.planned(3)
class ByHand(Loop):
    """Accumulation by hand: a divided loss, no_sync, no accelerator.accumulate."""

    accumulated = 1

    def epoch(self) -> None:
        for number, batch in enumerate(self.loader):
            if number % 2 == 0:
                with self.accelerator.no_sync(self.model):
                    self.backward(self.model(**batch).loss / 2)
            else:
                self.backward(self.model(**batch).loss / 2)
                self.update()


@script.planned(3)
class ByTokens(Loop):
    """Accelerate's own example for autoregressive models: a window of batches over its number of tokens."""

    accumulated = 1

    def epoch(self) -> None:
        batches = list(self.loader)
        for window in (batches[:2], batches[2:]):
            tokens = sum(batch["labels"][:, 1:].ne(-100).sum() for batch in window)
            tokens = self.accelerator.gather(tokens).sum().item()
            for batch in window:
                loss = self.model(**batch, use_cache=False, num_items_in_batch=tokens).loss
                self.backward(loss * self.accelerator.num_processes)
            self.update()


for mark, name, change in (
    (script.planned(3), "MaskingHooks", hooked(masked)),
    (script.planned(3), "OlderAdapters", adapted_by_older),
    (script.stays(NOT_LINEAR), "ClampingHooks", hooked(clamped)),
    (script.stays("PromptTuningConfig"), "PromptTuning", prompted),
):
    mark(type(name, (Loop,), {"change": staticmethod(change)}))


@script.planned(3)
class Windowed(Loop):
    def build(self) -> Any:
        torch.manual_seed(0)
        sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
        config = MistralConfig(vocab_size=97, num_key_value_heads=4, sliding_window=8, pad_token_id=0, **sizes)
        return MistralForCausalLM(config).double()


@script.stays("train by transformers.Trainer, where padded rows are regrouped too")
class OwnAttention(Loop):
    """A model whose attention is its own, so that packs do not reach it."""

    def build(self) -> Any:
        torch.manual_seed(0)
        config = BloomConfig(vocab_size=97, hidden_size=32, n_layer=2, n_head=4, pad_token_id=0)
        return BloomForCausalLM(config).double()


@script.planned(3)
class WithoutMask(Loop):
    def loss(self, batch: Any) -> Any:
        del batch["attention_mask"]
        return self.model(**batch)[0]


class Flattened(Loop):
    def collate(self, rows: list[Any]) -> dict[str, Any]:
        return flattened(rows)


@script.stays("the script's own rows let their samples see each other")
class FlattenedUnderACache(Flattened):
    """The cache is on where nobody turns it off, and masks then go without the borders of samples."""


@script.planned(3)
class FlattenedWithoutCache(Flattened):
    def loss(self, batch: Any) -> Any:
        return self.model(**batch, use_cache=False).loss


@script.stays("a batch without labels")
class OnLogits(Loop):
    def loss(self, batch: Any) -> Any:
        labels = batch.pop("labels")
        return double_loss(self.model(**batch).logits, labels)


@script.stays("the labels of this batch count padding as targets")
class LabelsAreInputs(Loop):
    def loss(self, batch: Any) -> Any:
        return self.model(**batch | {"labels": batch["input_ids"]}).loss


@script.planned(3)
class OtherLabels(Loop):
    def loss(self, batch: Any) -> Any:
        labels = batch["labels"].clone()
        labels[:, :4] = -100
        return self.model(**batch | {"labels": labels}).loss


@script.planned(3)
class WrittenIds(Loop):
    def loss(self, batch: Any) -> Any:
        batch["input_ids"][:, 1] = 7
        return self.model(**batch).loss


@script.planned(3)
class MovedAutocast(Loop):
    def loss(self, batch: Any) -> Any:
        batch = {key: value.to(self.accelerator.device, copy=True) for key, value in batch.items()}
        with self.accelerator.autocast():
            return self.model(**batch, return_dict=False)[0].mean()


@script.planned(3)
class ByRows(Loop):
    """A factor that goes by the shape of the loop's own batch."""

    def loss(self, batch: Any) -> Any:
        return self.model(**batch, use_cache=False).loss * batch["input_ids"].shape[0] / 8


@script.planned(3)
class WithFigures(Loop):
    def loss(self, batch: Any) -> Any:
        with torch.no_grad():
            logits = self.model(**batch).logits
        assert logits.shape[:2] == batch["labels"].shape
        return self.model(batch["input_ids"], batch["attention_mask"], labels=batch["labels"]).loss


@script.stays("the ranks multiply the model's loss by different numbers")
class OwnTokens(Loop):
    def loss(self, batch: Any) -> Any:
        return self.model(**batch).loss * int((batch["labels"] != -100).sum())


@script.stays("is not the model's own, nor a multiple of it")
class Squared(Loop):
    def loss(self, batch: Any) -> Any:
        return self.model(**batch).loss ** 2


@script.stays("is not the model's own, nor a multiple of it")
class WithLogits(Loop):
    def loss(self, batch: Any) -> Any:
        outputs = self.model(**batch)
        return outputs.loss + 1e-3 * torch.logsumexp(outputs.logits, -1).square().mean()


@script.refused("is not the model's own, nor a multiple of it")
class SquaredLater(Loop):
    def loss(self, batch: Any) -> Any:
        loss = self.model(**batch).loss
        return loss**2 if len(self.losses) > 1 else loss


@script.refused("a planned forward gives its loss alone")
class WithLogitsLater(Loop):
    """As a loop that prints an accuracy now and then."""

    def loss(self, batch: Any) -> Any:
        outputs = self.model(**batch)
        if len(self.losses) > 1:
            self.losses.append(float((outputs.logits.argmax(-1) == batch["labels"]).double().mean()))
        return outputs.loss


@script.stays("came to a second backward, or to another than the Accelerator's")
class TwoBackwards(Loop):
    accumulated = 1

    def backward(self, loss: Any) -> None:
        self.accelerator.backward(loss, retain_graph=True)
        super().backward(0.5 * loss)


@script.stays("came to a second backward, or to another than the Accelerator's")
class WithoutAcceleratorsBackward(Loop):
    def backward(self, loss: Any) -> None:
        loss.backward()


def one_length() -> dict[str, Any]:
    return script.compared(OneLength)


def filled_up() -> dict[str, Any]:
    """The plain loop with packs of a multiple of tokens, and the tokens of each."""
    with embedded_tokens() as ran:
        result = script.compared(Loop, round_tokens=64)
    return result | {"ran": ran[-len(result["planned"]) :]}
