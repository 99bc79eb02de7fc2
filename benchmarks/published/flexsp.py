"""FlexSP (ASPLOS'25, arXiv 2412.01523), its speed-ups on Wikipedia, with the coefficients of its released solver.

    python benchmarks/published/flexsp.py [--wikipedia FILE] [--quick] [--json] [--out FILE]

64 ranks (8 nodes of 8 A100-40G), 512 sequences a batch, longer ones left out, all padded to multiples of 128 tokens
(its data loader pads to twice the number of ranks). Ulysses all-to-all at the measured rates
of recipes/clusters/flexsp-a100.yaml. ZeRO-3: all ranks run the same number of micro-batches and meet in each; what it
gathers is in the coefficient of a launch. Seconds of a step:

    static     the least degree that holds a sequence of the context everywhere: 64 at 384K, 32 at 192K. It stands for
               the paper's DeepSpeed (SP64 at 384K; its degree at 192K is a guess)
    SP64       degree 64 everywhere
    BatchAda   FlexSP-BatchAda: the best one degree of each batch
    each       the best one degree of each micro-batch: what sorting alone gives, the strongest simple baseline
    evenload   the packing plugin on lanes of parallel.cp ranks, the best one degree of all batches (what a recipe can
               say today), and of each batch. Nothing is cut: after a full micro-batch these cards have no room for the
               keys and values of a cut sequence
    mesh, Ulysses    the mesh plugin with what FlexSP has: all-to-all alone on powers of two of ranks, heads not counted
    mesh       the mesh plugin with every cp_comm (rings over the links of the cluster file, heads counted), any degree

The first four sort: a batch, longest first, is cut into M runs whose largest holds the fewest tokens, as FlexSP's
blaster does, for the first five M that all ranks together hold; in each, sequences go longest first to the group that
is done first. The best M is taken for every column and batch by itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
from evenload.benchmarks.chains import plugins, recipe_of, with_traffic, without_sums
from evenload.benchmarks.frame import columns
from evenload.benchmarks.published.common import Batch, arguments, batches_of, finish
from evenload.benchmarks.published.lengths import K
from evenload.core.costs.costs import load
from evenload.core.errors import EvenloadError
from evenload.core.laws import check
from evenload.core.plan.step_plan import MicroBatch, Slice, StepPlan, as_lengths
from evenload.core.planning.chain import PlanChain
from evenload.core.planning.setting import RECIPES
from evenload.core.registry import get
from evenload.core.simulate.step import simulate
from evenload.plugins.mesh.config import MeshConfig

RANKS = 64
DEGREES = (1, 2, 4, 8, 16, 32, 64)
PAD = 2 * RANKS
TRIES = 5
"""Numbers of micro-batches, from the least on."""
MIB = 1 << 20
ULYSSES = MeshConfig(engines=("all_to_all",), powers_of_two=True, remap="off", routed="off", offload="off")
ROOM = 30_300 * MIB
"""Bytes of a 40 GB device for states and activations: what the solver's token cap for 7B at 384K (6,407) comes to."""

Seconds = dict[str, float]


@dataclass(frozen=True)
class Model:
    """A model of the paper, and its speed-ups over DeepSpeed and Megatron-LM by context."""

    name: str
    layers: int
    hidden: int
    heads: int
    parameters: float
    paper: tuple[tuple[int, tuple[float, float]], ...]

    @property
    def costs(self) -> str:
        return f"flexsp-{self.name}-a100"


MODELS = (
    Model("gpt-7b", 32, 4096, 32, 6.7e9, ((192 * K, (1.72, 1.98)), (384 * K, (1.46, 1.77)))),
    Model("gpt-13b", 40, 5120, 40, 13e9, ((192 * K, (1.59, 1.79)), (384 * K, (1.43, 1.77)))),
    Model("gpt-30b", 60, 6656, 52, 30e9, ((192 * K, (1.64, 1.95)), (384 * K, (1.53, 1.85)))),
)


@cache
def cap_of(model: Model) -> int:
    """Tokens that a rank may hold in a micro-batch: what ZeRO-3's 16 bytes a parameter leave."""
    per_token = load(model.costs, RECIPES / "costs").memory.activation_bytes_per_token
    return int((ROOM - 16 * model.parameters / RANKS) / per_token)


