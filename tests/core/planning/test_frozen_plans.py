"""Plans of the shipped recipes, and of what recipes ask beside them, are those of an earlier version, byte for byte.

Frozen are of each recipe and batch the order in which baselines and rules are asked, the best plan after each stage,
the plan, and every baseline and rule. After a change that means other plans, write the digests anew, and see in
`git diff` whose they are:

    python tests/core/planning/test_frozen_plans.py
"""

import json
from contextlib import suppress
from dataclasses import replace
from functools import partial
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
from evenload.api import load_recipe
from evenload.core.errors import EvenloadError
from evenload.core.plan.step_plan import as_lengths
from evenload.core.planning.chain import PlanChain
from evenload.core.planning.forward_only import forward_only
from evenload.core.planning.judge import rivals_of
from evenload.core.planning.setting import RECIPES, Setting
from evenload.core.planning.stages import PlanStages
from evenload.core.recipe.adapter import Adapter

FROZEN = Path(__file__).with_name("frozen_plans.json")
NO_SOLVER = "plugins.pipeline.solver_ms=0"
"""Another version of the solver may find another plan that is as good."""
BESIDE = [
    "quickstart parallel.cp=2 plugins.packing.max_tokens=4096",
    "quickstart parallel.pp=2 plugins.packing.round_tokens=128 plugins.packing.largest_first=true",
    "quickstart plugins.packing.group_size=4",
    "quickstart plugins.packing.padded=true",
    "quickstart plugins.mesh.enabled=true plugins.packing.max_tokens=4096",
    "quickstart train.recompute=true plugins.packing.activation_gib=0.01 plugins.packing.max_tokens=4096",
    "quickstart plugins.packing.enabled=false",
    "deepspeed deepspeed.zero_stage=3 plugins.packing.max_tokens=4096",
    "slices parallel.cp=2 parallel.pp=2",
    "mesh cluster=a100 costs=auto plugins.mesh.max_tokens=4096 model.num_query_groups=4",
    "pipeline plugins.packing.enabled=true plugins.packing.max_tokens=4096",
    "pipeline plugins.pipeline.v_shape=true",
    "pipeline plugins.packing.enabled=true plugins.mesh.enabled=true plugins.mesh.max_tokens=4096",
    "moe plugins.moe.enabled=true",
    "moe plugins.moe.enabled=true plugins.moe.mode=reroute plugins.packing.max_tokens=4096",
    "lora plugins.packing.max_tokens=2048",
]
SHIPPED = [path.stem for path in sorted(RECIPES.glob("*.yaml"))]


def batches():
    """Even lengths, a long tail, and one sequence that outweighs all others."""
    draws = np.random.default_rng(7)
    yield "even", as_lengths(draws.integers(200, 1000, 16))
    yield "tail", as_lengths(draws.lognormal(6.5, 1.4, 24).clip(16, 16000).astype(int))
    yield "outlier", as_lengths(np.append(draws.integers(16, 600, 15), 15000))


def chains(case):
    """What makes each chain of a case, by name: on the recipe's ranks and on twice as many; of a shipped recipe also
    for forwards alone, with adapters, for a baseline and in loops."""
    name, *keys = case.split()
    recipe = load_recipe(name, [*keys, NO_SOLVER])
    layout, setting = recipe.layout(), Setting.of_recipe(recipe)
    wide = recipe.changed({"parallel.dp": 2 * layout.dp}).layout()
    in_loop = partial(PlanChain.of_model, recipe, setting.shape, layout, setting.traits, warn=False)

    def own():
        chain = PlanChain.of_recipe(recipe, layout)
        if not chain.layers.need_loads:
            return chain
        layers = chain.context.experts.layers
        return chain.with_loads(tuple(tuple((7 * e + layer) % 5 + 1.0 for e in range(16)) for layer in layers))

    def adapted():
        from evenload.plugins.lora.costs import TenantLoad, with_tenants

        return with_tenants(own(), setting.shape, [TenantLoad(Adapter(r=4), 1.0)])

    made = {"own": own, "wide": lambda: PlanChain.of_recipe(recipe, wide)}
    if keys:
        return made
    return made | {
        "forward": lambda: forward_only(own()),
        "adapters": adapted,
        "in_order": lambda: replace(own(), instead="in_order"),
        "whole in loops": lambda: in_loop(orders=False),
        "slices in loops": lambda: in_loop(whole=False),
    }


def short(*words):
    return sha256(repr(words).encode()).hexdigest()[:8]


def digest(make):
    """Of a plan and of what it says of itself, or of the refusal."""
    try:
        plan = make()
    except EvenloadError as error:
        return short(str(error))
    caps = plan.limits.max_tokens, f"{plan.limits.max_activation_bytes:.6g}", plan.limits.whole_sequences
    own = plan.made_by, plan.notes, f"{plan.bound_s:.6g}", sorted(rivals_of(plan))
    return short(plan.digest, caps, own)


def stages_of(chain, batch):
    """Of the best plan after each stage."""
    stages = PlanStages(chain, batch)
    with suppress(EvenloadError):
        list(stages.run())
    made = [one and digest(lambda one=one: one.plan) for one in stages.best]
    return short(made, [(name, str(error)) for name, error in stages.failed])


def digests(chain, batch):
    """What is frozen of a chain and a batch, by name."""
    names = chain.rivals.rules, chain.rivals.names, chain.largest_slice, chain.staged, f"{chain.work_s(batch):.6g}"
    asked = [chain.rivals.of_batch(batch, purpose) for purpose in ("shown", "tried")]
    tenants = as_lengths(np.arange(len(batch)) % 3) if chain.of_slices else None
    return {
        "order": short(names, asked),
        "plan": digest(lambda: chain.plan(batch, tenants)),
        **{name: digest(lambda name=name: chain.baseline(name, batch, tenants)) for name in chain.rivals.names},
        **{f"rule {name}": digest(lambda name=name: chain.rule(name, batch, tenants)) for name in chain.rivals.rules},
    }


def frozen(case):
    """Digests by name, for each chain of a case and the batches that it plans: the long tail, and one more of two."""
    for name, make in chains(case).items():
        try:
            chain = make()
        except EvenloadError as error:
            yield name, {"refused": short(str(error))}
            continue
        for batch, lengths in batches():
            if batch == "tail":
                yield f"{name}, {batch}", {**digests(chain, lengths), "stages": stages_of(chain, lengths)}
            elif (name, batch) in (("own", "even"), ("wide", "outlier")):
                yield f"{name}, {batch}", digests(chain, lengths)


@pytest.mark.slow
@pytest.mark.parametrize("case", [*SHIPPED, *BESIDE])
def test_plans_are_those_of_before(case):
    before, now = json.loads(FROZEN.read_text())[case], dict(frozen(case))
    names = [(row, name) for row in {**before, **now} for name in {**before.get(row, {}), **now.get(row, {})}]
    changed = [": ".join(at) for at in names if before.get(at[0], {}).get(at[1]) != now.get(at[0], {}).get(at[1])]
    assert not changed, f"{case}: other plans than before. Where that is meant, run this file as a script. {changed}"


def written(case):
    """A case as it stands in the file, a line for each chain and batch."""
    return ",\n".join(f" {json.dumps(name)}: {json.dumps(made)}" for name, made in frozen(case))


if __name__ == "__main__":
    cases = [f"{json.dumps(case)}: {{\n{written(case)}\n}}" for case in [*SHIPPED, *BESIDE]]
    FROZEN.write_text("{" + ",\n".join(cases) + "}\n")
