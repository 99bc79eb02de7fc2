"""The independent checker refuses what the laws refuse: lawful plans written by hand, a table of what breaks them."""

import copy
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from evenload.api import load_plugins
from evenload.core.errors import PlanError
from evenload.core.laws import check
from evenload.core.plan_json import read_step
from evenload.core.planning.chain import PlanChain
from evenload.core.recipe.recipe import parse

from . import checker

load_plugins()
Plan = dict[str, Any]


def _ops(text):
    return [[word[0], int(word[1:])] for word in text.split()]


def plan(lengths, ranks, cap, *micro_batches, order="", **rest):
    """A step of plan.json. Micro-batches are (slices, ranks) or with further fields; an order is one text a stage."""
    ops = [_ops(row) for row in order.split(";")] if order else []
    rows = [{"slices": [list(s) for s in slices], "ranks": on, **dict(*more)} for slices, on, *more in micro_batches]
    said = {"lengths": lengths, "num_ranks": ranks, "max_tokens": cap, "micro_batches": rows, "order": ops}
    return {"backward": [], "replayed": [], "recompute": [], "offload": [], **said, **rest}


def recipe(dp, cap, pp=1, heads=4, **more):
    model = {"num_layers": 4, "num_attention_heads": heads, "hidden_size": 256}
    plugin = {"enabled": True, "max_tokens": cap, "block_tokens": 1}
    return {"model": model, "parallel": {"dp": dp, "pp": pp}, "plugins": {"packing": plugin}, **more}


ZERO_3 = {"trainer": "deepspeed", "deepspeed": {"zero_stage": 3}}
RING, HEADS = {"engine": "ring"}, {"engine": "all_to_all"}
PLANS = {
    "host": (  # padded, in the order of the host
        recipe(2, 20, 2),
        plan([10, 8, 6], 2, 20, ([(0, 0, 10), (1, 0, 8)], [0], {"pad_to": 10}), ([(2, 0, 6)], [1])),
    ),
    "stages": (  # a chain of two slices on rank 0, weight gradients apart, some layers again
        recipe(2, 20, 2),
        plan(
            [30, 12, 8],
            2,
            20,
            ([(0, 0, 18)], [0]),
            ([(0, 18, 30), (2, 0, 8)], [0]),
            ([(1, 0, 12)], [1]),
            order="F0 F1 F2 B1 W1 B2 B0 W0;F0 F2 F1 B1 B2 B0 W0",
            recompute=[[1, 0, 2], [0, 2, 0]],
            offload=[0.0, 0.5, 1.0],
        ),
    ),
    "two stages a device": (  # of a V of four, one rank each
        recipe(1, 20, 2) | {"plugins": {"pipeline": {"enabled": True, "max_tokens": 20, "v_shape": True}}},
        plan([9, 6], 1, 20, ([(0, 0, 9)], [0]), ([(1, 0, 6)], [0]), order=";".join(["F0 F1 B0 W0 B1"] * 4))
        | {"merge": [[0, 0, 3, 3, 3, 3, 3, 0, 0, 0], [1, 2, 1, 2, 2, 2, 1, 1, 2, 1]]},
    ),
    "regrouped": (  # the backward groups slices anew
        recipe(2, 20),
        plan(
            [24, 9, 7],
            2,
            20,
            ([(0, 0, 12)], [0]),
            ([(0, 12, 24), (1, 0, 6)], [0]),
            ([(1, 6, 9)], [0]),
            ([(2, 0, 7)], [1]),
            order="F0 F1 F2 F3 B0 B1 B2 B3",
            backward=[
                {"slices": [[0, 20, 24], [1, 0, 9]], "ranks": [0]},
                {"slices": [[0, 4, 20]], "ranks": [0]},
                {"slices": [[0, 0, 4]], "ranks": [0]},
                {"slices": [[2, 0, 7]], "ranks": [1]},
            ],
            replayed=[0, 1, 2],
        ),
    ),
    "ring": (  # a ring that grows from slice to slice; others at home on some of its ranks
        recipe(4, 14),
        plan(
            [40, 16, 5],
            4,
            14,
            ([(0, 0, 16)], [0, 1], RING),
            ([(0, 16, 40), (1, 0, 16)], [0, 1, 2, 3], {**RING, "homes": [[0, 1, 2, 3], [2, 3]]}),
            ([(2, 0, 5)], [3]),
            order="F0 F1 F2 B1 B0 B2",
        ),
    ),
    "heads": (  # heads are shared: by all, and inside groups of a ring
        recipe(4, 20, heads=2),
        plan(
            [40, 64, 9],
            4,
            20,
            ([(0, 0, 20)], [0, 1], HEADS),
            ([(0, 20, 40)], [0, 1], HEADS),
            ([(1, 0, 64)], [0, 1, 2, 3], {"engine": "hybrid", "inner": 2}),
            ([(2, 0, 9)], [2]),
            order="F0 F1 F2 F3 B3 B1 B0 B2",
        ),
    ),
    "moved": (  # tokens of single homes are moved until all ranks have as many
        recipe(4, 12),
        plan([30, 8], 4, 12, ([(0, 0, 30), (1, 0, 8)], [0, 1, 2, 3], {**RING, "homes": [[0, 1], [2]], "remap": True})),
    ),
    "in step": (  # ZeRO 3: the k-th pass of every rank is of one kind
        recipe(2, 20, **ZERO_3),
        plan(
            [30, 8, 16],
            2,
            20,
            ([(0, 0, 15)], [0]),
            ([(1, 0, 8)], [1]),
            ([(0, 15, 30)], [0]),
            ([], [1]),
            ([(2, 0, 16)], [0, 1], RING),
            order="F0 F1 F2 F3 F4 B4 B2 B1 B0 B3",
        ),
    ),
}


