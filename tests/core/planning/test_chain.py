"""The chain of planners: caps that hold, refusals that are told, what takes over, and loops that are not ours."""

from dataclasses import replace
from functools import partial

import pytest
from evenload.core.costs.memory import peaks_of_stage
from evenload.core.errors import EvenloadError, PlanError
from evenload.core.laws import check
from evenload.core.plan.limits import Limits
from evenload.core.plan.step_plan import MicroBatch, Slice, StepPlan, as_lengths
from evenload.core.plan.token_layout import tokens_of_ranks
from evenload.core.planning.chain import PlanChain, signed
from evenload.core.planning.notes import LEAST_CAP, LEFT_OUT, NO_EFFECT, warn_of_no_trees, warn_once
from evenload.core.planning.rivals import STOCK
from evenload.core.planning.setting import Setting
from evenload.core.planning.stock import stock_plan
from evenload.core.recipe.recipe import parse
from harness.cases import pairs

from ..by_hand import chain_of

GIB = 2.0**30


def chain(plugins, **parallel):
    return chain_of(plugins, parallel={"dp": 2, **parallel}, cluster="h100")


def rules(made, batch):
    return {name: partial(made.rule, name, batch) for name in made.rivals.rules}


def most_tokens(plan):
    return max(max(tokens_of_ranks(m).values()) for m in plan.micro_batches)


@pairs(
    ("order", [(900, 300), (300, 900)]),
    ("names", [("packing", "mesh"), ("packing", "pipeline"), ("mesh", "pipeline")]),
    ("parallel", [{}, {"pp": 2}, {"dp": 1}]),
)
def test_of_several_caps_the_least_holds(names, order, parallel):
    made = chain({name: {"max_tokens": cap} for name, cap in zip(names, order, strict=True)}, **parallel)
    plan = made.plan(as_lengths([2000, 800, 310, 299, 40]))
    assert made.caps.max_tokens == plan.limits.max_tokens == 300
    assert most_tokens(plan) <= 300
    words = ", ".join(f"{name} {cap}" for name, cap in zip(names, order, strict=True))
    assert plan.notes[-1] == LEAST_CAP + words


def test_lanes_keep_the_least_cap_and_its_note_speaks_of_ranks():
    made = chain({"packing": {"max_tokens": 900}, "pipeline": {"max_tokens": 300}}, cp=2)
    plan = made.plan(as_lengths([2000, 800, 310, 299, 40]))
    assert plan.limits.max_tokens == 300
    assert plan.notes[-1] == f"{LEAST_CAP}packing 900, pipeline 300"


def test_a_plugin_that_refuses_is_told_of_and_its_caps_still_hold():
    sections = {
        "packing": {"max_tokens": 400, "slices": "off", "activation_gib": 1.0},
        "mesh": {"engines": ["all_to_all"]},
        "pipeline": {"max_tokens": 500},
    }
    plan = chain(sections).plan(as_lengths([900, 300, 20]))
    assert any(note.startswith(f"{LEFT_OUT}packing: a sequence is longer than") for note in plan.notes)
    assert (plan.limits.max_tokens, plan.limits.max_activation_bytes) == (400, GIB)
    assert most_tokens(plan) <= 400


def test_a_plan_is_signed_by_the_plugin_that_changed_it_last():
    incoming = StepPlan(as_lengths([3, 4]), (MicroBatch((Slice(0, 0, 3), Slice(1, 0, 4)), (0,)),), Limits(1, 9))
    whole = replace(incoming, micro_batches=incoming.micro_batches[::-1])
    parts = replace(incoming, micro_batches=tuple(MicroBatch((s,), (0,)) for s in incoming.micro_batches[0].slices))
    assert signed("theirs", incoming, whole).made_by == ""
    assert signed("theirs", incoming, parts).made_by == "theirs"
    packed = replace(incoming, made_by="packing")
    assert signed("theirs", packed, replace(parts, made_by="packing")).made_by == "packing, theirs"
    assert signed("mesh", packed, replace(parts, made_by="mesh (halves)")).made_by == "mesh (halves)"


def test_the_plan_that_came_in_stays_where_a_later_plugin_refuses():
    def refuses(*_):
        raise EvenloadError("mesh has no way", "here", "disable it")

    made = chain({"packing": {}, "mesh": {}, "pipeline": {}})
    links = [(replace(plugin, plan=refuses) if plugin.name == "mesh" else plugin, c) for plugin, c in made.links]
    plan = replace(made, links=tuple(links)).plan(as_lengths([900, 300, 20]))
    assert f"{LEFT_OUT}mesh: mesh has no way (here)" in plan.notes
    assert plan.made_by == "packing"


def _greedy(bare, *_):
    """A planner that raises its cap on the way."""
    return stock_plan(bare.lengths, bare.limits)


def test_no_planner_raises_its_cap_on_the_way():
    made = chain({"packing": {"max_tokens": 100}})
    ((packing, config),) = made.links
    greedy = replace(packing, plan=_greedy)
    assert check(_greedy(StepPlan(as_lengths([101, 3]), (), made.limits)))
    with pytest.raises(PlanError, match=r"over the token cap\n.*101 tokens on a rank, cap 100"):
        replace(made, links=((greedy, config),)).plan(as_lengths([101, 3]))


