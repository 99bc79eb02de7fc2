"""What a tenant leaves: numbers that a run which goes on does not double, and how it has ended."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from evenload.commands.tenants.records.output import Output


class Tenant:
    def __init__(self, step: int, **status: Any) -> None:
        self.name, self.step, self._status = "acme", step, {"name": "acme", "state": "training", **status}

    def status(self) -> dict[str, Any]:
        return self._status


def output(out: Path, leads: bool = True) -> Output:
    return Output(SimpleNamespace(out=out, leads=leads))  # type: ignore[arg-type]


def steps(out: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (out / "acme" / "metrics.jsonl").read_text().splitlines()]


def test_rows_behind_the_step_that_a_run_goes_on_from_are_dropped(tmp_path: Path) -> None:
    one, tenant = output(tmp_path), Tenant(0)
    one.begin(tenant)  # type: ignore[arg-type]
    for step in range(5):
        one.row(tenant, {"step": step, "loss": 1.0})  # type: ignore[arg-type]
    with (tmp_path / "acme" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "lo')  # torn when the job was killed
    output(tmp_path).begin(Tenant(3))  # type: ignore[arg-type]
    assert steps(tmp_path) == [0, 1, 2]
    output(tmp_path).begin(Tenant(0))  # type: ignore[arg-type]
    assert steps(tmp_path) == []


def test_an_end_is_known_again_by_the_file_it_was_trained_from(tmp_path: Path) -> None:
    one = output(tmp_path)
    assert one.past("acme", "abc") is None
    for state in ("done", "stopped", "dropped", "failed"):
        one.status(Tenant(3, state=state, file="abc"))  # type: ignore[arg-type]
        past = one.past("acme", "abc")
        assert past is not None
        assert past["state"] == state
        assert one.past("acme", "of another file") is None
    for state in ("training", "waiting", "left"):
        one.status(Tenant(3, state=state, file="abc"))  # type: ignore[arg-type]
        assert one.past("acme", "abc") is None
    (tmp_path / "acme" / "status.json").write_text("{")
    assert one.past("acme", "abc") is None


def test_other_ranks_write_nothing(tmp_path: Path) -> None:
    one, tenant = output(tmp_path, leads=False), Tenant(0)
    one.begin(tenant)  # type: ignore[arg-type]
    one.row(tenant, {"step": 0})  # type: ignore[arg-type]
    one.status(tenant)  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())


def test_numbers_that_cannot_be_written_are_given_up_with_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "acme").write_text("a file where the folder should be")
    one, tenant = output(tmp_path), Tenant(0)
    one.begin(tenant)  # type: ignore[arg-type]
    one.row(tenant, {"step": 0})  # type: ignore[arg-type]
    one.status(tenant)  # type: ignore[arg-type]
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == [
        "numbers of the tenant acme are not written, training goes on"
    ]
