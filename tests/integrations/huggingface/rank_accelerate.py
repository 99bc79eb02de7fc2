"""What the ranks of a test world run: every function here is a case of test_accelerate.py."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import peft
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from evenload.core.errors import EvenloadError, RankError
from evenload.core.recipe import recipe as recipes
from evenload.integrations.transformers import accelerate_loop
from evenload.integrations.unmodified import planned_loop
from evenload.patches.session import enabled
from evenload.runtime.attributes import with_attributes
from evenload.runtime.world import agreement
from evenload.runtime.world.agreement import rank_and_size
from torch.nn.functional import cross_entropy, pad
from torch.utils.data import DataLoader
from transformers import BloomConfig, BloomForCausalLM, MistralConfig, MistralForCausalLM

LENGTHS = [61, 5, 17, 33, 9, 50, 3, 40, 26, 11, 44, 7, 12, 30, 21, 8]
PLUGINS = {"packing": {"enabled": True, "max_tokens": 256}}


def recipe(**packing: Any) -> Any:
    return recipes.parse({"trainer": "transformers", "plugins": {"packing": PLUGINS["packing"] | packing}})


class Loop:
    """A loop as users write it, over an epoch; subclasses and `VARIANTS` change how it gets from a batch to a loss."""

    accumulated = 2
    prepares_loader = True

    def __init__(self, trainers: Any, loss_of: Callable[[Any, Any], Any] | None = None) -> None:
        self.trainers = trainers
        self.loss_of = loss_of or (lambda loop, batch: loop.model(**batch).loss)

    def build(self) -> Any:
        return self.trainers.build_model()

    def collate(self, rows: list[Any]) -> dict[str, Any]:
        batch: dict[str, Any] = self.trainers.collate(rows)
        return batch

    def begin(self) -> None:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        os.environ["ACCELERATE_USE_DEEPSPEED"] = os.environ["ACCELERATE_USE_FSDP"] = "false"
        self.accelerator = Accelerator(cpu=True, gradient_accumulation_steps=self.accumulated)
        rows, model = self.trainers.samples_of(LENGTHS, masked=True), self.build()
        (model.get_base_model() if hasattr(model, "get_base_model") else model).loss_function = own_loss
        self.losses: list[float] = []
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
        own = rows[self.accelerator.process_index :: self.accelerator.num_processes]
        loader = DataLoader(rows if self.prepares_loader else own, batch_size=2, collate_fn=self.collate)
        self.held_out = DataLoader(rows[:4], batch_size=2, collate_fn=self.trainers.collate)
        self.model, self.optimizer, self.scheduler = self.accelerator.prepare(model, optimizer, scheduler)
        self.loader = self.accelerator.prepare(loader) if self.prepares_loader else loader
        self.model.train()

    def run(self) -> dict[str, Any]:
        self.begin()
        self.epoch()
        return {"losses": self.losses, "gradients": self.gradients}

    def epoch(self) -> None:
        for batch in self.loader:
            with self.accelerator.accumulate(self.model):
                loss = self.loss_of(self, batch)
                self.backward(loss)
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


class WholeEpoch(Loop):
    """All samples are one step's, so that a cap makes a difference."""

    def begin(self) -> None:
        super().begin()
        rows = self.trainers.samples_of(LENGTHS, masked=True)
        self.loader = self.accelerator.prepare(DataLoader(rows, batch_size=8, collate_fn=self.collate))


class OneLength(Loop):
    def begin(self) -> None:
        super().begin()
        rows = self.trainers.samples_of([24] * 8)
        self.loader = self.accelerator.prepare(DataLoader(rows, batch_size=2, collate_fn=self.collate))


class Resumed(Loop):
    def epoch(self) -> None:
        self.loader = self.accelerator.skip_first_batches(self.loader, 1)
        super().epoch()


class NotTraining(Loop):
    def begin(self) -> None:
        super().begin()
        self.model.eval()


class Unprepared(Loop):
    prepares_loader = False


class Pairs(Loop):
    """Two batches, one backward."""

    def epoch(self) -> None:
        batches = list(self.loader)
        for one, other in zip(batches[::2], batches[1::2], strict=True):
            self.backward(self.model(**one).loss / 2 + self.model(**other).loss / 3)
            self.accelerator.clip_grad_norm_(self.model.parameters(), 0.05)
            self.update()


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


class Closure(Loop):
    accumulated = 1

    def epoch(self) -> None:
        for batch in self.loader:

            def closure(batch: Any = batch) -> Any:
                loss = self.model(**batch).loss
                self.backward(loss)
                return loss

            closure()
            self.update()


