"""Plant every fault of `table` in a copy of the code, two at a time, and see whether its killer notices.

    python tests/mutants/run.py                  all of them, each killer first without a fault
    python tests/mutants/run.py --part 3/10      every tenth from the third on, faults alone
    python tests/mutants/run.py NAME ...         these

Killers are run as `make test` runs them: what is marked full does not count (``--full``: it does), and what
they draw is drawn alike each time. Exit code 1 if a fault survives, or if a killer fails where nothing is planted.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from queue import Queue
from typing import NamedTuple

from rich.console import Console
from rich.table import Table
from table import MUTANTS, Killer, Mutant

ROOT = Path(__file__).resolve().parent.parent.parent
LIMIT_S = 600.0


class Outcome(NamedTuple):
    """How a killer ended."""

    failed: bool | None
    """None: it neither passed nor failed, but could not be run."""
    said: str
    seconds: float


def copy_of_the_code(folder: Path) -> Path:
    """The checkout without what tools have left in it, as the package ``evenload`` in a folder."""
    left = shutil.ignore_patterns(".git", ".venv*", "__pycache__", ".*_cache", ".hypothesis", "build", "*.egg-info")
    return Path(shutil.copytree(ROOT, folder / "evenload", ignore=left))


def command_of(killer: Killer, full: bool) -> list[str]:
    if killer.verb == "verify":
        return [sys.executable, "-m", "evenload", "verify", *killer.words, "--json"]
    marks = " and ".join(f"({mark})" for mark in (killer.m, "" if full else "not full") if mark)
    selected = [word for option in (("-k", killer.k), ("-m", marks)) if option[1] for word in option]
    options = ("-x", "-q", "-n", "0", "-p", "no:cacheprovider", "--hypothesis-seed=0")
    return [sys.executable, "-m", "pytest", *options, *killer.words, *selected]


def run(killer: Killer, code: Path, full: bool) -> Outcome:
    """Run a killer on a copy of the code."""
    command = command_of(killer, full)
    environment = {**os.environ, "PYTHONPATH": str(code.parent), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    start = time.monotonic()
    try:
        done = subprocess.run(command, cwd=code, env=environment, capture_output=True, text=True, timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        return Outcome(None, f"not done after {LIMIT_S:g} s", LIMIT_S)
    failed, said = _verdict(done) if killer.verb == "verify" else _test_verdict(done)
    return Outcome(failed, said, time.monotonic() - start)


def _verdict(done: subprocess.CompletedProcess[str]) -> tuple[bool | None, str]:
    if done.returncode not in (0, 1):
        return None, f"exit code {done.returncode}: {done.stderr.strip().splitlines()[-1:]}"
    try:
        result = json.loads(done.stdout)
    except ValueError:
        lines = [line for line in done.stderr.splitlines() if line.startswith("evenload: ") and "{" not in line]
        return True, (lines or ["no word"])[-1]
    wrong = [f"not finite: {name}" for name in result["not_finite"]]
    wrong += [f"{result[key]} {key}" for key in ("samples_wrong", "tokens_missing", "tokens_repeated") if result[key]]
    return not result["exact"], (wrong + result["over"] or ["exact"])[0]


def _test_verdict(done: subprocess.CompletedProcess[str]) -> tuple[bool | None, str]:
    lines = [line for line in done.stdout.splitlines() if line.startswith(("E  ", "FAILED"))]
    said = lines[0][4:].strip() if lines else (done.stdout.strip().splitlines() or [""])[-1]
    return {0: False, 1: True}.get(done.returncode), said


def plant(mutant: Mutant, code: Path) -> None:
    """Replace the piece of code. Raises ValueError where it does not stand once in its file."""
    file = code / mutant.file
    text = file.read_text()
    if text.count(mutant.old) != 1:
        raise ValueError(
            f"{mutant.name}: the code to be replaced stands {text.count(mutant.old)} times in {mutant.file}"
        )
    file.write_text(text.replace(mutant.old, mutant.new))


def chosen(names: list[str], part: str) -> list[Mutant]:
    """The faults that the command line asks for."""
    mutants = [one for one in MUTANTS if not names or one.name in names]
    if part:
        first, of = map(int, part.split("/"))
        mutants = mutants[first % of :: of]
    return mutants


def judged(killer: Killer, mutant: Mutant | None = None, *, copies: Queue[Path], full: bool) -> Outcome:
    """Run a killer on one of the copies that nobody uses, with a fault planted or none."""
    code = copies.get()
    kept = (code / mutant.file).read_text() if mutant else ""
    try:
        if mutant:
            plant(mutant, code)
        return run(killer, code, full)
    finally:
        if mutant:
            (code / mutant.file).write_text(kept)
        copies.put(code)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*")
    parser.add_argument("--part", default="", help="K/N: every N-th fault from the K-th on")
    parser.add_argument("--full", action="store_true", help="killers may use cases that `make test` leaves out")
    parser.add_argument("--workers", type=int, default=2, help="so many at a time, each on a copy of its own")
    arguments = parser.parse_args()
    mutants, console = chosen(arguments.names, arguments.part), Console(stderr=True)
    table = Table("fault", "killer", "what it said", "seconds")
    bad = list[str]()
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder, ThreadPoolExecutor(arguments.workers) as pool:
        copies: Queue[Path] = Queue()
        for number in range(arguments.workers):
            copies.put(copy_of_the_code(Path(folder) / str(number)))
        judge = partial(judged, copies=copies, full=arguments.full)
        killers = () if arguments.part else dict.fromkeys(one.killer for one in mutants)
        for killer, outcome in zip(killers, pool.map(judge, killers), strict=True):
            if outcome.failed is not False:
                bad.append(f"fails without a fault: {killer}: {outcome.said[:300]}")
            console.print(f"[dim]nothing planted[/] {killer}: {outcome.said[:100]} ({outcome.seconds:.0f} s)")
        for mutant, outcome in zip(mutants, pool.map(judge, (one.killer for one in mutants), mutants), strict=True):
            if outcome.failed is not True:
                bad.append(f"{mutant.name}: {mutant.killer}: {outcome.said[:300]}")
            word = "killed" if outcome.failed else "SURVIVED"
            console.print(f"{word} by {mutant.killer} in {outcome.seconds:.0f} s: {mutant.name}: {outcome.said[:100]}")
            table.add_row(mutant.name, str(mutant.killer), f"{word}: {outcome.said[:80]}", f"{outcome.seconds:.0f}")
    Console(width=180).print(table)
    print(f"{len(mutants)} faults, {len(bad)} survived or could not be judged", *bad, sep="\n  ")
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