Change = Callable[[Plan], Any]


def _field(number, **fields):
    return lambda p: p["micro_batches"][number].update(fields)


def _slices(number, *slices):
    return _field(number, slices=list(slices))


def _order(stage, text):
    return lambda p: p["order"].__setitem__(stage, _ops(text))


def _set(**fields):
    return lambda p: p.update(fields)


def _backward(number, **fields):
    return lambda p: p["backward"][number].update(fields)


def _swap(name, a, b):
    def change(p):
        p[name][a], p[name][b] = p[name][b], p[name][a]

    return change


MUTATIONS = {
    "host": {
        "a sequence is not there": ("F of sequence 2 ends", lambda p: p["micro_batches"].pop()),
        "tokens behind the end": ("F1 has slice", _slices(1, [2, 0, 7])),
        "a sequence that is not in the batch": ("F1 has slice", _slices(1, [3, 0, 6])),
        "a sequence of no tokens": ("a sequence without tokens", _set(lengths=[10, 8, 6, 0])),
        "a rank that does not exist": ("F1 has ranks", _field(1, ranks=[2])),
        "no rank at all": ("F1 has ranks", _field(1, ranks=[])),
        "over the cap by padding": ("F0 holds 22 of 20", _field(0, pad_to=11)),
        "padded to less than it holds": ("F0 is padded to less", _field(0, pad_to=9)),
        "replays in the order of the host": ("the host's own order", _set(replayed=[0])),
    },
    "stages": {
        "tokens are missing": ("F of sequence 0 goes on", _slices(0, [0, 0, 17])),
        "tokens are planned twice": ("F of sequence 0 goes on", _slices(0, [0, 0, 19])),
        "a slice without tokens": ("F2 has slice", _slices(2, [1, 0, 12], [1, 12, 12])),
        "over the cap": ("F2 holds 21 of 20", _set(lengths=[30, 21, 8]), _slices(2, [1, 0, 21])),
        "launched out of order": ("F0 launches sequence 0", _swap("micro_batches", 0, 1)),
        "two slices of one sequence": (
            "F1 two of a chain",
            _set(lengths=[30, 12]),
            _slices(1, [0, 18, 24], [0, 24, 30]),
        ),
        "away from its prefix": ("F1 leaves the prefix", _field(1, ranks=[1])),
        "a chain in the order of the host": ("the host's own order", _set(order=[], offload=[], recompute=[])),
        "another number of stages": ("an order of 1 stages", lambda p: p["order"].pop()),
        "a pass is missing": ("stage 1 lacks some B", _order(1, "F0 F2 F1 B1 B2")),
        "a pass twice": ("stage 1 runs a pass twice", _order(1, "F0 F2 F1 B1 B2 B0 B0")),
        "a pass that is not there": ("stage 1 lacks some F", _order(1, "F0 F2 F1 B1 B2 B0 F3")),
        "backward before forward": ("B2 at stage 1 comes before", _order(1, "F0 F1 B1 B2 F2 B0")),
        "a slice before its prefix": ("has not the prefix", *(_order(s, "F1 F0 F2 B1 B2 B0") for s in (0, 1))),
        "a prefix that is freed": ("is not the last", *(_order(s, "F0 F1 F2 B0 B1 B2") for s in (0, 1))),
        "a backward before the last forward": (
            "B0 at stage 1 comes before a forward",
            *(_order(s, "F0 F2 B0 F1 B1 B2") for s in (0, 1)),
        ),
        "stages in unlike orders": (
            "takes what another micro-batch sent",
            _set(lengths=[18, 12, 8]),
            _slices(0, [0, 0, 18]),
            _slices(1, [2, 0, 8]),
            _order(1, "F1 F0 F2 B1 B2 B0"),
        ),
        "weight gradients before their backward": ("W1 at stage 0 comes", _order(0, "F0 F1 F2 W1 B1 B2 B0")),
        "weight gradients twice": ("stage 0 runs a pass twice", _order(0, "F0 F1 F2 B1 W1 W1 B2 B0")),
        "weight gradients of nothing": ("no such pass", _order(0, "F0 F1 F2 B1 B2 B0 W3")),
        "stages that wait for each other": (
            "a deadlock",
            _set(lengths=[18, 12, 8]),
            _slices(0, [0, 0, 18]),
            _slices(1, [2, 0, 8]),
            _order(0, "F0 B0 F1 B1 F2 B2"),
            _order(1, "F0 F1 B0 B1 F2 B2"),
        ),
        "layers of other stages": ("recompute of other passes", _set(recompute=[[0, 0, 0]])),
        "layers of other passes": ("recompute of other passes", _set(recompute=[[0, 0], [0, 0]])),
        "layers that are not there": ("layers that are not there", _set(recompute=[[3, 0, 0], [0, 0, 0]])),
        "offload of other passes": ("offload of other passes", _set(offload=[0.0])),
        "offload of more than there is": ("offloads more", _set(offload=[0.0, 0.5, 1.5])),
        "a merge of no V": ("passes of other devices", _set(merge=[[0], [1]])),
    },
    "ring": {
        "a rank twice": ("F0 has ranks", _field(0, ranks=[0, 0])),
        "over the cap on one of its ranks": ("F1 holds 22 of 14", _field(1, homes=[[0, 1, 2, 3], [2]])),
        "over the cap on all its ranks": (
            "F1 holds 20 of 14",
            _set(lengths=[64, 16, 5]),
            _slices(1, [0, 16, 64], [1, 0, 16]),
        ),
        "shared and padded": ("F0 is shared and padded", _field(0, pad_to=24)),
        "an engine that does not exist": ("F0 has engine tree", _field(0, engine="tree")),
        "a slice without a home": ("another number of homes", _field(1, homes=[[0, 1, 2, 3]])),
        "a home elsewhere": ("F0 has home", _field(0, homes=[[0, 2]])),
        "a home without ranks": ("F1 has home", _field(1, homes=[[0, 1, 2, 3], []])),
        "ranks that are nobody's home": ("nobody's home", _field(2, ranks=[2, 3], homes=[[3]], **RING)),
        "a rank without a token": (
            "F2 leaves a rank without a token",
            _set(lengths=[40, 16, 2]),
            _field(2, slices=[[2, 0, 2]], ranks=[0, 1, 2, 3], **RING),
        ),
        "a rank without a token of a slice": (
            "F1 has ranks that attend for nothing of a slice",
            _set(lengths=[30, 16, 5]),
            _slices(0, [0, 0, 28]),
            _slices(1, [0, 28, 30], [1, 0, 16]),
        ),
        "a ring that shrinks": (
            "F1 leaves the prefix",
            _field(0, ranks=[0, 1, 2, 3]),
            _field(1, ranks=[0, 1, 2], homes=[[0, 1, 2]] * 2),
        ),
    },
    "moved": {
        "over the cap where tokens move": (
            "F0 holds 13 of 12",
            _set(lengths=[30, 20]),
            _slices(0, [0, 0, 30], [1, 0, 20]),
        )
    },
    "heads": {
        "more ranks share heads than there are": (
            "F2 has 4 ranks for 2 heads",
            _field(2, engine="all_to_all", inner=0),
        ),
        "groups of heads under another engine": ("F0 has inner 2", _field(0, inner=2)),
        "hybrid without groups": ("F2 has inner 0", _field(2, inner=0)),
        "hybrid with one group": ("F2 has inner 4", _field(2, inner=4)),
        "groups that divide no home": ("F2 has 4 ranks in groups of 3", _field(2, inner=3)),
        "heads that change places": ("F1 leaves the prefix", _field(1, ranks=[1, 0])),
    },
    "regrouped": {
        "replays of nothing": ("replays [0, 1, 2, 4] of 4", _set(replayed=[0, 1, 2, 4])),
        "replays twice": ("replays [0, 1, 1, 2] of 4", _set(replayed=[0, 1, 1, 2])),
        "neither kept nor replayed": ("B1 equals no forward", _set(replayed=[0, 2])),
        "layers again in groups of their own": ("layers of other", _set(recompute=[[1, 0, 0, 0]])),
        "tokens are missing backward": ("B of sequence 1 goes on", _backward(0, slices=[[0, 20, 24], [1, 1, 9]])),
        "backward on another rank": (
            "B3 leaves the ranks of sequence 2",
            _backward(3, ranks=[0]),
            _set(replayed=[0, 1, 2, 3]),
        ),
        "backward slices ascend": ("B0 launches sequence 0", _swap("backward", 0, 1)),
        "a backward before its forward": ("comes before a forward of sequence 1", _order(0, "F0 F1 F3 B0 F2 B1 B2 B3")),
        "over the cap backward": (
            "B0 holds 21 of 20",
            _backward(0, slices=[[0, 12, 24], [1, 0, 9]]),
            _backward(1, slices=[[0, 4, 12]]),
        ),
    },
    "in step": {
        "unequal counts": (
            "unlike passes",
            _set(lengths=[30, 8, 8]),
            _field(4, slices=[[2, 0, 8]], ranks=[0], engine=""),
        ),
        "unlike passes": ("unlike passes", _order(0, "F0 F2 F1 B1 F3 F4 B4 B2 B0 B3")),
        "a meeting at unlike places": ("meet at unlike places", _order(0, "F0 F1 F2 F4 F3 B4 B2 B1 B0 B3")),
        "weight gradients in step": ("splits its backward", _order(0, "F0 F1 F2 F3 F4 B4 B2 B1 B0 B3 W0 W1")),
    },
    "two stages a device": {
        "a device that takes a pass twice": (
            "does not run what its stages do",
            _set(merge=[[0, 0, 3, 3, 3, 3, 3, 3, 0, 0], [1, 2, 1, 2, 2, 2, 1, 1, 2, 1]]),
        ),
        "devices that wait in a circle": (
            "a deadlock",
            _set(merge=[[0, 3, 3, 0, 3, 3, 3, 0, 0, 0], [1, 1, 2, 2, 2, 2, 1, 1, 2, 1]]),
        ),
        "no merge": ("a merge of 0 devices", _set(merge=[])),
    },
}
"""By plan: what breaks it, what the checker says, and the changes."""