@cache
def packing_chain(model: Model, degree: int) -> PlanChain:
    """Packing on lanes of ``degree`` ranks."""
    sizes = {"num_layers": model.layers, "hidden_size": model.hidden, "num_attention_heads": model.heads}
    recipe = recipe_of(
        {
            "trainer": "deepspeed",
            "deepspeed": {"zero_stage": 3},
            "model": {"family": "gpt", **sizes},
            "parallel": {"dp": RANKS},
            "train": {"dtype": "bf16", "global_batch_size": 512},
            "cluster": "flexsp-a100",
            "costs": model.costs,
            "plugins": plugins(cap_of(model), "packing", slices="off"),
        }
    )
    chain = PlanChain.of_recipe(recipe, replace(recipe.layout(), cp=degree, dp=RANKS // degree))
    # What ZeRO-3 gathers is in the published coefficient of a launch.
    return without_sums(chain, cp_comm="all_to_all")


@cache
def mesh_of(model: Model, ulysses: bool) -> PlanChain:
    """The mesh plugin on the same machines: as FlexSP, which knows of no number of heads, or with all it has."""
    chain = packing_chain(model, 1)
    config = (ULYSSES if ulysses else MeshConfig()).model_copy(update={"enabled": True, "max_tokens": cap_of(model)})
    heads = 0 if ulysses else chain.context.traffic.heads
    limits = replace(chain.limits, heads=heads)
    return replace(with_traffic(chain, heads=heads), links=((get("mesh"), config),), limits=limits)


def step_seconds(model: Model, plan: StepPlan, degree: int = 1) -> float:
    return simulate(plan, packing_chain(model, degree).context, record=False).step_s


def chunks(batch: Batch, count: int) -> list[list[int]]:
    """The batch, longest first, in ``count`` runs whose largest holds the fewest tokens."""
    order = sorted(range(len(batch)), key=lambda i: -int(batch[i]))
    tokens = [int(batch[i]) for i in order]

    def runs(most: int) -> list[list[int]]:
        out: list[list[int]] = [[]]
        held = 0
        for i, n in zip(order, tokens, strict=True):
            if held + n > most:
                out.append([])
                held = 0
            out[-1].append(i)
            held += n
        return out

    low, high = max(max(tokens), -(-sum(tokens) // count)), sum(tokens)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if len(runs(middle)) <= count else (middle + 1, high)
    return runs(low)


def groups(model: Model, batch: Batch, chunk: list[int], degree: int) -> list[MicroBatch] | None:
    """A micro-batch on equal groups of ``degree`` ranks, longest sequence first to the group that is done first.

    None where no group has room for the next.
    """
    costs, cap = packing_chain(model, 1).context.costs, cap_of(model) * degree
    done, held = np.zeros(RANKS // degree), np.zeros(RANKS // degree, dtype=np.int64)
    members: list[list[int]] = [[] for _ in done]
    for i in chunk:
        n = int(batch[i])
        if not (held + n <= cap).any():
            return None
        group = int(np.where(held + n <= cap, done, np.inf).argmin())
        members[group].append(i)
        done[group] += float(costs.sequence_s(n))
        held[group] += n
    out = []
    for g, own in enumerate(members):
        ranks = tuple(range(g * degree, (g + 1) * degree))
        if own:
            out.append(MicroBatch(tuple(Slice(i, 0, int(batch[i])) for i in own), ranks))
        else:
            out += [MicroBatch((), (rank,)) for rank in ranks]
    return out


@dataclass(frozen=True)
class Cut:
    """A batch in sorted micro-batches, each on equal groups of every degree that holds it."""

    of_parts: list[dict[int, list[MicroBatch]]]
    """Of each micro-batch, by degree."""
    seconds: list[dict[int, float]]
    """Simulated alone; all ranks meet after each, so those of a step add up."""

    def best(self, degrees: tuple[int, ...], *, each: bool) -> list[list[MicroBatch]] | None:
        """One degree for all micro-batches, or with ``each`` for every one; None where none of them holds the batch."""
        if each:
            return [
                by_degree[min(s, key=lambda d: s[d])]
                for by_degree, s in zip(self.of_parts, self.seconds, strict=True)
                if s
            ]
        whole = [d for d in degrees if all(d in by_degree for by_degree in self.of_parts)]
        if not whole:
            return None
        d = min(whole, key=lambda d: sum(s[d] for s in self.seconds))
        return [by_degree[d] for by_degree in self.of_parts]


def cuts_of(model: Model, batch: Batch) -> list[Cut]:
    """The first numbers of micro-batches that all ranks together can hold."""
    out: list[Cut] = []
    count = -(-int(batch.sum()) // (RANKS * cap_of(model)))
    while len(out) < TRIES:
        parts = chunks(batch, count)
        of_parts = [{d: by_degree for d in DEGREES if (by_degree := groups(model, batch, part, d))} for part in parts]
        if all(of_parts):
            seconds = [{d: _alone(model, batch, by_degree) for d, by_degree in one.items()} for one in of_parts]
            out.append(Cut(of_parts, seconds))
        count += 1
    return out


def static(model: Model, batch: Batch, cuts: list[Cut], degrees: tuple[int, ...], *, each: bool) -> tuple[float, int]:
    """Seconds and micro-batches of the best plan with one degree for the batch, or with ``each`` one a micro-batch."""
    limits = replace(packing_chain(model, 1).limits, max_tokens=cap_of(model) + 1)
    best = (float("inf"), 0)
    for cut in cuts:
        rounds = cut.best(degrees, each=each)
        if rounds is not None:
            plan = check(StepPlan(batch, tuple(m for one in rounds for m in one), limits, made_by="static"))
            best = min(best, (step_seconds(model, plan), len(rounds)))
    return best


def _alone(model: Model, batch: Batch, micro_batches: list[MicroBatch]) -> float:
    sequences = [s.sequence for m in micro_batches for s in m.slices]
    number = {old: new for new, old in enumerate(sequences)}
    part = batch[sequences]
    renamed = [
        m._replace(slices=tuple(s._replace(sequence=number[s.sequence]) for s in m.slices)) for m in micro_batches
    ]
    return step_seconds(model, StepPlan(part, tuple(renamed), packing_chain(model, 1).limits))


def row_of(
    model: Model, context: int, paper: tuple[float, float], batches: tuple[Batch, ...], label: str
) -> dict[str, Any]:
    least = next(d for d in DEGREES if d * cap_of(model) >= context)
    columns = {"static": (least,), "SP64": (64,), "BatchAda": DEGREES, "each": DEGREES}
    cuts = [cuts_of(model, batch) for batch in batches]
    figures = {
        name: [static(model, b, c, degrees, each=name == "each") for b, c in zip(batches, cuts, strict=True)]
        for name, degrees in columns.items()
    }
    seconds = {name: float(np.mean([s for s, _ in rows])) for name, rows in figures.items()}
    lanes = {d: [_packed(model, d, batch) for batch in batches] for d in DEGREES}
    seconds["evenload"] = float(min(np.mean(column) for column in lanes.values()))
    seconds["evenload, per batch"] = float(np.mean([min(column) for column in zip(*lanes.values(), strict=True)]))
    for name, ulysses in (("mesh, Ulysses", True), ("mesh", False)):
        chain = mesh_of(model, ulysses)
        steps = [simulate(chain.plan(batch), chain.context, record=False).step_s for batch in batches]
        seconds[name] = float(np.mean(steps))
    lengths = [batch.astype(np.float64) for batch in batches]
    return {
        "setting": f"{model.name} {context // K}K",
        "lengths": label,
        "paper": {"over DeepSpeed": paper[0], "over Megatron-LM": paper[1]},
        "static_degree": least,
        "seconds": seconds,
        "gain": {name: seconds["static"] / value for name, value in seconds.items()},
        "evenload_degree": min(lanes, key=lambda d: float(np.mean(lanes[d]))),
        "tokens": [float(n.sum()) for n in lengths],
        "squares": [float((n * n).sum()) for n in lengths],
        "micro_batches": [count for _, count in figures["SP64"]],
    }


def _packed(model: Model, degree: int, batch: Batch) -> float:
    """Seconds of the packing plugin's plan; infinite where lanes of this degree cannot hold the batch."""
    try:
        return step_seconds(model, packing_chain(model, degree).plan(batch), degree)
    except EvenloadError:
        return float("inf")


def rows(quick: bool, wikipedia: Any) -> Iterator[dict[str, Any]]:
    for model in MODELS[: 1 if quick else None]:
        for context, paper in reversed(model.paper[1:] if quick else model.paper):
            label, batches = batches_of("wikipedia-like", 512, 2 if quick else 8, context, wikipedia)
            batches = tuple(as_lengths(-(-batch // PAD) * PAD) for batch in batches)
            yield row_of(model, context, paper, batches, label)


def table(result: dict[str, Any]) -> Any:
    cells = {"setting": "{setting}", "FlexSP / DeepSpeed": "{paper[over DeepSpeed]:.2f}x"}
    cells |= {"/ Megatron-LM": "{paper[over Megatron-LM]:.2f}x"}
    cells |= {name: f"{{seconds[{name}]:.2f}} ({{gain[{name}]:.2f}}x)" for name in result["rows"][0]["seconds"]}
    cells |= {"degrees": "SP{static_degree}, cp {evenload_degree}"}
    about = f"lengths: {result['rows'][0]['lengths']}; seconds (gain over static); degrees: static's, evenload's"
    return columns(f"{result['title']} (predicted)", result["rows"], cells, about)


if __name__ == "__main__":
    asked = arguments(__doc__)
    title = "FlexSP, 512 Wikipedia sequences a step on 64 A100-40G"
    finish({"title": title, "rows": list(rows(asked.quick, asked.wikipedia))}, asked, table)
