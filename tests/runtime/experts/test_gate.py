"""The header that rides on the counts of a layer: who runs another pass is named, and loads leave dummies out."""

import numpy as np
import pytest
import torch
from evenload.core.errors import RankError
from evenload.core.experts.quotas import at_home
from evenload.core.plan.expert_policy import EXPERTS_AT_HOME, ExpertPolicy
from evenload.runtime.experts.gate import ExpertGate

SENT, COUNTED = torch.tensor([4, 1, 0, 3]), torch.tensor([4, 0, 0, 2])


def gates(digests=(b"a" * 16, b"a" * 16)):
    marks = []
    pair = ExpertGate((4, 7), 0), ExpertGate((4, 7), 1)
    for gate, digest in zip(pair, digests, strict=True):
        gate.begin(digest, marks.append, EXPERTS_AT_HOME, at_home)
    return *pair, marks


def test_ranks_that_agree_get_what_all_of_them_send_and_the_imbalance_without_dummies():
    first, second, _ = gates()
    for gate in (first, second):
        gate.enter("forward of micro-batch 0")
    rows = torch.stack([first.with_header(2, SENT, COUNTED), second.with_header(2, SENT * 2, COUNTED * 3)])
    assert second.take(2, rows, record=True).tolist() == [SENT.tolist(), (2 * SENT).tolist()]
    assert second.check().tolist() == [SENT.tolist(), (2 * SENT).tolist()]
    assert second.check() is None
    (load,) = second.loads
    assert (load.number, load.layer, load.counts) == (0, 2, (12, 0, 0, 6))
    assert load.imbalance == 16 / 12  # 16 of 24 tokens for the two experts of the first rank
    assert load[4:] == (16 / 12, 0, 0, 0.0, "")  # every expert at its home: none copied, nothing fetched
    first.take(2, rows, record=False)
    assert first.check().shape == (2, 4)
    assert not first.loads


def test_a_load_says_why_its_layer_was_not_planned_whatever_the_layers_around_it_are():
    gate, planners = ExpertGate((4, 7), 0), iter([at_home, lambda *_: np.zeros((4, 2), dtype=np.int64), at_home])
    gate.begin(b"a" * 16, lambda _: None, ExpertPolicy("drawn", slots=2), lambda *of_layer: next(planners)(*of_layer))
    gate.enter("forward of micro-batch 0")
    for layer in range(3):
        rows = torch.stack([gate.with_header(layer, SENT, COUNTED)] * 2)
        gate.take(layer, rows, record=True)
        assert gate.shares(layer, record=True) is None
    first, second, third = (load.failed for load in gate.loads)
    assert (first, third) == ("", "")
    assert second.startswith("experts of layer 1 stay at home, as 'drawn' failed: quotas lose tokens")


@pytest.mark.parametrize("what", ["pass", "plan", "layer", "quotas"])
def test_a_rank_that_runs_another_pass_plan_layer_or_quotas_is_named(what):
    first, second, _ = gates((b"a" * 16, b"b" * 16) if what == "plan" else (b"a" * 16, b"a" * 16))
    first.enter("forward of micro-batch 0")
    second.enter("forward of micro-batch 0")
    if what == "pass":
        second.enter("forward of micro-batch 3")
    if what == "quotas":
        second.begin(b"a" * 16, lambda _: None, ExpertPolicy("drawn", slots=1), lambda *_: np.array([[5, 0], [0, 5]]))
        second.enter("forward of micro-batch 0")
        second.take(
            0,
            torch.stack([second.with_header(0, torch.tensor(sent), SENT[:2]) for sent in ([4, 1], [1, 4])]),
            record=False,
        )
        assert second.shares(0, record=False) is None
    rows = torch.stack([first.with_header(0, SENT, SENT), second.with_header(int(what == "layer"), SENT, SENT)])
    second.take(int(what == "layer"), rows, record=True)
    with pytest.raises(RankError, match="run different passes") as caught:
        second.check()
    assert "rank 4 runs pass 0" in caught.value.found
    assert f"rank 7 runs pass {int(what == 'pass')}" in caught.value.found
    assert not second.loads


def test_marks_name_the_layer_and_go_back_behind_it():
    first, _, marks = gates()
    first.enter("backward of micro-batch 5")
    first.at_layer(3)
    first.behind_layer()
    assert marks == ["backward of micro-batch 5, experts of layer 3", "backward of micro-batch 5"]
