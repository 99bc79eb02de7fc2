"""What all tests share: which of them run, in what order, and the fixtures that start ranks (see harness)."""

from __future__ import annotations

import gc
import json
import os
import random
import shutil
import socket
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from evenload.api import load_recipe
from harness import costs
from harness.forge import REFERENCES, Done, Forge
from harness.lazy import LATE, TOO_SOON
from harness.verbs import Verbs
from harness.world import World, WorldPool
from rich.console import Console

# A busy machine is no failure: nothing here is timed. The Makefile seeds draws by the number of commits, so that a tree
# that passed passes again and each change draws others; `make explore` draws anew at every run.
_UNTIMED = hypothesis.settings(deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow], database=None)
hypothesis.settings.register_profile("change", _UNTIMED, max_examples=25)
hypothesis.settings.register_profile("full", _UNTIMED, max_examples=200)
hypothesis.settings.register_profile("explore", _UNTIMED, max_examples=2000)
hypothesis.settings.load_profile("change")


LONGEST = (
    "commands/test_train.py",
    "hosts/test_equal.py",
    "integrations/huggingface/test_families.py",
    "integrations/megatron/test_slices.py",
    "integrations/deepspeed/test_experts.py",
    "integrations/megatron/test_experts.py",
    "integrations/megatron/unmodified/test_order.py",
    "commands/test_check.py",
    "plugins/rollout/test_verify_generation.py",
    "integrations/deepspeed/test_slices.py",
    "integrations/megatron/test_pipeline.py",
    "runtime/watchdog/test_watchdog.py",
    "hosts/test_messages.py",
    "integrations/deepspeed/test_shared.py",
    "integrations/deepspeed/pipeline/test_pipeline.py",
    "hosts/test_benchmarks.py",
    "training/profiling/test_memory.py",
    "integrations/megatron/test_shared.py",
    "integrations/megatron/saving/test_checkpoint.py",
)
"""Files of half a minute and more, the longest first."""


CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
BROWSER_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-dev-shm-usage",
    "--disable-sync",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--part 2/10``: what CI runs at one change of the tests that it does not run at each."""
    text = "of the tests marked full or cuda every N-th, from the K-th on; K may be any number"
    costs.add_option(parser)
    parser.addoption("--fresh-worlds", action="store_true", help="ranks serve one call of `world`, and are forked anew")
    parser.addoption("--shuffle", metavar="SEED", help="files, and the tests of each, in a random order")
    parser.addoption("--part", metavar="K/N", type=_part, default=(0, 1), help=text)


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(costs)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Modules and cases stay: a garbage collector would go through them in vain."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """Which file has imported what none need import before it runs."""
    for name in LATE & sys.modules.keys() - TOO_SOON.keys():
        TOO_SOON[name] = report.nodeid


def _part(text: str) -> tuple[int, int]:
    number, parts = map(int, text.split("/"))
    return (number - 1) % parts, parts


def _deselect_other_parts(config: pytest.Config, items: list[pytest.Item]) -> None:
    """So that as many changes as there are parts have run every test."""
    part, parts = config.getoption("part")
    divided = [item for item in items if item.get_closest_marker("full") or item.get_closest_marker("cuda")]
    others = [item for place, item in enumerate(divided) if place % parts != part]
    config.hook.pytest_deselected(items=others)
    left = set(others)
    items[:] = [item for item in items if item not in left]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What starts ranks is slow. Where workers share the files, those that take long come first: short ones fill the
    end."""
    for item in items:
        if "forge" in getattr(item, "fixturenames", ()):
            item.add_marker("slow")
    _deselect_other_parts(config, items)
    if seed := config.getoption("--shuffle"):
        drawn = random.Random(seed)
        files = {item.path: drawn.random() for item in items}
        items.sort(key=lambda item: (files[item.path], drawn.random()))
    elif hasattr(config, "workerinput"):
        places = {Path(__file__).parent / name: place for place, name in enumerate(LONGEST)}
        slow = {item.path: len(places) for item in items if item.get_closest_marker("slow")}
        order = slow | places
        items.sort(key=lambda item: order.get(item.path, len(LONGEST) + 1))


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()  # thousands of cases, which no collection need go through
    gc.set_threshold(20_000, 20, 20)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """How the requests of the fuzz ended, by verb, and the longest of them, under `make explore`."""
    if hypothesis.settings.get_current_profile_name() != "explore":
        return
    counts: Counter[str] = Counter()
    longest: list[Any] = [0.0, 0.0, ""]
    for reports in terminalreporter.stats.values():
        for report in reports:
            fuzz = dict(getattr(report, "user_properties", ())).get("fuzz")
            if fuzz and getattr(report, "when", "") == "call":
                counts.update(fuzz["counts"])
                longest = max(longest, list(fuzz["longest"]))
    if counts:
        terminalreporter.section(f"{counts.total():,} requests of the fuzz")
        for end, count in sorted(counts.items()):
            terminalreporter.line(f"{count:6} {end}")
        terminalreporter.line(f"the longest: {longest[0]:.1f} CPU seconds, {longest[1]:.1f} by the wall: {longest[2]}")


@pytest.fixture(scope="session")
def forge(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Forge]]:
    """``forge(trainer)``: the process that has imported it, one for all workers. What this worker has started and still
    runs ends with it."""
    forges: dict[str, Forge] = {}
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if hasattr(request.config, "workerinput") else base
    references = shared / "references"
    references.mkdir(exist_ok=True)
    os.environ.setdefault(REFERENCES, str(references))

    def get(trainer: str) -> Forge:
        if trainer not in forges:
            forges[trainer] = Forge(trainer, tmp_path_factory.mktemp(f"forge_{trainer}"), shared)
        return forges[trainer]

    yield get
    for one in forges.values():
        one.close()


