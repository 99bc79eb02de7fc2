"""Costs of a busy machine say so, and whoever reads them is told once. No clock: loads are given."""

import logging

import pytest
from evenload.core.costs import busy
from evenload.core.costs.busy import OtherLoad, load_average
from evenload.core.costs.costs import Costs, PassCost, load


@pytest.mark.parametrize(
    ("load_", "used", "cores", "spread", "is_busy"),
    [
        (2.2, 2, 2, 1.1, False),  # all of it ours
        (3.0, 2, 2, 1.1, True),  # another one wants a core
        (9.0, 2, 64, 1.1, False),  # and has one
        (4.3, 4, 2, 1.1, False),  # more ranks than cores, all ours
        (0.0, 2, 2, 1.4, True),  # no load is known, but runs differ
    ],
)
def test_a_machine_is_busy_where_others_wanted_its_cores(load_, used, cores, spread, is_busy):
    assert OtherLoad(load=load_, used=used, cores=cores, spread=spread).busy == is_busy


def test_who_reads_costs_of_a_busy_machine_is_told_once(tmp_path, caplog, write_costs):
    one = PassCost(token_s=1e-6)
    quiet = Costs(source="a machine", forward=one, backward=one)
    loaded = quiet.model_copy(update={"busy": OtherLoad(load=5.25, used=2, cores=2, spread=1.5)})
    for name, costs in (("quiet", quiet), ("busy", loaded)):
        write_costs(costs, tmp_path / f"{name}.yaml")
    with caplog.at_level(logging.WARNING, "evenload"):
        assert load(str(tmp_path / "quiet.yaml"), tmp_path).busy is None
        assert not caplog.records
        for _ in range(2):
            assert load(str(tmp_path / "busy.yaml"), tmp_path) == loaded
    assert [record.getMessage() for record in caplog.records] == [
        f"{tmp_path / 'busy.yaml'} was measured on a busy machine (load 5.2 on 2 cores, 2 ours; runs 1.50x their "
        "least): what it predicts is too slow, all or some"
    ]


def test_a_system_that_does_not_say_has_no_load(monkeypatch):
    def fails():
        raise OSError

    monkeypatch.setattr(busy.os, "getloadavg", fails)
    assert load_average() == 0.0
