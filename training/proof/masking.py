"""Labels in which half of all tokens carry no loss, so that every recipe is proved for prompts, too.

Some sequences begin with a prompt, of no token up to all of them; in the others tokens are masked here and there. So
slices, packs and ranks come about that have no target, and borders at which the label of the next slice is none.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ...core.aliases import Ints
from ...runtime.attention.labels import Labels, weighed
from ...runtime.attention.pack import IGNORE, TokensOf

_BEYOND = 0.2
"""How far beyond 0 and 1 the share of a prompt is drawn, before it is cut to what a prompt can be."""
_DRAWS = 4
"""Of so many draws the one that comes nearest to half of a batch counts, for some sequences are very long."""


def half_masked(labels: Labels | None, tokens_of: TokensOf, samples: Ints, lengths: Ints, seed: int) -> Labels:
    """The labels of a batch without about half of its targets, drawn by the numbers of its samples; the others keep
    their weights.

    Where nothing would be left, all targets stay: a batch needs one.
    """
    random, half = np.random.default_rng([seed, *samples.tolist()]), int(lengths.sum()) / 2
    drawn = [_masks(lengths, random) for _ in range(_DRAWS)]
    masks = min(drawn, key=lambda masks: abs(sum(int(mask.sum()) for mask in masks) - half))
    known = tokens_of if labels is None else labels.of

    def of(index: int) -> npt.NDArray[np.int64]:
        return np.where(masks[index], IGNORE, known(index)[: lengths[index]]).astype(np.int64)

    targets = np.array([np.count_nonzero(of(index)[1:] != IGNORE) for index in range(len(lengths))], dtype=np.int64)
    if targets.any():
        masked = Labels(of, targets)
        weights = labels and labels.weights
        return weighed(masked, tokens_of, lengths, weights.of, weights.divisor) if weights else masked
    return labels or Labels(tokens_of, np.maximum(lengths - 1, 0))


def _masks(lengths: Ints, random: np.random.Generator) -> list[npt.NDArray[np.bool_]]:
    shares = random.uniform(-_BEYOND, 1 + _BEYOND, len(lengths))
    prompts = np.round(shares.clip(0.0, 1.0) * lengths)
    scattered = random.random(len(lengths)) < 0.5
    return [
        random.random(n) < 0.5 if anywhere else np.arange(n) < prompt
        for n, prompt, anywhere in zip(lengths.tolist(), prompts, scattered, strict=True)
    ]
