"""Joining and leaving a job."""

import pytest
import torch
import torch.distributed as dist
from evenload.core.errors import EvenloadError
from evenload.runtime.watchdog.watchdog import Watchdog
from evenload.runtime.world.plane import own_group
from evenload.runtime.world.world import close_world, init_world

VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture
def no_job(monkeypatch):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return monkeypatch


def test_alone_there_is_a_process_group_all_the_same(no_job):
    world = init_world()
    try:
        assert (world.rank, world.size) == (0, 1)
        x = torch.ones(3, device=world.device)
        dist.all_reduce(x)
        assert x.tolist() == [1.0] * 3
        with Watchdog():
            own, group = own_group([(0,)])
            assert (own, dist.get_world_size(group)) == ((0,), 1)
    finally:
        close_world(world)
    assert not dist.is_initialized()


def test_groups_that_are_made_later_have_the_time_limit_of_the_job(no_job):
    world = init_world(timeout_s=77.0)
    try:
        _, group = own_group([(0,)])
        assert group._get_backend(world.device).options._timeout.total_seconds() == 77.0
    finally:
        close_world(world)


@pytest.mark.parametrize("given", [("RANK",), ("RANK", "WORLD_SIZE"), VARIABLES[:3]])
def test_half_a_job_is_refused(no_job, given):
    for name in given:
        no_job.setenv(name, "1")
    with pytest.raises(EvenloadError) as caught:
        init_world()
    assert caught.value.found == f"missing: {', '.join(n for n in VARIABLES if n not in given)}"


def test_a_group_of_ranks_that_do_not_exist_is_refused(no_job):
    world = init_world()
    try:
        with pytest.raises(EvenloadError, match="cannot form a group"):
            own_group([(0, 1)])
    finally:
        close_world(world)


def joins_twice():
    world = init_world()
    close_world(world)
    return world.rank, world.size, world.owned, dist.is_initialized()


def watches_twice():
    """A second watchdog must not read what the first one left."""
    for step in range(2):
        with Watchdog(every_s=0.05, gone_s=60) as dog:
            for _ in range(10):
                dog.at("a sum", step)
                dist.all_reduce(torch.ones(1))
    return step


@pytest.mark.slow
def test_a_process_group_of_the_user_is_taken_and_left_alone(world):
    assert world(2).run(joins_twice) == [(rank, 2, False, True) for rank in range(2)]


@pytest.mark.slow
def test_watchdogs_one_after_the_other(world):
    assert world(2).run(watches_twice) == [1, 1]


def fails_on(bad):
    if dist.get_rank() == bad:
        raise ValueError("planted")
    dist.barrier()
    return bad


@pytest.mark.slow
def test_the_test_world_itself_tells_which_rank_failed_and_recovers(world):
    with pytest.raises(AssertionError, match=r"(?s)rank 1 ---.*fails_on.*ValueError: planted.*rank 0 did not answer"):
        world(2).run(fails_on, 1)
    assert world(2).run(fails_on, 5) == [5, 5]
