"""What is measured before the first update: models and losses of anybody are planned exactly, or stay as they are."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
pytestmark = pytest.mark.slow  # imports Transformers' Trainer

DIVISOR, LOSS = "a loss with another divisor", "a loss that is not the sum of its samples'"


@pytest.fixture(scope="module")
def families() -> Any:
    import families
    from evenload.api import load_plugins

    load_plugins()
    return families


def shapes() -> dict[str, Any]:
    common = {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "pad_token_id": 0}
    return {**common, "max_position_embeddings": 256, "initializer_range": 0.25}


def model(kind: str = "") -> Any:
    import torch
    from torch.nn.functional import cross_entropy
    from transformers import LlamaConfig, LlamaForCausalLM, LlamaForTokenClassification

    config = LlamaConfig(intermediate_size=48, num_labels=96, classifier_dropout=0.0, **shapes())

    class Changed(LlamaForCausalLM):
        """A user's own class of model."""

        def forward(self, input_ids=None, attention_mask=None, labels=None, position_ids=None, **more):  # type: ignore[no-untyped-def]
            where = {"attention_mask": attention_mask, "position_ids": position_ids}
            if kind == "positions of its own":
                where["position_ids"] = torch.arange(input_ids.shape[1])[None] ** 2
            if kind == "means of rows":
                more.pop("shift_labels", None)
                num_items = more.pop("num_items_in_batch")
                out = super().forward(input_ids=input_ids, **where, **more)
                targets = labels[:, 1:].reshape(-1)
                out.loss = cross_entropy(out.logits[:, :-1].flatten(0, 1), targets, ignore_index=-100)
                out.loss = out.loss * labels.shape[0] / num_items
                return out
            out = super().forward(input_ids=input_ids, labels=labels, **where, **more)
            if kind == "weight penalty":
                out.loss = out.loss + 1e-2 * sum(p.pow(2).sum() for p in self.parameters())
            if kind == "penalty of scores":
                out.loss = out.loss + 1e-2 * out.logits.logsumexp(-1).pow(2).mean()
            return out

    torch.manual_seed(0)
    if kind == "classes of tokens":
        return LlamaForTokenClassification(config).double()
    return (Changed if kind else LlamaForCausalLM)(config).double()


def trainer(kind: str, folder: Any, families: Any) -> Any:
    """A Trainer of one step of which `kind` is the user's own."""
    from torch.nn.functional import cross_entropy
    from transformers import Trainer, TrainingArguments

    def sum_of_tokens(logits: Any, labels: Any, num_items: Any) -> Any:
        targets = labels[:, 1:].flatten()
        return cross_entropy(logits[:, :-1].flatten(0, 1), targets, ignore_index=-100, reduction="sum") / num_items

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
            out = model(**inputs)
            return cross_entropy(out.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)

    class Masks(Trainer):
        def _prepare_inputs(self, inputs: Any) -> Any:
            inputs = super()._prepare_inputs(inputs)
            labels = inputs["labels"].clone()
            labels[:, :4] = -100
            return {**inputs, "labels": labels}

    own: dict[str, Any] = {
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "max_steps": 1,
        "seed": 1,
    }
    own |= {"report_to": "none", "save_strategy": "no", "disable_tqdm": True, "logging_steps": 1, "max_grad_norm": 0.0}
    if kind == "older checkpoints":
        own |= {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}}
    more: dict[str, Any] = {}
    if kind == "loss function":
        more["compute_loss_func"] = lambda out, labels, num_items_in_batch=None: sum_of_tokens(
            out.logits, labels, num_items_in_batch
        )
    named = {"logs": Logs, "means": Means, "masks": Masks}
    of_model = kind if kind not in (*named, "loss function", "older checkpoints") else ""
    keep = families._Keep()
    data = {"train_dataset": families._rows(), "data_collator": families.collate, "callbacks": [keep]}
    arguments = TrainingArguments(str(folder), use_cpu=True, **own)
    made = named.get(kind, Trainer)(model(of_model), arguments, **data, **more)
    made.kept = keep
    return made


def both(kind: str, folder: Any, families: Any, caplog: Any) -> tuple[Any, Any, str]:
    """The Trainer stock, and under evenload, and what was said of what is not planned."""
    from evenload.integrations.unmodified import planned_runs

    planned_runs._idle.clear()
    stock, own = trainer(kind, folder, families), trainer(kind, folder, families)
    stock.train()
    with caplog.at_level(logging.WARNING, "evenload"), families.planned():
        own.train()
    (said,) = [idle.why for idle in planned_runs._idle] or [""]
    return stock, own, said


