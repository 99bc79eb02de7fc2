"""Checkpoints: bit-equal on the same ranks, to rounding on others, and never a silent start from step 0."""

from __future__ import annotations

import pytest
from harness.cases import only_full

pytestmark = pytest.mark.slow

ROUNDING = 1e-6
OTHER_RANKS = [(1, {}, ROUNDING)]
REFUSED = [
    (2, {"stage": 2}, "written under another zero_stage"),
    (2, {"folder": "/nonexistent"}, "no complete DeepSpeed checkpoint"),
]
EXPERTS = {"ep": 2, "family": "mixtral"}
EP_2, EP_4 = [(4, {}, ROUNDING)], [(4, {"ep": 4}, ROUNDING)]
EP_2_ALONE = [*EP_2, (4, {"ep": 4}, "another ep\n  found: 2 there, 4 in this recipe")]
STAGES = [
    (4, {"pp": 4}, "written under another pp"),
    (2, {"layers": [1, 3]}, "another number of layers of each stage"),
    (2, {}, ROUNDING),
]
OF_V = [
    (2, {"v_shape": False}, "another number of pipeline stages on each device"),
    (4, {}, 1e-2),
]


@pytest.mark.parametrize(
    ("ranks", "asked", "then"),
    [
        only_full(2, {"stage": 0}, OTHER_RANKS),
        (2, {"stage": 0, "dtype": "bf16"}, []),
        (2, {"stage": 1}, OTHER_RANKS + REFUSED),
        only_full(2, {"stage": 2, "dtype": "bf16"}, []),
        only_full(2, {"stage": 3}, OTHER_RANKS),
        only_full(2, {"stage": 0, **EXPERTS}, EP_2_ALONE),
        only_full(2, {"stage": 1, **EXPERTS}, EP_4),
        only_full(2, {"stage": 2, **EXPERTS}, EP_2),
        (2, {"stage": 3, **EXPERTS}, EP_4),
        only_full(2, {"stage": 0, "pp": 2}, []),
        only_full(2, {"stage": 1, "pp": 2, "dtype": "bf16"}, []),
        (4, {"stage": 1, "pp": 2}, STAGES),
        (2, {"stage": 1, "pp": 2, "dtype": "bf16", "v_shape": True}, OF_V),
    ],
)
def test_a_run_goes_on_from_its_checkpoint(on_ranks, tmp_path, ranks, asked, then):
    """``then``: on so many ranks of a recipe with these changes it goes on to a rounding, or is refused by a message.

    Divided experts are tried on few other ranks: from ZeRO 1 on a process of its own converts the checkpoint, which
    takes seconds.
    """
    arguments = {"folder": str(tmp_path), **asked}
    went_on = on_ranks(ranks, "save_and_go_on", **arguments)
    assert on_ranks(ranks, "resume", **arguments) == went_on
    assert len(set(went_on[0])) == 2
    for size, changes, end in then:
        for resumed in on_ranks(size, "resume", **{**arguments, **changes}):
            if isinstance(end, str):
                assert end in resumed[0]
            else:
                assert list(map(float.fromhex, resumed)) == pytest.approx(list(map(float.fromhex, went_on[0])), rel=end)
