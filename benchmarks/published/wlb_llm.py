"""WLB-LLM (OSDI'25, arXiv 2503.17924): micro-batches of variable length and delayed outliers, 1.23x on average.

    python benchmarks/published/wlb_llm.py [--quick] [--json] [--out FILE]

LLaMA on H100, a step of PP x DP context windows, keys and values gathered by context-parallel ranks; speed-ups over
Plain-4D from its figures 12 and 14. Its documents are internal: GitHub-like lengths stand in, those longer than a
window left out. Its table of layouts was not at hand; those here (TP8 PP4 CP2, 70B CP8, DP 1) are guesses.
Recomputation where the windows do not fit without.

    theirs    Plain-4D: documents end to end in the order of the data, cut at the end of every window, a window a
              micro-batch; attention stays within documents. The parts are the documents of all other rows, so that the
              work is the same
    whole     balanced packing of whole documents, the strongest simple baseline; no micro-batch longer than a window.
              Its Fixed-4D is a weaker form
    slices    evenload: documents cut so that micro-batches cost alike
    ours      the faster of that and evenload with plugins.packing.slices off, in the sum of all steps
    delay 4   evenload with slices off and plugins.packing.max_delay_steps 4, the nearest to WLB-LLM's own way; tokens a
              second, as its steps hold more or fewer documents

"imbalance" is the costliest micro-batch over the mean, forward (its table 2: 1.39 plain, 1.35 greedy, 1.05 WLB-LLM).
Sharding each document evenly inside a context-parallel group is taken for granted in every row: its 1.02x to 1.05x for
that are in none.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain as flat
from itertools import islice
from typing import Any

import numpy as np
from evenload.benchmarks.frame import columns
from evenload.benchmarks.published.common import Batch, Degrees, Machines, Way, arguments, finish
from evenload.benchmarks.published.lengths import SEED, K, Lengths, corpus
from evenload.core.laws import check
from evenload.core.plan.step_plan import MicroBatch, Slice, StepPlan, as_lengths
from evenload.core.planning.chain import PlanChain
from evenload.core.planning.static_cp import fold_cp, unfold_cp
from evenload.core.simulate.predict import micro_batch_imbalance
from evenload.core.simulate.step import simulate
from evenload.data.samples.order import BatchSize
from evenload.training.drawing import Drawing

DELAY = 4


@dataclass(frozen=True)
class Setting:
    model: str
    world: int
    context: int
    degrees: Degrees
    paper: str

    @property
    def windows(self) -> int:
        """Context windows, and micro-batches of Plain-4D, of a step."""
        return self.world // (self.degrees.tp * self.degrees.cp)

    def chain(self, planner: str, recompute: bool, **packing: Any) -> PlanChain:
        d = replace(self.degrees, recompute=recompute)
        setup = Way(planner, d, self.context // d.cp, packing=tuple(packing.items()))
        return Machines(self.model, self.world, "h100", cp_comm="all_gather").chain(setup)


SETTINGS = (
    Setting("llama-7b", 64, 128 * K, Degrees(8, 4, 2), "1.33x"),
    Setting("llama-7b", 64, 64 * K, Degrees(8, 4, 2), "1.21x"),
    Setting("llama-7b", 64, 160 * K, Degrees(8, 4, 2), "1.40x"),
    Setting("llama-550m", 64, 128 * K, Degrees(8, 4, 2), "1.41x"),
    Setting("llama-30b", 64, 128 * K, Degrees(8, 4, 2), "1.26x"),
    Setting("llama-70b", 256, 128 * K, Degrees(8, 4, 8), "1.20x"),
)


def steps_of(lengths: Lengths, setting: Setting, count: int) -> Iterator[list[int]]:
    """Documents of every step, in order; the last is cut so that a step holds exactly its windows."""
    rest = iter(lengths.tolist())
    for _ in range(count):
        left, documents = setting.windows * setting.context, []
        while left > 1:
            documents.append(min(next(rest), left))
            left -= documents[-1]
        yield documents


def parts_of(documents: list[int], context: int) -> list[list[int]]:
    """The documents end to end in windows: the lengths of the parts in each."""
    windows: list[list[int]] = [[]]
    space = context
    for n in documents:
        while n:
            if not space:
                windows.append([])
                space = context
            take = min(n, space)
            windows[-1].append(take)
            n, space = n - take, space - take
    return windows


def plain(chain: PlanChain, windows: list[list[int]]) -> StepPlan:
    """A window a micro-batch, dealt to the lanes in turn."""
    limits, _ = fold_cp(chain.limits, chain.context)
    batch = as_lengths(flat.from_iterable(windows))
    rest = iter(Slice(i, 0, n) for i, n in enumerate(batch.tolist()))
    micro_batches = []
    for k, window in enumerate(windows):
        slices = tuple(islice(rest, len(window)))
        micro_batches.append(MicroBatch(slices, (k % limits.num_ranks,)))
    return check(unfold_cp(StepPlan(batch, tuple(micro_batches), limits), chain.limits, chain.context.layout.cp))


@dataclass
class Tally:
    """Seconds, tokens, imbalance and peak over the steps of one variant."""

    seconds: float = 0.0
    tokens: int = 0
    imbalance: float = 0.0
    peak_bytes: float = 0.0
    steps: int = 0

    def add(self, plan: StepPlan, chain: PlanChain) -> None:
        outcome = simulate(plan, chain.context, record=False)
        self.seconds += outcome.step_s
        self.tokens += plan.num_tokens
        self.imbalance += micro_batch_imbalance(plan, chain.context.costs)[0]
        self.peak_bytes = max(self.peak_bytes, float(outcome.peak_bytes.max()))
        self.steps += 1

    def to_json(self) -> dict[str, float]:
        return {
            "tokens_per_s": self.tokens / self.seconds,
            "step_s": self.seconds / self.steps,
            "imbalance": self.imbalance / self.steps,
            "peak_bytes": self.peak_bytes,
        }


def row_of(setting: Setting, count: int) -> dict[str, Any]:
    label, lengths = corpus("github-like", 4096, setting.context)
    steps = list(steps_of(lengths, setting, count))

    windows = [parts_of(documents, setting.context) for documents in steps]
    batches = [as_lengths(flat.from_iterable(step)) for step in windows]

    def planned(planner: str, recompute: bool, **packing: Any) -> Tally:
        chain, total = setting.chain(planner, recompute, **packing), Tally()
        for batch in batches:
            total.add(chain.plan(batch), chain)
        return total

    def theirs_with(recompute: bool) -> Tally:
        chain, total = setting.chain("evenload", recompute), Tally()
        for step in windows:
            total.add(plain(chain, step), chain)
        return total

    theirs = theirs_with(False)
    recompute = theirs.peak_bytes > setting.chain("evenload", False).context.cluster.memory_bytes
    if recompute:
        theirs = theirs_with(True)
    slices = planned("evenload", recompute)
    whole = planned("evenload", recompute, slices="off")
    figures = {
        "theirs": theirs,
        "whole": planned("whole", recompute),
        "slices": slices,
        "ours": min(slices, whole, key=lambda one: one.seconds),
        f"delay {DELAY}": _delayed(setting, recompute, batches),
    }
    variants = {name: one.to_json() for name, one in figures.items()}
    return {
        "setting": f"{setting.model} {setting.context // K}K, {setting.world} ranks",
        "paper": setting.paper,
        "lengths": label,
        "definition": "theirs: windows end to end in the order of the data",
        "recompute": recompute,
        "variants": variants,
        "gain": {n: v["tokens_per_s"] / variants["theirs"]["tokens_per_s"] for n, v in variants.items()},
    }


def _delayed(setting: Setting, recompute: bool, batches: list[Batch]) -> Tally:
    """The same documents, drawn in another order, in as many steps and those in which the last may wait."""
    lengths = np.concatenate(list(batches))
    chain = setting.chain("evenload", recompute, slices="off", max_delay_steps=DELAY)
    size = BatchSize(len(lengths) // len(batches))
    drawing, total = Drawing(None, lengths, size, chain, seed=SEED), Tally()
    for _ in range(len(batches) + DELAY):
        total.add(chain.plan(as_lengths(drawing().lengths)), chain)
    return total


def table(result: dict[str, Any]) -> Any:
    variants = list(result["rows"][0]["variants"])
    cells = {"setting": "{setting}", "paper": "{paper}"}
    cells |= {name: f"{{gain[{name}]:.2f}}x, {{variants[{name}][imbalance]:.2f}}" for name in variants}
    cells |= {"a step of theirs": "{variants[theirs][step_s]:.2f} s"}
    cells |= {"recompute": lambda row: "yes" if row["recompute"] else "no"}
    about = f"lengths: {result['rows'][0]['lengths']}; cells: tokens/s over theirs, imbalance of micro-batches"
    return columns(f"{result['title']} (predicted)", result["rows"], cells, about)


if __name__ == "__main__":
    asked = arguments(__doc__)
    rows = [row_of(setting, 2 if asked.quick else 8) for setting in SETTINGS[: 1 if asked.quick else None]]
    finish({"title": "WLB-LLM: LLaMA on H100", "rows": rows}, asked, table)
