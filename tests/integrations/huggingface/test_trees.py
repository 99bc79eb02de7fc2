"""What padded rows begin with in common, computed once by live models: every row gets the logits that it gets alone,
and every weight the gradients of all rows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from evenload.runtime.attention.pack import IGNORE
from harness.cases import only_full
from harness.lazy import LazyModule
from torch import Tensor
from torch.nn.functional import pad

attention = LazyModule("evenload.integrations.huggingface.attention")
pack_call = LazyModule("evenload.integrations.transformers.pack_call")
proof = LazyModule("evenload.integrations.transformers.units.proof")
pytestmark = pytest.mark.slow  # imports Transformers' Trainer

DOUBLE = 1e-9
TRUNK, TAILS = 20, (9, 1, 0, 30, 9, 4, 12)
"""Tokens that rows begin with, and those that each adds; two rows are equal."""


WINDOWS = {name: {"sliding_window": 64} for name in ("gemma2", "gpt_oss")}
"""No row is longer, so all are packed."""


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    attention.register()
    yield
    attention.unregister()


def batch(*, left: bool = False) -> dict[str, Tensor]:
    """Rows of one trunk, two of which go on alike for a while, and one of its own; padded."""
    draw = torch.Generator().manual_seed(5)
    trunk, *tails, own = (torch.randint(3, 96, (n,), generator=draw) for n in (TRUNK, *TAILS, 25))
    tails[4] = tails[0]
    tails[6][:6] = tails[3][:6]
    rows = [*(torch.cat([trunk, tail]) for tail in tails), own]
    most = max(map(len, rows)) + 2
    ids, mask = torch.zeros(2, len(rows), most, dtype=torch.int64)
    for row, tokens in enumerate(rows):
        first = most - len(tokens) if left else 0
        ids[row, first : first + len(tokens)], mask[row, first : first + len(tokens)] = tokens, 1
    return {"input_ids": ids, "attention_mask": mask}


def calls_of(model: Any, *, trees: bool) -> Any:
    calls = pack_call.PackCalls(
        SimpleNamespace(model=model, accelerator=SimpleNamespace(unwrap_model=lambda model: model))
    )
    calls.trees = trees
    return calls


def numbers(model: Any, rows: dict[str, Tensor]) -> dict[str, Tensor]:
    """Logits of all that is no padding, and the gradient of every parameter, of a loss that weighs each by itself."""
    logits = model(**rows).logits[rows["attention_mask"] == 1]
    weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    model.zero_grad()
    (logits * weights).sum().backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"logits": logits.detach(), **grads}


def compared(families: Any, name: str, rows: dict[str, Tensor], *, checkpointing: bool = False) -> dict[bool, float]:
    """The largest relative error with trees and without, against the model as it is."""
    with families.Wide():
        model = families.tiny(name, **WINDOWS.get(name, {}))
        if checkpointing:
            model.gradient_checkpointing_enable(
                {"use_reentrant": False, "context_fn": lambda: (nullcontext(), families.Wide())}
            )
        model.train()
        wanted, errors = numbers(model, rows), {}
        for trees in (False, True):
            seen: list[Any] = []
            with calls_of(model, trees=trees).running(seen):
                own = numbers(model, rows)
            (of_call,) = seen
            assert (of_call.trie is not None) == trees
            errors[trees] = families.error_of(own, wanted)
    return errors


@pytest.mark.parametrize("left", [False, True], ids=["right", "left"])
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss", only_full("gpt2")])
def test_every_row_and_weight_gets_what_it_gets_without_trees(name, left, families):
    """Soft caps, sinks, positions by a table; padding on either side."""
    errors = compared(families, name, batch(left=left))
    assert max(errors.values()) < DOUBLE


@pytest.mark.parametrize("name", ["llama", "gemma2", only_full("gpt_oss")])
def test_so_it_is_where_layers_are_recomputed(name, families):
    errors = compared(families, name, batch(), checkpointing=True)
    assert max(errors.values()) < DOUBLE


def test_rows_beyond_a_window_run_as_they_are(families):
    rows, seen, found = batch(), [], []
    with families.Wide():
        model = families.tiny("mistral")
        found.append(numbers(model, rows))
        with calls_of(model, trees=True).running(seen):
            found.append(numbers(model, rows))
    assert not seen
    assert all(torch.equal(found[1][name], wanted) for name, wanted in found[0].items())


@pytest.mark.parametrize("left", [False, True], ids=["right", "left"])
def test_a_token_that_rows_share_has_the_position_and_the_target_of_each(left):
    """Calls of TRL's head, whose targets go with the tokens that predict them."""
    rows = batch(left=left)
    ids, is_real = rows["input_ids"], rows["attention_mask"] == 1
    labels = ids.masked_fill(~(is_real & pad(is_real, (1, -1))), IGNORE)  # no padding predicts a token
    labels[2, TRUNK // 2 :] = IGNORE
    words = {**rows, "labels": labels, "fused_lm_head": True}
    of_call, pack, packed = pack_call._pack(words, frozenset(words), True)
    assert len(set(of_call.tokens_M.tolist())) == pack.num_padded_tokens < len(of_call.tokens_M)
    wanted = {
        "input_ids": ids,
        "position_ids": torch.arange(ids.shape[1]).expand(ids.shape),
        "shift_labels": pad(labels[:, 1:], (0, 1), value=IGNORE),
    }
    for key, value in wanted.items():
        assert torch.equal(packed[key][0, of_call.tokens_M], value[is_real]), key


@pytest.mark.parametrize("left", [False, True], ids=["right", "left"])
def test_rows_that_begin_unlike_are_tried_as_if_they_began_alike(left):
    """Those of a batch that stays in its place: KTO's first one has seldom two answers to one prompt."""
    rows = batch(left=left)
    real = rows["attention_mask"] == 1
    rows["input_ids"] = torch.arange(real.numel()).view_as(real).masked_fill(~real, 0)
    forked = proof.forked_batch({**rows, "label": 1})
    first, *others = (tokens[mask].tolist() for tokens, mask in zip(forked["input_ids"], real, strict=True))
    assert first == rows["input_ids"][0][real[0]].tolist()
    for number, own in enumerate(others, 1):
        alike = min(len(first), len(own)) - number
        assert own[:alike] == first[:alike]
        assert not {*own[alike:]} & {*first}
    assert torch.equal(forked["input_ids"][~real], rows["input_ids"][~real])
    positions = (real.cumsum(1) - 1).clamp(min=0)
    calls = [{**one, "position_ids": positions} for one in (rows, forked)]
    unlike, alike = (pack_call._pack(one, frozenset(one), True)[0].trie for one in calls)
    assert unlike is None
    assert alike is not None


def trainer_of(model: Any) -> Any:
    from trainer_runs import arguments
    from transformers import Trainer, TrainingArguments

    return Trainer(model, TrainingArguments(**arguments()), train_dataset=[])


@pytest.mark.parametrize("name", ["llama", "jamba", "nemotron_h", "qwen3_next", "mamba"])
def test_what_mixes_tokens_by_itself_keeps_its_rows_apart(name, families):
    rows = batch()
    labels = rows["input_ids"].masked_fill(rows["attention_mask"] == 0, IGNORE)
    with families.Wide():
        trainer = trainer_of(families.tiny(name))
        for prove in (proof.prove_calls, proof.prove_trees):
            fault = prove(
                trainer, pack_call.PackCalls(trainer), {**rows, "labels": labels}, (labels != IGNORE).sum()
            ).fault
            assert (fault is None) == (name == "llama")
