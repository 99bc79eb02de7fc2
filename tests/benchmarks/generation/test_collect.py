"""The benchmark of samples that are kept, on two rules and a model that has learned nothing."""

from __future__ import annotations

import json
import sys

import pytest
from evenload.benchmarks.generation import collect
from harness.cases import full


@full
@pytest.mark.slow
def test_a_row_for_each_rule_and_less_work_where_the_first_is_kept(forged, monkeypatch, tmp_path, capsys):
    """Its commands are run in forks."""

    def run(folder, *words):
        done = forged(folder, *words, "--json")
        assert done.returncode == 0, done.stderr[-3000:]
        return json.loads(done.stdout), 1.0

    monkeypatch.setattr(collect, "run", run)
    monkeypatch.setattr(sys, "argv", ["collect.py", "--quick", "--json", "--folder", str(tmp_path / "c")])
    collect.main(collect.arguments(), collect.benchmark, collect.table)
    whole, first = json.loads(capsys.readouterr().out)["rows"]
    assert (whole["rule"], first["rule"]) == ("all of 2", "1 of 2")
    assert first["tokens"] <= whole["tokens"]
    assert first["kept_tokens"] <= whole["kept_tokens"]
    assert (whole["collected"], first["collected"]["kept"]) == (None, 3)
