"""Recipes of any settings, drawn: a plan keeps the laws, the independent checker and the recipe's caps, or is refused.

`make explore` draws thousands of them; `--hypothesis-show-statistics` counts what became of them.
"""

import json
import re
from dataclasses import replace

import numpy as np
import pytest
from evenload.api import load_plugins
from evenload.core.errors import EvenloadError
from evenload.core.experts.quotas import check_quotas
from evenload.core.laws import check
from evenload.core.plan.step_plan import as_lengths
from evenload.core.plan_json import step_json
from evenload.core.planning.chain import PlanChain
from evenload.core.planning.setting import Setting
from evenload.core.planning.trees import branches_of, plan_trees
from evenload.core.recipe.recipe import parse
from evenload.core.registry import layer_planner
from evenload.core.simulate.one_queue import send_turns
from hypothesis import event, given
from hypothesis import strategies as st

from . import checker, one_queue

load_plugins()
pytestmark = pytest.mark.timeout(7200)

ENGINES = ("ring", "all_gather", "all_to_all", "hybrid")
CLUSTERS = ("local", "a100", "a800", "h100", "h200", "flexsp-a100")
COSTS = ("auto", "auto", "cpu", "cpu-2-stages", "cpu-4-ranks", "verl-7b", "flexsp-gpt-7b-a100", "galvatron-llama2-7b")
LONGEST = 6000
"""Tokens of a drawn sequence at the most: what is tried is what settings do to each other, not size,"""
_PARTS, _CAPS = 40, 200
"""and how many caps it fills at the most, and a batch: what thousands of slices take to plan is not the question."""

HUGE = 10**30
CAPS = st.one_of(st.integers(1, 12), st.integers(1, 2 * LONGEST), st.sampled_from([64, 512, 4096, HUGE]))
BLOCKS = st.sampled_from([1, 2, 3, 4, 4, 4, 16, 128, HUGE])
GIB = st.one_of(
    st.none(), st.none(), st.floats(-8, -1).map(lambda exponent: 10.0**exponent), st.sampled_from([1e-12, 1e9])
)
KEYS = re.compile(r"plugins\.|model\.moe|parallel\.|max_tokens|activation_gib|parallelism")
SETTINGS = {
    "packing": {
        "max_tokens": CAPS,
        "slices": st.sampled_from(["auto", "even", "off"]),
        "block_tokens": BLOCKS,
        "asymmetric": st.booleans(),
        "activation_gib": GIB,
        "max_delay_steps": st.sampled_from([0, 1, HUGE]),
        "group_size": st.sampled_from([0] * 9 + [2]),
        "groups_in": st.sampled_from(["rank", "rank", "micro_batch"]),
        "equal_size": st.sampled_from([False] * 9 + [True]),
        "padded": st.sampled_from([False] * 4 + [True]),
        "round_tokens": st.sampled_from([1] * 4 + [8, 64]),
        "largest_first": st.sampled_from([False, False, True]),
        "trees": st.sampled_from([True, True, True, False]),
    },
    "mesh": {
        "max_tokens": st.one_of(st.none(), CAPS),
        "max_degree": st.one_of(st.integers(0, 9), st.just(HUGE)),
        "powers_of_two": st.booleans(),
        "engines": st.lists(st.sampled_from(ENGINES), min_size=1, max_size=4, unique=True),
        "remap": st.sampled_from(["auto", "off"]),
        "routed": st.sampled_from(["auto", "off"]),
        "offload": st.sampled_from(["auto", "off"]),
        "effort": st.sampled_from([0, 1, 2, HUGE]),
    },
    "pipeline": {
        "max_tokens": CAPS,
        "chunks": st.sampled_from([1, 2, 3, 8, 64, HUGE]),
        "block_tokens": BLOCKS,
        "activation_gib": GIB,
        "recompute": st.sampled_from(["auto", "off"]),
        "split_backward": st.sampled_from(["auto", "on", "off"]),
        "v_shape": st.sampled_from([False, True]),
        "max_extra": st.sampled_from([0, 1, 2, HUGE]),
        "solver_ms": st.sampled_from([0, 0, 1, 100, HUGE]),
    },
    "moe": {
        "mode": st.sampled_from(["auto", "clone", "reroute", "layout"]),
        "slots": st.one_of(st.none(), st.integers(0, 3), st.just(HUGE)),
        "tolerance": st.one_of(st.none(), st.floats(1, 3), st.just(1e9)),
        "once_a_node": st.sampled_from([None, True, False]),
        "owners": st.sampled_from(["home", "home", "sharded"]),
    },
    "lora": {},
}
"""Every setting of every plugin, its least and largest values among them."""


