"""What the scripts of this folder share: batches, ways to run a batch, the fastest of them that fits, the table.

A *setup* (`Way`) is a planner on a layout. Everything is planned in the package's own vocabulary and timed by
`core.simulate.step`; nothing is measured here and nothing is fitted to a paper's number.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from evenload.benchmarks.chains import K, plugins, recipe_of, with_launches, with_traffic
from evenload.benchmarks.frame import Row, columns, means, options, show
from evenload.benchmarks.published.lengths import corpus
from evenload.core.errors import EvenloadError
from evenload.core.plan.step_plan import CpComm, Lengths, as_lengths
from evenload.core.planning.chain import PlanChain
from evenload.core.simulate.step import simulate

Batch = Lengths


def _shape(layers: int, hidden: int, heads: int, ffn: int, **more: int) -> dict[str, Any]:
    sizes = {"num_layers": layers, "hidden_size": hidden, "num_attention_heads": heads, "ffn_hidden_size": ffn}
    return {**sizes, **more}


MODELS: dict[str, dict[str, Any]] = {
    "llama-550m": _shape(16, 1536, 16, 4096),
    "llama-3b": _shape(26, 3200, 32, 8640),
    "llama-7b": _shape(32, 4096, 32, 11008),
    "llama-13b": _shape(40, 5120, 40, 13824),
    "llama-32b": _shape(60, 6656, 64, 17920),
    "llama-30b": _shape(60, 6656, 64, 17920),
    "llama-70b": _shape(80, 8192, 64, 28672, num_query_groups=8),
    "qwen2.5-7b": _shape(28, 3584, 28, 18944, num_query_groups=4, vocab_size=152064),
    "qwen2.5-14b": _shape(48, 5120, 40, 13824, num_query_groups=8, vocab_size=152064),
    "qwen2.5-32b": _shape(64, 5120, 40, 27648, num_query_groups=8, vocab_size=152064),
    "qwen2.5-72b": _shape(80, 8192, 64, 29568, num_query_groups=8, vocab_size=152064),
}
"""Shapes of the models' own config files (550M: ours); a vocabulary of 32,000 where none is given."""


@dataclass(frozen=True)
class Degrees:
    """Tensor, pipeline and context parallelism; the data-parallel degree is what they leave of the machines."""

    tp: int = 1
    pp: int = 1
    cp: int = 1
    recompute: bool = False

    def __str__(self) -> str:
        named = [f"TP{self.tp}", f"PP{self.pp}", f"CP{self.cp}"]
        return " ".join([n for n in named if n[2:] != "1"] + ["recompute"] * self.recompute) or "DP"


@dataclass(frozen=True)
class Way:
    """A planner on a layout: ``evenload`` or the name of a baseline."""

    planner: str
    degrees: Degrees
    max_tokens: int
    """Of a micro-batch on a rank."""
    packing: tuple[tuple[str, Any], ...] = ()
    """Further settings of plugins.packing."""

    def __str__(self) -> str:
        settings = "".join(f", {key} {value}" for key, value in self.packing)
        return f"{self.planner}{settings}, {self.degrees}, micro-batches of {self.max_tokens * self.degrees.cp // K}K"


@dataclass(frozen=True)
class Machines:
    """A model on a cluster."""

    model: str
    world: int
    cluster: str
    launch: float = 1.0
    """Factor on the cost of a launch, for sensitivity."""
    cp_comm: CpComm = "ring"
    """How a micro-batch is shared by context-parallel ranks."""

    @cache  # noqa: B019  # a script's settings live as long as the script
    def chain(self, setup: Way) -> PlanChain:
        """The chain of a way. Raises EvenloadError for a layout that the model or the machines do not allow."""
        d, sizes = setup.degrees, {"global_batch_size": 1 << 20, "micro_batch_size": 1}
        recipe = recipe_of(
            {
                "model": {"vocab_size": 32000, **MODELS[self.model]},
                "parallel": {"tp": d.tp, "pp": d.pp, "cp": d.cp},
                "train": {"dtype": "bf16", "recompute": d.recompute, **sizes},
                "cluster": self.cluster,
                "plugins": plugins(setup.max_tokens, "packing", **dict(setup.packing)),
            }
        )
        chain = with_traffic(PlanChain.of_recipe(recipe, recipe.layout(self.world)), cp_comm=self.cp_comm)
        context = with_launches(chain.context, lambda _, launch_s: launch_s * self.launch)
        return replace(chain, context=context, instead="" if setup.planner == "evenload" else setup.planner)


@dataclass(frozen=True)
class Timed:
    """What a way comes to over all batches."""

    setup: Way
    step_s: float
    """Mean over the batches."""
    peak_bytes: float
    fits: bool


def timed(machines: Machines, setup: Way, batches: Iterable[Batch]) -> Timed:
    """Plan and simulate every batch. Raises EvenloadError for what cannot be planned."""
    chain = machines.chain(setup)
    outcomes = [simulate(chain.plan(batch), chain.context, record=False) for batch in batches]
    peak = max(float(o.peak_bytes.max()) for o in outcomes)
    step_s = sum(o.step_s for o in outcomes) / len(outcomes)
    return Timed(setup, step_s, peak, peak <= chain.context.cluster.memory_bytes)


def fastest(machines: Machines, setups: Iterable[Way], batches: Iterable[Batch]) -> Timed:
    """The fastest way that fits into memory. Raises EvenloadError if none does."""
    timed_recipes: list[Timed] = []
    why = ""
    for setup in setups:
        try:
            timed_recipes.append(timed(machines, setup, batches))
        except EvenloadError as error:
            why = str(error)
    fitting = [one for one in timed_recipes if one.fits]
    if not fitting:
        least = min(timed_recipes, key=lambda one: one.peak_bytes, default=None)
        held = f"the least of them holds {least.peak_bytes / 2**30:.0f} GiB ({least.setup})" if least else why
        raise EvenloadError("no way of this setting fits into memory", held, "give it other layouts")
    return min(fitting, key=lambda one: one.step_s)


