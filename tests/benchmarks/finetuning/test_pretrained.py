"""Reading weights on ranks: the table of what a run says."""

from __future__ import annotations

import importlib.util
import io
from pathlib import Path

from rich.console import Console

PATH = Path(__file__).parents[3] / "benchmarks" / "finetuning" / "pretrained.py"
_spec = importlib.util.spec_from_file_location("benchmark_pretrained", PATH)
assert _spec
assert _spec.loader
pretrained = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(pretrained)


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
