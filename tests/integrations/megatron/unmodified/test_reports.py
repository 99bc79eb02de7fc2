"""What a loop is given of its loss functions' reports, where ranks know it alike and where they do not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from evenload.core.plan.step_plan import Slice
from harness.lazy import LazyModule

context_parallel = LazyModule("evenload.integrations.megatron.unmodified.reading.context_parallel")
reports = LazyModule("evenload.integrations.megatron.unmodified.running.reports")

LOSSES = torch.tensor([[1.0, 2.0, 4.0, 8.0, 16.0]], dtype=torch.float64)
"""Of a pack of two samples, of two and of three tokens."""


@pytest.fixture
def elsewhere(monkeypatch):
    """What the other rank says of its kinds, if it says something else."""
    others: list[Any] = []
    module = "evenload.integrations.megatron.unmodified.running.reports"
    monkeypatch.setattr(f"{module}.everyone", lambda own, _: [own, others[0] if others else own])
    monkeypatch.setattr(reports.dist, "all_reduce", lambda *_, **__: None)
    return others


def of_loop(report, answer=None):
    """The reports of the loop's two micro-batches, a sample each, where a pack of both has this report."""
    told = reports.Reports(context_parallel.CpShards(1, [3, 3]))
    pack = SimpleNamespace(slices=(Slice(0, 0, 2), Slice(1, 0, 3)), segments=(0, 2, 5))
    packed: Any = SimpleNamespace(pack=pack, fields={"loss_mask": torch.ones(1, 5)})
    told.add(packed, LOSSES, (LOSSES.sum() if answer is None else answer, torch.tensor(5), report))
    return told.of_loop([report], [[0], [1]], [2.0, 3.0], None)


def test_sums_and_means_are_those_of_the_loops_own_micro_batches(elsewhere):
    both = torch.tensor([31.0, 5.0])
    first, second = of_loop({"lm loss": both, "mean": torch.tensor(6.2)})
    assert first["lm loss"].tolist() == [3.0, 2.0]
    assert second["lm loss"].tolist() == [28.0, 3.0]
    assert (first["mean"].item(), second["mean"].item()) == pytest.approx((1.5, 28 / 3))


def test_a_loss_that_is_its_own_report_is_divided_as_the_schedule_divides_it(elsewhere):
    mean = LOSSES.mean()
    first, second = of_loop({"lm loss": mean}, mean)
    assert (first["lm loss"].item(), second["lm loss"].item()) == pytest.approx((1.5 / 2, 28 / 3 / 2))


def test_a_value_that_is_not_known_on_every_rank_stays_the_packs_own(elsewhere):
    report = {"lm loss": torch.tensor([31.0, 5.0])}
    elsewhere.append({})
    assert of_loop(report) == [report]
    elsewhere[0] = {"lm loss": "mean"}
    assert of_loop(report) == [report]


@pytest.mark.parametrize("odd", [{"lm loss": torch.tensor([30.0, 5.0])}, {"lm loss": 6.2}, [1.0]])
def test_another_value_stays_the_packs_own(odd, elsewhere):
    assert of_loop(odd) == [odd]
