"""What the scripts of this folder share: tenants with short instruction samples, and ranks that train them.

Lengths are log-normal (median 181 tokens, shape 0.9, from 16 to 4,096), as instruction data sets have them. Tokens are
drawn: no time depends on them. The base is the model of recipes/quickstart.yaml, in a pipeline that of
recipes/pipeline.yaml, frozen, float32.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
from evenload.core.aliases import Ints
from evenload.core.plan.step_plan import StepPlan, as_lengths
from evenload.core.planning.chain import PlanChain
from evenload.core.recipe.adapter import Adapter, TenantTrain
from evenload.core.recipe.recipe import Recipe, parse

VOCABULARY = 256
SHORTEST, LONGEST = 16, 4096
LOG_MEDIAN, SHAPE = 5.2, 0.9
ADAPTER = Adapter(r=16, lora_alpha=32.0)
_MODEL = {"family": "llama", "num_attention_heads": 4, "vocab_size": VOCABULARY}
LAYOUTS: dict[str, dict[str, Any]] = {
    "dp1": {
        "model": {**_MODEL, "num_layers": 2, "hidden_size": 128, "num_query_groups": 2},
        "parallel": {"dp": 1},
        "costs": "cpu",
        "plugins": {"packing": {"enabled": True, "max_tokens": LONGEST}},
    },
    "pp2": {
        "model": {**_MODEL, "num_layers": 4, "hidden_size": 64, "num_query_groups": 1},
        "parallel": {"pp": 2},
        "costs": "cpu-2-stages",
        "plugins": {"pipeline": {"enabled": True, "max_tokens": LONGEST}},
    },
}
LAYOUTS["dp2"] = {**LAYOUTS["dp1"], "parallel": {"dp": 2}}


class Batch(NamedTuple):
    """The samples of some tenants in one step."""

    lengths: Ints
    tenants: Ints
    """Number of each sample's tenant."""
    seeds: tuple[tuple[int, ...], ...]
    """Of each sample's tokens."""

    def tokens(self, index: int) -> Ints:
        draw = np.random.default_rng(self.seeds[index])
        return draw.integers(0, VOCABULARY, int(self.lengths[index]), dtype=np.int64)

    def renumbered(self, more: int) -> Batch:
        """The same samples, of tenants with higher numbers."""
        return self._replace(tenants=self.tenants + more)

    def of(self, tenant: int) -> Batch:
        """The samples of one tenant."""
        places = np.flatnonzero(self.tenants == tenant)
        return Batch(self.lengths[places], self.tenants[places], tuple(self.seeds[place] for place in places))


def batch_of(step: int, tenants: Sequence[int], samples: int, longest: int = LONGEST) -> Batch:
    """A step's samples of each of these tenants: its own, whoever else is there."""
    lengths, seeds = [], []
    for tenant in tenants:
        draw = np.random.default_rng((tenant, step))
        lengths.append(np.clip(np.exp(draw.normal(LOG_MEDIAN, SHAPE, samples)), SHORTEST, longest).astype(np.int64))
        seeds += [(tenant, step, place) for place in range(samples)]
    return Batch(np.concatenate(lengths), np.repeat(np.array(tenants, np.int64), samples), tuple(seeds))


def recipe_of(layout: str) -> Recipe:
    """A job of tenants; plugins must be registered."""
    fields = LAYOUTS[layout]
    plugins = {**fields["plugins"], "lora": {"enabled": True, "tenants": "."}}
    return parse({**fields, "plugins": plugins, "data": {"max_length": LONGEST}})


def train_of(tenant: int, samples: int) -> TenantTrain:
    """How a tenant is trained."""
    return TenantTrain(batch_size=samples, seed=tenant, lr=1e-3, lr_schedule="constant")


@contextmanager
def on_rank(layout: str) -> Iterator[Any]:
    """This rank's `TenantJob`, where nobody is yet. Collective."""
    from evenload.api import load_plugins
    from evenload.plugins.lora.arrivals.job import TenantJob
    from evenload.training.job import open_host, open_world

    load_plugins()
    recipe = recipe_of(layout)
    with open_world(recipe) as (world, watchdog):
        host: Any = open_host(recipe, world)
        chain = PlanChain.of_recipe(recipe, recipe.layout(world.size))
        yield TenantJob(recipe, world, host, chain, watchdog)
        watchdog.at("end", waits=True)
        host.close()


def plan_of(chain: PlanChain, batch: Batch) -> StepPlan:
    return chain.plan(as_lengths(batch.lengths), as_lengths(batch.tenants))


def trained(job: Any, plan: StepPlan, batch: Batch) -> Mapping[int, float]:
    """The loss of each tenant of a step that is trained. Collective."""
    rates = {int(tenant): 1e-3 for tenant in np.unique(batch.tenants)}
    result = job.host.train_step(plan, batch.tokens, lr=rates)
    bad = {number: tenant.failed for number, tenant in result.tenants.items() if tenant.failed}
    assert not bad, bad
    return {number: tenant.loss for number, tenant in result.tenants.items()}
