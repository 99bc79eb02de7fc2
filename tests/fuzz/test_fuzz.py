"""Whatever is asked of evenload ends with a result, or with one short message and nothing done.

`make check` asks a few hundred times, the same every time; `make explore` ten thousand times, anew, and prints how
requests of each verb ended. No trainer starts: the launcher is replaced (`child.py`).
"""

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from . import brought, cases

pytestmark = pytest.mark.hypothesis

THOROUGH = hypothesis.settings.get_current_profile_name() == "explore"
MOST_CPU_S = 5.0
MOST_MESSAGE = 12_000
"""Characters; a word of 8,192 may be in it, with a frame around its lines."""

AREAS = {
    "overrides": (cases.overrides(), 35, 2600),
    "recipes": (cases.recipe_files(), 25, 1500),
    "clusters and costs": (cases.machine_files(), 20, 1200),
    "lengths": (cases.length_files(), 25, 1500),
    "loads": (cases.load_files(), 15, 600),
    "data": (cases.data_files(), 10, 800),
    "arguments": (cases.arguments() if THOROUGH else cases.arguments(("--out", "--report", "--trace")), 35, 1200),
    "environment": (cases.environments((*cases.HOSTS, "nope.invalid") if THOROUGH else tuple(cases.HOSTS)), 20, 400),
    "face": (cases.faces(), 25, 500),
    "plan files": (cases.plan_files(), 5, 100),
    "sections": (cases.sections(), 10, 200),
}
"""Strategy, and cases of a quick and of a thorough run: 200, and 10,000."""
BROUGHT = {
    "tenants": (brought.tenants(), 12, 1000),
    "adapters": (brought.adapters(), 8, 500),
    "templates": (brought.templates(), 4, 150),
    "folders": (brought.folders(), 10, 600),
    "records": (brought.records(), 20, 500),
    "company": (brought.company(), 8, 300),
    "written": (brought.written(), 25, 1000),
}
"""Likewise: 85, and 4,000. The process that runs them imports torch and Transformers, in ten seconds."""


Ask = Callable[[Any], dict[str, Any]]


@contextmanager
def _asking(folder, *words):
    """The answer of `child.py` to a case."""
    command = [sys.executable, str(Path(__file__).with_name("child.py")), str(folder), *words]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdin is not None
        assert server.stdout is not None

        def ask(case):
            server.stdin.write(json.dumps(case) + "\n")
            server.stdin.flush()
            return json.loads(server.stdout.readline())

        yield ask
        server.stdin.close()


@pytest.fixture(scope="module")
def ask(tmp_path_factory):
    with _asking(tmp_path_factory.mktemp("fuzz"), *(["plots"] if THOROUGH else [])) as ask:
        yield ask


@pytest.fixture(scope="module")
def ask_with_torch(tmp_path_factory):
    with _asking(tmp_path_factory.mktemp("brought"), "brought") as ask:
        yield ask


def faults(case, answer):
    """What is wrong with the way in which a case ended."""
    end, out, err = answer["end"], answer["out"], answer["err"]
    wrong = []
    if end not in ("exit 0", "exit 2", "done", "refused", "launch", "rank", "command"):
        wrong.append(f"{end} {answer['message']}")
    if answer["cpu_s"] > MOST_CPU_S:
        wrong.append(f"{answer['cpu_s']:.1f} CPU seconds")
    if "Traceback" in err or "Warning" in err:
        wrong.append("a traceback or a warning of a library")
    if answer["events"]:
        wrong.append("written elsewhere, or started")
    if end in ("exit 2", "refused"):
        if answer["written"]:
            wrong.append(f"wrote {answer['written']}")
        if out and "Usage:" not in out:  # of no words at all help is printed
            wrong.append("a refusal on stdout")
        if not (answer["message"] + out + err).strip() or len(answer["message"]) + len(err) > MOST_MESSAGE:
            wrong.append("no message, or one without end")
    empty = {f"work/{name}" for name, content in case.get("files", {}).items() if content.get("text") == ""}
    ours = {name for name in case.get("ours", ()) if end == "done" or (name.endswith(".lock") and name in empty)}
    if others := set(answer["changed"]) - ours if "ours" in case else ():
        wrong.append(f"touched {others}")
    if end in ("done", "exit 0") and "--json" in case.get("argv", ()) and "--help" not in case["argv"]:
        try:
            json.loads(out, parse_constant=lambda name: pytest.fail(name))
        except ValueError:
            wrong.append("no JSON on stdout")
    return wrong


@pytest.mark.timeout(3600 if THOROUGH else 300)
@pytest.mark.parametrize("area", AREAS)
def test_every_request_ends_well(area, ask, record_property):
    _hold(AREAS[area], ask, record_property)


@pytest.mark.slow
@pytest.mark.timeout(7200 if THOROUGH else 300)
@pytest.mark.parametrize("area", BROUGHT)
def test_whatever_is_brought_along_ends_well(area, ask_with_torch, record_property):
    _hold(BROUGHT[area], ask_with_torch, record_property)


def _hold(area, ask, record_property):
    """Ask as many cases as the profile wants, and record how they ended."""
    strategy, quick, thorough = area
    counts = Counter()
    longest = (0.0, 0.0, "")

    @hypothesis.settings(max_examples=thorough if THOROUGH else quick, deadline=None)
    @hypothesis.given(strategy)
    def holds(case):
        nonlocal longest
        answer = ask(case)
        verb = case["call"].partition("(")[0] if "call" in case else next(iter(case["argv"]), "nothing")
        counts[f"{verb if verb in VERBS else 'other words'}: {answer['end']}"] += 1
        longest = max(longest, (answer["cpu_s"], answer["wall_s"], json.dumps(case)[:300]))
        wrong = faults(case, answer)
        assert not wrong, (wrong, {key: answer[key] for key in ("out", "err", "events", "message")})

    try:
        holds()
    finally:
        record_property("fuzz", {"counts": dict(counts), "longest": longest})


VERBS = ("train", "plan", "verify", "bench", "profile", "run", "plugins", "schema", "evenload.plan")
VERBS += ("evenload.load_recipe", "read_plans", "recipe_of", "admit", "logged", "lora", "export")
VERBS += ("watch", "generate", "score", "sampled", "scored")
