"""Reading weights on ranks: the table of what a run says."""

from __future__ import annotations

import io
import json

import pytest
from evenload.benchmarks.finetuning import pretrained
from rich.console import Console


def test_the_table_sets_a_peak_beside_the_share_of_its_rank() -> None:
    ranks = [
        {"share_bytes": 100 << 20, "more_bytes": n << 20, "largest_bytes": 40 << 20, "seconds": 1.5} for n in (30, 55)
    ]
    console = Console(file=io.StringIO(), width=140)
    console.print(pretrained.table({"layout": "ZeRO 0", "ranks": ranks, "from_pretrained_s": 0.5}))
    first, second = (line for line in console.file.getvalue().splitlines() if "1.5 s" in line or "1,500" in line)
    assert "1.30" in first
    assert "1.55" in second
    assert "500 ms" in console.file.getvalue()


FORKED = """
import torch.multiprocessing as mp
mp.spawn = lambda function, arguments, ranks: mp.start_processes(function, arguments, ranks, start_method="fork")
"""


@pytest.mark.slow
def test_every_rank_says_what_it_keeps(ran):
    num_ranks = part = 2
    words = ("--quick", "--layout", "zero3", "--json")
    done = ran("finetuning/pretrained.py", *words, trainer="deepspeed", planted=FORKED)
    ranks = json.loads(done.stdout)["ranks"]
    assert len(ranks) == num_ranks
    # An embedding and an output layer of 512 x 64, two layers of four projections and an MLP, five norms.
    whole_bytes = 4 * (2 * 512 * 64 + 2 * (4 * 64 * 64 + 3 * 64 * 128) + 5 * 64)
    for row in ranks:
        assert whole_bytes / part <= row["share_bytes"] < 1.05 * whole_bytes / part
        assert row["more_bytes"] > 0
