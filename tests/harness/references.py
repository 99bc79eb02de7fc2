"""Reference gradients, computed once for all layouts that they are compared with.

A reference depends on weights, samples and labels alone: seven layouts of one model share one. It is kept in a folder
of the run, by a digest of all that goes into it, where every world finds it.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from .forge import REFERENCES

Reference = tuple[float, dict[str, Any]]


def kept(
    compute: Callable[..., Reference], recipe: Any, host: Any, tokens_of: Any, lengths: Any, labels: Any = None
) -> Reference:
    """What ``compute(recipe, host, tokens_of, lengths, labels)`` gives, from the folder where all ranks find it there.
    Collective."""
    if REFERENCES not in os.environ or (labels is not None and labels.reference is not None):
        return compute(recipe, host, tokens_of, lengths, labels)
    trainer = getattr(recipe, recipe.trainer)
    parts = [
        compute.__module__,
        recipe.model,
        recipe.train.dtype,
        trainer,
        recipe.parallel.tp,
        sorted(host.trained.frozen),
    ]
    parts += [getattr(host, "tp_rank", 0), sorted(host.weights().items()), sorted(host.expert_biases().items())]
    samples = range(len(lengths))
    parts += [lengths, [tokens_of(i) for i in samples]]
    if labels is not None:
        weights = labels.weights
        parts += [[labels.of(i) for i in samples], weights and [*weights[1:], [weights.of(i) for i in samples]]]
    file = Path(os.environ[REFERENCES]) / digest(parts)
    found = torch.tensor([int(file.exists())])
    dist.all_reduce(found, dist.ReduceOp.MIN)
    if found:
        loss, gradients = torch.load(file)
        return loss, gradients
    loss, gradients = compute(recipe, host, tokens_of, lengths, labels)
    written = file.with_suffix(f".{os.getpid()}")
    torch.save((loss, dict(gradients)), written)
    written.rename(file)
    return loss, gradients


def digest(value: Any) -> str:
    """Of nested lists, arrays, tensors and whatever has a `repr` that tells all."""
    hashed = hashlib.blake2b(digest_size=16)
    _add(hashed, value)
    return hashed.hexdigest()


def _add(hashed: Any, value: Any) -> None:
    if isinstance(value, torch.Tensor):
        hashed.update(f"{value.dtype}{tuple(value.shape)}".encode())
        hashed.update(value.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    elif hasattr(value, "tobytes"):
        hashed.update(f"{value.dtype}{value.shape}".encode())
        hashed.update(value.tobytes())
    elif isinstance(value, (list, tuple)):
        hashed.update(f"{len(value)}(".encode())
        for entry in value:
            _add(hashed, entry)
    else:
        hashed.update(repr(value).encode())
