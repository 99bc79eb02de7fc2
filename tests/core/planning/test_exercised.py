"""Which plugins the steps of a run have shown at work, and what they say of planners that failed."""

import logging
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from evenload.core.plan.branches import COPIED, signs_of
from evenload.core.plan.step_plan import as_lengths
from evenload.core.planning.exercised import Exercised, failure_of
from evenload.core.planning.planner import Draw, Planner
from evenload.core.registry import DataPlugin, registered

from ..by_hand import chain_of
from .ranks import fails, late, unlawful

chain = partial(chain_of, ranks=2)
UNEVEN = [900, 100, 100, 100, 100, 100, 100, 500]
EVEN = [100, 100]
EXPERTS = {"parallel": {"ep": 2}, "model": {"family": "mixtral", "moe": {"num_experts": 4}}}
SERIAL = {"chunks": 1, "recompute": "off", "split_backward": "off"}
STAGES = {"parallel": {"pp": 2}, "model": {"num_layers": 4}}


def noted(of, lengths, taken=None, tenants=None):
    exercised = Exercised()
    exercised.note(of, of.plan(as_lengths(lengths), tenants), taken)
    return {name: not lacking for name, lacking in exercised.plugins.items()}


def test_every_plugin_of_ours_says_what_shows_it():
    """Of batches no plan shows anything: they are drawn before it is made."""
    own = [plugin for plugin in registered() if plugin.origin.startswith("evenload.plugins.")]
    assert all(plugin.shown.by for plugin in own if not isinstance(plugin, DataPlugin))


@pytest.mark.parametrize(
    ("plugins", "sections", "lengths", "shown"),
    [
        ({"packing": {"max_tokens": 1000}}, {}, UNEVEN, True),
        ({"packing": {"max_tokens": 100, "slices": "off"}}, {}, EVEN, False),  # a sample a rank, as stock has it
        ({"packing": {"max_tokens": 50}}, {}, EVEN, True),
        ({"mesh": {"max_tokens": 600}}, {}, UNEVEN, True),
        ({"mesh": {"max_tokens": 1000, "max_degree": 1}}, {}, UNEVEN, False),
        ({"pipeline": {"max_tokens": 200, "block_tokens": 1}}, STAGES, UNEVEN, True),
        ({"pipeline": {"max_tokens": 100, **SERIAL}}, STAGES, [100], False),
    ],
)
def test_a_plugin_is_shown_by_what_stock_does_not_do(plugins, sections, lengths, shown):
    assert noted(chain(plugins, **sections), lengths) == {next(iter(plugins)): shown}


def test_copies_show_the_planner_of_layers_where_branches_are_known():
    experts = chain({"moe": {}}, **EXPERTS)
    assert noted(experts, EVEN) == {}
    assert noted(experts, EVEN, []) == {"moe": False}
    assert noted(experts, EVEN, [COPIED]) == {"moe": True}


def test_tenants_show_lora_and_one_step_of_many_is_enough():
    company = chain({"lora": {}, "packing": {"max_tokens": 100, "slices": "off"}})
    assert noted(company, EVEN) == {"lora": False, "packing": False}
    assert noted(company, EVEN, tenants=np.array([0, 1])) == {"lora": True, "packing": False}
    exercised = Exercised()
    for lengths in ([50, 50, 100], EVEN):
        exercised.note(company, company.plan(as_lengths(lengths), np.zeros(len(lengths), dtype=np.int64)), None)
    assert not exercised.idle


def test_padding_of_the_trainers_own_micro_batches_counts_as_theirs():
    packed = chain({"packing": {"max_tokens": 200, "slices": "off"}})
    exercised = Exercised()
    exercised.note(packed, packed.plan(as_lengths([100] * 4)), None, micro_batch_size=2)
    assert not exercised.idle, "packs have no padding"
    stock = replace(packed, micro_batch_size=2).stock(as_lengths([100] * 4))
    assert not signs_of(stock, stock) & set(packed.links[0][0].shown.by)


def planned(plan, budget_s=60.0):
    """A step whose first planner is another one."""
    made = chain({"packing": {"max_tokens": 1000}})
    ((plugin, config),) = made.links
    made = replace(made, links=((replace(plugin, plan=plan), config),))
    draw = Draw(np.arange(len(UNEVEN)), np.array(UNEVEN), {})
    return made, Planner(made, lambda: draw, budget_s=budget_s).next(ahead=False)


@pytest.mark.parametrize(("plan", "why"), [(fails, "ZeroDivisionError: inside a planner"), (unlawful, "PlanError")])
def test_what_took_over_shows_no_planner_and_names_the_failure(plan, why, caplog):
    made, step = planned(plan)
    failure = failure_of(step.plan)
    assert failure.startswith(f"planning failed on ranks [0]: {why}")
    assert failure.endswith("the simpler plan 'chunks' ran")
    exercised = Exercised()
    exercised.note(made, step.plan, [])
    assert exercised.plugins == {"packing": "no micro-batches other than the trainer's own"}
    with caplog.at_level(logging.WARNING, "evenload"):
        caplog.clear()
        exercised.say()
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == [
        "planning failed in 1 of 1 steps, and a simpler plan ran in each of them",
        "plugins.packing did not run",
    ]


def test_a_plan_that_was_late_is_no_failure_and_shows_no_planner_either():
    made, step = planned(late, budget_s=0.01)
    assert failure_of(step.plan) == ""
    exercised = Exercised()
    exercised.note(made, step.plan, [])
    assert exercised.idle.keys() == {"packing"}


def test_a_plugin_that_was_left_out_is_not_shown_by_the_others():
    """A sequence that packing may not cut, and mesh shares."""
    both = chain({"packing": {"max_tokens": 600, "slices": "off"}, "mesh": {"max_tokens": 600}})
    assert noted(both, UNEVEN) == {"packing": False, "mesh": True}


def test_who_is_content_says_nothing(caplog):
    made = chain({"packing": {"max_tokens": 1000}})
    exercised = Exercised()
    with caplog.at_level(logging.WARNING, "evenload"):
        exercised.note(made, made.plan(as_lengths(UNEVEN)), None)
        exercised.say()
    assert not caplog.records
