"""A real run of two ranks, of which one reads slowly."""

from __future__ import annotations

import json

import pytest


@pytest.mark.slow
def test_a_rank_that_reads_slowly_is_named_by_the_run(ran):
    done = ran("training/slow_ranks.py", "--causes", "data", "--steps", 21, ranks=2)
    row = json.loads(done.stdout)
    assert ("data", 1) in [(one["cause"], one["rank"]) for one in row["stragglers"]]
    assert "rank 1 is slow in data" in done.stderr