def limits_of(words):
    parsed = parse(words)
    return PlanChain.of_recipe(parsed, parsed.layout()).caps


@pytest.mark.parametrize("name", PLANS)
def test_both_accept_what_is_lawful(name):
    words, step = PLANS[name]
    check(read_step(step, limits_of(words)))
    checker.refuse(step, checker.facts_of(words))


@pytest.mark.parametrize(("name", "mutation"), [(name, one) for name, every in MUTATIONS.items() for one in every])
def test_both_refuse_what_is_broken(name, mutation):
    words, lawful = PLANS[name]
    fault, *changes = MUTATIONS[name][mutation]
    step = copy.deepcopy(lawful)
    for change in changes:
        change(step)
    with pytest.raises(checker.BrokenError, match=re.escape(fault)):
        checker.refuse(step, checker.facts_of(words))
    with pytest.raises(PlanError):
        check(read_step(step, limits_of(words)))


def test_a_plan_that_hides_its_cap_is_refused():
    """A plan says under which cap it stands; only the recipe knows what was promised."""
    words, lawful = PLANS["host"]
    step = copy.deepcopy(lawful) | {"max_tokens": 100, "lengths": [10, 8, 60]}
    step["micro_batches"][1]["slices"] = [[2, 0, 60]]
    check(read_step(step, replace(limits_of(words), max_tokens=100)))
    with pytest.raises(checker.BrokenError, match="holds 60 of 20"):
        checker.refuse(step, checker.facts_of(words))


