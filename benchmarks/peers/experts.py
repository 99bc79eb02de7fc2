"""Layers of experts beside MoonEP's, UltraEP's and EPLB's rules: busiest rank, copies, planning. Counts are drawn.

    python benchmarks/peers/experts.py [--draws 2] [--json] [--out FILE]

Rules: the project's own baselines (`plugins.moe.baselines`, after papers and documents), judged by
benchmarks/experts/moe.py. Popularity falls as a power (zipf 0.3, 0.9, 1.2); the step before it differs by a tenth. A
layer is 64 ranks x 128 experts or 256 x 256. EPLB sees the loads of the step before ("late"), as a run does, the others
exact counts, as evenload does. Of lengths no layer knows anything, so there are no files of them here.
"""

from __future__ import annotations

from typing import Any

from evenload.api import load_plugins
from evenload.benchmarks.experts import moe
from evenload.benchmarks.frame import Row, columns, main, options
from evenload.benchmarks.peers.shared import case_result, who_is_ahead

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


def benchmark(asked: Any) -> Row:
    load_plugins()
    wanted = [case for case in moe.zipf_cases(asked.draws) if case.name.split(",")[0].removeprefix("zipf ") in SKEWS]
    return case_result(asked, [case_of(case) for case in wanted], "ratio", "case")


def table(result: Row) -> Any:
    """A line for each case and rule."""
    cells = {
        "loads": "{case}",
        "rule": "{name}",
        "busiest over mean": "{ratio:.4f}",
        "copies": "{copies:.0f}",
        "slots": "{slots}",
        "planning": "{plan_ms:.2f} ms",
    }
    caption = f"of tokens; planning in Python, the least of several runs; ahead of evenload: {who_is_ahead(result)}"
    return columns("experts of a layer on their ranks", result["rows"], cells, caption)


if __name__ == "__main__":
    main(options(__doc__, draws=2), benchmark, table)
