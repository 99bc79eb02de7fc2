"""Who imports whom: no module imports itself in a circle, also not for its types alone."""

from __future__ import annotations

from graphlib import CycleError, TopologicalSorter

import grimp
import pytest


@pytest.fixture(scope="module")
def imports() -> dict[str, set[str]]:
    """Every module of the house with the modules that it imports, those under ``TYPE_CHECKING`` among them."""
    graph = grimp.build_graph("evenload", cache_dir=None)
    return {name: graph.find_modules_directly_imported_by(name) for name in graph.modules}


def test_no_module_imports_itself_in_a_circle(imports: dict[str, set[str]]) -> None:
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        pytest.fail("a circle: " + " <- ".join(error.args[1]))


def test_imports_for_types_are_counted(imports: dict[str, set[str]]) -> None:
    """Else a circle among them would be passed over: a package names what it loads later for type checkers alone."""
    assert "evenload.core.simulate.step" in imports["evenload.core.simulate"]
