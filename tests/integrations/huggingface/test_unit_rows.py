"""Rows of generated answers in units and back: a row whose answer counts nothing keeps a slot all the same."""

from __future__ import annotations

import pytest
import torch
from evenload.integrations.huggingface.units import Unit, batch_of, split_units

PROMPTS, ANSWERS = (3, 1, 2, 2), (2, 0, 4, 0)
"""Tokens of each row."""


def batch() -> dict[str, torch.Tensor]:
    """Prompts end and answers begin where they meet; an empty answer's first slot holds what nothing else does."""
    longest, most = max(PROMPTS), max(ANSWERS)
    masks = {
        "prompt_mask": torch.tensor([[0] * (longest - n) + [1] * n for n in PROMPTS]),
        "completion_mask": torch.tensor([[1] * n + [0] * (most - n) for n in ANSWERS]),
    }
    ids = {
        f"{part}_ids": torch.where(masks[f"{part}_mask"] == 1, torch.arange(first, first + 4 * size).view(4, size), 7)
        for part, size, first in (("prompt", longest, 100), ("completion", most, 500))
    }
    ids["completion_ids"][[1, 3], 0] = torch.tensor([901, 903])
    log_probs = torch.where(masks["completion_mask"] == 1, -0.5 * torch.arange(16.0).view(4, 4), 0.0)
    log_probs[[1, 3], 0] = torch.tensor([-9.25, -3.5])
    return {**masks, **ids, "old_per_token_logps": log_probs, "advantages": torch.arange(4.0)}


def test_units_and_back_are_the_same_batch() -> None:
    wanted = batch()
    units, form = split_units(wanted, 1, fill=7)
    back = batch_of(units, form, torch.device("cpu"))
    assert back.keys() == wanted.keys()
    assert all(torch.equal(back[key], wanted[key]) for key in wanted)


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 0), (1,), (1, 3)])
def test_an_empty_answer_keeps_its_first_slot_whatever_units_stand_beside_it(order: tuple[int, ...]) -> None:
    units, form = split_units(batch(), 1, fill=7)
    assert [unit.sizes for unit in units] == [[max(1, n)] for n in ANSWERS]
    assert [unit.lengths for unit in units] == [[p + max(1, n)] for p, n in zip(PROMPTS, ANSWERS, strict=True)]
    assert [unit.answers[0].num_tokens for unit in units] == list(ANSWERS)
    chosen = batch_of([units[place] for place in order], form, torch.device("cpu"))
    most = max(max(1, ANSWERS[place]) for place in order)
    assert chosen["completion_ids"].shape == (len(order), most)
    known = {1: (901, -9.25), 3: (903, -3.5)}
    for row, place in enumerate(order):
        if place in known:
            first = chosen["completion_ids"][row, 0], chosen["old_per_token_logps"][row, 0]
            assert tuple(map(float, first)) == known[place]
            assert not chosen["completion_mask"][row].any()
    read = [Unit.of_bytes(unit.to_bytes()) for unit in units]
    again = batch_of([read[place] for place in order], form, torch.device("cpu"))
    assert all(torch.equal(again[key], chosen[key]) for key in chosen)


def test_prompts_of_one_length_are_padded_before_them_unless_some_batch_shows_otherwise() -> None:
    """Padding between a prompt and its answer would hide the token that predicts the answer's first one."""
    even = {key: value[2:] for key, value in batch().items()}
    even |= {key: even[key][:, 1:] for key in ("prompt_ids", "prompt_mask")}
    units, form = split_units(even, 1, fill=7)
    padded = batch_of(units, form, torch.device("cpu"), padding=2)
    assert padded["prompt_mask"].tolist() == [[0, 0, 1, 1]] * 2
    assert padded["completion_mask"].tolist() == [[1] * 4 + [0] * 2, [0] * 6]
    _, left = split_units(batch(), 1, fill=7)
    right = left._replace(parts=tuple(part._replace(left=False) for part in left.parts))
    for shown, side in ((left, True), (right, False)):
        for one, other in ((form, shown), (shown, form)):
            assert one.merged(other).parts[0].left is side


def test_a_fork_has_the_log_probabilities_of_the_rows_that_it_begins_as() -> None:
    values = batch() | {"old_logps": -100.0 * torch.arange(4.0)}
    units, _ = split_units(values, 1, fill=7)
    fork = units[2].forked(units[0], 1)
    assert float(fork.values["old_logps"]) == float(units[0].values["old_logps"])
    assert float(fork.values["advantages"]) == float(units[2].values["advantages"])
    wanted, own = units[0].rows[0], fork.rows[0]
    assert torch.equal(own["completion_ids"][:-1], wanted["completion_ids"][:-1])
    assert not torch.equal(own["completion_ids"], wanted["completion_ids"])
    assert torch.equal(own["old_per_token_logps"], wanted["old_per_token_logps"])


def test_of_a_row_in_one_part_the_first_token_of_an_answer_is_predicted_by_none_where_nothing_is_before_it() -> None:
    """The token before a target predicts it, so that the first of a row is none."""
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0]])
    answer = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 0]])
    pair = {"input_ids": torch.arange(8).view(2, 4), "attention_mask": mask, "completion_mask": answer}
    (unit,), _ = split_units(pair, 2, fill=0)
    assert [(one.chosen, one.num_tokens) for one in unit.answers] == [(True, 2), (False, 2)]
