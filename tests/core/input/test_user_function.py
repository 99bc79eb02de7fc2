"""Functions that a recipe names: what cannot be imported, and what they may give."""

import ast
import math
import re
import sys

import numpy as np
import pytest
from evenload.api import load_plugins
from evenload.core.errors import EvenloadError, RankError
from evenload.core.input.user_function import scored_by, user_function
from evenload.core.recipe.generated import FunctionName
from evenload.core.recipe.recipe import schema_type
from harness.product import ROOT, trees
from pydantic import TypeAdapter

PATTERN = TypeAdapter(FunctionName).json_schema()["pattern"]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "own_scores", raising=False)
    return tmp_path


def test_a_function_of_the_working_folder_is_taken(folder):
    (folder / "own_scores.py").write_text("class Of:\n    def length(prompt, text, row): return len(text)\n")
    function = user_function("own_scores:Of.length", "key")
    assert scored_by(function, "key", 0, ("a", "bcd", {})) == 3.0


@pytest.mark.parametrize(
    ("text", "word", "message"),
    [
        (None, "own_scores:f", "No module named 'own_scores'"),
        ("f = 1", "own_scores:f", "key names no function"),
        ("def g(): pass", "own_scores:f", "no attribute 'f'"),
        ("1 / 0", "own_scores:f", "ZeroDivisionError"),
        ("def f(:", "own_scores:f", "SyntaxError"),
    ],
)
def test_what_is_no_function_is_refused(folder, text, word, message):
    if text is not None:
        (folder / "own_scores.py").write_text(text)
    with pytest.raises(EvenloadError, match=message):
        user_function(word, "key")


@pytest.mark.parametrize("value", [True, 1, 0.5, np.float32(0.25), np.array(0.0)])
def test_numbers_and_truth_values_are_scores(value):
    assert scored_by(lambda *_: value, "key", 0, ("", "", {}), share=True) == float(value)


@pytest.mark.parametrize("value", [math.nan, math.inf, None, "1", [0.5, 0.5], [], np.ones(2), {}, 1.5, -0.1])
def test_what_is_no_score_names_the_prompt(value):
    with pytest.raises(RankError, match=r"key gave .* for a sample of prompt 7, not a number from 0 to 1") as caught:
        scored_by(lambda *_: value, "key", 7, ("one and one", "two", {}), share=True)
    assert "one and one" in caught.value.found
    if value not in (1.5, -0.1) if isinstance(value, float) else True:
        with pytest.raises(RankError, match="not a finite number"):
            scored_by(lambda *_: value, "key", 7, ("", "", {}))


def test_a_function_that_raises_names_the_prompt_and_has_a_line_of_its_own():
    row = {"answer": 3}
    assert scored_by(lambda prompt, text, line: line.pop("answer"), "key", 0, ("", "", row)) == 3.0
    assert row == {"answer": 3}, "what a function does to a line stays with it"
    with pytest.raises(RankError, match=r"key raised KeyError for a sample of prompt 2"):
        scored_by(lambda prompt, text, line: line["nothing"], "key", 2, ("", "", row))


def keys_of_functions(schema, node, above=()):
    """Dotted keys of a recipe whose value names a function, through sections in lists and by name."""
    if "$ref" in node:
        yield from keys_of_functions(schema, schema["$defs"][node["$ref"].rpartition("/")[2]], above)
    if node.get("pattern") == PATTERN:
        yield ".".join(above)
    below = [((), one) for kind in ("anyOf", "oneOf", "allOf", "prefixItems") for one in node.get(kind, [])]
    below += [((), node[name]) for name in ("items", "additionalProperties") if isinstance(node.get(name), dict)]
    below += [((name,), one) for name, one in node.get("properties", {}).items()]
    for more, one in below:
        yield from keys_of_functions(schema, one, (*above, *more))


def test_the_security_page_names_every_key_that_takes_a_function():
    load_plugins()
    schema = schema_type().model_json_schema()
    section = (ROOT / "SECURITY.md").read_text().partition("## Functions that a recipe names")[2].partition("\n## ")[0]
    assert sorted(keys_of_functions(schema, schema)) == sorted(re.findall(r"^- `(\S+)`$", section, re.MULTILINE)) != []


@pytest.mark.every_plugin
def test_nothing_but_these_keys_names_a_function():
    """Whoever imports what a user says does it here, and is handed a key of the recipe."""
    calls = {
        path: [ast.unparse(node.args[0]) for node in ast.walk(tree) if isinstance(node, ast.Call) and node.args
               and isinstance(node.func, ast.Name) and node.func.id == "user_function"]
        for path, tree in trees().items()
    }  # fmt: skip
    assert {path: words for path, words in calls.items() if words} == {
        "core/cascade.py": ["name"],
        "training/preflight.py": ["config.answer"],
        "plugins/verdicts/answering.py": ["word"],
        "training/sampling/scored.py": ["config.answer"],
    }
