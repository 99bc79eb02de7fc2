"""What the scores of several samples of each prompt come to.

pass@k   chance that one of k samples is right: 1 - C(n - c, k) / C(n, k) of c right ones of n, the mean of prompts;
         without bias for every k (Chen et al., arXiv 2107.03374, equation 1)
maj@k    mean score of the answer that most of the first k samples of a prompt have; of answers with equally many
         the mean
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence

import numpy as np

from ...core.aliases import Floats, Ints


def pass_at(k: int, right: Ints, of: int) -> float:
    """The estimate of pass@k from how many of a prompt's samples, ``of`` so many, are right, int64 [P]."""
    return float(np.mean([1.0 - math.comb(of - count, k) / math.comb(of, k) for count in right.tolist()]))


def majority_at(k: int, scores: Floats, answers: Sequence[Sequence[Hashable]]) -> float:
    """The score of the answer that most samples have, from the scores [P, N] and answers [P][N] of samples; one that is
    None votes for nothing, and a prompt without a vote scores 0."""
    return float(np.mean([_of_majority(own[:k].tolist(), said[:k]) for own, said in zip(scores, answers, strict=True)]))


def _of_majority(scores: Sequence[float], answers: Sequence[Hashable]) -> float:
    voters: dict[Hashable, list[float]] = defaultdict(list)
    for answer, score in zip(answers, scores, strict=True):
        if answer is not None:
            voters[answer].append(score)
    most = max(map(len, voters.values()), default=0)
    means = [sum(own) / most for own in voters.values() if len(own) == most]
    return sum(means) / max(1, len(means))


def figures_of(row: Mapping[str, float]) -> str:
    """Scores of a validation's samples in a line: score 0.312, pass@4 0.5."""
    chances = [f"{name.replace('_at_', '@')} {row[name]:.3f}" for name in row if "_at_" in name]
    return ", ".join([f"score {score_of(row)}", *chances])


def score_of(row: Mapping[str, float]) -> str:
    """The mean score, with its interval where it has one."""
    ends = f" ({row['score_low']:.3f} to {row['score_high']:.3f})" if "score_low" in row else ""
    return f"{row['score']:.3f}{ends}"
