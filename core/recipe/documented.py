"""The docstrings of fields, for the schema alone: to read them as classes are made costs every command 35 ms."""

from __future__ import annotations

import ast
import inspect
import textwrap
from itertools import pairwise
from typing import Any

from pydantic import BaseModel

from ..input.validation import sections_in


def describe_fields(schema: dict[str, Any], model: type[BaseModel], defs: dict[str, Any]) -> None:
    """Write the docstrings of a model's fields, and of those of its sections, into its JSON Schema."""
    texts = {name: text for cls in reversed(model.__mro__) for name, text in _docstrings(cls).items()}
    for name, field in model.model_fields.items():
        if name in texts:
            schema["properties"][name]["description"] = texts[name]
        for section in sections_in(field.annotation):
            describe_fields(defs[section.__name__], section, defs)


def _docstrings(cls: type) -> dict[str, str]:
    """By field the text below it; none of a class that no file holds."""
    if not issubclass(cls, BaseModel) or cls is BaseModel:
        return {}
    try:
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    except OSError:
        return {}
    body = tree.body if isinstance(tree, ast.ClassDef) else []
    return {
        ast.unparse(field.target): inspect.cleandoc(ast.literal_eval(text.value))
        for field, text in pairwise(body)
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr)
    }
