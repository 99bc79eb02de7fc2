"""What each case costs: CPU and wall seconds of all its processes, and the work that is worth doing once.

A plugin of pytest. A case's CPU seconds are those of its pytest process, of the processes that this one started and
waited for, and what ranks and forges report with their answers (`add`). ``--costs FILE`` writes them all as JSON lines
and prints them by folder, with the dearest cases.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

COUNTS = ("groups", "hosts", "references", "interpreters", "forks", "examples")
"""Of ranks: process groups, hosts and references; Python processes started anew, or forked from a forge; examples of
hypothesis."""

SCRIPTS = Path(sys.executable).parent
"""Where commands of packages are, each of which starts an interpreter."""

_case: Counter[str] = Counter()


def add(costs: Mapping[str, float]) -> None:
    """Add to what the running case costs."""
    _case.update(costs)  # type: ignore[arg-type]


def add_option(parser: pytest.Parser) -> None:
    parser.addoption("--costs", metavar="FILE", type=Path, help="write what each case costs, and print a table")


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(_Controller(config), "costs of cases")
    _count_interpreters()


def _count_interpreters() -> None:
    if hasattr(subprocess.Popen.__init__, "__wrapped__"):
        return
    init = subprocess.Popen.__init__

    def counting(self: Any, args: Any, *rest: Any, **named: Any) -> None:
        words = [args] if isinstance(args, (str, bytes)) else list(args)
        if any("python" in Path(str(word)).name or Path(str(word)).parent == SCRIPTS for word in words[:3]):
            add({"interpreters": 1})
        init(self, args, *rest, **named)

    counting.__wrapped__ = init  # type: ignore[attr-defined]
    subprocess.Popen.__init__ = counting  # type: ignore[method-assign]


def _cpu_s() -> float:
    return time.process_time() + _of_children_s()


def _of_children_s() -> float:
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return children.ru_utime + children.ru_stime


@contextmanager
def reported_already() -> Iterator[None]:
    """The processes that are waited for in here have reported their costs."""
    before = _of_children_s()
    yield
    add({"cpu_s": before - _of_children_s()})


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    _case.clear()
    item.stash[_BEGAN] = (time.perf_counter(), _cpu_s())
    _count_examples(item)
    return (yield)


_BEGAN = pytest.StashKey[tuple[float, float]]()


def _count_examples(item: Any) -> None:
    handle = getattr(getattr(item, "obj", None), "hypothesis", None)
    if handle is None or getattr(handle.inner_test, "counted", False):
        return
    inner = handle.inner_test

    def counted(*args: Any, **kwargs: Any) -> Any:
        _case["examples"] += 1
        return inner(*args, **kwargs)

    counted.counted = True  # type: ignore[attr-defined]
    handle.inner_test = counted


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[pytest.TestReport]:
    report = yield
    if call.when == "teardown":
        wall, cpu = item.stash[_BEGAN]
        _case["wall_s"] += time.perf_counter() - wall
        _case["cpu_s"] += _cpu_s() - cpu
        report.user_properties.append(("costs", {name: round(value, 4) for name, value in _case.items()}))
    return report


class _Controller:
    """Collects the cases of all workers."""

    def __init__(self, config: pytest.Config) -> None:
        self._file: Path | None = config.getoption("--costs")
        self._cases: dict[str, dict[str, float]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        costs = dict(report.user_properties).get("costs") if report.when == "teardown" else None
        if costs:
            self._cases[report.nodeid] = costs

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if self._file is None or not self._cases:
            return
        with self._file.open("w") as out:
            for case, costs in sorted(self._cases.items(), key=lambda entry: -entry[1].get("cpu_s", 0)):
                out.write(json.dumps({"case": case, **costs}) + "\n")
        terminalreporter.section("what the suite costs")
        for line in tables(self._cases):
            terminalreporter.line(line)


def tables(cases: Mapping[str, Mapping[str, float]], dearest: int = 40) -> Iterator[str]:
    """Costs by folder, and the dearest cases, as lines of Markdown."""
    folders: dict[str, Counter[str]] = defaultdict(Counter)
    for case, costs in cases.items():
        file = Path(case.partition("::")[0])
        parts = file.parts[1:-1] if file.parts[:1] == ("tests",) else file.parts[:-1]
        folder = "/".join(parts[:2]) or file.name
        folders[folder].update({"cases": 1, **costs})  # type: ignore[dict-item]
    columns = ("cases", *COUNTS)
    yield f"| folder | CPU s | wall s | {' | '.join(columns)} |"
    yield "|---|" + "---|" * (len(columns) + 2)
    total: Counter[str] = Counter()
    for folder, costs in sorted(folders.items(), key=lambda entry: -entry[1]["cpu_s"]):
        total.update(costs)
        yield _row(folder, costs, columns)
    yield _row("all", total, columns)
    yield ""
    yield f"| the {dearest} dearest cases | CPU s | wall s |"
    yield "|---|---|---|"
    for case, costs in sorted(cases.items(), key=lambda entry: -entry[1].get("cpu_s", 0))[:dearest]:
        yield f"| {case.removeprefix('tests/')} | {costs.get('cpu_s', 0):.1f} | {costs.get('wall_s', 0):.1f} |"


def _row(name: str, costs: Mapping[str, float], columns: tuple[str, ...]) -> str:
    cells = [f"{costs.get(column, 0):,.0f}" for column in ("cpu_s", "wall_s", *columns)]
    return f"| {name} | {' | '.join(cells)} |"
