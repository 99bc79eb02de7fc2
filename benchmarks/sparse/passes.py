"""Scoring passes that leave blocks of keys out against dense ones, choosing included: CPU seconds.

    python benchmarks/sparse/passes.py [--lengths 16384 32768] [--repeats 3] [--layers 2] [--hidden 128] [--json]
                                       [--out FILE]

One rank of DeepSpeed, float32, fresh weights: `Host.score` of one sample of each length, the variants alternating.
Which blocks are kept is drawn, such a share of each row; what choosing them and keeping them costs is not.

dense, again   without the section; what the two differ by is what a ratio is sure to
sample         looks at queries by stride in every pass
kept           with blocks of a pass before; "search" is that pass, dense, one in 20, and "with it" counts it as such
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from typing import Any

import numpy as np
import torch
from evenload.benchmarks.chains import plugins, recipe_of
from evenload.benchmarks.frame import columns, machine, main, options, timed
from evenload.core.plan.step_plan import as_lengths
from evenload.core.planning.chain import PlanChain
from evenload.runtime.attention.choosers import CHOOSERS, BlockChoice, Chooser
from evenload.runtime.attention.sparse import SEARCH_EVERY, KeptBlocks, SparsePass
from evenload.runtime.world.world import init_world

with redirect_stdout(sys.stderr):  # DeepSpeed writes there which accelerator it takes
    from evenload.integrations.deepspeed import open_host

SHARES = (0.5, 0.25)


def recipe_for(asked: Any) -> Any:
    longest = max(asked.lengths)
    heads = {"num_attention_heads": 4, "num_query_groups": 2, "vocab_size": 256}
    return recipe_of(
        {
            "trainer": "deepspeed",
            "model": {"num_layers": asked.layers, "hidden_size": asked.hidden, **heads},
            "data": {"max_length": longest},
            "parallel": {"dp": 1},
            "costs": "cpu",
            "deepspeed": {"zero_stage": 0},
            "plugins": plugins(longest, "packing"),
        }
    )


def drawn(name: str, share: float) -> Chooser:
    """A chooser that looks as the one of this name does, and then keeps any blocks, so many of each row."""
    row = CHOOSERS[name]

    def choose(choice: BlockChoice) -> torch.Tensor:
        chosen, draw = row.choose(choice), np.random.default_rng(0)
        for number, block in enumerate(choice.query_blocks):
            num = block.begin // choice.grid.keys
            for kept in chosen[:, number, :num] if num else ():
                kept[:] = torch.from_numpy(draw.permutation(num) < round(share * num))
                kept[0] = True
        return chosen

    return Chooser(name, choose, row.keeps)


def measured(host: Any, chain: PlanChain, length: int, repeats: int) -> list[dict[str, Any]]:
    """A row for each variant of a sample of this length."""
    tokens = np.random.default_rng(length).integers(0, 256, length)
    plan, stores = chain.plan(as_lengths([length])), {share: KeptBlocks() for share in SHARES}
    pairs: dict[str, float] = {}

    def scored(name: str, chooser: Chooser | None = None, blocks: KeptBlocks | None = None) -> None:
        run = SparsePass(chooser, 0.9, ["a sample"], blocks or KeptBlocks()) if chooser else None
        host.score(plan, lambda _: tokens, sparse=run)
        pairs[name] = float(run.pairs().computed[0]) if run else 1.0

    variants: dict[str, Callable[[], None]] = {}
    for name in ("dense", "again"):
        variants[name] = lambda name=name: scored(name)
    for share in SHARES:
        name = f"sample {share:g}"
        variants[name] = lambda name=name, share=share: scored(name, drawn("sample", share))
        name = f"kept {share:g}"
        variants[name] = lambda name=name, share=share: scored(name, drawn("kept", share), stores[share])
    searches = [
        timed(lambda share=share: scored("search", drawn("kept", share), stores[share]), 1)[1] for share in SHARES
    ]
    scored("dense")
    spent: dict[str, list[float]] = {name: [] for name in variants}
    for turn in range(repeats):
        for name in list(variants)[turn % len(variants) :] + list(variants)[: turn % len(variants)]:
            spent[name].append(timed(variants[name], 1)[1])
    search_s, dense = min(searches), np.array(spent["dense"])
    rows = []
    for name, own in spent.items():
        ratios = dense / own
        row = {"length": length, "variant": name, "pairs": pairs[name], "cpu_s": float(np.median(own))}
        row |= {"over_dense": float(np.median(ratios)), "lowest": float(ratios.min()), "highest": float(ratios.max())}
        if name.startswith("kept"):
            mean_s = (search_s + (SEARCH_EVERY - 1) * row["cpu_s"]) / SEARCH_EVERY
            row |= {"search_s": search_s, "with_search": float(np.median(dense)) / mean_s}
        rows.append(row)
        print(row, file=sys.stderr, flush=True)
    return rows


def benchmark(asked: Any) -> dict[str, Any]:
    torch.set_num_threads(1)
    with redirect_stdout(sys.stderr):
        recipe = recipe_for(asked)
        host, chain = open_host(recipe, init_world()), PlanChain.of_recipe(recipe, recipe.layout(1))
        rows = [row for length in asked.lengths for row in measured(host, chain, length, asked.repeats)]
        host.close()
    return {"machine": machine(), "layers": asked.layers, "hidden": asked.hidden, "rows": rows}


def table(result: dict[str, Any]) -> Any:
    cells = {
        "tokens": "{length:,}",
        "": "{variant}",
        "pairs": lambda row: f"{100 * row['pairs']:.0f} %",
        "CPU s": "{cpu_s:.2f}",
        "dense over it": "{over_dense:.2f}x",
        "lowest, highest": "{lowest:.2f}, {highest:.2f}",
        "search": lambda row: f"{row['search_s']:.1f} s" if "search_s" in row else "",
        "with it": lambda row: f"{row['with_search']:.2f}x" if "search_s" in row else "",
    }
    return columns(f"{result['layers']} layers of {result['hidden']}, one core", result["rows"], cells)


if __name__ == "__main__":
    main(options(__doc__, lengths=[16384, 32768], repeats=3, layers=2, hidden=128), benchmark, table)
