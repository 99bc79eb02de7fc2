"""A planned loader draws from a sampler step by step, whose shares may change between two of them."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from evenload import MixtureSampler
from evenload.integrations.deepspeed.unmodified import loader as loaders
from evenload.integrations.deepspeed.unmodified.loader import PlannedLoader
from evenload.integrations.unmodified.planned_loop import LoopSession


class Stock(SimpleNamespace):
    def __len__(self) -> int:
        return self.num_batches  # type: ignore[no-any-return]


def drawn(sampler: Any, num_batches: int, then: Any = None) -> list[list[list[int]]]:
    """The stock micro-batches, two a step of three samples each, that a loader plans; ``then``: after each step."""
    stock, steps = Stock(data_sampler=sampler, batch_size=3, num_batches=num_batches, tput_timer=None), []
    nobody: Any = None
    loader = PlannedLoader(stock, LoopSession(name="a loop"), nobody, 2, deque())

    def plan_step(stock_batches: list[list[int]]) -> list[Any]:
        steps.append(stock_batches)
        return [(one, SimpleNamespace(place=place)) for place, one in enumerate(stock_batches)]

    loader._plan_step = plan_step  # type: ignore[method-assign, assignment]
    for number, _ in enumerate(loader):
        if then and number % 2:
            then(number // 2)
    return steps


def sampler_of(steps: int) -> MixtureSampler:
    return MixtureSampler({"a": 30, "b": 30}, {"a": 1, "b": 1}, 6, steps=steps)


def test_shares_that_change_between_steps_hold_from_the_next_one_on() -> None:
    sampler, whole = sampler_of(4), sampler_of(4)
    whole.set_shares({"b": 0}, 1)
    rows = list(whole)
    steps = drawn(sampler, 8, lambda step: sampler.set_shares({"b": 0}) if step == 0 else None)
    assert steps == [[rows[i : i + 3], rows[i + 3 : i + 6]] for i in range(0, 24, 6)]


def test_a_sampler_that_goes_on_from_a_state_ends_where_its_run_does() -> None:
    whole, other = sampler_of(4), sampler_of(4)
    rows = list(whole)
    other.load_state_dict(whole.state_dict(3))
    assert drawn(other, 8) == [[rows[18:21], rows[21:24]]], "its loader was made before the state was loaded"


@pytest.mark.parametrize(("count", "steps"), [(24, 4), (23, 4), (20, 3)])
def test_a_list_is_taken_as_far_as_it_fills_steps(count: int, steps: int) -> None:
    rows = list(range(count))
    batches = [rows[i : i + 3] for i in range(0, count, 3)]
    assert drawn(rows, len(batches)) == [batches[i : i + 2] for i in range(0, 2 * steps, 2)]


def collated(samples: list[list[int]]) -> dict[str, torch.Tensor]:
    """Rows padded on the right; the first token of each and odd tokens carry no loss."""
    most = max(map(len, samples))
    tokens = torch.tensor([own + [0] * (most - len(own)) for own in samples])
    mask = torch.tensor([[1] * len(own) + [0] * (most - len(own)) for own in samples])
    return {
        "input_ids": tokens,
        "attention_mask": mask,
        "labels": tokens.masked_fill((mask == 0) | (tokens % 2 == 1), -100),
    }


@pytest.mark.parametrize("rank", [0, 1])
def test_a_loss_is_over_the_targets_and_a_model_must_reach_the_samples_of_all_ranks(
    rank: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Rank 0 has short samples with few targets, rank 1 long ones; what is asked of the model is the same on both."""
    data = [[2, 4, 1], [3, 5], [6, 8, 10, 12, 14, 16, 18], [1, 3, 4, 5]]
    rows, nobody, asked, made = (([0], [1]), ([2], [3])), cast(Any, None), [], []
    stock = Stock(dataset=data, collate_fn=collated, batch_size=1)

    def loader_of() -> PlannedLoader:
        return PlannedLoader(stock, LoopSession(name="a loop"), SimpleNamespace(), 2, deque())

    known = [loader_of()._read_own([*own], {}) for own in rows]
    monkeypatch.setattr(loaders, "everyone", lambda own: [own if r == rank else known[r] for r in (0, 1)])
    monkeypatch.setattr(loaders.dist, "get_rank", lambda: rank)
    monkeypatch.setattr(loaders, "is_rotary", lambda config: True)
    monkeypatch.setattr(loaders, "refuse_lengths", lambda config, *sizes, **_: asked.append(sizes[:2]))
    monkeypatch.setattr(loaders, "build_batch", lambda *words: made.append(words[3]))
    loader = loader_of()
    monkeypatch.setattr(loader, "_planned", lambda lengths: (nobody, [nobody, nobody]))
    for _ in range(2):
        loader._plan_step([*rows[rank]])
    targets = [1, 0, 6, 1]  # of each row: even tokens behind its first one
    assert made == [sum(targets)] * 4
    assert asked == [(7, 7)] * 2
    assert [record.args for record in caplog.records] == [(0, 6)] * (rank == 0), "a mean of means is another: said once"
