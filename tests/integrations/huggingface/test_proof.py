"""What is measured before the first update: models and losses of anybody are planned exactly, or stay as they are."""

from __future__ import annotations

import logging
from importlib import import_module
from typing import Any

import pytest
import torch
from harness.lazy import LazyModule

proof = LazyModule("evenload.integrations.transformers.proof")
probe_samples = LazyModule("evenload.integrations.transformers.probe_samples")

pytestmark = pytest.mark.slow  # imports Transformers' Trainer

DIVISOR, LOSS = "a loss with another divisor", "a loss that is not the sum of its samples'"


@pytest.fixture(scope="module")
def trainer(families: Any) -> Any:
    return import_module("own_trainers").trainer


def both(kind: str, trainer: Any, families: Any, caplog: Any) -> tuple[float, str]:
    """How far apart the gradients of a Trainer are with evenload and without, and why it is not planned."""
    stock = trainer(kind)
    stock.train()
    own = trainer(kind)  # which draws the same random numbers
    with caplog.at_level(logging.WARNING, "evenload"), families.planned() as seen:
        own.train()
    (said,) = seen.idle or [""]
    return families.difference(own.kept.updates[0], stock.kept.updates[0]), said


@pytest.fixture
def sampled(families: Any) -> tuple[Any, ...]:
    """What a Trainer is measured by: two short samples with a batch, and its number of targets."""
    samples = probe_samples.probe_samples([torch.tensor([[5, 6, 7, 8]] * 2), torch.tensor([[9, 10, 11]] * 2)])
    return probe_samples.SamplePair(samples, families.collate(families.rows()[:2])), torch.tensor(5)


STAYS = {
    "classes of tokens": DIVISOR,
    "weight penalty": DIVISOR,
    "means": DIVISOR,
    "means of rows": LOSS,
    "flattened, cached": "the script's own rows let their samples see each other",
    "by rows": "a loss that depends on more than each sample",
    "shifted before": LOSS,
    "random": "random numbers of Python's or numpy's in a forward",
    "noisy": "a loss that is another one each time",
    "warming up": "a loss that is another one each time",
    "reference": LOSS,
}


@pytest.mark.parametrize("kind", STAYS)
def test_what_is_not_exact_in_packs_stays_as_it_is_and_is_named(kind, trainer, families, caplog):
    error, said = both(kind, trainer, families, caplog)
    assert said.startswith(STAYS[kind])
    if kind == "warming up":  # its loss goes by its calls
        assert "padded groups" not in said
    else:
        assert error == 0.0


@pytest.mark.parametrize(
    "kind",
    ["", "positions of its own", "logs", "loss function", "older checkpoints", "flattened", "far places", "two tables"],
)
def test_what_is_exact_is_planned_whoever_wrote_it(kind, trainer, families, caplog):
    error, said = both(kind, trainer, families, caplog)
    assert said == ""
    assert error < 1e-9


@pytest.mark.parametrize(
    ("kind", "rows", "why"),
    [
        ("no targets", None, "no row of any step has a target: all labels are -100"),
        ("", 1, "its loop ran no step: its train_dataset holds 1 rows"),
    ],
)
def test_a_run_without_a_planned_step_says_what_its_script_did(kind, rows, why, trainer, families):
    own = trainer(kind)
    if rows is not None:  # too few for a batch
        own.train_dataset, own.args.dataloader_drop_last = own.train_dataset[:rows], True
    with families.planned() as seen:
        own.train()
    assert seen.idle == [why]


def test_nothing_of_a_measurement_is_left(trainer, sampled):
    """Counters, logs, random numbers, modes: the first step finds them as a stock run does."""
    from transformers import TrainerCallback

    class Tracker(TrainerCallback):
        def on_log(self, *_, logs, **__):
            logged.append(logs)

    logged: list[dict[str, float]] = []
    own = trainer("logs", Tracker())
    own.model.eval()
    torch.manual_seed(5)
    wanted = torch.rand(3)
    torch.manual_seed(5)
    assert probe_samples.prove_trainer(own, *sampled) == proof.Proof(None, may_cut=True, sees_windows=True)
    assert torch.equal(torch.rand(3), wanted)
    assert (own.counted, own.seen, own.state.log_history, logged) == (0, [], [], [])
    assert not any(module.training for module in own.model.modules())
    assert all(parameter.grad is None for parameter in own.model.parameters())
    assert own.model.config._attn_implementation != "evenload"


@pytest.mark.parametrize(("kind", "may_cut"), [("", True), ("loss function", False), ("older checkpoints", True)])
def test_a_sample_is_cut_only_where_the_loss_goes_by_shifted_labels(kind, may_cut, trainer, sampled):
    """The target of a slice's last token lies in the next slice: a loss that shifts labels itself would lose it."""
    assert probe_samples.prove_trainer(trainer(kind), *sampled) == proof.Proof(None, may_cut=may_cut, sees_windows=True)


def test_rotary_tables_of_the_longest_are_refused_where_a_pack_counts_on(trainer, sampled):
    """Short packs give what samples give alone; a longer one than the table would not."""
    fault = probe_samples.prove_trainer(trainer("positions counted by the mask"), *sampled).fault
    assert fault is not None
    assert fault.found == "a CountedPositions counts to 7 in a pack whose longest sample has 4 tokens"


def test_two_samples_are_made_of_one(families):
    one = torch.stack([torch.arange(40), torch.full((40,), -100)])
    one[1, 20:] = one[0, 20:]
    for sample in (one, one[:, 19:21]):
        first, second = probe_samples.probe_samples([sample])
        assert (first.shape[1], second.shape[1]) <= probe_samples.LENGTHS
        assert min(map(probe_samples.num_targets, (first, second))) > 0


def test_what_is_no_number_is_no_rounding():
    masked, wanted = torch.tensor([[1.0, -torch.inf], [2.0, 3.0]]), torch.tensor([[1.0, -torch.inf], [2.0, 3.1]])
    assert 0.02 < proof.difference(masked, wanted) < 0.04
    for number in (torch.nan, torch.inf):
        assert not proof.difference(wanted, torch.tensor([[1.0, number], [2.0, 3.1]])) <= 1.0


@pytest.mark.parametrize(
    ("family", "wanted"),
    [
        ("bloom", "padded groups"),
        ("gpt2", "planned"),
        ("roberta", "padded groups"),
        ("xlm", "stock: attention that packs do not reach"),
    ],
)
def test_attention_is_counted(family, wanted, families):
    """BLOOM and XLM attend by code of their own, RoBERTa has its own positions; what a layer hands on is one call."""
    said, error = families.outcome(family)
    assert said.startswith(wanted)
    assert error < 1e-6
