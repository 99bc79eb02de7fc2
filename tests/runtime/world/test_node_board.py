"""Boards of real ranks, and planners that take turns over them."""

import os
import time
from dataclasses import replace
from unittest.mock import patch

import numpy as np
import pytest
import torch.distributed as dist
from evenload.api import load_plugins
from evenload.core.errors import RankError
from evenload.core.plan.step_plan import as_lengths
from evenload.core.planning import planner as planner_module
from evenload.core.planning.chain import PlanChain
from evenload.core.planning.planner import Draw, Planner
from evenload.core.recipe.recipe import parse
from evenload.core.registry import get
from evenload.runtime.world.agreement import gather_bytes
from evenload.runtime.world.node_board import open_board

pytestmark = pytest.mark.slow
STEPS = 4


def be_on_node(first, size):
    os.environ |= {"LOCAL_RANK": str(dist.get_rank() - first), "LOCAL_WORLD_SIZE": str(size)}


def opens(sizes):
    """Place and size of a rank, and what it reads that each rank of its node has written; nodes of these sizes."""
    rank = dist.get_rank()
    node = next(n for n in range(len(sizes)) if rank < sum(sizes[: n + 1]))
    be_on_node(sum(sizes[:node]), sizes[node])
    opened = open_board()
    if opened is None:
        return None
    opened.board.put(f"from {opened.place}", f"rank {rank}".encode())
    words = [opened.board.take(f"from {place}", 60.0) for place in range(opened.size)]
    assert opened.board.take("nothing", 0.05) is None
    dist.barrier()
    opened.board.drop(f"from {opened.place}")
    assert opened.board.take(f"from {opened.place}", 0.0) is None
    dist.barrier()  # the first rank of a node holds its board
    return opened.place, opened.size, [word.decode() if word else None for word in words]


def opens_without(variables):
    """Whether there is no board where the second rank lacks these variables."""
    be_on_node(0, 2)
    for name in variables if dist.get_rank() else ():
        del os.environ[name]
    return open_board() is None


def late(*_):
    time.sleep(20)
    raise AssertionError("nobody waits for this")


def fails(*_):
    raise ZeroDivisionError("inside a planner")


def other(bare, *rest):
    plan = get("packing").plan(bare, *rest)
    return replace(plan, micro_batches=plan.micro_batches[::-1])


def lengths_of(step):
    return np.random.default_rng(step).integers(4, 60, 8)


def chain(plan=None):
    load_plugins()
    recipe = parse({"parallel": {"dp": 2}, "plugins": {"packing": {"enabled": True, "max_tokens": 64}}})
    made = PlanChain.of_recipe(recipe, recipe.layout())
    ((plugin, config),) = made.links
    return replace(made, links=((replace(plugin, plan=plan or plugin.plan), config),))


def plans(bad, how, budget_s, per_node):
    """(planner, digest, samples drawn) of steps, where one rank plans badly; or the message that ended them."""
    rank, drawn = dist.get_rank(), [0]

    def draw():
        drawn[0] += 1
        lengths = lengths_of(drawn[0] - 1)
        return Draw(np.arange(8), lengths + 1 if how == "draws" and rank == bad else lengths, {"drawn": drawn[0]})

    be_on_node(rank - rank % per_node, per_node)
    opened = open_board()
    of = chain({"late": late, "fails": fails, "other": other}.get(how) if rank == bad else None)
    settings = {"budget_s": budget_s, "exchange": gather_bytes, "turns": opened, "steps_ahead": per_node}
    try:
        with patch.object(planner_module, "WORTH_S", 0.0):
            planner = Planner(of, draw, **settings)
            steps = [planner.next(ahead=STEPS - 1 - step) for step in range(STEPS)]
    except RankError as error:
        return str(error)
    finally:
        dist.barrier()
    return [(one.plan.made_by, one.plan.digest.hex(), one.draw.state["drawn"]) for one in steps]


@pytest.mark.parametrize("sizes", [[2, 2], [4], [3, 1], [1, 1, 2]])
def test_ranks_of_a_node_read_what_each_of_them_writes(world, sizes):
    answers = world(4).run(opens, sizes)
    if 1 in sizes:
        assert answers == [None] * 4
        return
    places = [
        (place, size, first)
        for first, size in zip(np.cumsum([0, *sizes]), sizes, strict=False)
        for place in range(size)
    ]
    assert answers == [(place, size, [f"rank {first + one}" for one in range(size)]) for place, size, first in places]


@pytest.mark.parametrize("variables", [["LOCAL_RANK"], ["LOCAL_RANK", "LOCAL_WORLD_SIZE"]])
def test_no_board_where_a_rank_does_not_know_its_node(world, variables):
    assert world(2).run(opens_without, variables) == [True, True]


@pytest.mark.parametrize(("size", "per_node"), [(2, 2), (4, 4), (4, 2)])
def test_ranks_that_take_turns_run_one_plan(world, size, per_node):
    alone = [chain().plan(as_lengths(lengths_of(step))) for step in range(STEPS)]
    expected = [(plan.made_by, plan.digest.hex(), step + 1) for step, plan in enumerate(alone)]
    assert world(size).run(plans, -1, "", 60.0, per_node) == [expected] * size


@pytest.mark.parametrize("how", ["late", "fails"])
@pytest.mark.parametrize(("size", "per_node"), [(2, 2), (4, 2)])
def test_a_rank_without_a_plan_takes_all_to_a_simpler_one(world, size, per_node, how):
    first, *others = world(size).run(plans, 1, how, 0.3, per_node)
    assert others == [first] * (size - 1)
    simple = [step % per_node == 1 for step in range(STEPS)]
    assert [made_by != "packing" for made_by, _, _ in first] == simple


@pytest.mark.parametrize(("size", "per_node", "how"), [(2, 2, "draws"), (4, 2, "draws"), (4, 2, "other")])
def test_ranks_that_differ_stop_with_one_message(world, size, per_node, how):
    first, *others = world(size).run(plans, 1, how, 60.0, per_node)
    assert "ranks planned different steps" in first
    assert others == [first] * (size - 1)
