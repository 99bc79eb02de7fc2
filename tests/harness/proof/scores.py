"""Scores of sequences by plans that run forward only, against those of whole sequences one by one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from evenload.core.plan.step_plan import StepPlan, as_lengths
from evenload.runtime.attention.choosers import BlockChoice, Chooser, Grid
from evenload.runtime.attention.labels import Labels
from evenload.runtime.attention.pack import IGNORE
from evenload.runtime.attention.sparse import SparsePass
from evenload.training.proof.weighing import drawn_weights

from . import LENGTHS, tokens

Plain = dict[int, tuple[torch.Tensor, np.ndarray]]
"""Of each sequence its logits, and the losses of all tokens but the first."""
GRID, BLOCKS = Grid(16, 4), 5
"""Of passes that leave blocks of keys out; and the seed of what they leave out."""


def half_weighed() -> Labels:
    """Every second token carries loss, with a weight of its own, and of the last sequence none."""
    last, data = len(LENGTHS) - 1, tokens()

    def of(index: int) -> np.ndarray:
        return np.where((np.arange(LENGTHS[index]) % 2 == 1) & (index < last), data(index), IGNORE)

    targets = np.array([int((of(i)[1:] != IGNORE).sum()) for i in range(len(LENGTHS))])
    return drawn_weights(Labels(of, targets), data, as_lengths(LENGTHS), "token", [0])


def drawn_blocks(seed: int, *, keeps: bool = False) -> SparsePass:
    """A pass that leaves out what `seen_of` does."""

    def choose(choice: BlockChoice) -> torch.Tensor:
        chosen = choice.empty()
        for number, block in enumerate(choice.query_blocks):
            blocks = range(block.begin // GRID.keys)
            chosen[:, number, : len(blocks)] = torch.tensor([_is_kept(seed, block.begin, j) for j in blocks])
        return chosen

    return SparsePass(Chooser("drawn", choose, keeps), 0.5, [f"sample {i}" for i in range(len(LENGTHS))], grid=GRID)


def causal(length: int) -> torch.Tensor:
    """The keys that each query sees, bool [L, L]."""
    return torch.ones(length, length, dtype=torch.bool).tril()


def seen_of(seed: int, length: int) -> torch.Tensor:
    """The keys that each query of a sequence sees, bool [L, L], where blocks of a drawn half are left out."""
    queries, keys = torch.arange(length)[:, None], torch.arange(length)[None]
    begins = queries // GRID.queries * GRID.queries
    kept = torch.tensor(
        [[_is_kept(seed, int(b), k // GRID.keys) for k in range(length)] for b in begins[:, 0]], dtype=torch.bool
    )
    return (keys <= queries) & (kept | (keys >= begins))


def is_shared(plan: StepPlan, sequence: int) -> bool:
    """Whether ranks share some slice of a sequence."""
    of = [m for m in plan.micro_batches if sequence in {piece.sequence for piece in m.slices}]
    return any(len(micro_batch.ranks) > 1 for micro_batch in of)


def off_in_blocks(host: Any, plan: StepPlan, tokens_of: Any, dense: Plain, sparse: Plain) -> dict[str, float]:
    """How far passes that leave blocks out are from plain ones that do: at once; after a dense pass has chosen; and in
    the share of pairs that they say they have kept. Collective."""
    first, later = drawn_blocks(BLOCKS), drawn_blocks(BLOCKS, keeps=True)
    wanted = {i: dense[i] if is_shared(plan, i) else sparse[i] for i in dense}
    scores = [host.score(plan, tokens_of, sparse=run) for run in (first, later, replace(later))]
    errors = [off_in_losses(one, of, None) for one, of in zip(scores, (wanted, dense, wanted), strict=True)]
    kept = [float(seen_of(BLOCKS, n).sum()) / (n * (n + 1) / 2) for n in LENGTHS]
    kept = [1.0 if is_shared(plan, i) else share for i, share in enumerate(kept)]
    pairs = max(float(np.abs(run.pairs().kept - kept).max()) for run in (first, later))
    return {"sparse": max(errors), "pairs": pairs, "left out": abs(scores[0].loss - scores[1].loss)}


def _is_kept(seed: int, begin: int, block: int) -> bool:
    return block == 0 or bool(hash((seed, begin, block)) % 2)


def off_in_vectors(own: np.ndarray, expected: dict[int, np.ndarray]) -> float:
    return max(float(np.linalg.norm(own[i] - row) / np.linalg.norm(row)) for i, row in expected.items())


def off_in_losses(scores: Any, expected: Plain, labels: Labels | None) -> float:
    """The largest relative error of a sequence's loss, and of that of all; infinite where its targets are others."""
    worst, total, divisor = 0.0, 0.0, 0.0
    for number, (_, losses) in expected.items():
        counts = labels.of(number)[1:] != IGNORE if labels else np.ones(len(losses), dtype=bool)
        if int(scores.targets[number]) != int(counts.sum()):
            return float("inf")
        weights = counts * (labels.weights.of(number)[1:] if labels and labels.weights else 1.0)
        wanted = float((losses * weights).sum())
        worst = max(worst, abs(wanted - float(scores.losses[number])) / max(1.0, abs(wanted)))
        total, divisor = total + wanted, divisor + float(weights.sum())
    return max(worst, abs(scores.loss * divisor / total - 1))


def of_a_reference(index: int) -> np.ndarray:
    """Losses of the tokens of a sequence by another model: about half of them are exceeded."""
    return 5.5 + np.random.default_rng(index).normal(size=LENGTHS[index])


def off_in_excess(scores: Any, expected: Plain, labels: Labels) -> float:
    """The largest relative error of what a sequence's token losses exceed those of a reference by."""
    worst = 0.0
    for number, (_, losses) in expected.items():
        counts = (labels.of(number)[1:] != IGNORE) * labels.weights.of(number)[1:]
        wanted = float((counts * np.maximum(losses - of_a_reference(number)[1:], 0.0)).sum())
        worst = max(worst, abs(wanted - float(scores.excess[number])) / max(1.0, abs(wanted)))
    return worst


def off_by_token(own: torch.Tensor, number: int, expected: Plain, labels: Labels) -> float:
    """The largest error of a token's loss, the first token's among them, which has none."""
    losses = np.append(0.0, np.where(labels.of(number)[1:] != IGNORE, expected[number][1], 0.0))
    return float(np.abs(own.double().numpy() - losses).max())
