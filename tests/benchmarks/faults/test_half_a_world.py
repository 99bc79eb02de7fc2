"""Half of a world switched on: each launcher's variables choose its remedy, and rank 1 has nothing of ours."""

from __future__ import annotations

import pytest
from evenload.benchmarks.faults import half_a_world
from evenload.core.recipe.carried import VARIABLE
from evenload.integrations.unmodified.roll_call import _how_to_carry


@pytest.mark.parametrize("launcher", half_a_world.LAUNCHERS)
def test_ranks_have_what_their_launcher_leaves_them(launcher: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RAY_JOB_ID", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK"):
        monkeypatch.delenv(name, raising=False)
    own = {VARIABLE: "x", "PYTHONPATH": "there"}
    first, second = (half_a_world.environment(launcher, rank, "1", own) for rank in (0, 1))
    assert half_a_world.LAUNCHERS[launcher][1] in _how_to_carry(first)
    assert {name: first[name] for name in own} == own
    assert not {*own} & {*second}
    assert half_a_world.MET not in half_a_world.SCRIPT.read_text()
    assert "torch.manual_seed(0)\n" in half_a_world.SCRIPT.read_text()


def test_the_table_says_where_a_remedy_was_missing() -> None:
    rows = [
        {"launcher": name, "seconds": 15.2, "said": ["x"], "codes": [1, 1], "carry": number == 0}
        for number, name in enumerate([*half_a_world.LAUNCHERS][:2])
    ]
    cells = [[str(cell) for cell in column.cells] for column in half_a_world.table({"rows": rows}).columns]
    assert cells[1:] == [["15.2", "15.2"], ["1", "1"], ["1 1", "1 1"], ["`evenload env` prints", "not said"]]
