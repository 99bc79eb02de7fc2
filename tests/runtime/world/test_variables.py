"""torchrun's variables: a place in a job, or one message."""

import pytest
from evenload.core.errors import EvenloadError
from evenload.runtime.world import variables
from evenload.runtime.world.variables import JobVariables, job_variables

GOOD = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


@pytest.fixture
def job(monkeypatch):
    for name in (*GOOD, "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(variables, "_NAMED_S", 0.0)
    return monkeypatch


def read_with(job, **values):
    for name, value in (GOOD | values).items():
        job.setenv(name, value)
    return job_variables()


def test_a_place_in_a_job_or_none(job):
    assert job_variables() is None
    assert read_with(job) == JobVariables(1, 2, "127.0.0.1", 29500)
    assert read_with(job, MASTER_ADDR="localhost", RANK=" 0 ") == JobVariables(0, 2, "localhost", 29500)
    assert read_with(job, RANK="0", WORLD_SIZE="1", MASTER_PORT="0") == JobVariables(0, 1, "127.0.0.1", 0)


NONSENSE = {
    "RANK": ["x", "", "-1", "2", "1.0", "1e0", "\u0661", "1" * 5000, "0x1"],
    "WORLD_SIZE": ["x", "", "0", "1", "-2", "99999999999"],
    "MASTER_PORT": ["x", "", "0", "65536", "99999", "-1"],
    "LOCAL_RANK": ["x", "", "-1", "99999999999"],
    "LOCAL_WORLD_SIZE": ["x", "0"],
    "MASTER_ADDR": ["nope.invalid", "a b", "", "..", "x" * 300, "999.1.1.1", "\udcff"],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in NONSENSE.items() for value in values])
def test_nonsense_is_named(job, name, value):
    with pytest.raises(EvenloadError) as caught:
        read_with(job, **{name: value})
    named = "RANK" if (name, value) == ("WORLD_SIZE", "1") else name  # rank 1 of 1
    assert caught.value.what.startswith(named)
    assert len(caught.value.found) <= 250
    assert "torchrun" in caught.value.do