@pytest.mark.parametrize("name", ["packing", "mesh", "pipeline"])
def test_what_takes_over_keeps_the_caps(name):
    for parallel in ({}, {"dp": 1}, {"pp": 2}):
        made = chain({name: {"max_tokens": 200}}, **parallel)
        batch = as_lengths([900, 300, 20, 199])
        simpler = rules(made, batch)
        assert made.rivals.rules[-1] == STOCK
        with pytest.raises(PlanError, match="900 tokens on a rank, cap 200"):
            simpler[STOCK]()
        for plan in (make() for at, make in simpler.items() if at not in (STOCK, "memory_degree")):
            assert plan.limits.max_tokens == 200
            assert most_tokens(plan) <= 200
        assert simpler.keys() - {STOCK}


def test_chunks_take_over_with_replays_under_a_cap_of_memory():
    batch = as_lengths([6000, 300, 20])
    free = chain({"packing": {"max_tokens": 500}})
    held = rules(free, batch)["chunks"]()
    peak = max(bytes_ for bytes_, _ in peaks_of_stage(held, 0))
    tight = chain({"packing": {"max_tokens": 500, "activation_gib": 0.7 * peak / GIB}})
    plan = rules(tight, batch)["chunks"]()
    assert plan.replayed
    assert max(bytes_ for bytes_, _ in peaks_of_stage(plan, 0)) <= 0.7 * peak
    # For show it may hold more than any cap.
    tiny = chain({"packing": {"max_tokens": 500, "activation_gib": 1e-6}})
    assert tiny.baseline("chunks", batch)
    with pytest.raises(PlanError, match="activation_gib"):
        rules(tiny, batch)["chunks"]()


def test_what_takes_over_keeps_the_settings():
    made = chain({"packing": {"max_tokens": 200, "slices": "off"}, "mesh": {}})
    batch = as_lengths([900, 30])
    assert made.plan(batch)
    chunks, cp_1 = (rules(made, batch)[name] for name in ("chunks", "cp_1"))
    with pytest.raises(EvenloadError, match=r"plugins\.packing\.slices is off, 1 sequences are cut"):
        chunks()
    assert most_tokens(cp_1()) <= 200


def of_a_loop(packing, **how):
    """The chain of somebody else's training loop."""
    asks = parse({"parallel": {"dp": 2}, "plugins": {"packing": {"enabled": True, "max_tokens": 64, **packing}}})
    setting = Setting.of_recipe(asks)
    return PlanChain.of_model(asks, setting.shape, asks.layout(), setting.traits, **how)


ASKS = {"slices": "even", "max_delay_steps": 3}


def test_a_loop_of_ones_own_runs_whole_sequences_and_is_told_so_once(caplog):
    with caplog.at_level("WARNING", logger="evenload"):
        chain = of_a_loop(ASKS)
        of_a_loop(ASKS, warn=False)
    assert caplog.text.count("plugins.packing.slices=even, max_delay_steps=3 has no effect") == 1
    assert not chain.plan(as_lengths([60, 50, 3, 2])).cut
    with pytest.raises(EvenloadError, match="sequence 0 has 65 tokens, the cap is 64"):
        chain.plan(as_lengths([65, 3]))


def test_a_loop_that_runs_orders_gets_slices_and_is_told_what_is_left(caplog):
    with caplog.at_level("WARNING", logger="evenload"):
        chain = of_a_loop(ASKS, whole=False)
    assert caplog.text.count("plugins.packing.max_delay_steps=3 has no effect") == 1
    assert chain.plan(as_lengths([65, 3])).cut == {0}
    caplog.clear()
    of_a_loop({})
    assert not caplog.text, "nothing is told where nothing is asked"


@pytest.mark.parametrize(
    ("ep", "why"), [(1, "as every rank has all experts: parallel.ep is 1"), (0, "as the model has no experts"), (2, "")]
)
def test_a_planner_of_layers_with_nothing_to_plan_is_told_of_once(ep, why, caplog):
    model = {"family": "mixtral", "moe": {"num_experts": 4, "topk": 2}} if ep else {}
    plugins = {"packing": {"max_tokens": 300}, "moe": {"mode": "reroute"}}
    made = chain_of(plugins, model={"num_layers": 2, **model}, parallel={"dp": 2, "ep": ep or 1})
    plan = made.plan(as_lengths([200, 100, 50]))
    notes = [note for note in plan.notes if note.startswith(NO_EFFECT)]
    assert notes == ([f"{NO_EFFECT}plugins.moe, {why}"] if why else [])
    assert made.layers.need_loads == (not why)
    warned = set()
    with caplog.at_level("WARNING", "evenload"):
        for _ in range(2):
            warn_once(plan, warned)
    assert [record.getMessage() for record in caplog.records] == notes


@pytest.mark.parametrize(("asked", "count"), [({"trees": True}, 1), ({"trees": False}, 0), ({}, 0)], ids=str)
def test_trees_without_effect_are_named_where_a_recipe_asks_for_them(asked, count, caplog):
    recipe = parse({"plugins": {"packing": {"enabled": True, "max_tokens": 64, **asked}}})
    warn_of_no_trees(recipe, "no rows begin alike")
    assert caplog.text.count("plugins.packing.trees has no effect in the first step: no rows begin alike") == count