class Named(Loop):
    """A collate function of the user's own that hands the names of samples on."""

    def collate(self, rows: list[Any]) -> dict[str, Any]:
        return super().collate(rows) | {"sample_ids": torch.arange(len(rows)), "sample_names": ["one"] * len(rows)}


class Hooked(Loop):
    """A hook on every parameter."""

    def __init__(self, trainers: Any, hook: Any) -> None:
        super().__init__(trainers)
        self.hook = hook

    def build(self) -> Any:
        model = super().build()
        for parameter in model.parameters():
            parameter.register_hook(self.hook)
        return model


class Prompted(Loop):
    """Prompt tuning."""

    def build(self) -> Any:
        torch.manual_seed(1)
        config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
        model = peft.get_peft_model(super().build(), config).double()
        torch.nn.init.normal_(next(p for p in model.parameters() if p.requires_grad))
        return model


class Windowed(Loop):
    """A model that sees less than its longest sample."""

    def build(self) -> Any:
        torch.manual_seed(0)
        sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
        return MistralForCausalLM(
            MistralConfig(vocab_size=97, num_key_value_heads=4, sliding_window=8, pad_token_id=0, **sizes)
        ).double()


class OwnAttention(Loop):
    """A model whose attention is its own, so that packs do not reach it."""

    def build(self) -> Any:
        torch.manual_seed(0)
        config = BloomConfig(vocab_size=97, hidden_size=32, n_layer=2, n_head=4, pad_token_id=0)
        return BloomForCausalLM(config).double()


class AdaptedByOlder(Loop):
    """LoRA of PEFT before 0.21, which calls the model's method, past hooks of the module."""

    def build(self) -> Any:
        torch.manual_seed(1)
        config = peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules="all-linear", init_lora_weights=False)
        model = peft.get_peft_model(super().build(), config).double()
        model.base_model.forward = model.base_model.model.forward
        return model


def own_loss(logits: Any, labels: Any, num_items_in_batch: Any = None, **_: Any) -> Any:
    """`ForCausalLMLoss` of a whole batch without its cast to float32."""
    shifted, reduction = pad(labels, (0, 1), value=-100)[..., 1:], "mean" if num_items_in_batch is None else "sum"
    loss = cross_entropy(logits.flatten(0, 1), shifted.flatten(), ignore_index=-100, reduction=reduction)
    return loss if num_items_in_batch is None else loss / num_items_in_batch


def _by_keywords(loop: Any, batch: Any) -> Any:
    return loop.model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], labels=batch["labels"]).loss


def _without_mask(loop: Any, batch: Any) -> Any:
    del batch["attention_mask"]
    return loop.model(**batch)[0]


def _on_logits(loop: Any, batch: Any) -> Any:
    labels = batch.pop("labels")
    return own_loss(loop.model(**batch).logits, labels)


def _labels_are_inputs(loop: Any, batch: Any) -> Any:
    return loop.model(**batch | {"labels": batch["input_ids"]}).loss


def _other_labels(loop: Any, batch: Any) -> Any:
    labels = batch["labels"].clone()
    labels[:, :4] = -100
    return loop.model(**batch | {"labels": labels}).loss


def _written_ids(loop: Any, batch: Any) -> Any:
    batch["input_ids"][:, 1] = 7
    return loop.model(**batch).loss


def _moved(loop: Any, batch: Any) -> Any:
    batch = {key: value.to(loop.accelerator.device, copy=True) for key, value in batch.items()}
    with loop.accelerator.autocast():
        return loop.model(**batch, return_dict=False)[0].mean()


def _by_rows(loop: Any, batch: Any) -> Any:
    """A factor that goes by the shape of the loop's own batch."""
    return loop.model(**batch, use_cache=False).loss * batch["input_ids"].shape[0] / 8


def _with_figures(loop: Any, batch: Any) -> Any:
    with torch.no_grad():
        logits = loop.model(**batch).logits
    assert logits.shape[:2] == batch["labels"].shape
    return loop.model(batch["input_ids"], batch["attention_mask"], labels=batch["labels"]).loss


def _own_tokens(loop: Any, batch: Any) -> Any:
    return loop.model(**batch).loss * int((batch["labels"] != -100).sum())


def _squared(loop: Any, batch: Any) -> Any:
    return loop.model(**batch).loss ** 2


def _with_logits(loop: Any, batch: Any) -> Any:
    outputs = loop.model(**batch)
    return outputs.loss + 1e-3 * torch.logsumexp(outputs.logits, -1).square().mean()


