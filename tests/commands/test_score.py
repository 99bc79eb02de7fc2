"""What `evenload score` refuses before a rank starts, and what it leaves out of the recipe."""

from __future__ import annotations

from pathlib import Path

import pytest
from evenload.api import load_plugins
from evenload.core.errors import EvenloadError
from evenload.core.recipe.recipe import parse
from evenload.training.verbs.score import asked

load_plugins()
DOMAINS = {name: {"source": "python-docstrings"} for name in "ab"}


def test_policies_of_data_have_no_part_in_it(tmp_path: Path) -> None:
    data = {"enabled": True, "reference": "nowhere", "mix": {"policy": "doremi"}}
    recipe = parse({"data": {"domains": DOMAINS}, "plugins": {"data": data}})
    with pytest.raises(EvenloadError, match="nothing has trained"):
        asked(recipe, tmp_path / "out", None)
    with pytest.raises(EvenloadError, match="there is no checkpoint in"):
        asked(recipe, tmp_path / "out", tmp_path)
    (tmp_path / "taken").write_text("")
    with pytest.raises(EvenloadError, match="is not empty"):
        asked(recipe, tmp_path, tmp_path)
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "evenload.json").write_text("{}")
    scored, folder = asked(recipe, tmp_path / "out", tmp_path / "kept")
    assert folder == tmp_path / "kept"
    assert scored.data_policy("mix") is None
    assert scored.data.domains == recipe.data.domains
