"""What tests of trainings share: a verb that ranks do to its end, and what it says."""

import json
import sys

import pytest
from evenload.api import load_plugins
from rich.console import Console

load_plugins()


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
def two_domains():
    """``two_domains(folder, long=(count, least, most), short=...)``: files of rows of such lengths; a third of the
    tokens of `long` is masked."""

    def write(folder, **sizes):
        for name, (count, least, most) in sizes.items():
            rows = []
            for i in range(count):
                ids = [(7 * i + k * k) % 251 for k in range(least + 37 * i % (most - least))]
                masked = len(ids) // 3 if name == "long" else 0
                rows.append({"input_ids": ids, "labels": [-100] * masked + ids[masked:]})
            (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))

    return write


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
