"""Writes the pages that repeat what code says: ``python docs/reference.py`` in `make docs`.

reference.md          each command with its arguments and options, from typer; then what `import evenload` gives, with
                      signatures and docstrings
reference_recipe.md   each key of a recipe by section, with type, default and docstring
support.md            its end: the versions that are tested, and the symbols that are wrapped
"""

from __future__ import annotations

import ast
import inspect
import json
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import evenload
from evenload.api import load_plugins
from evenload.core.input.validation import sections_in
from evenload.core.recipe.recipe import schema_type
from evenload.patches import support
from pydantic import BaseModel

HERE = Path(__file__).parent
_BY_HAND = "Written by `python docs/reference.py`; do not edit by hand."


def page(title: str, gives: str, lines: Iterator[str]) -> str:
    return "\n".join([f"# {title}", "", *wrapped(gives), "", _BY_HAND, "", *lines]).rstrip() + "\n"


def wrapped(text: str, indent: str = "") -> list[str]:
    """Lines of at most 118 characters; code spans are not taken apart."""
    spans = re.sub(r"`[^`]*`", lambda span: span[0].replace(" ", "\0"), " ".join(text.split()).replace("``", "`"))
    lines = textwrap.wrap(spans, 118, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
    return [line.replace("\0", " ") for line in lines]


def commands_and_python() -> Iterator[str]:
    yield from [*cli(), *_IN_PYTHON.splitlines(), "", *python()]


def cli() -> Iterator[str]:
    import typer
    from evenload.cli import app

    group: Any = typer.main.get_command(app)
    for name, command in group.commands.items():
        arguments = [one for one in command.params if one.param_type_name == "argument"]
        words = " ".join(one.metavar or one.name.upper() for one in arguments)
        yield from [f"## evenload {name}", "", f"`evenload {name} {words}`".replace(" `", "`"), ""]
        yield from [*wrapped(command.help or ""), ""]
        for one in command.params:
            if one in arguments or one.name == "help":
                continue
            default = f" Default: `{one.default}`." if one.default else ""
            value = "" if one.is_flag else f" {one.metavar or one.name.upper()}"
            yield from wrapped(f"- `{', '.join(one.opts)}{value}`: {one.help or ''}{default}", "  ")
        yield ""


def recipe() -> Iterator[str]:
    load_plugins()
    schema = schema_type()
    fields = schema.model_fields.items()
    plain = {name: field for name, field in fields if not section_of(field)}
    yield from ["## The recipe itself", "", *keys_of(schema, plain), ""]
    for name, field in fields:
        if section := section_of(field):
            yield from section_and_below(name, section)


def section_and_below(name: str, section: type[BaseModel]) -> Iterator[str]:
    fields = section.model_fields
    if name != "plugins":
        yield from [f"## {name}", "", *keys_of(section, fields), ""]
    for key, field in fields.items():
        if below := section_of(field):
            yield from section_and_below(f"{name}.{key}", below)


def section_of(field: Any) -> type[BaseModel] | None:
    return next(iter(sections_in(field.annotation)), None)


def keys_of(section: type[BaseModel], fields: Any) -> Iterator[str]:
    texts = docstrings_of(section)
    properties = section.model_json_schema()["properties"]
    for name, field in fields.items():
        default = field.get_default(call_default_factory=True)
        dumped = default.model_dump(mode="json", exclude_defaults=True) if isinstance(default, BaseModel) else default
        told = json.dumps(dumped, default=str)
        says = "required" if field.is_required() else f"default `{told}`"
        text = f"- **{name}** ({type_of(properties[name])}; {says}). {texts.get(name, '')}"
        yield from wrapped(text, "  ")


def type_of(schema: Any) -> str:
    """A type of JSON Schema in words, with its bounds."""
    if kinds := schema.get("anyOf") or schema.get("oneOf"):
        return " or ".join(map(type_of, kinds))
    if words := schema.get("enum"):
        return " or ".join(f"`{word}`" for word in words)
    if "$ref" in schema:
        return "section"
    bounds = {"minimum": "at least", "exclusiveMinimum": "above", "maximum": "at most"}
    limits = [f"{text} {schema[key]:g}" for key, text in bounds.items() if abs(schema.get(key, 1e9)) < 1e6]
    return " ".join([schema.get("type", "any"), *limits])


def docstrings_of(section: type[BaseModel]) -> dict[str, str]:
    """What stands below each field, of the classes that it inherits from too."""
    texts: dict[str, str] = {}
    for kind in reversed(section.__mro__):
        if not issubclass(kind, BaseModel) or kind.__module__.startswith("pydantic") or kind.__name__ == "Plugins":
            continue
        try:
            (tree,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
        except OSError:  # made by a call
            continue
        assert isinstance(tree, ast.ClassDef)
        for node, below in zip(tree.body, tree.body[1:], strict=False):
            if isinstance(node, ast.AnnAssign) and isinstance(below, ast.Expr) and isinstance(node.target, ast.Name):
                assert isinstance(below.value, ast.Constant)
                texts[node.target.id] = str(below.value.value)
    return texts


def python() -> Iterator[str]:
    for name in sorted(evenload.__all__, key=str.lower):
        value = getattr(evenload, name)
        if not callable(value):
            continue
        where = f"{value.__module__}".removeprefix("evenload.")
        text = inspect.getdoc(value) or ""
        parameters = [f"`{one}`" for one in inspect.signature(value).parameters] if inspect.isfunction(value) else []
        yield from [
            f"### {name}",
            "",
            f"Of `{where}`." + (f" Takes {', '.join(parameters)}." if parameters else ""),
            "",
        ]
        for paragraph in re.split(r"\n\s*\n", text):
            indented = "\n    " in paragraph or paragraph.startswith("    ")
            yield from [*(paragraph.splitlines() if indented else wrapped(paragraph)), ""]


_IN_PYTHON = """## In Python

`evenload.plan(recipe, lengths)` takes integers of 1 or more in a list, an array or an iterator. Floats, booleans, text,
sets, mappings, nested lists and empty batches raise EvenloadError.

`evenload.train` and `evenload.verify` take a Recipe, a path or the name of a shipped recipe, and return what `--json`
prints:

```python
recipe = evenload.load_recipe("quickstart", ["train.steps=20"])
result = evenload.train(recipe, against=["stock"], progress=lambda task, done, total, text: print(task, done, text))
assert evenload.verify(recipe)["exact"]
```

Ranks are processes on this machine; their output goes to stderr. In a process that torchrun started, this rank trains
there; rank 0 returns the object and calls `progress`, the others return None. A failing rank raises RankError. Ranks
know plugins of installed packages (entry points), not those that your script has registered.

Nothing in `import evenload` imports torch or a trainer before it is used.
"""

PAGES = {
    "reference.md": (
        "Commands and Python",
        "This page gives every command with its arguments and options, and what `import evenload` offers [in "
        "Python](#in-python). `RECIPE` is a file or a name of `evenload recipes`; [exit codes](faults.md#exit-codes) "
        "say how a command ended.",
        commands_and_python,
    ),
    "reference_recipe.md": (
        "The recipe, key by key",
        "This page gives each key of a recipe by section: its type, its default, what it does. `evenload schema` "
        "prints the same as JSON Schema, for editors.",
        recipe,
    ),
}


def documents() -> dict[str, str]:
    """The text of each page by its file's name."""
    pages = {name: page(title, gives, lines()) for name, (title, gives, lines) in PAGES.items()}
    by_hand, _, _ = (HERE / "support.md").read_text().partition("## Tested versions\n")
    return {**pages, "support.md": by_hand + support.document()}


if __name__ == "__main__":
    for name, text in documents().items():
        (HERE / name).write_text(text)
