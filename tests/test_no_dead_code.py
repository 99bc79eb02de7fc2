"""Every function, method and class of the product is used by the product: what only tests call is dead."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest
from harness.product import trees

CALLED_FROM_OUTSIDE = {
    "repr_int": "reprlib calls it",
    "repr_bytes": "reprlib calls it",
    "read_plans": "reads plan.json for users (docs/plan.md)",
    "along": "scores samples by their gradients along a direction, for users (docs/selection.md)",
    "_partition_layers": "DeepSpeed calls it",
    "async_save": "Megatron calls it",
    "record_event": "Megatron and DeepSpeed call it of a stream",
    "set_shares": "a loop of users moves shares of its sampler (docs/data.md)",
    "serve": "benchmarks/published/tie.py plays arrivals",
}
"""Names that the product defines and does not refer to, and who does."""
CALLING_DECORATORS = ("field_validator", "model_validator", "field_serializer")

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def referred(tree: ast.Module) -> Iterator[str]:
    """Names that a module loads, looks up, or writes as a string of one word (`getattr`, rows of symbols)."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and " " not in node.value:
            yield from node.value.replace(":", ".").replace(",", ".").split(".")


def definitions(tree: ast.Module) -> Iterator[Definition]:
    """Functions, methods and classes that somebody must call by name."""
    for node in ast.walk(tree):
        if not isinstance(node, Definition) or node.name.startswith("__"):
            continue
        if not any(word in ast.unparse(d) for d in node.decorator_list for word in CALLING_DECORATORS):
            yield node


@pytest.mark.every_plugin
def test_whatever_the_product_defines_it_uses() -> None:
    modules = trees()
    used = {name for tree in modules.values() for name in referred(tree)}
    unused = {
        node.name: f"{path}:{node.lineno}"
        for path, tree in modules.items()
        for node in definitions(tree)
        if node.name not in used
    }
    dead = {name: place for name, place in unused.items() if name not in CALLED_FROM_OUTSIDE}
    assert not dead, "only tests call these: delete them, or move them to the tests"
    assert set(CALLED_FROM_OUTSIDE) <= set(unused), "the product uses these by now, or they are gone: shorten the list"


def test_a_function_that_nothing_calls_is_seen() -> None:
    tree = ast.parse("def lonely(): return other\ndef other(): return 1\n")
    assert [node.name for node in definitions(tree) if node.name not in set(referred(tree))] == ["lonely"]
