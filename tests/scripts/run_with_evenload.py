"""``python run_with_evenload.py SCRIPT ...``: the rows on, the script, the rows off; every symbol must be as it was."""

import importlib
import runpy
import sys

from evenload.integrations.unmodified.planned_runs import release_loops
from evenload.patches import deepspeed, transformers
from evenload.patches.ledger import Ledger
from evenload.patches.slots import locate


def main() -> None:
    script, sys.argv = sys.argv[1], sys.argv[1:]
    rows = (*deepspeed.rows(), *transformers.rows())
    for row in rows:
        importlib.import_module(row.module)
    before = {row.target: locate(row.target).read() for row in rows}
    with Ledger() as ledger:
        ledger.apply(rows)
        changed = [row.target for row in rows if locate(row.target).read() is before[row.target]]
        assert not changed, f"not applied: {changed}"
        runpy.run_path(script, run_name="__main__")
    release_loops()
    left = [target for target, value in before.items() if locate(target).read() is not value]
    assert not left, f"not restored: {left}"
    print("RESTORED", flush=True)


if __name__ == "__main__":
    main()