@dataclass(frozen=True)
class Case:
    """One published number and what is compared for it."""

    name: str
    paper: str
    """As published, with what it is over."""
    machines: Machines
    lengths: str
    batches: tuple[Batch, ...]
    theirs: tuple[Way, ...]
    """The paper's baseline: the fastest of these that fits."""
    definition: str
    """What ``theirs`` is, and what of it is guessed."""
    simple: tuple[Way, ...]
    """Simple baselines: balanced and sorted packing of whole sequences, every static layout that is searched."""
    ours: tuple[Way, ...]
    more: dict[str, tuple[Way, ...]] = field(default_factory=dict)
    """Further columns: ways to run the batch that are neither side's, by name."""

    def run(self) -> Row:
        """The row of the table. Raises EvenloadError if a side has no way that fits."""
        theirs, simple, ours, *more = (
            fastest(self.machines, setups, self.batches)
            for setups in (self.theirs, self.simple, self.ours, *self.more.values())
        )
        simple = min(theirs, simple, key=lambda one: one.step_s)
        tokens = sum(int(batch.sum()) for batch in self.batches) / len(self.batches)
        return {
            "setting": self.name,
            "paper": self.paper,
            "lengths": self.lengths,
            "definition": self.definition,
            "tokens": tokens,
            "theirs": _side(theirs),
            "simple": _side(simple),
            "ours": _side(ours),
            "gain": theirs.step_s / ours.step_s,
            "gain_over_simple": simple.step_s / ours.step_s,
            "more": {
                name: {**_side(one), "gain": theirs.step_s / one.step_s}
                for name, one in zip(self.more, more, strict=True)
            },
        }


def _side(one: Timed) -> Row:
    return {"way": str(one.setup), "step_s": one.step_s, "peak_bytes": one.peak_bytes}


def batches_of(
    name: str, size: int, count: int, longest: int, wikipedia: Path | None = None
) -> tuple[str, tuple[Batch, ...]]:
    """What stood in, and ``count`` global batches of ``size`` sequences up to ``longest`` tokens."""
    label, lengths = corpus(name, size * count, longest, wikipedia)
    return label, tuple(as_lengths(lengths[i * size : (i + 1) * size]) for i in range(count))


def setups(
    planners: Iterable[str], degrees: Iterable[Degrees], caps: Callable[[Degrees], Iterable[int]]
) -> Iterator[Way]:
    """All planners on all layouts with all caps (tokens of a micro-batch on a rank)."""
    some = tuple(planners)
    for d in degrees:
        for cap in caps(d):
            yield from (Way(planner, d, cap) for planner in some)


def evenload(degrees: Iterable[Degrees], caps: Callable[[Degrees], Iterable[int]]) -> Iterator[Way]:
    """evenload on all layouts with all caps, with slices as its planner wants them and without any.

    Both, because the planner weighs compute alone: where slices move their prefix between ranks, whole may be faster.
    """
    for setup in setups(["evenload"], degrees, caps):
        yield setup
        yield replace(setup, packing=(("slices", "off"),))


SIMPLE = ("whole", "karmarkar_karp", "best_fit", "in_order")
"""Baselines that anyone can have: whole sequences balanced by cost, bins, order of arrival."""


def table(result: Row) -> Any:
    """Setting, paper's number, ours, strongest simple baseline, what the baselines are."""

    def times(row: Row) -> str:
        return ", ".join(f"{row[side]['step_s']:.3g}" for side in ("theirs", "simple", "ours")) + " s"

    def over_theirs(name: str) -> Any:
        return lambda row: f"{row['more'][name]['gain']:.2f}x" if name in row["more"] else ""

    cells: dict[str, Any] = {"setting": "{setting}", "paper": "{paper}", "ours over theirs": "{gain:.2f}x"}
    cells |= {"ours over simple": "{gain_over_simple:.2f}x"}
    cells |= {f"{name} over theirs": over_theirs(name) for name in result["more"]}
    cells |= {"a step: theirs, simple, ours": times}
    notes = list(result["notes"])
    for r in result["rows"]:
        sides = "; ".join(f"{side}: {r[side]['way']}" for side in ("theirs", "simple", "ours"))
        notes.append(f"{r['setting']}: lengths {r['lengths']}; {r['definition']}; {sides}")
    return columns(f"{result['title']} (predicted)", result["rows"], cells, "\n".join(notes))


def arguments(about: str | None) -> argparse.Namespace:
    """The options that all scripts have: ``--wikipedia`` is FlexSP's file, else a stand-in of its quantiles."""
    return options(about, wikipedia=Path, quick=False).parse_args()


def finish(result: Row, asked: argparse.Namespace, draw: Callable[[Row], Any] = table) -> None:
    """Print the table or the JSON, and write the file that was asked for; all is predicted."""
    show({"predicted": True, **result}, asked, draw)


def mean_columns(steps: list[dict[str, Row]], keys: tuple[str, ...] = ("step_s", "imbalance")) -> dict[str, Row]:
    """Of every column the mean over the steps."""
    return {name: means([{key: one[name][key] for key in keys} for one in steps]) for name in steps[0]}


def claim(title: str, cases: Iterable[Case], notes: Iterable[str] = ()) -> Row:
    """The rows of all cases as one result."""
    rows = [case.run() for case in cases]
    more = dict.fromkeys(name for row in rows for name in row["more"])
    return {"title": title, "rows": rows, "more": list(more), "notes": list(notes)}
