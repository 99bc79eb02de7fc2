"""What is a wrong request before the first step is work that failed after it."""

from types import SimpleNamespace

import pytest
from evenload.core.errors import EvenloadError, PlanError, RankError
from evenload.training.run.variant import as_rank_error

JOB = SimpleNamespace(world=SimpleNamespace(rank=3))


@pytest.mark.parametrize("kind", [EvenloadError, PlanError])
def test_a_refusal_becomes_a_failure_of_its_rank_once_a_step_has_run(kind):
    with pytest.raises(RankError) as caught, as_rank_error(JOB, begun=True):
        raise kind("cannot read data.jsonl", "No such file", "restore it")
    assert (caught.value.what, caught.value.found) == ("rank 3: cannot read data.jsonl", "No such file")
    assert caught.value.do == "restore it"
    with pytest.raises(kind) as caught, as_rank_error(JOB, begun=False):
        raise kind("the plan cannot be run", "3 slices", "plan again")
    assert not isinstance(caught.value, RankError)


def test_what_all_ranks_say_alike_and_faults_of_the_program_stay_as_they_are():
    with pytest.raises(RankError, match=r"^the ranks hold different plans"), as_rank_error(JOB, begun=True):
        raise RankError("the ranks hold different plans")
    with pytest.raises(KeyError), as_rank_error(JOB, begun=True):
        raise KeyError("weight")
