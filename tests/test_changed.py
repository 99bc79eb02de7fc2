"""`make test-changed` leaves out no test that a change can break."""

from __future__ import annotations

import pytest
from harness import changed

pytestmark = pytest.mark.slow


def test_a_change_at_the_bottom_selects_whoever_imports_evenload() -> None:
    selected = set(changed.selected(["core/errors.py"]))
    for file in changed.test_files():
        if "from evenload" in file.read_text():
            assert str(file.relative_to(changed.ROOT)) in selected


@pytest.mark.parametrize(
    ("path", "there", "absent"),
    [
        ("plugins/moe/plan.py", "tests/plugins/moe/test_policy.py", "tests/data/test_order.py"),
        ("integrations/megatron/stage.py", "tests/integrations/megatron/test_slices.py", "tests/core/test_laws.py"),
        ("integrations/deepspeed/plain.py", "tests/integrations/deepspeed/test_slices.py", "tests/core/test_laws.py"),
        (
            "integrations/megatron/saving/optimizer.py",
            "tests/integrations/megatron/saving/test_optimizer.py",
            "tests/core/test_laws.py",
        ),
        ("tests/harness/proof/drawn.py", "tests/integrations/megatron/test_slices.py", "tests/core/test_laws.py"),
        ("tests/core/test_laws.py", "tests/core/test_laws.py", "tests/core/test_errors.py"),
        ("recipes/slices.yaml", "tests/rehearsal/test_recipes.py", "tests/core/test_errors.py"),
    ],
)
def test_a_change_selects_those_that_depend_on_it(path: str, there: str, absent: str) -> None:
    selected = changed.selected([path])
    assert there in selected
    assert absent not in selected


def test_who_starts_commands_depends_on_all_of_the_product() -> None:
    selected = changed.selected(["integrations/megatron/tenants.py"])
    assert "tests/commands/test_train.py" in selected
    assert "tests/test_cli.py" in selected
