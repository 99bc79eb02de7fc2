"""The batches that a training call takes from a loop's iterators, and gives back where it is not planned."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .....core.errors import EvenloadError

Taken = dict[int, list[Any]]
"""The batches of a training call, by the identity of the iterator that gave them: chunks may share one."""


def has_any(data_iterator: Any) -> bool:
    """Whether some chunk of this rank has an iterator."""
    return any(one is not None for one in _of_chunks(data_iterator))


def taken_from(data_iterator: Any, number: int) -> Taken:
    """So many batches from each iterator of this rank; StopIteration passes, as in Megatron's schedule."""
    own = {id(one): one for one in _of_chunks(data_iterator) if one is not None}
    return {key: [next(one) for _ in range(number)] for key, one in own.items()}


def given_back(data_iterator: Any, taken: Taken) -> Any:
    """What a schedule takes the batches from that were ``taken``: a list where it was given one."""
    again = {key: iter(batches) for key, batches in taken.items()}
    of_chunks = [again.get(id(one)) for one in _of_chunks(data_iterator)]
    return of_chunks if isinstance(data_iterator, (list, tuple)) else of_chunks[0]


def of_one(taken: Taken) -> list[Any] | None:
    """The batches that all chunks are given; None where no chunk has an iterator. Raises EvenloadError."""
    for first, *others in zip(*taken.values(), strict=True):
        if any(_unlike(first, other) for other in others):
            raise EvenloadError(
                "the chunks of a rank are given other samples",
                f"{len(taken)} data iterators whose batches have other tokens",
                "give each chunk an iterator over the same samples, or None, as Megatron-LM does",
            )
    return next(iter(taken.values()), None)


def _of_chunks(data_iterator: Any) -> Sequence[Any]:
    return data_iterator if isinstance(data_iterator, (list, tuple)) else [data_iterator]


def _unlike(batch: Any, other: Any) -> bool:
    """Whether two batches have other tokens, where they have some that can be looked at without waiting."""
    here, there = (one.get("tokens") if hasattr(one, "get") else None for one in (batch, other))
    if not isinstance(here, Tensor) or not isinstance(there, Tensor):
        return False
    return {here.device.type, there.device.type} == {"cpu"} and not torch.equal(here, there)
