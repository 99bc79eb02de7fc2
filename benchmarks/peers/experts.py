"""Layers of experts beside MoonEP's, UltraEP's and EPLB's rules: busiest rank, copies, planning. Counts are drawn.

    python benchmarks/peers/experts.py [--draws 2] [--json] [--out FILE]

Rules: the project's own baselines (`plugins.moe.baselines`, after papers and documents), judged by
benchmarks/experts/moe.py. Popularity falls as a power (zipf 0.3, 0.9, 1.2); the step before it differs by a tenth. A
layer is 64 ranks x 128 experts or 256 x 256. EPLB sees the loads of the step before ("late"), as a run does, the others
exact counts, as evenload does. Of lengths no layer knows anything, so there are no files of them here.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from evenload.api import load_plugins
from evenload.commands.tables.show import grid

sys.path.append(str(Path(__file__).parent))
from shared import Row, arguments, finish, leaders, script

moe = script("experts/moe.py")

RULES = {
    "clone": "evenload clone",
    "static": "static",
    "eplb, late": "EPLB",
    "ultraep": "UltraEP",
    "moonep": "MoonEP",
}
"""Planners of benchmarks/experts/moe.py, by what they are called here."""
SKEWS = ("0.3", "0.9", "1.2")


def case_of(case: Any) -> list[Row]:
    """Rows of everybody for one drawn popularity and size."""
    own = moe.Case(case.name, case.pairs)
    return [{**row, "name": RULES[row["planner"]]} for row in moe.rows_of(own, 1, repeats=5) if row["planner"] in RULES]


def benchmark(words: Any) -> Row:
    load_plugins()
    wanted = [case for case in moe.zipf_cases(words.draws) if case.name.split(",")[0].removeprefix("zipf ") in SKEWS]
    cases = [case_of(case) for case in wanted]
    behind = [{"case": case[0]["case"], "ahead": ahead} for case in cases if (ahead := leaders(case, "ratio"))]
    return {"draws": words.draws, "rows": [row for case in cases for row in case], "behind": behind}


def table(result: Row) -> Any:
    """A line for each case and rule."""
    lines = [
        (
            row["case"],
            row["name"],
            f"{row['ratio']:.4f}",
            f"{row['copies']:.0f}",
            f"{row['slots']}",
            f"{row['plan_ms']:.2f} ms",
        )
        for row in result["rows"]
    ]
    head = ("loads", "rule", "busiest over mean", "copies", "slots", "planning")
    behind = "; ".join(f"{one['case']}: {', '.join(one['ahead'])}" for one in result["behind"])
    caption = f"of tokens; planning in Python, the least of several runs; ahead of evenload: {behind or 'nobody'}"
    return grid("experts of a layer on their ranks", head, lines, caption)


if __name__ == "__main__":
    words = arguments(__doc__, draws=2)
    finish(benchmark(words), words, table)
