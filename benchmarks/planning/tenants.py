"""What tenants of the lora plugin save by sharing steps: one after another over all together. All is predicted.

    python benchmarks/planning/tenants.py [--tenants 4] [--samples 2,4,8,16] [--ranks 2,4] [--draws 48] [--rank 16]
                                          [--quick] [--json] [--out FILE]

Every tenant draws so many samples a step. "saving" is the sum of the steps that the chain plans for each tenant alone
on all ranks, over the step that it plans for all of them, both summed over the draws; "at most" is the same sum over
the certified lower bound of them all together, where the chain has one. The same plugins plan both.

    packing      sequences on single ranks, long ones in slices
    mesh         the same, and long sequences on several ranks, which helps a tenant that is alone
    pipeline     PP of as many stages as ranks

    short        lengths of instructions: log-normal, median 180, shape 0.9, 16 to 4,096 tokens
    files        of the running Python's library, up to 8,192 tokens, longer ones left out

Costs: those of recipes/costs/cpu.yaml and cpu-2-stages.yaml (hidden 128) with a frozen base, adapters of rank 16 on all
linear layers; "whole" has the costs of training the whole model instead, without adapters. Launches are among them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from evenload.api import load_plugins
from evenload.benchmarks.frame import main, options
from evenload.commands.tables.show import grid
from evenload.core.aliases import Ints
from evenload.core.machine.shape import Shape
from evenload.core.plan.step_plan import as_lengths
from evenload.core.planning.chain import PlanChain
from evenload.core.planning.judge import certified_s, outcome_of
from evenload.core.recipe.adapter import Adapter
from evenload.core.recipe.recipe import RECIPES, load
from evenload.core.recipe.sizes import shape_of
from evenload.data.sources import open_source
from evenload.plugins.lora.costs import TenantLoad, with_tenants

MEDIAN, SHAPE, SHORTEST, LONGEST = 180, 0.9, 16, 4096
FILE_TOKENS = 8192
PLANNERS = {
    "packing": ("quickstart.yaml", ["costs=cpu", "plugins.packing.max_tokens={cap}"]),
    "mesh": (
        "quickstart.yaml",
        ["costs=cpu", "plugins.packing.max_tokens={cap}", "plugins.mesh.enabled=true", "plugins.mesh.max_tokens={cap}"],
    ),
    "pipeline": ("pipeline.yaml", ["costs=cpu-2-stages", "plugins.pipeline.max_tokens={cap}"]),
}
FEWER = ("mesh", "pipeline")
"""Planners that take long: a quarter of the draws."""


class Setting(NamedTuple):
    """A row of the table, but for the samples."""

    planner: str
    lengths: str
    num_ranks: int
    costs: str = "frozen"


def settings(ranks: list[int], quick: bool) -> Iterator[Setting]:
    for num_ranks in ranks:
        yield Setting("packing", "short", num_ranks)
        if quick:
            continue
        yield Setting("packing", "short", num_ranks, "whole")
        yield Setting("mesh", "short", num_ranks)
        yield Setting("packing", "files", num_ranks)
        yield Setting("mesh", "files", num_ranks)
        yield Setting("pipeline", "short", num_ranks)


def chain_of(setting: Setting) -> tuple[PlanChain, Shape]:
    """The planners of a setting, which know no tenant yet, and the model."""
    load_plugins()
    name, words = PLANNERS[setting.planner]
    cap = FILE_TOKENS if setting.lengths == "files" else LONGEST
    place = "pp" if setting.planner == "pipeline" else "dp"
    words = [word.format(cap=cap) for word in words] + [f"parallel.{place}={setting.num_ranks}"]
    if setting.costs == "frozen":
        words.append("plugins.lora.enabled=true")
    recipe = load(RECIPES / name, [*words, f"data.max_length={cap}", "train.global_batch_size=64"])
    return PlanChain.of_recipe(recipe, recipe.layout(setting.num_ranks)), shape_of(recipe.model)


def drawn(lengths: str, count: int, rng: np.random.Generator) -> Ints:
    """Tokens of so many samples."""
    if lengths == "files":
        return rng.choice(open_source("python-stdlib", max_length=FILE_TOKENS, long_samples="drop").lengths, count)
    return np.clip(rng.lognormal(np.log(MEDIAN), SHAPE, count), SHORTEST, LONGEST).astype(np.int64)


def step_s(chain: PlanChain, lengths: Ints) -> tuple[float, float]:
    """Seconds of the planned step, and the least of any plan; 0: none is certified."""
    plan = chain.plan(as_lengths(lengths))
    return outcome_of(plan, chain.context).step_s, certified_s(plan, chain.context)


def row_of(setting: Setting, tenants: int, samples: int, draws: int, adapter: Adapter) -> dict[str, Any]:
    """All draws of a setting with so many samples of each tenant."""
    rng = np.random.default_rng(0)
    known, shape = chain_of(setting)
    together = alone = known
    if setting.costs == "frozen":
        together, alone = (with_tenants(known, shape, [TenantLoad(adapter, 1)] * count) for count in (tenants, 1))
    together_s = alone_s = bound_s = 0.0
    certified = True
    for _ in range(draws):
        batches = [drawn(setting.lengths, samples, rng) for _ in range(tenants)]
        alone_s += sum(step_s(alone, batch)[0] for batch in batches)
        planned_s, least_s = step_s(together, np.concatenate(batches))
        together_s, bound_s, certified = together_s + planned_s, bound_s + least_s, certified and least_s > 0
    times = {"together_s": together_s, "one_after_another_s": alone_s, "bound_s": bound_s if certified else None}
    gains = {"saving": alone_s / together_s, "saving_at_most": alone_s / bound_s if certified else None}
    return {**setting._asdict(), "tenants": tenants, "samples": samples, "draws": draws, **times, **gains}


def benchmark(asked: Any) -> dict[str, Any]:
    """A row for each setting and number of samples."""
    adapter, rows = Adapter(r=asked.rank), []
    for setting in settings(asked.ranks, asked.quick):
        count = -(-asked.draws // 4) if setting.planner in FEWER else asked.draws
        rows += [row_of(setting, asked.tenants, each, count, adapter) for each in asked.samples]
    return {"predicted": True, "tenants": asked.tenants, "adapter_rank": asked.rank, "rows": rows}


def table(result: dict[str, Any]) -> Any:
    """A line for each setting; a cell for each number of samples."""
    by_setting: dict[tuple[Any, ...], dict[int, dict[str, Any]]] = {}
    for row in result["rows"]:
        key = (row["planner"], row["lengths"], row["costs"], row["num_ranks"])
        by_setting.setdefault(key, {})[row["samples"]] = row

    def cell(row: dict[str, Any]) -> str:
        most = row["saving_at_most"]
        return f"{row['saving']:.2f}" + (f" ({most:.2f})" if most is not None else "")

    lines = [(*map(str, key), *map(cell, rows.values())) for key, rows in by_setting.items()]
    samples = dict.fromkeys(row["samples"] for row in result["rows"])
    head = ("planner", "lengths", "costs", "ranks", *(f"{each} samples" for each in samples))
    about = f"{result['tenants']} tenants, adapters of rank {result['adapter_rank']}"
    caption = "one after another over all together, each planned as well; in brackets at most, by the bound; predicted"
    return grid(f"tenants in shared steps: {about}", head, lines, caption)


if __name__ == "__main__":
    sizes = {"tenants": 4, "samples": [2, 4, 8, 16], "ranks": [2, 4], "draws": 48, "rank": 16}
    main(options(__doc__, **sizes, quick=False), benchmark, table)
