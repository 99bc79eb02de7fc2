"""What the ranks of a test world run: loops of their own under `evenload audit`, each rank with batches of its own."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from evenload.core.recipe.carried import ROWS
from evenload.integrations.unmodified.run_folder import VARIABLE, RunFolder
from evenload.patches.session import enabled
from evenload.plugins.audit import audit, rows
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM

RECIPE = "trainer: transformers\nplugins: {packing: {enabled: true, max_tokens: 64}}\n"
LENGTHS = (((7, 12), (5, 9)), ((14, 6),))
"""By rank and micro-batch: tokens of the samples in it."""


class EndedError(Exception):
    """In place of the end of the process."""


def model() -> Any:
    torch.manual_seed(0)
    sizes = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=2, pad_token_id=0, initializer_range=0.25))


def tokens_of(rank: int, micro_batch: int, lengths: tuple[int, ...]) -> list[Any]:
    draw = torch.Generator().manual_seed(10 * rank + micro_batch)
    return [torch.randint(1, 96, (length,), generator=draw) for length in lengths]


def losses() -> list[Any]:
    """The loss of each target of the global batch, each sample by itself."""
    own = model().eval()
    found = []
    for rank, batches in enumerate(LENGTHS):
        for number, lengths in enumerate(batches):
            for tokens in tokens_of(rank, number, lengths):
                with torch.no_grad():
                    logits = own(input_ids=tokens[None]).logits[0]
                found.append(cross_entropy(logits[:-1], tokens[1:], reduction="none").double())
    return found


def verdict_of(folder: Path, train: Callable[[], None], name: str = "recipe") -> dict[str, Any] | None:
    """What `evenload audit` judges of a training function."""

    def end() -> None:
        raise EndedError

    (folder / f"{name}.yaml").write_text(RECIPE)
    with (
        patch.dict(os.environ, {VARIABLE: str(folder), ROWS: rows.__name__}),
        patch.object(audit, "end_together", end),
        enabled(folder / f"{name}.yaml"),
        pytest.raises(EndedError),
    ):
        train()
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
    return RunFolder(folder).record("audit")


def verdict(folder: str, batches: Any = LENGTHS, own_means: bool = False, leaks_on: int = -1) -> Any:
    """What is judged of a step in which each token counts as much as any other.

    Args:
        own_means: each micro-batch is divided by its own targets instead.
        leaks_on: the rank whose rows of several samples are one sample for attention.
    """
    rank = torch.distributed.get_rank()
    num_targets = sum(length - 1 for of_rank in batches for lengths in of_rank for length in lengths)

    def train() -> None:
        own = model().train()
        optimizer = torch.optim.SGD(own.parameters(), lr=0.1)
        for number, lengths in enumerate(batches[rank]):
            samples = tokens_of(rank, number, lengths)
            tokens = torch.cat(samples)[None]
            positions = torch.cat([torch.arange(len(one)) for one in samples])[None]
            labels = tokens.masked_fill(positions == 0, -100)
            more = {"attention_mask": torch.ones_like(tokens)} if rank == leaks_on else {}
            logits = own(input_ids=tokens, position_ids=positions, use_cache=False, **more).logits
            total = cross_entropy(logits[0, :-1], labels[0, 1:], ignore_index=-100, reduction="sum")
            divisor = sum(lengths) - len(lengths) if own_means else num_targets
            (total / divisor).backward()
        optimizer.step()

    return verdict_of(Path(folder), train, f"r{rank}")
