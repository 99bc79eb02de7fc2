"""Ranks that serve many cases: each finds them as the first one did, and who leaves something behind fails."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytestmark = pytest.mark.slow
World = Callable[[int], Any]


def leaves(what: str) -> None:
    """Plant a leak."""
    import torch
    import torch.distributed as dist
    from evenload.core import laws
    from evenload.runtime.world.plane import Plane

    if what == "a function":
        laws.check = lambda plan: plan
    elif what == "a method":
        Plane.make = classmethod(lambda cls, *args: None)
    elif what == "a function of torch":
        dist.all_reduce = print
    elif what == "a group":
        dist.new_group([0, 1])
    elif what == "a mode":
        torch.set_default_dtype(torch.float64)


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("a function", r"evenload\.core\.laws\.check is replaced"),
        ("a method", r"evenload\.runtime\.world\.plane:Plane\.make is replaced"),
        ("a function of torch", r"torch\.distributed\.all_reduce is replaced"),
        ("a group", r"a process group is open: ranks \(0, 1\)"),
        ("a mode", r"default dtype is torch\.float64, was torch\.float32"),
    ],
)
def test_what_a_case_leaves_fails_it_and_the_next_has_other_ranks(world: World, what: str, said: str) -> None:
    ranks = world(2)
    ranks.run(leaves, "nothing")  # modules are watched from when a case has imported them
    with pytest.raises(AssertionError, match=f"leaves did not leave its ranks as it found them: {said}"):
        ranks.run(leaves, what)
    assert world(2).run(leaves, "nothing") == [None, None]


def draws_and_sets() -> list[Any]:
    """What generators give and the environment has, which are then others."""
    import torch

    found = [random.random(), float(np.random.rand()), float(torch.rand(())), os.environ.get("LEFT"), os.getcwd()]
    os.environ["LEFT"] = "here"
    os.chdir("/")
    return found


def test_generators_and_environment_are_the_same_at_every_begin(world: World) -> None:
    assert world(1).run(draws_and_sets) == world(1).run(draws_and_sets)


def uses_groups() -> list[Any]:
    """Sums over groups, two of them of the same ranks, and their identities; all are destroyed."""
    import torch
    import torch.distributed as dist

    pair = [dist.new_group([0, 1]), dist.new_group([0, 1])]
    alone = [dist.new_group([rank]) for rank in range(3)][dist.get_rank()]
    sums = []
    for group in [*pair, alone]:
        number = torch.tensor(dist.get_rank() + 1)
        if dist.get_rank(group) >= 0:
            dist.all_reduce(number, group=group)
            sums.append((int(number), dist.get_process_group_ranks(group)))
    known = len(dist.distributed_c10d._world.pg_map)
    identities = [id(group) for group in [*pair, alone] if not isinstance(group, int)]
    for group in [*pair, alone]:
        if dist.get_rank(group) >= 0:
            dist.destroy_process_group(group)
    assert len(dist.distributed_c10d._world.pg_map) == known - len(sums), "torch knows no destroyed group"
    return [sums, identities]


def test_groups_are_taken_again_and_no_two_at_a_time_are_one(world: World) -> None:
    ranks = world(3)
    first, second = ranks.run(uses_groups), ranks.run(uses_groups)
    assert first == second
    assert first[0][0] == [(3, [0, 1]), (3, [0, 1]), (1, [0])]
    assert first[2][0] == [(3, [2])]
    for _, identities in first:
        assert len(set(identities)) == len(identities)


def refers(scale: float, token: int, weight: float) -> tuple[float, int]:
    """The loss of a reference, and how often it was computed."""
    import torch
    from evenload.runtime.attention.labels import TargetWeights
    from harness.references import kept

    computed = []

    def compute(recipe: Any, host: Any, tokens_of: Any, lengths: Any, labels: Any) -> Any:
        computed.append(1)
        return scale, {"w": torch.ones(2)}

    recipe = SimpleNamespace(
        trainer="megatron",
        megatron=None,
        model="model",
        train=SimpleNamespace(dtype="fp64"),
        parallel=SimpleNamespace(tp=1),
    )
    host = SimpleNamespace(
        trained=SimpleNamespace(frozen=()), weights=lambda: {"w": torch.full((2,), scale)}, expert_biases=dict
    )
    labels = SimpleNamespace(
        reference=None,
        of=lambda i: np.array([1, 2]),
        weights=TargetWeights(lambda i: np.array([weight]), np.array([weight])),
    )
    loss, gradients = kept(compute, recipe, host, lambda i: np.array([token, 2]), np.array([2]), labels)
    assert gradients["w"].tolist() == [1, 1]
    return loss, len(computed)


def test_a_reference_is_computed_once_and_anew_for_anything_else(world: World) -> None:
    assert world(2).run(refers, 1.0, 1, 0.5) == [(1.0, 1)] * 2
    assert world(2).run(refers, 1.0, 1, 0.5) == [(1.0, 0)] * 2
    assert world(1).run(refers, 1.0, 1, 0.5) == [(1.0, 0)], "another world finds it"
    for other in ((2.0, 1, 0.5), (1.0, 3, 0.5), (1.0, 1, 0.25)):
        assert world(2).run(refers, *other) == [(other[0], 1)] * 2
