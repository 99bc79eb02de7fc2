"""Scripts that start themselves on several CPU ranks, and show or write what rank 0 has printed.

def on_rank(asked): ...; print(json.dumps(result))      on each rank; rank 0 prints one line
def benchmark(asked): return result_of(begun(__file__, sys.argv[1:], asked.ranks))
main(parser(__doc__), on_rank, benchmark, table)
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

Result = dict[str, Any]


def parser(doc: str | None) -> argparse.ArgumentParser:
    """The script's own arguments are added by it; --json and --out are there."""
    own = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    own.add_argument("--json", action="store_true")
    own.add_argument("--out", type=Path)
    return own


def begun(script: str, words: Sequence[str], ranks: int) -> subprocess.Popen[str]:
    """The script once more, on so many ranks; its last line on stdout is its result."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    environment = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **os.environ}
    command = [*launcher, str(Path(script).resolve()), *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)


def result_of(job: subprocess.Popen[str]) -> Result:
    """Of ranks that `begun` has started. Raises RuntimeError where they fail."""
    out, _ = job.communicate()
    if job.returncode:
        raise RuntimeError(f"{' '.join(map(str, job.args))} ended with {job.returncode}")  # type: ignore[arg-type]
    result: Result = json.loads(out.strip().splitlines()[-1])
    return result


def main(
    arguments: argparse.ArgumentParser,
    on_rank: Callable[[argparse.Namespace], None],
    benchmark: Callable[[argparse.Namespace], Result],
    table: Callable[[Result], Any],
) -> None:
    """On a rank its work; else the benchmark, whose result is written where --out says, and shown."""
    asked = arguments.parse_args()
    if "RANK" in os.environ:
        on_rank(asked)
        return
    from evenload.commands.tables.show import emit

    result = benchmark(asked)
    if asked.out:
        asked.out.write_text(json.dumps(result, indent=1) + "\n")
    emit(result, asked.json, table)
