"""Planning in stages: none is worse than the one before, the last is the chain's plan, and loops weigh it in line."""

from dataclasses import replace

import numpy as np
import pytest
from evenload.core.laws import check
from evenload.core.plan.step_plan import as_lengths
from evenload.core.planning import stages as planning
from evenload.core.planning.judge import UnwantedError, outcome_of, wanted_no_more
from evenload.core.planning.stages import PlanStages, SyncPlanning
from evenload.core.registry import Estimates

from ..by_hand import chain_of

BATCH = as_lengths(np.random.default_rng(3).lognormal(6.0, 1.2, 60).astype(int).clip(16, 6000))


SETS = ("packing",), ("mesh",), ("packing", "mesh"), ("packing", "mesh", "pipeline")


def chain(*names, **parallel):
    plugins = {name: {"max_tokens": 4096} for name in names}
    return chain_of(plugins, parallel={"dp": 4, **parallel}, cluster="h100")


@pytest.mark.parametrize(
    ("parallel", "names"), [*(({"pp": pp}, names) for pp in (1, 2) for names in SETS), ({"cp": 2}, ("packing",))]
)
def test_no_stage_is_slower_than_the_one_before_and_the_last_is_the_plan(names, parallel):
    made = chain(*names, **parallel)
    stages = PlanStages(made, BATCH)
    *before, plan = stages.run()
    assert set(before) <= {None}
    assert len(before) == stages.reached - 1 >= len(made.rivals.rules) + 1
    assert plan.digest == made.plan(BATCH).digest
    known = [one for one in stages.best if one]
    assert len(known) == stages.reached, "chunks, the first of the rules, can run"
    seconds = [outcome_of(check(one.plan), made.context).step_s for one in known]
    assert seconds == sorted(seconds, reverse=True)
    assert all(one.plan.limits.max_tokens <= 4096 for one in known)


def test_a_stage_does_not_take_what_breaks_the_settings_of_a_later_plugin():
    made = chain("packing", "mesh")
    links = tuple(
        (replace(plugin, baselines=replace(plugin.baselines, breaks=lambda *_: "all of it")), config)
        for plugin, config in made.links
    )
    stages = PlanStages(replace(made, links=links), BATCH)
    list(stages.run())
    assert stages.best[-2] is None
    assert stages.best[-1] is not None


def test_a_plan_that_nobody_waits_for_ends_with_the_next_stage():
    stages = PlanStages(chain("packing", "mesh"), BATCH)
    run = stages.run()
    next(run)
    token = wanted_no_more.set(lambda: True)
    try:
        with pytest.raises(UnwantedError):
            list(run)
    finally:
        wanted_no_more.reset(token)
    assert stages.reached == 1


def test_in_line_a_rule_runs_where_a_whole_plan_gains_less_than_it_takes(monkeypatch):
    made, loop = chain("packing", "mesh"), SyncPlanning()
    monkeypatch.setattr(planning, "FREE_S", 0.0)
    monkeypatch.setattr(planning, "LEARN_EVERY", 2)
    whole = made.plan(BATCH)
    assert loop.plan(made, BATCH).digest == whole.digest, "what planning gains is known after a first plan alone"
    assert loop.gained < 1.0
    dear = tuple((replace(plugin, estimates=Estimates(work_s=lambda *_: 1e3)), config) for plugin, config in made.links)
    plans = [loop.plan(replace(made, links=dear), BATCH) for _ in range(3)]
    assert [plan.digest == whole.digest for plan in plans] == [False, False, True]
    assert plans[0].digest == plans[1].digest
    assert "planned by a rule" in plans[0].notes[-1]
    assert check(plans[0])
    cheap = tuple((replace(plugin, estimates=Estimates()), config) for plugin, config in made.links)
    assert loop.plan(replace(made, links=cheap), BATCH).digest == whole.digest
