"""Agreement and groups among real ranks."""

import pytest
import torch
import torch.distributed as dist
from evenload.core.errors import EvenloadError, RankError
from evenload.core.plan.limits import Limits
from evenload.core.plan.step_plan import MicroBatch, Slice, StepPlan, as_lengths
from evenload.runtime.world.agreement import (
    agree,
    all_or_none,
    everyone,
    first_error,
    gather_bytes,
    name_ranks,
    on_host,
)
from evenload.runtime.world.plane import own_group


def plan(border):
    """Two sequences on two ranks; `border` says where the second is cut."""
    cut = (MicroBatch((Slice(0, 0, 9), Slice(1, 0, border)), (0,)), MicroBatch((Slice(1, border, 7),), (1,)))
    return StepPlan(as_lengths([9, 7]), cut, Limits(num_ranks=2, max_tokens=32))


def gathers():
    return gather_bytes(bytes([dist.get_rank()] * 64))


def disagrees(borders):
    """The message of a rank, or None where all agree."""
    try:
        agree(plan(borders[dist.get_rank()]).digest, "plans", 7)
    except RankError as error:
        return str(error)
    return None


def errs(bad):
    rank = dist.get_rank()
    return first_error(f"no space on {rank}" if rank in bad else None)


def uses_groups():
    """This rank's row, the sum over its group, and who is in that; every rank lists the rows in another order."""
    rank, rows = dist.get_rank(), [(2, 0), (1, 3), (2, 0)]
    own, group = own_group(rows[rank % 2 :] + rows[: rank % 2])
    total = torch.tensor([2.0**rank])
    dist.all_reduce(total, group=group)
    members = dist.get_process_group_ranks(group)
    dist.destroy_process_group(group)
    return own, float(total), members


def declares_differently():
    try:
        own_group([(0, 1, 2, 3)] if dist.get_rank() else [(0, 1), (2, 3)])
    except RankError as error:
        return str(error)
    return ""


def tries_in_groups(rows, bad):
    """What this rank's group says where some ranks refuse, and what its members hold, by their order in the group."""
    _, group = own_group(rows)

    def work():
        if dist.get_rank() in bad:
            raise EvenloadError(f"rank {dist.get_rank()} refuses", "a test", "nothing")
        return "done"

    try:
        said = all_or_none(work, group)
    except EvenloadError as refusal:
        said = refusal.what
    found = said, everyone(dist.get_rank(), group)
    dist.destroy_process_group(group)
    return found


@pytest.mark.slow
def test_a_refusal_ends_its_own_group_and_no_other(world):
    """Of several the first one of the group is raised on all of its ranks."""
    rows = [(0, 2), (1, 3)]
    one = world(4).run(tries_in_groups, rows, [3])
    assert one == [("done", [0, 2]), ("rank 3 refuses", [1, 3])] * 2
    both = world(4).run(tries_in_groups, rows, [0, 2])
    assert both == [("rank 0 refuses", [0, 2]), ("done", [1, 3])] * 2


@pytest.mark.slow
def test_what_is_gathered_and_failed_is_in_the_order_of_ranks_and_equal_plans_pass(world):
    assert world(4).run(gathers) == [[bytes([r] * 64) for r in range(4)]] * 4
    assert world(4).run(errs, []) == [[]] * 4
    assert world(4).run(errs, [3, 1]) == [[(1, "no space on 1"), (3, "no space on 3")]] * 4
    assert world(2).run(disagrees, [3, 3]) == [None, None]


@pytest.mark.slow
@pytest.mark.parametrize("odd", [0, 2, 3])
def test_one_other_plan_is_named_on_every_rank(world, odd):
    borders = [3] * 4
    borders[odd] = 4
    first, *others = world(4).run(disagrees, borders)
    assert others == [first] * 3
    assert f"step 7: the ranks hold different plans: rank {odd} differs from the other 3" in first
    assert plan(3).digest.hex()[:12] in first
    assert plan(4).digest.hex()[:12] in first


@pytest.mark.slow
def test_two_sides_of_equal_size_are_both_shown(world):
    first, second = world(2).run(disagrees, [3, 4])
    assert first == second
    assert "no side has a majority" in first
    assert "rank 0: " in first
    assert "rank 1: " in first


@pytest.mark.slow
def test_every_rank_finds_the_group_of_its_row(world):
    first, second, third, fourth = world(4).run(uses_groups)
    assert first == third == ((2, 0), 5.0, [0, 2])
    assert second == fourth == ((1, 3), 10.0, [1, 3])


@pytest.mark.slow
def test_groups_declared_differently_are_refused_before_they_hang(world):
    messages = world(4).run(declares_differently)
    assert len(set(messages)) == 1
    assert "rank 0 differs from the other 3" in messages[0]


@pytest.mark.parametrize(
    ("ranks", "name"),
    [([2], "rank 2"), ([1, 0], "ranks 0, 1"), ([0, 1, 2, 3, 7], "ranks 0-3, 7"), ([4, 2], "ranks 2, 4")],
)
def test_ranks_are_named_in_runs(ranks, name):
    assert name_ranks(ranks) == name


def test_who_cannot_meet_over_gloo_is_told_which_network_to_name(monkeypatch):
    def refuses(*_, **__):
        raise RuntimeError("Gloo connectFullMesh failed")

    monkeypatch.setattr(dist, "get_backend_config", lambda _=None: "cuda:nccl")
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda _: [0, 1])
    monkeypatch.setattr(dist, "new_group", refuses)
    with pytest.raises(RankError, match="over gloo") as caught:
        on_host()
    assert "connectFullMesh" in caught.value.found
    assert "GLOO_SOCKET_IFNAME" in caught.value.do
