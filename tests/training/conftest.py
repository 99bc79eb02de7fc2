"""What tests of trainings share: a verb that ranks do to its end, and what it says."""

import json
import sys

import pytest
from evenload.api import load_plugins
from rich.console import Console

load_plugins()


@pytest.fixture(scope="session")
def ran(forged):
    """``ran(place, "train", "recipe.yaml", "key=value")``: what the verb says as JSON, which must not fail."""

    def run(place, *words, **how):
        done = forged(place, *words, "--json", **how)
        assert done.returncode == 0, done.stderr[-3000:]
        return json.loads(done.stdout)

    return run


@pytest.fixture(scope="session")
def shown():
    """The text of a table on a terminal of that width."""

    def text(table, width=160):
        console = Console(width=width)
        with console.capture() as caught:
            console.print(table)
        return caught.get()

    return text


@pytest.fixture(scope="session")
def logged():
    """The steps of a log: neither its validations nor its end."""

    def lines(log):
        return [row for row in map(json.loads, log.read_text().splitlines()) if "samples" in row]

    return lines


@pytest.fixture
def launched_by_forge(forged, tmp_path):
    """In place of `launch.launch`: ranks are forks of a forge, not interpreters that begin anew."""
    from evenload.training.launching.launch import RanksFailed

    def launch(words, num_ranks, *_):
        done = forged(tmp_path, *words, "--json", ranks=num_ranks)
        print(done.stderr, file=sys.stderr)
        if done.returncode:
            raise RanksFailed(done.returncode)
        return json.loads(done.stdout)

    return launch