STAYS = {
    "classes of tokens": DIVISOR,
    "weight penalty": DIVISOR,
    "penalty of scores": DIVISOR,
    "means": DIVISOR,
    "means of rows": LOSS,
}


@pytest.mark.parametrize("kind", STAYS)
def test_what_is_not_exact_in_packs_stays_as_it_is_and_is_named(kind, tmp_path, families, caplog):
    stock, own, said = both(kind, tmp_path, families, caplog)
    assert said.startswith(STAYS[kind])
    assert families._error(own.kept.gradients, stock.kept.gradients) == 0.0


@pytest.mark.parametrize("kind", ["", "positions of its own", "logs", "loss function", "older checkpoints", "masks"])
def test_what_is_exact_is_planned_whoever_wrote_it(kind, tmp_path, families, caplog):
    stock, own, said = both(kind, tmp_path, families, caplog)
    assert said == ""
    assert families._error(own.kept.gradients, stock.kept.gradients) < 1e-9


def test_nothing_of_a_measurement_is_left(tmp_path, families, caplog):
    """Counters, logs, random numbers, modes: the first step finds them as a stock run does."""
    import torch
    from transformers import TrainerCallback

    class Tracker(TrainerCallback):
        def on_log(self, *_, logs, **__):
            logged.append(logs)

    logged: list[dict[str, float]] = []
    own = trainer("logs", tmp_path, families)
    own.add_callback(Tracker())
    own.model.eval()
    torch.manual_seed(5)
    wanted = torch.rand(3)
    torch.manual_seed(5)
    from evenload.integrations.transformers import proof

    samples = proof.windows([torch.tensor([[5, 6, 7, 8]] * 2), torch.tensor([[9, 10, 11]] * 2)])
    row = families.collate(families._rows()[:2])
    assert proof.prove_trainer(own, samples, row, torch.tensor(5)) == proof.Proof(None, may_cut=True, windows=True)
    assert torch.equal(torch.rand(3), wanted)
    assert (own.counted, own.seen, own.state.log_history, logged) == (0, [], [], [])
    assert not any(module.training for module in own.model.modules())
    assert all(parameter.grad is None for parameter in own.model.parameters())
    assert own.model.config._attn_implementation != "evenload"


def test_a_sample_is_cut_only_where_the_loss_goes_by_shifted_labels(tmp_path, families):
    """The target of a slice's last token lies in the next slice: a loss that shifts labels itself would lose it."""
    import torch
    from evenload.integrations.transformers import proof

    samples = proof.windows([torch.tensor([[5, 6, 7, 8]] * 2), torch.tensor([[9, 10, 11]] * 2)])
    row = families.collate(families._rows()[:2])
    for kind, may_cut in (("", True), ("loss function", False), ("older checkpoints", True)):
        found = proof.prove_trainer(trainer(kind, tmp_path, families), samples, row, torch.tensor(5))
        assert found == proof.Proof(None, may_cut=may_cut, windows=True), kind


def test_two_samples_are_made_of_one(families):
    import torch
    from evenload.integrations.transformers import proof

    one = torch.stack([torch.arange(40), torch.full((40,), -100)])
    one[1, 20:] = one[0, 20:]
    for sample in (one, one[:, 19:21]):
        first, second = proof.windows([sample])
        assert (len(first[0]), len(second[0])) <= proof.LENGTHS
        assert min(proof.num_targets(first), proof.num_targets(second)) > 0


def test_what_is_no_number_is_no_rounding():
    import torch
    from evenload.integrations.transformers.proof import difference

    masked, wanted = torch.tensor([[1.0, -torch.inf], [2.0, 3.0]]), torch.tensor([[1.0, -torch.inf], [2.0, 3.1]])
    assert 0.02 < difference(masked, wanted) < 0.04
    for number in (torch.nan, torch.inf):
        assert not difference(wanted, torch.tensor([[1.0, number], [2.0, 3.1]])) <= 1.0


def test_attention_is_counted(families):
    """BLOOM attends by code of its own, and RoBERTa has positions of its own; what a layer hands on is one call."""
    from evenload.integrations.unmodified import planned_runs

    for family, wanted in (("bloom", "padded groups"), ("gpt2", "planned"), ("roberta", "padded groups")):
        said, error = families.outcome(family)
        assert said.startswith(wanted), (family, said)
        assert error < 1e-6
    planned_runs._idle.clear()
