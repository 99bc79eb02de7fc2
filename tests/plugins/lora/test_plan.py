"""Tenants on their way through the planners: none is lost, and they change the order of slices alone."""

from dataclasses import replace

import evenload
import pytest
from evenload.core.errors import EvenloadError, PlanError
from evenload.core.laws import check
from evenload.core.plan.step_plan import MicroBatch, Slice, StepPlan, as_lengths
from evenload.core.plan_json import read_step, step_json
from evenload.core.planning.forward_only import forward_only
from evenload.core.planning.judge import judge
from evenload.core.recipe.recipe import parse
from hypothesis import given, settings
from hypothesis import strategies as st

from ..chains import chain_of

CAP = 512
CHAINS = {
    "stock": ({}, {}),
    "packing": ({"packing": {"max_tokens": CAP}}, {}),
    "replays": ({"packing": {"max_tokens": CAP, "activation_gib": 0.1}}, {}),
    "mesh": ({"mesh": {"max_tokens": CAP}}, {}),
    "pipeline": ({"pipeline": {"max_tokens": CAP}}, {"pp": 2}),
    "packing of groups": ({"packing": {"max_tokens": CAP}}, {"cp": 2}),
}
BATCHES = st.lists(st.tuples(st.integers(2, 3 * CAP), st.sampled_from([3, 7, 8, 20])), min_size=1, max_size=24)


def chain(name, lora=True):
    plugins, parallel = CHAINS[name]
    enabled = {plugin: {"enabled": True, **section} for plugin, section in plugins.items()}
    if lora and name != "packing of groups":
        enabled["lora"] = {"enabled": True}
    return chain_of({"parallel": {"dp": 2, **parallel}, "cluster": "h100", "plugins": enabled})


def answers(of, lengths, tenants):
    """All plans that the chain has of a batch."""
    yield of.plan(lengths, tenants)
    yield of.stock(lengths, tenants)
    for name in of.rivals.of_batch(lengths, "shown"):
        yield of.baseline(name, lengths, tenants)
    for name in of.rivals.rules:
        try:
            yield of.rule(name, lengths, tenants)
        except EvenloadError:
            continue


def by_tenant(micro_batch, tenants):
    of_slices = [tenants[s.sequence] for s in micro_batch.slices]
    return of_slices == sorted(of_slices)


def unordered(micro_batch):
    """What a micro-batch is but for the order of its slices."""
    pairs = zip(micro_batch.slices, micro_batch.cp_groups or micro_batch.slices, strict=True)
    return sorted(pairs), micro_batch._replace(slices=(), cp_groups=())


@pytest.mark.slow
@pytest.mark.parametrize("name", CHAINS)
@settings(max_examples=settings.default.max_examples // 2)
@given(batch=BATCHES)
def test_no_plan_loses_a_tenant_and_they_change_the_order_of_slices_alone(name, batch):
    of = chain(name)
    lengths, tenants = (as_lengths(column) for column in zip(*batch, strict=True))
    for owned, bare in zip(answers(of, lengths, tenants), answers(of, lengths, None), strict=True):
        assert owned.tenants.tolist() == tenants.tolist()
        assert not len(bare.tenants)
        for of_owned, of_bare in ((owned.micro_batches, bare.micro_batches), (owned.backward, bare.backward)):
            assert [unordered(m) for m in of_owned] == [unordered(m) for m in of_bare]
            if of.of_slices:
                assert all(by_tenant(m, tenants.tolist()) for m in of_owned)
        assert owned.revised(micro_batches=bare.micro_batches, backward=bare.backward, tenants=[]).digest == bare.digest
        assert read_step(step_json(owned)).digest == owned.digest
        assert judge(owned, of.context).step_s == pytest.approx(judge(bare, of.context).step_s)


def test_backward_groups_of_tenants_are_in_order_too():
    """Sequence 0 is one slice forward, in two groups backward; sequences 1 and 2 are of another tenant than 0."""
    of = chain("packing")
    whole, first, second = Slice(0, 0, 12), Slice(0, 0, 8), Slice(0, 8, 12)
    others = Slice(1, 0, 5), Slice(2, 0, 5)
    plan = StepPlan(
        [12, 5, 5],
        (MicroBatch((others[0], whole, others[1]), (0,)), MicroBatch((), (1,))),
        of.limits,
        backward=(MicroBatch((others[0], second, others[1]), (0,)), MicroBatch((first,), (0,)), MicroBatch((), (1,))),
    )
    owned = of.owned(plan, as_lengths([4, 9, 2]))
    assert owned.tenants.tolist() == [4, 9, 2]
    assert owned.micro_batches[0].slices == (others[1], whole, others[0])
    assert owned.backward[0].slices == (others[1], second, others[0])
    assert owned.backward[1:] == plan.backward[1:]


def test_plans_that_run_forward_only_have_tenants():
    of = forward_only(chain("packing"))
    plan = of.plan(as_lengths([300, 200, 100, 40, 30]), as_lengths([2, 1, 2, 1, 2]))
    assert plan.tenants.tolist() == [2, 1, 2, 1, 2]
    assert all(by_tenant(m, plan.tenants.tolist()) for m in plan.micro_batches)


def test_tenants_are_in_the_digest_and_those_of_another_batch_are_refused():
    of, lengths = chain("packing"), as_lengths([100, 100])
    assert of.plan(lengths, as_lengths([1, 2])).digest != of.plan(lengths, as_lengths([1, 1])).digest
    with pytest.raises(PlanError, match="not one tenant for each sequence"):
        of.plan(lengths, as_lengths([1]))


def test_a_planner_of_slices_that_breaks_a_law_is_noticed():
    of = chain("packing")
    ((plugin, config),) = of.of_slices
    drops = replace(plugin, plan=lambda plan, *_: plan.revised(micro_batches=plan.micro_batches[1:]))
    with pytest.raises(PlanError, match="tokens are missing"):
        replace(of, of_slices=((drops, config),)).plan(as_lengths([500, 500, 500]), as_lengths([1, 1, 2]))


def test_tenants_of_a_plan_from_python():
    recipe = parse({"plugins": {"lora": {"enabled": True}, "packing": {"enabled": True}}, "parallel": {"dp": 2}})
    assert evenload.plan(recipe, [30, 20, 10], tenants=[2, 2, 1]).tenants.tolist() == [2, 2, 1]
    with pytest.raises(EvenloadError, match="not one tenant for each sequence"):
        evenload.plan(recipe, [30, 20, 10], tenants=[2])


def test_slices_of_one_tenant_may_lie_anywhere():
    plan = chain("packing").plan(as_lengths([100, 90, 80, 70]), as_lengths([1, 2, 1, 2]))
    reversed_ = tuple(m._replace(slices=m.slices[::-1]) for m in plan.micro_batches)
    assert check(plan.revised(micro_batches=reversed_))


def test_ranks_that_share_a_slice_go_with_it():
    """Of a shared micro-batch each slice has ranks of its own, and says so by its place."""
    of = chain("mesh")
    slices, groups = (Slice(0, 0, 8), Slice(1, 0, 4), Slice(2, 0, 6)), ((0, 1), (0,), (1,))
    shared = MicroBatch(slices, (0, 1), cp_groups=groups)
    plan = StepPlan([8, 4, 6], (shared,), of.limits).revised(tenants=as_lengths([9, 4, 2]))
    ((plugin, config),) = of.of_slices
    (ordered,) = plugin.plan(plan, of.context, config).micro_batches
    assert (ordered.slices, ordered.cp_groups) == (slices[::-1], groups[::-1])