def _with_a_penalty(loop: Any, batch: Any) -> Any:
    return loop.model(**batch).loss + 1e-2 * next(loop.model.parameters()).square().sum()


class WithoutAccelerator(Loop):
    def backward(self, loss: Any) -> None:
        loss.backward()


Made = Callable[[Any], Loop]


def _written(loss_of: Callable[[Any, Any], Any]) -> Made:
    return lambda trainers: Loop(trainers, loss_of)


VARIANTS: dict[str, Made] = {
    "plain": Loop,
    "evaluating": Evaluating,
    "one length": OneLength,
    "resumed": Resumed,
    "not training": NotTraining,
    "unprepared loader": Unprepared,
    "two losses, clipped": Pairs,
    "by hand": ByHand,
    "by tokens": ByTokens,
    "closure": Closure,
    "names of samples": Named,
    "by keywords": _written(_by_keywords),
    "without mask": _written(_without_mask),
    "on logits": _written(_on_logits),
    "labels are inputs": _written(_labels_are_inputs),
    "other labels": _written(_other_labels),
    "written ids": _written(_written_ids),
    "moved, autocast": _written(_moved),
    "by rows": _written(_by_rows),
    "with figures": _written(_with_figures),
    "own tokens": _written(_own_tokens),
    "squared": _written(_squared),
    "with logits": _written(_with_logits),
    "with a penalty": _written(_with_a_penalty),
    "without accelerator.backward": WithoutAccelerator,
    "masking hooks": lambda trainers: Hooked(trainers, lambda g: g * (g.new_ones(g.shape).cumsum(0) % 2)),
    "older adapters": AdaptedByOlder,
    "windows": Windowed,
    "own attention": OwnAttention,
    "clamping hooks": lambda trainers: Hooked(trainers, lambda g: g.clamp(-1e-3, 1e-3)),
    "prompt tuning": Prompted,
}


def variants(load: Any, names: list[str]) -> dict[str, dict[str, Any]]:
    """Errors of every variant against itself without evenload, steps that were planned, what was said and refused."""
    trainers = load("rank_trainer")
    trainers._join()
    return {name: _compared(lambda make=VARIANTS[name]: make(trainers).run()) for name in names}


def filled_up(load: Any) -> dict[str, Any]:
    """The plain loop with packs of a multiple of tokens, and the tokens of each."""
    trainers = load("rank_trainer")
    trainers._join()
    embed, ran = torch.nn.Embedding.forward, []
    noting = {"forward": lambda own, ids: ran.append(ids.numel()) or embed(own, ids)}
    with with_attributes(torch.nn.Embedding, **noting):
        result = _compared(Loop(trainers).run, round_tokens=64)
    return result | {"ran": ran[-len(result["planned"]) :]}


def unlike_recipes(load: Any) -> str:
    """What this rank reads whose recipe has another cap than its neighbour's, and that no roll call has compared."""
    trainers = load("rank_trainer")
    trainers._join()
    plugins = {"packing": {"enabled": True, "max_tokens": 64 << 2 * rank_and_size()[0]}}
    try:
        own = recipes.parse({"trainer": "transformers", "plugins": plugins})
        with enabled(own), with_attributes(agreement, before_first=None):
            WholeEpoch(trainers).run()
    except RankError as error:
        return str(error)
    return "no error"


def _compared(run: Callable[[], dict[str, Any]], **packing: Any) -> dict[str, Any]:
    stock, steps, said = run(), [], []
    result: dict[str, Any] = {"planned": steps, "said": said, "refused": None, "grad": None, "loss": None}
    try:
        with (
            with_attributes(planned_loop, report_step=lambda *_, **__: steps.append(1)),
            with_attributes(accelerate_loop, report_idle=lambda *words: said.append(" ".join(words))),
            enabled(recipe(**packing)),
        ):
            own = run()
    except EvenloadError as error:
        return result | {"refused": str(error)}
    pairs = zip(own["losses"], stock["losses"], strict=True)
    return result | {"grad": _error(own["gradients"], stock["gradients"]), "loss": max(abs(a - b) for a, b in pairs)}


def _error(own: dict[str, torch.Tensor], stock: dict[str, torch.Tensor]) -> float:
    """Largest ||a - b|| / ||b|| over parameters with a gradient."""
    assert own.keys() == stock.keys()
    return max(_errors(own, stock))


def _errors(own: dict[str, torch.Tensor], stock: dict[str, torch.Tensor]) -> Iterator[float]:
    for name, wanted in stock.items():
        yield float((own[name] - wanted).norm() / wanted.norm().clamp(min=1e-300))
