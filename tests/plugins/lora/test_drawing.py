"""Batches of several tenants: each draws what it would draw alone, whoever comes, ends or is put back meanwhile."""

from types import SimpleNamespace

import numpy as np
from evenload.core.planning.chain import PlanChain
from evenload.core.recipe.recipe import parse
from evenload.data.samples.order import BatchSize
from evenload.plugins.lora.state.drawing import TenantDrawing, own_draws, union
from evenload.training.drawing import Drawing
from hypothesis import given
from hypothesis import strategies as st

CHAIN = PlanChain.of_recipe(parse({"parallel": {"dp": 2}}), parse({"parallel": {"dp": 2}}).layout())
SIZES = {1: 2, 2: 3, 3: 5}
STEPS = {1: 7, 2: 5, 3: 9}


def lengths_of(number):
    return np.arange(2, 2 + 11 * number, dtype=np.int64)


def targets_of(number):
    """The first tenant has targets everywhere, those of the others lie here and there, and some samples have none."""
    return None if number == 1 else np.arange(len(lengths_of(number))) % (number + 1)


def drawing_of(number):
    size, targets = BatchSize(SIZES[number]), targets_of(number)
    return Drawing(None, lengths_of(number), size, CHAIN, seed=number, targets=targets)


def tenant(number):
    return SimpleNamespace(number=number, step=0, until=STEPS[number], drawing=drawing_of(number))


def alone(number, steps):
    drawing, batches = drawing_of(number), []
    while len(batches) < steps:
        if len(samples := drawing().samples):
            batches.append(samples.tolist())
    return batches


@given(st.lists(st.sampled_from(["step", "step", "ahead", "put_back", "come", "leave"]), max_size=40))
def test_whoever_comes_and_goes_each_trains_on_what_it_would_alone(events):
    tenants = {number: tenant(number) for number in SIZES}
    here, seen = [tenants[1]], {number: [] for number in SIZES}
    union, ahead = TenantDrawing(lambda: here), []
    for event in events:
        if event == "step" and (ahead or union.more):
            draw = ahead.pop(0) if ahead else union()
            union.trained()
            for number, own in own_draws(draw).items():
                seen[number].append(own.samples.tolist())
                tenants[number].step += 1
        elif event == "ahead" and union.more and len(ahead) < 2:
            ahead.append(union())
        elif event != "step":
            union.put_back()
            ahead.clear()
            if event == "come" and len(here) < len(tenants):
                here.append(next(one for one in tenants.values() if one not in here))
            elif event == "leave" and len(here) > 1:
                here.pop(0)
    for number, batches in seen.items():
        assert batches == alone(number, len(batches))
        assert len(batches) <= STEPS[number]


def test_a_batch_says_whose_each_sequence_is_and_which_targets_it_has():
    tenants = [tenant(1), tenant(3)]
    draw = TenantDrawing(lambda: tenants)()
    first, third = own_draws(draw)[1], own_draws(draw)[3]
    assert draw.tenants.tolist() == [1] * len(first.samples) + [3] * len(third.samples)
    assert draw.lengths.tolist() == [*first.lengths, *third.lengths]
    assert draw.targets.tolist() == [*(first.lengths - 1), *targets_of(3)[third.samples]]
    assert draw.targets.min() > 0
    assert draw.without_target == third.without_target


def test_a_union_holds_the_weights_of_each_tenant():
    """The data of the second give their targets weights, the draws of the third have one, the first has neither."""
    draws = {number: drawing_of(number)() for number in (1, 2, 3)}
    sums = np.linspace(-1, 2, len(draws[2].samples))
    draws = {1: draws[1], 2: draws[2]._replace(own_sums=sums), 3: draws[3]._replace(weight=0.25)}
    wanted = [*(draws[1].lengths - 1), *sums, *(0.25 * targets_of(3)[draws[3].samples])]
    assert union(draws).weight_sums.tolist() == wanted
    assert union({1: draws[1]}).weight_sums is None


def test_batches_that_are_put_back_come_again_from_the_oldest():
    one = tenant(2)
    union = TenantDrawing(lambda: [one])
    ahead = [union().samples.tolist() for _ in range(3)]
    union.put_back()
    assert union.num_open == 0
    assert [union().samples.tolist() for _ in range(3)] == ahead == alone(2, 3)
