"""Which parameters ``train.freeze`` names, and what it may not name."""

from __future__ import annotations

import pytest
from evenload.core.errors import EvenloadError
from evenload.integrations.host.trained import freeze
from torch import nn

STAGES = [["embedding.weight", "layers.0.fc1.weight"], ["layers.1.fc1.weight", "head.weight"]]


def test_patterns_reach_every_stage_and_freeze_what_is_here() -> None:
    own = {name: nn.Parameter() for name in STAGES[0]}
    assert freeze(["layers.*.fc1.weight"], own, STAGES) == {"layers.0.fc1.weight", "layers.1.fc1.weight"}
    assert {name: p.requires_grad for name, p in own.items()} == {
        "embedding.weight": True,
        "layers.0.fc1.weight": False,
    }
    assert freeze([], own, STAGES) == frozenset()
    assert all(p.requires_grad for p in own.values())


@pytest.mark.parametrize(
    ("patterns", "what", "told"),
    [
        (["embeding.*"], "matches no parameter", "did you mean 'embedding.weight'?"),
        (["layers.0.fc2.weight"], "matches no parameter", "layers.*.fc1.weight"),
        (["*"], "leaves nothing to train", "freeze less"),
        (["layers.1.*", "head.*"], "leaves nothing to train on pipeline stage 1", "freeze less"),
    ],
)
def test_a_pattern_of_nothing_and_of_everything_is_refused(patterns: list[str], what: str, told: str) -> None:
    with pytest.raises(EvenloadError, match=what) as caught:
        freeze(patterns, {}, STAGES)
    assert told in caught.value.do
