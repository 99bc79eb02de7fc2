"""Processes of tests, which pay for imports once.

Forges: a process that has imported a trainer, and lives as long as pytest. Its forks are the ranks of commands and
scripts, and those of worlds: real gloo ranks that live as long as a test module and run functions of it.
"""

from __future__ import annotations

import inspect
import json
import os
import pickle
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from evenload.api import load_recipe

# A busy machine is no failure: nothing here is timed. Draws are the same from run to run, so that a tree that passed
# passes again; `make explore` draws anew.
_UNTIMED = hypothesis.settings(deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.register_profile("explore", _UNTIMED)
hypothesis.settings.register_profile("again", _UNTIMED, derandomize=True)
hypothesis.settings.load_profile("again")


LONGEST = (
    "commands/test_train.py",
    "hosts/test_equal.py",
    "integrations/huggingface/test_families.py",
    "integrations/megatron/test_slices.py",
    "integrations/deepspeed/test_experts.py",
    "integrations/megatron/test_experts.py",
    "integrations/megatron/unmodified/test_order.py",
    "benchmarks/faults/test_faults.py",
    "benchmarks/lora/test_lora.py",
    "commands/test_check.py",
    "commands/test_verify_generation.py",
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


WITHOUT_FORGE = ("tests/integrations/huggingface/test_families.py", "tests/integrations/huggingface/test_proof.py")
"""Files of those folders that start no rank."""


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
    """``--part 2/4``: what CI runs of the slow tests at one change."""
    text = "of the slow tests of each file every N-th, from the K-th on; K may be any number"
    parser.addoption("--part", metavar="K/N", type=_part, default=(0, 1), help=text)


def _part(text: str) -> tuple[int, int]:
    number, parts = map(int, text.split("/"))
    return (number - 1) % parts, parts


def _deselect_other_parts(config: pytest.Config, items: list[pytest.Item]) -> None:
    """So that as many changes as there are parts have run every test; all files are in each of them."""
    part, parts = config.getoption("part")
    places: Counter[Path] = Counter()
    others = []
    for item in items:
        if item.get_closest_marker("slow") or item.get_closest_marker("cuda"):
            others += [item] if places[item.path] % parts != part else []
            places[item.path] += 1
    config.hook.pytest_deselected(items=others)
    left = set(others)
    items[:] = [item for item in items if item not in left]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Where workers share the files, those that take long come first: short ones fill the end."""
    _deselect_other_parts(config, items)
    if hasattr(config, "workerinput"):
        places = {Path(__file__).parent / name: place for place, name in enumerate(LONGEST)}
        slow = {item.path: len(places) for item in items if item.get_closest_marker("slow")}
        order = slow | places
        items.sort(key=lambda item: order.get(item.path, len(LONGEST) + 1))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Each file goes to one worker, and all that the forge of Hugging Face serves to the same one: it starts slowly."""
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            served = nodeid.startswith(("tests/hosts/", "tests/integrations/huggingface/"))
            served = served and not nodeid.startswith(WITHOUT_FORGE)
            return "huggingface" if served else super()._split_scope(nodeid)

    return Scheduling(config, log) if config.getoption("dist") == "loadfile" else None


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


Done = subprocess.CompletedProcess[str]
PLANNING, PATIENT = ("train", "bench", "verify"), "planner.budget_ms=60000"
"""Verbs that plan ahead, and what makes them wait for each plan on a machine however busy: runs are compared bit by
bit."""


def free_port() -> int:
    """A port that nobody has, of those that the system gives nobody who does not ask for it: it stays free."""
    while True:
        port = random.SystemRandom().randrange(12000, 30000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


class Forge:
    """One process that has imported one trainer, and forks the ranks of jobs and of worlds."""

    def __init__(self, trainer: str, folder: Path) -> None:
        self._folder, self._number = folder, 0
        self._started: list[Started] = []
        clean = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
        script = Path(__file__).with_name("rank_forge.py")
        self._log = (folder / "log").open("wb")
        self._process = subprocess.Popen(
            [sys.executable, str(script), trainer],
            env={**clean, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": ""},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )

    def ask(self, request: str, content: Any) -> list[int]:
        """The answer of rank_forge.py to a request."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({request: content}) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, (self._folder / "log").read_text()[-3000:]
        numbers: list[int] = json.loads(answer)
        return numbers

    def run(
        self,
        place: Path,
        arguments: tuple[str, ...],
        ranks: int,
        planted: str = "",
        script: Path | None = None,
        limit_s: float = 250,
    ) -> Done:
        """Run ``evenload ARGUMENTS`` or a script as so many ranks; stdout is rank 0's, stderr what all of them said."""
        if script is None and arguments[0] in PLANNING and not any("planner." in word for word in arguments):
            arguments = (*arguments, PATIENT)
        outputs = self._outputs()
        (outputs / "planted.py").write_text(planted)
        port = free_port()
        job = {"place": str(place), "arguments": arguments, "ranks": ranks, "port": port, "outputs": str(outputs)}
        job |= {"planted": bool(planted), "script": str(script or ""), "limit_s": limit_s}
        codes = self.ask("job", job)
        code = next((c for c in sorted(codes, reverse=True) if c > 0), min(codes))
        said = "".join((outputs / f"err.{rank}").read_text() for rank in range(ranks))
        done = Done(list(arguments), code, (outputs / "out.0").read_text(), said)
        done.outputs = outputs
        return done

    def start(self, script: Path, *arguments: object, environment: dict[str, str]) -> Started:
        """Start a script as one rank with this environment alone."""
        outputs = self._outputs()
        content = {"script": str(script), "arguments": list(map(str, arguments)), "environment": environment}
        (pid,) = self.ask("start", {**content, "outputs": str(outputs)})
        self._started.append(Started(self, pid, outputs))
        return self._started[-1]

    def _outputs(self) -> Path:
        folder = self._folder / str(self._number)
        folder.mkdir()
        self._number += 1
        return folder

    def close(self) -> None:
        for started in self._started:
            started.end()
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()


class Started:
    """A script that a forge has started; as subprocess.Popen, with both outputs in one text."""

    def __init__(self, forge: Forge, pid: int, outputs: Path) -> None:
        self._forge, self.pid, self._outputs = forge, pid, outputs
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            (self.returncode,) = self._forge.ask("poll", self.pid) or (None,)
        return self.returncode

    def wait(self, timeout_s: float = 250) -> int:
        deadline = time.monotonic() + timeout_s
        while self.poll() is None:
            assert time.monotonic() < deadline, f"{self.pid} did not end in {timeout_s} s: {self.output}"
            time.sleep(0.02)
        assert self.returncode is not None
        return self.returncode

    @property
    def output(self) -> str:
        return "".join((self._outputs / f"{name}.0").read_text() for name in ("out", "err"))

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def end(self) -> None:
        self.send_signal(signal.SIGKILL)
        self.wait()


class TestWorld:
    """`size` ranks over a file store, forked from a forge; `run` gives each the same case and collects the results."""

    __test__ = False

    def __init__(self, forge: Forge, size: int, folder: Path) -> None:
        self._forge, self._folder = forge, folder
        self._ranks: dict[int, Connection] = {}
        with tempfile.TemporaryDirectory(prefix="world-") as place, socket.socket(socket.AF_UNIX) as server:
            door = f"{place}/door"  # short: the name of a socket has at most 107 bytes
            server.bind(door)
            server.listen(size)
            server.settimeout(60)
            self._pids = forge.ask("world", {"folder": str(folder), "door": door, "size": size})
            while len(self._ranks) < size:
                connection = Connection(server.accept()[0].detach())
                self._ranks[connection.recv()] = connection
        self.active = True

    def run(self, function: Callable[..., Any], *arguments: Any, timeout_s: float = 200.0) -> list[Any]:
        """What `function(*arguments)` returned on each rank.

        Args:
            function: of the top level of a test module. It finds the process group initialised.
            arguments: must survive JSON; the results must survive pickle.

        Raises:
            AssertionError: a rank raised, died or took too long; holds the ranks' tracebacks or logs.
        """
        case = json.dumps([inspect.getfile(function), function.__name__, arguments]).encode()
        for connection in self._ranks.values():
            connection.send_bytes(case)
        waiting = {connection: rank for rank, connection in self._ranks.items()}
        results: dict[int, Any] = {}
        failures: dict[int, str] = {}
        deadline = time.monotonic() + timeout_s
        while waiting and (ready := wait(list(waiting), max(0.0, deadline - time.monotonic()))):
            for connection in ready:
                rank = waiting.pop(connection)
                try:
                    ok, value = pickle.loads(connection.recv_bytes())
                except EOFError:
                    ok, value = False, f"the process ended\n{self._tail(rank)}"
                (results if ok else failures)[rank] = value
            if failures:  # the others may wait for this rank
                deadline = min(deadline, time.monotonic() + 2.0)
        if failures or waiting:
            codes = self.close()
            texts = [f"--- rank {rank} ---\n{text}" for rank, text in failures.items()]
            texts += [f"--- rank {rank} did not answer ---\n{self._tail(rank)}" for rank in sorted(waiting.values())]
            raise AssertionError(f"{function.__name__} failed; exit codes {codes}\n" + "\n".join(texts))
        return [results[rank] for rank in sorted(results)]

    def close(self) -> list[int]:
        """End the ranks; their exit codes."""
        self.active = False
        for connection in self._ranks.values():
            connection.close()
        return self._forge.ask("end", self._pids)

    def _tail(self, rank: int) -> str:
        return "".join((self._folder / f"{name}.{rank}").read_text(errors="replace")[-4000:] for name in ("out", "err"))


@pytest.fixture(scope="session")
def forge(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Forge]]:
    """``forge(trainer)``: the process that has imported it. What it started and still runs ends with it."""
    forges: dict[str, Forge] = {}

    def get(trainer: str) -> Forge:
        if trainer not in forges:
            forges[trainer] = Forge(trainer, tmp_path_factory.mktemp(f"forge_{trainer}"))
        return forges[trainer]

    yield get
    for one in forges.values():
        one.close()


@pytest.fixture(scope="session")
def trainer() -> str:
    """What the ranks of `world` have imported; the folders of the trainers have fixtures of their own."""
    return "torch"


@pytest.fixture(scope="module")
def world(
    forge: Callable[[str], Forge], trainer: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[int], TestWorld]]:
    """`world(4).run(function, *arguments)` gives the list of results of 4 ranks.

    A world is started when it is first asked for, serves the whole module, and is replaced when a case broke it.
    """
    worlds: dict[int, TestWorld] = {}

    def get(size: int) -> TestWorld:
        if size not in worlds or not worlds[size].active:
            worlds[size] = TestWorld(forge(trainer), size, tmp_path_factory.mktemp(f"world{size}"))
        return worlds[size]

    yield get
    for one in worlds.values():
        if one.active:
            one.close()


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