@pytest.mark.every_plugin
def test_every_setting_is_drawn():
    sections = parse({}).plugins
    for name, drawn in SETTINGS.items():
        without_effect = {"polish_nodes"}  # accepted, as recipes may still name it
        without_effect |= {"tenants", "out", "root", "wait"}  # which say nothing of plans
        settings = set(type(getattr(sections, name)).model_fields) - without_effect - {"enabled"}
        assert set(drawn) == settings, name


PLUGINS = [["packing"], ["mesh"], ["pipeline"], ["packing", "mesh"], ["packing", "pipeline"]]
PLUGINS += [["mesh", "pipeline"], ["packing", "mesh", "pipeline"]]
BESIDE = [[], [], ["moe"], ["lora"]]
"""Of any of these."""


@st.composite
def lengths_of_a_batch(draw, cap):
    """Lengths of all shapes; ``cap`` tokens hold at least a small part of the longest."""
    longest = draw(st.integers(1, min(LONGEST, int(_PARTS * min(cap, LONGEST)))))
    count = draw(st.integers(1, min(24, max(1, int(_CAPS * min(cap, LONGEST)) // longest))))
    any_length = st.integers(1, longest)
    shapes = {
        "uniform": st.lists(any_length, min_size=count, max_size=count),
        "equal": st.just([longest] * count),
        "giant": st.lists(st.integers(1, max(1, longest // 50)), min_size=count, max_size=count).map(
            lambda row: [*row, longest]
        ),
        "ones": st.just([1] * count),
        "powers": st.lists(
            st.integers(0, longest.bit_length() - 1).map(lambda k: 1 << k), min_size=count, max_size=count
        ),
        "two": st.lists(st.sampled_from([longest, max(1, longest // 100)]), min_size=count, max_size=count),
    }
    return draw(shapes[draw(st.sampled_from(sorted(shapes)))])


@st.composite
def cases(draw):
    """A recipe, lengths of a batch, and in whose loop it runs: ours, or one that keeps samples whole or cuts them."""
    recipe = draw(recipes())
    lengths = draw(lengths_of_a_batch(checker.facts_of(recipe).max_tokens))
    return recipe, lengths, draw(st.sampled_from(["", "", "", "whole", "cut"]))


@st.composite
def recipes(draw):
    deepspeed = draw(st.booleans())
    names = [*draw(st.sampled_from([[], *PLUGINS, *PLUGINS])), *draw(st.sampled_from(BESIDE))]
    pp = draw(st.sampled_from([1, 1, 2, 4]))
    tp = 1 if deepspeed else draw(st.sampled_from([1, 1, 2]))
    cp = 1 if "mesh" in names or "lora" in names or deepspeed else draw(st.sampled_from([1, 1, 1, 2, 3]))
    dp = draw(st.one_of(st.integers(1, 4), st.integers(1, 12)))
    heads = draw(st.sampled_from([1, 2, 4, 6])) * tp
    plugins = {}
    for name in names:
        every = SETTINGS[name]
        plugins[name] = {"enabled": True, **{key: draw(every[key]) for key in every if draw(st.booleans())}}
    ep = draw(st.sampled_from([1, 1, 2, 3])) if draw(st.booleans()) else 1
    ep = {"moe": draw(st.sampled_from([1, 2, 2, 3, 4])), "lora": 1}.get(names[-1] if names else "", ep)
    experts = {
        "family": "mixtral",
        "moe": {"num_experts": 2 * ep, "every": 1 if deepspeed else draw(st.sampled_from([1, 2]))},
    }
    dp = dp * ep if ep > 1 and dp * ep <= 12 else dp
    return {
        "trainer": "deepspeed" if deepspeed else "megatron",
        "model": {
            "num_layers": pp * draw(st.sampled_from([1, 2, 4])),
            "hidden_size": 64 * heads,
            "num_attention_heads": heads,
            "num_query_groups": draw(st.sampled_from([tp, heads])),
            "vocab_size": 256,
            **(experts if ep > 1 else {}),
        },
        "data": {"max_length": LONGEST},
        "parallel": {"tp": tp, "pp": pp, "cp": cp, "ep": ep, "dp": dp},
        "train": {
            "global_batch_size": 64,
            "micro_batch_size": draw(st.sampled_from([1, 1, 4])),
            "recompute": draw(st.booleans()),
            "dtype": "fp32" if deepspeed and pp > 1 else draw(st.sampled_from(["bf16", "fp32"])),
        },
        "megatron": {"overlap_grad_reduce": draw(st.booleans()), "distributed_optimizer": draw(st.booleans())},
        "deepspeed": {"zero_stage": draw(st.integers(0, 1 if pp > 1 else 3))},
        "cluster": draw(st.sampled_from(CLUSTERS)),
        "costs": draw(st.sampled_from(COSTS)),
        "plugins": plugins,
    }


def facts(recipe, chain):
    """What the recipe says, and what the machine says of bytes."""
    limits = chain.limits
    layers, memory = limits.layers_per_stage, limits.memory
    kept = memory.activation_bytes_per_token / layers
    if not memory.replay_bytes_per_token:  # else the recipe recomputes, and only inputs of layers are kept
        kept -= memory.cut_saves_bytes_per_token / layers
    least = min(kept, memory.input_bytes_per_token)
    return replace(
        checker.facts_of(recipe),
        whole=limits.whole_sequences,
        splits=limits.splits_backward,
        layer_bytes=kept,
        input_bytes=least,
    )


def accept(plan, recipe, chain):
    """The laws, the checker and the caps of the recipe hold; no rank stops where its device has one queue."""
    check(plan)
    if plan.limits.num_stages > 1:
        stops = one_queue.blocked(plan, one_queue.at_once)
        event(
            f"{plan.made_by}: {'would stop' if stops else 'would not stop'} in one queue if sends were issued at once"
        )
        assert not one_queue.blocked(plan, send_turns)
    checker.refuse(json.loads(json.dumps(step_json(plan))), facts(recipe, chain))


def accept_quotas(plan, chain, loads):
    """The planner of layers that a plan names keeps its laws, and the checker's, on the loads of every layer; so does
    its fallback."""
    policy, written = plan.experts, json.loads(json.dumps(step_json(plan))).get("experts")
    experts, size = chain.context.experts, chain.context.layout.ep
    if written is None or experts is None:
        return
    assert written["planner"] in ("clone", "reroute", "layout")
    for layer, loads_E in zip(experts.layers, loads, strict=True):
        parts = np.array([[int(load) * (rank + 1) % 97 for load in loads_E] for rank in range(size)], dtype=np.int64)
        known = policy.copies_of(layer)
        for counts_RE in (parts, parts * 0, parts * (np.arange(parts.shape[1]) == 0)):
            quotas_ER = check_quotas(layer_planner(policy.planner)(counts_RE, policy, known), counts_RE, policy, known)
            checker.refuse_quotas(quotas_ER.tolist(), counts_RE.tolist(), written, layer)
    event(f"moe: {policy.planner}, {'copies known' if any(map(any, policy.copies)) else 'no copies known'}")


def accept_tenants(plan, tenants):
    """Each sequence is of its tenant, and slices of a tenant stand together."""
    if tenants is None:
        return
    written = json.loads(json.dumps(step_json(plan)))
    assert written["tenants"] == tenants.tolist()
    for micro_batch in [*written["micro_batches"], *written["backward"]]:
        owners = [written["tenants"][sequence] for sequence, _, _ in micro_batch["slices"]]
        assert owners == sorted(owners)


def loads_of(chain, numbers):
    """Loads of all layers with experts, of which the last ones have most."""
    experts = chain.context.experts
    if experts is None:
        return ()
    every = range(experts.num_experts)
    return tuple(tuple(float(numbers[(e + 3 * layer) % len(numbers)] ** 4) for e in every) for layer in experts.layers)


def chain_of(recipe, loop):
    parsed = parse(recipe)
    layout = parsed.layout()
    if loop:
        return PlanChain.of_model(
            parsed, (at := Setting.of_recipe(parsed)).shape, layout, at.traits, warn=False, whole=loop == "whole"
        )
    return PlanChain.of_recipe(parsed, layout)


@given(cases(), st.lists(st.integers(0, 9), min_size=7, max_size=7))
def test_any_recipe_is_planned_under_its_caps_or_refused(case, numbers):
    recipe, lengths, loop = case
    names, batch = "+".join(sorted(recipe["plugins"])) or "stock", as_lengths(lengths)
    try:
        chain = chain_of(recipe, loop)
        loads = loads_of(chain, numbers)
        chain = chain.with_loads(loads) if chain.layers.need_loads else chain
        tenants = as_lengths([n * 7 % 4 for n in lengths]) if "lora" in recipe["plugins"] else None
        plan = chain.plan(batch, tenants)
    except EvenloadError as error:
        event(f"{names}: refused", error.what)
        refusal = str(error)
    else:
        event(f"{names}: planned")
        accept(plan, recipe, chain)
        accept_quotas(plan, chain, loads)
        accept_tenants(plan, tenants)
        refusal = "plugins."
    assert KEYS.search(refusal), "a refusal names what to change"


def attempt(make):
    """What is made; None where that is refused."""
    try:
        return make()
    except EvenloadError:
        return None


@given(cases())
def test_what_takes_over_keeps_the_caps_and_no_baseline_crashes(case):
    recipe, lengths, loop = case
    batch, chain = as_lengths(lengths), attempt(lambda: chain_of(recipe, loop))
    if chain is None:
        return
    for name in chain.rivals.rules:
        if (plan := attempt(lambda name=name: chain.rule(name, batch))) is not None:
            event(f"{name} can take over")
            accept(plan, recipe, chain)
    lies = {"enabled": True, "v_shape": True, "max_tokens": HUGE}  # where layers lie is no baseline's to choose
    uncapped = {**recipe, "plugins": {"pipeline": lies} if chain.limits.v_shape else {}}
    for name in chain.rivals.names:
        if (plan := attempt(lambda name=name: chain.baseline(name, batch))) is not None:
            event(f"{name} is lawful")
            accept(plan, uncapped, chain)


@given(cases(), st.lists(st.integers(0, 3), min_size=30, max_size=30))
def test_any_recipe_with_tenants_keeps_them_and_its_caps(case, numbers):
    drawn, lengths, _ = case
    drawn["plugins"].pop("moe", None)
    dense = {key: value for key, value in drawn["model"].items() if key not in ("family", "moe")}
    bare = {**drawn, "model": dense, "parallel": {**drawn["parallel"], "cp": 1, "ep": 1}}
    recipe = {**bare, "plugins": {**drawn["plugins"], "lora": {"enabled": True}}}
    batch, tenants = as_lengths(lengths), as_lengths(numbers[: len(lengths)])
    chain = attempt(lambda: chain_of(recipe, ""))
    plan = chain and attempt(lambda: chain.plan(batch, tenants))
    if plan is None:
        event("refused")
        return
    event("planned")
    accept(plan, bare, chain)
    accept_tenants(plan, tenants)


@given(cases(), st.data())
def test_any_recipe_plans_samples_that_begin_alike_under_its_caps_too(case, data):
    recipe, lengths, loop = case
    packing = recipe["plugins"].get("packing", {}) | {
        "enabled": True,
        "padded": False,
        "max_tokens": 2 * max(lengths) + 8,
    }
    others = {name: own for name, own in recipe["plugins"].items() if name in ("pipeline", "moe")}
    recipe = {**recipe, "parallel": {**recipe["parallel"], "cp": 1}, "plugins": {**others, "packing": packing}}
    try:
        chain, batch = chain_of(recipe, loop), as_lengths(lengths)
        groups = data.draw(st.lists(st.integers(0, 2), min_size=len(batch), max_size=len(batch)))
        shares = data.draw(st.lists(st.sampled_from([0.0, 0.5, 0.9, 1.0]), min_size=3, max_size=3))
        least = {group: min(n for n, own in zip(lengths, groups, strict=True) if own == group) for group in set(groups)}
        trunks = [int(shares[group] * (least[group] - 1)) for group in groups]
        branches = branches_of(chain, batch, groups, trunks)
        plan = plan_trees(chain, branches) if branches else None
    except EvenloadError as error:
        event(f"refused: {error.what}")
        return
    if plan is None:
        event("planned by rows")
        return
    event(f"{plan.made_by}: {'trunks' if plan.trunks.any() else 'no trunks'}")
    accept(plan, recipe, chain)
    assert plan.lengths.tolist() == batch.tolist()
