"""Patterns of names choose as PEFT does, and one that is none or has no end is an error within its CPU seconds."""

from functools import partial

import pytest
from evenload.core.errors import EvenloadError
from evenload.core.input.sandbox import Budget
from evenload.core.recipe import adapter as module
from evenload.core.recipe.adapter import Adapter

NAMES = [f"model.layers.{layer}.{kind}" for layer in (0, 1, 11) for kind in ("self_attn.q_proj", "mlp.up_proj")]
PATTERNS = [
    "q_proj",
    "proj",
    "layers.1.mlp.up_proj",
    r"layers\.1\..*",
    r"model\.layers\.(0|11)\..*_proj",
    "^q_proj",
    r"^model\.layers\.\d+\.mlp.*",
    "layers.1",
    "[qv]_proj|up_proj",
    r"(?=model)\S+",
]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_patterns_mean_what_they_mean_to_peft(pattern):
    matching = pytest.importorskip("peft.utils.other").get_pattern_key
    adapter = Adapter(r=4, rank_pattern={pattern: 8, "up_proj": 2}, alpha_pattern={pattern: 3.0})
    for name in NAMES:
        theirs = {pattern: 8, "up_proj": 2}.get(matching([pattern, "up_proj"], name), 4)
        assert adapter.rank_of(name) == theirs
        assert adapter.scaling_of(name) == {pattern: 3.0}.get(matching([pattern], name), 8.0) / theirs


def test_names_are_matched_here_and_programs_elsewhere(monkeypatch):
    asked = []
    monkeypatch.setattr(module, "bounded", lambda *question: asked.append(question))
    names = {"q_proj": 8, r"layers\.1\.mlp\.up_proj": 2, "layers.0.mlp.up_proj": 3}
    assert [Adapter(rank_pattern=names).rank_of(name) for name in NAMES] == [8, 3, 8, 2, 8, 8]
    assert not asked
    for patterns in ({".*": 8}, {"a|b": 8}, {"(": 8}, {f"n{i}": 8 for i in range(100)}):
        Adapter(rank_pattern=patterns).rank_of("name")
    assert len(asked) == 4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        ("(", "unterminated subpattern"),
        ("a{4294967296}", "OverflowError"),
        ("(" * 5000, "RecursionError"),
        ("([a-z0-9_.]+)+!", "takes too long"),
        ("a?" * 40 + "a" * 40 + "!", ""),
    ],
)
def test_what_is_no_pattern_or_has_no_end_is_refused(pattern, words, monkeypatch):
    monkeypatch.setattr(module, "Budget", partial(Budget, 0.3))
    names = [f"model.layers.0.{'a' * 40}", *NAMES]
    for key in ("rank_pattern", "alpha_pattern"):
        adapter = Adapter(**{key: {pattern: 4}})
        with pytest.raises(EvenloadError, match=rf"adapter.{key} has no patterns of names\n.*{words}"):
            [adapter.scaling_of(name) for name in names]


def test_looking_up_changes_no_adapter():
    one, other = Adapter(rank_pattern={"q_proj": 2}), Adapter(rank_pattern={"q_proj": 2})
    one.scaling_of("q_proj")
    assert one == other
    assert one.model_dump() == other.model_dump()
