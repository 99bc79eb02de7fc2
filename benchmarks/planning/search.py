"""How soon `evenload search` answers, how near its answer is proven to be, and what other ways to choose cost.

    python benchmarks/planning/search.py [--wikipedia FILE] [--part gap|choices|all] [--limit-s 300] [--quick]
                                         [--json] [--out FILE]

gap       13B on A100s (Megatron-Core, bf16, no pins), one core: CPU seconds, those of the space among them, until there
          is an answer, until nothing else in the space can be more than 3 % and 1 % faster, and what is known at the
          limit. Lengths are Wikipedia's to 64K, also with the longest in every 128 set to 64K (a tail as of a mixture)
choices   four models x three sets of lengths on 64 A100s, steps predicted. Next to the best of the search:
            fixed     what a search over the same settings picks that takes all sequences to be of one length and shares
                      none (Galvatron's executable space, arXiv 2504.21411), on the real lengths: windows of the longest
                      with as many tokens, or all of the mean length
            table     layouts of a table of rules (`plugins.search.answer.BY_HAND`) without plugins: the fastest that
                      fits of packs in the order of the batch under every cap, recomputed or not
            on it     our plugins on the layouts of that table, the best setting of any

Without a file Wikipedia's lengths are the stand-in of published/lengths.py. Every search ends at its limit or when
nothing can be 1 % faster; "least" is the certificate: no setting takes less.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterable
from contextlib import suppress
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from evenload.benchmarks.chains import recipe_of
from evenload.benchmarks.frame import Row, columns, machine, main, options
from evenload.benchmarks.published.common import MODELS
from evenload.benchmarks.published.lengths import K, corpus
from evenload.core.errors import EvenloadError
from evenload.core.input.format import seconds
from evenload.core.plan.step_plan import Lengths, as_lengths
from evenload.core.planning.chain import PlanChain
from evenload.core.planning.floors import step_floor_s
from evenload.core.planning.judge import judge
from evenload.core.recipe.recipe import Recipe
from evenload.core.recipe.sizes import shape_of
from evenload.plugins.search.answer import BY_HAND, said
from evenload.plugins.search.best_first import Played, SearchState, best_first
from evenload.plugins.search.space import CAPS, SearchBatch, space_of
from rich.console import Group

LONGEST, EACH_TAIL, SEED = 64 * K, 128, 7
GAPS = (0.03, 0.01)
LONGER = 5
"""Times its limit that a search may take for a first answer."""
MIXTURE = {
    "family": "mixtral",
    "num_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_query_groups": 8,
    "ffn_hidden_size": 14336,
    "moe": {"num_experts": 8, "topk": 2},
}
SHAPES = {"7B": MODELS["llama-7b"], "13B": MODELS["llama-13b"], "32B": MODELS["llama-32b"], "8 x 7B": MIXTURE}
SETS = ("wikipedia-like", "github-like", "sft-like")
NO_SHARING = {"plugins.mesh.enabled": False, "plugins.pipeline.v_shape": False}


class Known(NamedTuple):
    """What a search knows after so many CPU seconds."""

    cpu_s: float
    state: SearchState
    first_s: float
    reached_s: dict[float, float]
    """CPU seconds until each of `GAPS`; those that were reached."""


def a100s(shape: dict[str, Any], size: int) -> Recipe:
    return recipe_of(
        {
            "model": {"vocab_size": 32000, **shape},
            "train": {"dtype": "bf16", "global_batch_size": size},
            "data": {"max_length": LONGEST},
            "cluster": "a100",
        }
    )


def batch_of(name: str, size: int, wikipedia: Path | None, *, tail: bool = False) -> tuple[str, Lengths]:
    """What lengths stand for it, and so many of them; with a ``tail`` the longest are all of the most tokens."""
    label, body = corpus(name, max(size, 1 << 16), LONGEST, wikipedia)
    lengths = np.random.default_rng(SEED).choice(body, size)
    if tail:
        lengths[np.argsort(lengths)[-max(1, size // EACH_TAIL) :]] = LONGEST
    return label, as_lengths(lengths)


def searched(
    recipe: Recipe, ranks: int, batch: Lengths, limit_s: float, pins: dict[str, Any], gap: float = GAPS[-1]
) -> Known:
    """A search until nothing can be faster by more than ``gap``, or until its CPU seconds are over."""
    began, first_s, reached_s = time.process_time(), math.inf, dict[float, float]()
    for state in best_first(space_of(recipe, ranks, pins).choices, [SearchBatch(batch)]):
        cpu_s = time.process_time() - began
        if state.best is not None:
            first_s = min(first_s, cpu_s)
            reached_s |= {bar: cpu_s for bar in GAPS if state.gap <= bar and bar not in reached_s}
        if state.gap <= gap or (cpu_s > limit_s and (state.best is not None or cpu_s > LONGER * limit_s)):
            break
    return Known(time.process_time() - began, state, first_s, reached_s)


def gap_row(name: str, ranks: int, size: int, wikipedia: Path | None, limit_s: float, *, tail: bool) -> Row:
    label, batch = batch_of(name, size, wikipedia, tail=tail)
    known = searched(a100s(SHAPES["13B"], size), ranks, batch, limit_s, {})
    state, best = known.state, known.state.best
    planned = [one for one in state.played if one.steps]
    return {
        "lengths": f"{size:,} of {label}" + (", a tail of 64K" if tail else ""),
        "ranks": ranks,
        "tokens": int(batch.sum()),
        "settings": len(state.played),
        "played": len(planned),
        "cpu_s": known.cpu_s,
        "first_s": known.first_s,
        "reached_s": {f"{bar:.0%}": known.reached_s.get(bar) for bar in GAPS},
        "gap": state.gap,
        "best": None if best is None else said(best.choice.values),
        "best_s": None if best is None else best.mean_s,
        "least_s": state.left[0][0] if state.left else None,
        "left_by_layout": left_by_layout(state),
        "played_over_floor": over_floor(planned, batch),
    }


def left_by_layout(state: SearchState) -> dict[str, int]:
    """How many settings of each layout may still be faster than the best by more than the last of `GAPS`."""
    best = state.best
    bar_s = math.inf if best is None else best.mean_s / (1 + GAPS[-1])
    counts: dict[str, int] = {}
    for floor_s, _, place in state.left:
        one = state.played[place]
        if floor_s < bar_s and not one.whole:
            counts[layout_of(one)] = counts.get(layout_of(one), 0) + 1
    return counts


def over_floor(planned: Iterable[Played], batch: Lengths) -> dict[str, float]:
    """The least of steps over their own certified floors by layout, of settings that were planned."""
    least: dict[str, float] = {}
    for one in planned:
        over = one.steps[0].step_s / step_floor_s(one.choice.chain, batch, asked=True)
        least[layout_of(one)] = min(least.get(layout_of(one), math.inf), over)
    return least


def layout_of(one: Played) -> str:
    layout = one.choice.chain.context.layout
    degrees = {"tp": layout.tp, "pp": layout.pp, "ep": layout.ep, "dp": layout.dp}
    return " ".join(f"{name}{size}" for name, size in degrees.items() if size > 1)


def choice_row(model: str, name: str, ranks: int, size: int, wikipedia: Path | None, limit_s: float) -> Row:
    """A model and lengths: the best of the search next to other choices."""
    recipe, (label, batch) = a100s(SHAPES[model], size), batch_of(name, size, wikipedia)
    known = searched(recipe, ranks, batch, limit_s, {})
    best = known.state.best
    assert best is not None
    total, longest = int(batch.sum()), int(batch.max())
    fixed = {
        "longest": np.full(max(1, total // longest), longest),
        "mean": np.full(size, total // size),
    }
    weights = shape_of(recipe.model).parameters
    degrees = next((row for most, row in BY_HAND if weights <= most), BY_HAND[-1][1])
    return {
        "model": model,
        "lengths": label,
        "tokens": total,
        "longest": longest,
        "best": said(best.choice.values),
        "layout": layout_of(best),
        "best_s": best.mean_s,
        "gap": known.state.gap,
        "fixed": {word: picked(recipe, ranks, as_lengths(even), batch, limit_s / 4) for word, even in fixed.items()},
        "table": min((by_rules(recipe, ranks, at, batch) for at in degrees), key=lambda row: row["step_s"]),
        "on_table": min((on_layout(recipe, ranks, at, batch, limit_s / 4) for at in degrees), key=itemgetter("step_s")),
    }


def picked(recipe: Recipe, ranks: int, even: Lengths, batch: Lengths, limit_s: float) -> Row:
    """What a search picks that takes sequences to be these, and its step on the real ones; infinite: it cannot run."""
    best = None
    with suppress(EvenloadError):
        best = searched(recipe, ranks, even, limit_s, NO_SHARING).state.best
    if best is None:
        return {"layout": "nothing fits", "thinks_s": math.inf, "step_s": math.inf}
    step_s = math.inf
    with suppress(EvenloadError):
        real = judge(best.choice.chain.plan(batch), best.choice.chain.context)
        step_s = real.step_s if real.fits else math.inf
    return {
        "layout": layout_of(best),
        "picks": said(best.choice.values),
        "thinks_s": best.mean_s,
        "step_s": step_s,
    }


def by_rules(recipe: Recipe, ranks: int, degrees: tuple[int, int], batch: Lengths) -> Row:
    """The fastest that fits of packs in the order of the batch on a layout, infinite where none does."""
    tp, pp = degrees
    row: Row = {"layout": _named(tp, pp, ranks), "step_s": math.inf}
    for again in (False, True):
        for cap in CAPS:
            changes = {"parallel.tp": tp, "parallel.pp": pp, "train.recompute": again}
            packing = {"plugins.packing.enabled": True, "plugins.packing.max_tokens": cap}
            with suppress(EvenloadError):
                changed = recipe.changed({**changes, **packing})
                chain = PlanChain.of_recipe(changed, changed.layout(ranks))
                one = judge(chain.baseline("in_order", batch), chain.context)
                if one.fits and one.step_s < row["step_s"]:
                    row |= {"step_s": one.step_s, "recompute": again, "cap": cap}
    return row


def on_layout(recipe: Recipe, ranks: int, degrees: tuple[int, int], batch: Lengths, limit_s: float) -> Row:
    """The best setting of our plugins on a layout of the table."""
    tp, pp = degrees
    pins = {"parallel.tp": tp, "parallel.pp": pp, "parallel.ep": 1}
    with suppress(EvenloadError):
        best = searched(recipe, ranks, batch, limit_s, pins).state.best
        if best is not None:
            return {"layout": layout_of(best), "settings": said(best.choice.values), "step_s": best.mean_s}
    return {"layout": _named(tp, pp, ranks), "step_s": math.inf}


def _named(tp: int, pp: int, ranks: int) -> str:
    degrees = {"tp": tp, "pp": pp, "dp": ranks // (tp * pp)}
    return " ".join(f"{name}{size}" for name, size in degrees.items() if size > 1)


def benchmark(asked: Any) -> Row:
    logging.disable(logging.CRITICAL)
    file, few = asked.wikipedia, asked.quick
    cases = [(64, 512, True), (64, 512, False), (1024, 8192, True)] if not few else [(8, 32, True)]
    choices = [(model, name) for model in SHAPES for name in SETS] if not few else [("7B", SETS[0])]
    only = slice(None) if asked.case is None else slice(asked.case, asked.case + 1)
    ranks, size = (8, 32) if few else (64, 512)
    result: Row = {"predicted": True, "machine": machine()}
    if asked.part != "choices":
        result["gap"] = [gap_row(SETS[0], n, k, file, asked.limit_s, tail=t) for n, k, t in cases[only]]
    if asked.part != "gap":
        result["choices"] = [choice_row(m, name, ranks, size, file, asked.choice_s) for m, name in choices[only]]
    return result


def table(result: Row) -> Group:
    """A row a case of each part."""
    cells = {
        "lengths": "{lengths}",
        "ranks": "{ranks}",
        "played": "{played} of {settings}",
        "first": "{first_s:seconds}",
        **{f"gap {bar:.0%}": f"{{reached_s[{bar:.0%}]:seconds}}" for bar in GAPS},
        "at the end": lambda row: f"{row['gap']:.1%} after {seconds(row['cpu_s'])}",
        "best": "{best_s:seconds}, {best}",
    }
    gaps = columns("How soon, how near (steps predicted, CPU seconds measured)", result.get("gap", ()), cells)
    cells = {
        "model": "{model}",
        "lengths": "{lengths}",
        "best": lambda row: f"{seconds(row['best_s'])} ({row['gap']:.1%})",
        "": "{layout}",
        "fixed: longest": lambda row: _beside(row["fixed"]["longest"], row),
        "fixed: mean": lambda row: _beside(row["fixed"]["mean"], row),
        "table": lambda row: _beside(row["table"], row),
        "on the table's": lambda row: _beside(row["on_table"], row),
    }
    choices = columns("Other choices over the best of the search (predicted)", result.get("choices", ()), cells)
    return Group(*(one for one in (gaps, choices) if one.row_count))


def _beside(other: Row, row: Row) -> str:
    if math.isinf(other["step_s"]):
        return f"does not run ({other['layout']})"
    where = "the same layout" if other["layout"] == row["layout"] else other["layout"]
    return f"{other['step_s'] / row['best_s']:.2f}x, {where}"


if __name__ == "__main__":
    limits = {"limit_s": 300.0, "choice_s": 40.0}
    asked = options(__doc__, wikipedia=Path, part=("all", "gap", "choices"), case=int, **limits, quick=False)
    main(asked, benchmark, table)
