"""Megatron's dynamic context parallelism as a baseline: as its wheel places sequences, and lawful."""

from types import SimpleNamespace

import numpy as np
import pytest
from evenload.api import load_recipe
from evenload.core.plan.step_plan import as_lengths
from evenload.core.planning.chain import PlanChain
from evenload.plugins.mesh.dynamic_cp import next_round, ranks_of, rounds_of


@pytest.mark.filterwarnings("ignore")
def test_without_packing_it_places_as_the_wheel_does():
    """Its trimming, which main leaves out, never acts where ranks may differ by all of their work."""
    wheel = pytest.importorskip("megatron.core.pipeline_parallel.hybrid_cp_schedule")
    rng = np.random.default_rng(5)
    for _ in range(20):
        ranks, cap = int(rng.choice([4, 8, 16])), int(rng.choice([256, 1024]))
        lengths = np.minimum(rng.lognormal(6, 1.4, rng.integers(1, 80)).astype(int) + 1, cap * ranks).tolist()
        scheduler = wheel.BalancedCPScheduler(cap, SimpleNamespace(size=lambda ranks=ranks: ranks))
        theirs = sorted(enumerate(lengths), key=lambda one: -one[1])
        while theirs:
            items = [number for number, _ in theirs]
            groups, left = next_round(items, lengths, ranks, cap, slack=1.0, held=float("inf"))
            _, theirs, _, placed = scheduler.next_hdp_group(theirs, scheduler.get_total_workload, ranks, delta=1.0)
            own = {rank: group.items for group, of in zip(groups, ranks_of(groups), strict=True) for rank in of}
            assert [own[rank] for rank in range(ranks)] == placed
            assert left == [number for number, _ in theirs]


def test_every_rank_has_work_and_no_pack_is_over_the_cap():
    lengths = np.random.default_rng(1).lognormal(6, 1.5, 300).astype(int).clip(1, 8192)
    rounds = rounds_of(lengths, 6, 2048)
    assert sorted(i for groups in rounds for g in groups for i in g.items) == list(range(300))
    for groups in rounds:
        assert [rank for ranks in ranks_of(groups) for rank in ranks] == list(range(6))
        assert all(sum(lengths[g.items]) <= 2048 * g.degree for g in groups)


def test_its_plan_keeps_the_laws():
    words = ["plugins.mesh.enabled=true", "parallel.dp=8", "plugins.packing.max_tokens=4096", "data.max_length=32768"]
    recipe = load_recipe("gpu-node", [*words, "train.global_batch_size=64"])
    lengths = as_lengths(np.random.default_rng(2).lognormal(7, 1.3, 64).astype(int).clip(8, 32768))
    plan = PlanChain.of_recipe(recipe, recipe.layout()).baseline("dynamic_cp", lengths)  # checked
    assert plan.made_by == "dynamic_cp"
    assert plan.shared
