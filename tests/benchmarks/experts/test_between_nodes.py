"""Quotas between nodes beside those that know none, and both ways to send tokens: the targets of the pages hold."""

from __future__ import annotations

import pytest
from evenload.api import load_plugins
from evenload.benchmarks.experts import between_nodes


@pytest.mark.slow
def test_copies_and_tokens_that_go_once_to_a_node_are_ahead_of_even_routing() -> None:
    load_plugins()
    for row in between_nodes.rows_of(64, 1, [0, 4, 12]):
        share = {name: one["share"] for name, one in row["answers"].items()}
        assert share["0 more"] >= 0.995 * max(share["near"], share["blind"])
        assert share["even"] > 1.2 if row["once"] else share["even"] == 1.0
        mild = row["model"].startswith("DeepSeek")
        if row["once"]:
            assert min(share["0 more"], share["12 more"]) >= (1.02 if mild else 1.08)
        elif mild:
            assert share["12 more"] == share["4 more"] == share["0 more"] > 0.87
        else:
            assert share["0 more"] < 0.93 < share["4 more"]
            assert share["12 more"] >= (1.12 if row["keep"] else 0.95)
