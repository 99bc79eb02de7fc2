"""Which query and key/value heads a rank attends for where ranks share heads."""

from __future__ import annotations

import math
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from ....core.errors import EvenloadError


class Heads(NamedTuple):
    """A run of query heads and the key/value heads that they read."""

    queries: slice
    keys: slice
    copies: tuple[int, ...] = ()
    """The key head, counted from `keys.start`, of every run of equally many query heads; empty: each key head once."""

    def spread(self, x_MGD: Tensor) -> Tensor:
        """Key heads as the blocks want them: each for equally many query heads in a row."""
        return x_MGD.index_select(1, _index(self.copies, x_MGD.device)) if self.copies else x_MGD

    def folded(self, grad_MKD: Tensor) -> Tensor:
        """Gradients of the key heads from those of `spread`."""
        if not self.copies:
            return grad_MKD
        keys, dim = self.keys.stop - self.keys.start, grad_MKD.shape[-1]
        index = _index(self.copies, grad_MKD.device)
        return grad_MKD.new_zeros(len(grad_MKD), keys, dim).index_add_(1, index, grad_MKD)


@cache
def _index(copies: tuple[int, ...], device: torch.device) -> Tensor:
    """On the device once: to copy it there in every call would stop the host."""
    return torch.tensor(copies, device=device)


def heads_of(share: int, shares: int, num_queries: int, num_keys: int) -> Heads:
    """The heads of one of the ranks that share them; nearly equal runs of query heads. A key head that query heads of
    two ranks read is with both. Raises EvenloadError: there are fewer query heads than ranks."""
    if num_queries < shares:
        counts = f"{num_queries} heads, {shares} ranks"
        raise EvenloadError(
            "more ranks share heads than there are", counts, "use a ring, or a hybrid with smaller groups"
        )
    first, end = (i * num_queries // shares for i in (share, share + 1))
    each = num_queries // num_keys
    keys = slice(first // each, (end - 1) // each + 1)
    readers = [min(end, (g + 1) * each) - max(first, g * each) for g in range(keys.start, keys.stop)]
    run = math.gcd(*readers)
    copies = tuple(g for g, count in enumerate(readers) for _ in range(count // run))
    return Heads(slice(first, end), keys, copies if len(copies) > len(readers) else ())
