"""Centres of prompts from numbers that describe them, such as the last hidden state of a prompt's own prefill.

Ridge regression (Hoerl and Kennard, Technometrics 12, 1970), its strength by generalised cross-validation, on the mu of
prompts that have samples. It is used only if, on prompts left out of it in turn, its squared errors are below those of
the plain mean by more than the standard error of their difference. O(P^2 F).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ...core.aliases import Floats

_FOLDS = 5
_FEWEST = 4 * _FOLDS
_STRENGTHS = np.logspace(-4, 4, 17)
"""Of the penalty, in units of the mean squared singular value."""


def predicted_centres(features: Floats, mu: Floats, known: Any) -> Floats | None:
    """What to add to the mean of all prompts [P]; None where features [P, F] do not help.

    ``mu`` [P], of which those are ``known``, bool [P]. Of a known prompt it is the regression of the other folds.
    """
    rows = np.flatnonzero(known)
    if len(rows) < _FEWEST or not np.isfinite(features).all():
        return None
    spread = features[rows].std(axis=0)
    used = spread > 0
    scaled = (features[:, used] - features[rows][:, used].mean(axis=0)) / spread[used]
    held_out, plain = np.zeros(len(rows)), np.zeros(len(rows))
    for fold in range(_FOLDS):
        out = np.arange(len(rows)) % _FOLDS == fold
        held_out[out] = _regression(scaled[rows[~out]], mu[rows[~out]], scaled[rows[out]])
        plain[out] = mu[rows[~out]].mean()
    gain = (mu[rows] - plain) ** 2 - (mu[rows] - held_out) ** 2
    if gain.mean() <= gain.std() / np.sqrt(len(rows)):
        return None
    centres = _regression(scaled[rows], mu[rows], scaled)
    centres[rows] = held_out
    return np.asarray(centres - mu[rows].mean())


def _regression(features: Floats, targets: Floats, asked: Floats) -> Floats:
    """Targets at ``asked`` [A, F] by those [N] at ``features`` [N, F]."""
    mean, centre = targets.mean(), features.mean(axis=0)
    u, s, vt = np.linalg.svd(features - centre, full_matrices=False)
    seen = u.T @ (targets - mean)
    unit = float(np.mean(s**2)) or 1.0
    best = min(_STRENGTHS, key=lambda strength: _cross_validated(s, seen, targets - mean, strength * unit))
    return np.asarray(mean + (asked - centre) @ (vt.T @ (s / (s**2 + best * unit) * seen)))


def _cross_validated(s: Floats, seen: Floats, targets: Floats, penalty: float) -> float:
    """Generalised cross-validation (Golub, Heath and Wahba, Technometrics 21, 1979) of a penalty."""
    kept = s**2 / (s**2 + penalty)
    left = float(targets @ targets - seen @ seen + ((1 - kept) * seen) @ ((1 - kept) * seen))
    freedom = len(targets) - 1 - float(kept.sum())
    return left / freedom**2 if freedom > 0 else np.inf