def test_what_is_kept_is_held_to_the_cap_of_memory():
    words, step = PLANS["stages"]
    step = step | {"offload": []}
    facts = replace(checker.facts_of(words), layer_bytes=10.0, input_bytes=1.0)
    # Rank 0 of stage 0 keeps 18 tokens of one layer and 20 of two, and 18 of the input of a layer.
    checker.refuse(step, replace(facts, activation_bytes=18 * 11 + 20 * 20))
    with pytest.raises(checker.BrokenError, match="rank 0 of stage 0 holds"):
        checker.refuse(step, replace(facts, activation_bytes=18 * 11 + 20 * 20 - 1))


def test_caps_are_the_least_of_the_enabled_plugins():
    sections = {
        "packing": {"enabled": True, "max_tokens": 300},
        "mesh": {"enabled": True},
        "pipeline": {"max_tokens": 9},
    }
    assert checker.facts_of({"plugins": sections}).max_tokens == 300
    sections["pipeline"] |= {"enabled": True, "activation_gib": 2.0}
    assert checker.facts_of({"plugins": sections}).max_tokens == 9
    assert checker.facts_of({"plugins": sections}).activation_bytes == 2.0**31
    assert checker.facts_of({"plugins": {"pipeline": {"enabled": True}}}).max_tokens == 16384
    assert checker.facts_of({"plugins": {"mesh": {"enabled": True}}}).max_tokens == float("inf")