@pytest.fixture(scope="session")
def trainer() -> str:
    """What the ranks of `world` have imported; the folders of the trainers have fixtures of their own."""
    return "torch"


@pytest.fixture(scope="session")
def worlds(
    request: pytest.FixtureRequest, forge: Callable[[str], Forge], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[str, int], World]]:
    """``worlds("megatron", 4)``: ranks that have imported it, the same ones for all tests; see `WorldPool`."""
    fresh = request.config.getoption("--fresh-worlds")
    pool = WorldPool(forge, lambda: tmp_path_factory.mktemp("world"), fresh)
    yield pool.get
    pool.close()


@pytest.fixture(scope="module")
def world(worlds: Callable[[str, int], World], trainer: str) -> Callable[[int], World]:
    """``world(4).run(function, *arguments)`` gives the list of results of 4 ranks, which have imported `trainer`."""
    return lambda size: worlds(trainer, size)


@pytest.fixture(scope="session")
def forged(forge: Callable[[str], Forge]) -> Callable[..., Done]:
    """``forged(place, verb, recipe, key=value ..., planted=code)`` does what ``evenload`` does there, launcher aside.

    ``ranks``: of the job, else what the recipe's layout needs; ``planted`` is code that every rank runs first.
    """

    def run(place: Path, *arguments: str, ranks: int = 0, planted: str = "", limit_s: float = 250) -> Done:
        overrides = [word for word in arguments[2:] if "=" in word and not word.startswith("-")]
        recipe = load_recipe(place / arguments[1], overrides)
        num_ranks = ranks or recipe.min_world_size
        return forge(recipe.trainer).run(place, arguments, num_ranks, planted, limit_s=limit_s)

    return run


@pytest.fixture
def launched_by_forge(forged: Callable[..., Done], tmp_path: Path) -> Callable[..., Any]:
    """In place of `launch.launch`: ranks are forks of a forge, not interpreters that begin anew."""
    from evenload.training.launching.processes import RanksFailed

    def launch(words: list[str], num_ranks: int, *_: Any) -> Any:
        done = forged(tmp_path, *words, "--json", ranks=num_ranks)
        print(done.stderr, file=sys.stderr)
        if done.returncode:
            raise RanksFailed(done.returncode)
        return json.loads(done.stdout)

    return launch


@pytest.fixture(scope="session")
def ran(forged: Callable[..., Done]) -> Callable[..., Any]:
    """``ran(place, "train", "recipe.yaml", "key=value")``: what the verb says as JSON, which must not fail."""

    def run(place: Path, *words: str, **how: Any) -> Any:
        done = forged(place, *words, "--json", **how)
        assert done.returncode == 0, done.stderr[-3000:]
        return json.loads(done.stdout)

    return run


@pytest.fixture(scope="session")
def verbs(worlds: Callable[[str, int], World]) -> Verbs:
    """``verbs(place, "verify", "recipe.yaml", "key=value", ..., steps=1)`` on ranks that serve all tests."""
    return Verbs(worlds)


@pytest.fixture
def on_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes of this case see no GPU, have a thread each, and meet on this machine alone."""
    for name, value in {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "CUDA_VISIBLE_DEVICES": ""}.items():
        monkeypatch.setenv(name, value)
    if "lo" in (name for _, name in socket.if_nameindex()):
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")


@pytest.fixture(scope="session")
def shown() -> Callable[..., str]:
    """The text of a table on a terminal of that width."""

    def text(table: Any, width: int = 160) -> str:
        console = Console(width=width)
        with console.capture() as caught:
            console.print(table)
        return caught.get()

    return text


@pytest.fixture(scope="session")
def logged() -> Callable[[Path], list[Any]]:
    """The steps of a log: neither its validations nor its end."""

    def lines(log: Path) -> list[Any]:
        return [row for row in map(json.loads, log.read_text().splitlines()) if "samples" in row]

    return lines


@pytest.fixture(scope="session")
def two_domains() -> Callable[..., None]:
    """``two_domains(folder, long=(count, least, most), short=...)``: files of rows of such lengths; a third of the
    tokens of `long` is masked."""

    def write(folder: Path, **sizes: tuple[int, int, int]) -> None:
        for name, (count, least, most) in sizes.items():
            rows = []
            for i in range(count):
                ids = [(7 * i + k * k) % 251 for k in range(least + 37 * i % (most - least))]
                masked = len(ids) // 3 if name == "long" else 0
                rows.append({"input_ids": ids, "labels": [-100] * masked + ids[masked:]})
            (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))

    return write


@pytest.fixture(scope="session")
def scripted(forge: Callable[[str], Forge]) -> Callable[..., Done]:
    """``scripted(trainer, place, script, *words, ranks=1, planted="")``: a script there, started without a launcher."""

    def run(trainer: str, place: Path, script: Path, *words: object, ranks: int = 1, planted: str = "") -> Done:
        return forge(trainer).run(place, tuple(map(str, words)), ranks, planted, script)

    return run


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Chromium without a window, which fetches nothing by itself; tests of it are skipped where it is not installed."""
    chromedriver = shutil.which("chromedriver")
    if not (CHROMIUM and chromedriver):
        pytest.skip("no chromium and chromedriver on this machine")
    webdriver = pytest.importorskip("selenium.webdriver")
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    for flag in (*BROWSER_FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(flag)
    driver = webdriver.Chrome(options=options, service=Service(chromedriver))
    yield driver
    driver.quit()
