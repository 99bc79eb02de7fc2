"""Parameters that keep the values that they begin with: ``train.freeze`` against the names that a trainer gives them.

A frozen parameter has no gradient and no state of the optimizer, and counts in no norm. It stands in the model and in
checkpoints as ever.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

from torch import nn

from ...core.errors import EvenloadError, nearest


def freeze(patterns: Sequence[str], own: Mapping[str, nn.Parameter], stages: Sequence[Sequence[str]]) -> frozenset[str]:
    """Freeze what the patterns name; the names of all parameters that are frozen anywhere.

    Args:
        patterns: as a shell has them; upper and lower case differ.
        own: this rank's parameters by global name, before an engine or an optimizer is made for them.
        stages: the global names of the parameters of each part of the model, those of other ranks too.

    Raises:
        EvenloadError: a pattern matches no name, or nothing is left to train, of the model or of one of its parts.
    """
    names = sorted({name for part in stages for name in part})
    frozen: set[str] = set()
    for pattern in patterns:
        matched = [name for name in names if fnmatchcase(name, pattern)]
        if not matched:
            kinds = {re.sub(r"\.\d+(?=\.)", ".*", name) for name in names}
            raise EvenloadError("train.freeze matches no parameter of this model", pattern, nearest(pattern, kinds))
        frozen.update(matched)
    for number, part in enumerate(stages):
        if frozen.issuperset(part):
            what = "train.freeze leaves nothing to train" + (f" on pipeline stage {number}" if len(stages) > 1 else "")
            raise EvenloadError(what, ", ".join(patterns), "freeze less, or set fewer stages (parallel.pp)")
    for name, parameter in own.items():
        parameter.requires_grad_(name not in frozen)
    return frozenset(frozen)
