"""What Megatron-LM's scripts are handed where they broadcast a batch, by the version of Megatron-Core."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from evenload.integrations.host.versions import version_of
from evenload.patches import Ledger, bridge_cpu
from evenload.patches.megatron import rows
from packaging.specifiers import SpecifierSet

BATCH_ROWS = [row for row in rows() if row.target.endswith(":get_batch_on_this_tp_rank")]
OLD = ["tokens", "labels", "loss_mask", "attention_mask", "position_ids", "cu_seqlens", "max_seqlen", "local_cp_size"]
"""The order in which scripts of 0.16 and 0.17 unpack ``batch.values()``."""
KEYS = {*OLD, "cu_seqlens_padded", "hybrid_cp_group"}
"""BATCH_KEYS of `pretrain_gpt.py` of 0.18 and 0.19, each of which is read by its name."""
PACK = {"tokens": torch.tensor([[1, 2, 3]]), "position_ids": torch.tensor([[0, 1, 2]])}


@pytest.fixture(scope="module")
def forward_step() -> Iterator[ModuleType]:
    """The functions of the rows; Megatron-Core wants the bridge before it is imported."""
    bridge = bridge_cpu()
    from evenload.integrations.megatron.unmodified.running import forward_step

    yield forward_step
    bridge.undo()


def stock(*words: Any, **options: Any) -> Any:
    return words, options


@pytest.mark.parametrize(
    ("version", "module"),
    [
        ("0.16.1", "megatron.training.utils"),
        ("0.17.1", "megatron.training.utils"),
        ("0.18.0", "megatron.core.utils"),
        ("0.19.2", "megatron.core.utils"),
    ],
)
def test_each_version_has_one_row_where_its_scripts_take_the_function_from(version: str, module: str) -> None:
    needed = [row for row in BATCH_ROWS if SpecifierSet(row.only).contains(version)]
    assert [row.target for row in needed] == [f"{module}:get_batch_on_this_tp_rank"]


@pytest.mark.parametrize("function", ["batch_on_tensor_ranks", "batch_of_core"])
def test_outside_a_planned_step_stock_broadcasts(forward_step: ModuleType, function: str) -> None:
    answer = getattr(forward_step, function)(stock, None, (1,), {"tp_rank": 0})
    assert answer == ((1,), {"tp_rank": 0})


def test_inside_a_planned_step_the_pack_has_what_the_script_reads(forward_step: ModuleType) -> None:
    with forward_step.present(PACK):
        old = forward_step.batch_on_tensor_ranks(stock, None, (), {})
        new = forward_step.batch_of_core(stock, None, (), {})
    assert list(old) == OLD
    assert set(new) == KEYS
    for batch in (old, new):
        assert {name: value.tolist() for name, value in batch.items() if value is not None} == {
            name: value.tolist() for name, value in PACK.items()
        }


def test_a_script_that_has_copied_the_name_gets_the_pack(
    forward_step: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatron.core import utils

    if SpecifierSet("<0.18").contains(version_of("megatron-core") or "0", prereleases=True):
        pytest.skip("the function of 0.16 and 0.17 is in a checkout alone")
    script = ModuleType("script_with_a_copy")
    script.get_batch = utils.get_batch_on_this_tp_rank  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, script.__name__, script)
    ledger = Ledger()
    ledger.apply(BATCH_ROWS)
    try:
        with forward_step.present(PACK):
            assert set(script.get_batch({}, tp_rank=1)) == KEYS
    finally:
        ledger.undo()
    with forward_step.present(PACK), pytest.raises(TypeError):
        script.get_batch({}, tp_rank=1)  # stock's own, which wants more
