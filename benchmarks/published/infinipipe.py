"""InfiniPipe (arXiv 2509.21275, section V): elastic pipelines on 4 x 8 A800, up to 1.69x FlexSP and 2.60x Megatron-LM.

    python benchmarks/published/infinipipe.py [--quick] [--json] [--out FILE]

LLaMA 7B, 13B and 30B, 512 sequences a step, longer ones cut to the context. Pipelines: a stage on each node, Ulysses
over its 8 ranks, states divided over these (the paper's FSDP; what that moves is taken to be hidden). Seconds a step:

    Megatron   TP 8, CP 2 (7B) or 4, ring; 10, 20 or 55 layers recomputed, as published; the faster of packs in the
               order of the batch and best-fit packs, up to the context (a guess)
    DeepSpeed  ZeRO-3, Ulysses over 16 (7B) or 32 ranks, 36 of 30B's layers recomputed, as published; best-fit packs,
               the fastest of 1, 2 and 4 contexts that fits (a guess)
    FlexSP     ZeRO-3, likewise recomputed; in its place evenload's mesh plugin with all-to-all alone on powers of two
               of ranks, heads not counted: FlexSP's own problem, solved at least as well (benchmarks/planning/mesh.py)
    Seq1F1B    as the paper has it: chunks of equally many tokens, one number of layers recomputed; the fastest of eight
               sizes, 1K to 128K
    Alg. 1     InfiniPipe's own algorithms as evenload's baseline ``algorithm_1`` runs them
    evenload   the pipeline plugin
    own states evenload with the states that its runtime keeps today: those of the optimizer are divided, weights and
               gradients are not

Guessed: lengths (stand-ins, lengths.py; GitHub for 64K to 192K), all rates of recipes/clusters/a800.yaml but NVLink's
and InfiniBand's, compute at half of the data sheet, and what ZeRO-3 gathers in a micro-batch: FlexSP's measured
coefficient of a launch on nodes with the same 400 Gbit/s (recipes/costs/flexsp-*). The paper's bars are not readable
here; its numbers are those of its text.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
from evenload.benchmarks.chains import plugins, recipe_of, with_launches, without_sums
from evenload.benchmarks.frame import Row, columns, means
from evenload.benchmarks.published.common import MODELS, Batch, Degrees, Machines, Way, arguments, finish
from evenload.benchmarks.published.flexsp import ULYSSES
from evenload.benchmarks.published.lengths import K, drawn
from evenload.benchmarks.published.pipelines import Pipeline, judged, missing_bytes
from evenload.core.costs.costs import load
from evenload.core.costs.memory import activation_budget_bytes, fixed_bytes
from evenload.core.errors import EvenloadError
from evenload.core.plan.step_plan import StepPlan, as_lengths
from evenload.core.planning.chain import PlanChain
from evenload.core.planning.setting import RECIPES
from evenload.core.registry import get

CLUSTER, RANKS, STAGES = "a800", 32, 4
COUNT = 512
CAP = 16 * K
"""Most tokens of a pipeline's chunk on a rank."""
COLUMNS = ("Megatron", "DeepSpeed", "FlexSP", "Seq1F1B", "Alg. 1", "evenload", "own states")


@dataclass(frozen=True)
class Theirs:
    """What the paper gives its baselines for a model."""

    cp: int
    """Of Megatron-LM, next to TP 8."""
    megatron_layers: int
    """That are recomputed."""
    sp: int
    """Of DeepSpeed."""
    zero_layers: int


THEIRS = {
    "llama-7b": Theirs(2, 10, 16, 0),
    "llama-13b": Theirs(4, 20, 32, 0),
    "llama-30b": Theirs(4, 55, 32, 36),
}


@dataclass(frozen=True)
class Setting:
    model: str
    lengths: str
    context: int
    paper: str = ""
    """Gains of InfiniPipe that its text gives for this setting."""

    @property
    def name(self) -> str:
        return f"{self.model.removeprefix('llama-').upper()} {self.lengths} {self.context // K}K"


def settings() -> Iterator[Setting]:
    known = {
        ("llama-7b", "commoncrawl-like", 48): "FlexSP 1.31x",
        ("llama-13b", "commoncrawl-like", 48): "FlexSP 1.52x, DeepSpeed 1.71x",
        ("llama-30b", "commoncrawl-like", 48): "FlexSP 1.69x",
        ("llama-13b", "github-like", 64): "FlexSP 1.30x, Seq1F1B 1.23x",
        ("llama-13b", "github-like", 192): "FlexSP 1.37x, Seq1F1B 1.63x",
    }
    for context in (48, 96):
        for name in ("commoncrawl-like", "github-like"):
            for model in THEIRS:
                yield Setting(model, name, context * K, known.get((model, name, context), ""))
    for context in (64, 128, 192):
        yield Setting("llama-13b", "github-like", context * K, known.get(("llama-13b", "github-like", context), ""))


def batches_of(setting: Setting, count: int, size: int) -> list[Batch]:
    """Longer sequences are cut to the context, as in the paper."""
    lengths = np.minimum(drawn(setting.lengths, count * size), setting.context)
    return [as_lengths(lengths[i * size : (i + 1) * size].tolist()) for i in range(count)]


def with_layers(plan: StepPlan, layers: int) -> StepPlan:
    """The plan with so many layers of every micro-batch recomputed at its only stage."""
    return replace(plan, recompute=((layers,) * len(plan.micro_batches),) if layers else ())


@cache
def megatron(setting: Setting, packing: str) -> PlanChain:
    own = THEIRS[setting.model]
    return Machines(setting.model, RANKS, CLUSTER).chain(Way(packing, Degrees(8, 1, own.cp), setting.context // own.cp))


@cache
def zero_3(model: str, sp: int, tokens: int) -> PlanChain:
    """ZeRO-3 on all ranks: best-fit packs on lanes of ``sp`` ranks, with so many tokens on a rank."""
    recipe = recipe_of(
        {
            "trainer": "deepspeed",
            "deepspeed": {"zero_stage": 3},
            "model": {"vocab_size": 32000, **MODELS[model]},
            "parallel": {"dp": RANKS},
            "train": {"dtype": "bf16", "global_batch_size": COUNT},
            "cluster": CLUSTER,
            "plugins": plugins(tokens, "packing", slices="off"),
        }
    )
    chain = PlanChain.of_recipe(recipe, replace(recipe.layout(), cp=sp, dp=RANKS // sp))
    chain = without_sums(chain, cp_comm="all_to_all", heads=0)
    gathers = load(f"flexsp-{model.replace('llama', 'gpt')}-a100", RECIPES / "costs")
    context = with_launches(chain.context, lambda name, _: getattr(gathers, name).launch_s)
    return replace(chain, context=context, limits=replace(chain.limits, heads=0), instead="best_fit")


@cache
def flexsp(model: str) -> PlanChain:
    """The mesh plugin with what FlexSP has, and as many tokens on a rank as fit."""
    chain, layers = zero_3(model, 1, CAP), THEIRS[model].zero_layers
    limits, memory = chain.limits, chain.context.costs.memory
    each = limits.memory.activation_bytes_per_token / limits.layers_per_stage
    kept = each * (limits.layers_per_stage - layers)
    head = memory.head_bytes_per_token + memory.head_working_bytes_per_token
    again = each * bool(layers)
    per_token = kept + limits.memory.input_bytes_per_token * layers + head + again
    tokens = int(activation_budget_bytes(chain.context.cluster, memory, limits) / per_token)
    config = ULYSSES.model_copy(update={"enabled": True, "max_tokens": tokens})
    return replace(chain, links=((get("mesh"), config),), instead="")


@cache
def pipeline(model: str, planner: str = "", cap: int = CAP, *, fsdp: bool = True) -> PlanChain:
    """A pipeline of nodes; with ``fsdp`` all states are divided over the ranks of a node."""
    chain = Pipeline(model, STAGES, RANKS // STAGES, CLUSTER).chain("pipeline", cap, planner)
    if not fsdp:
        return chain
    costs = chain.context.costs
    memory = costs.memory.model_copy(update={"sharded_bytes": costs.memory.fixed_bytes})
    return replace(chain, context=replace(chain.context, costs=costs.model_copy(update={"memory": memory})))


def result_of(plan: StepPlan, chain: PlanChain) -> Row:
    """Raises EvenloadError where it does not fit."""
    over = missing_bytes(plan, chain.context)
    if over > 0:
        held = fixed_bytes(chain.context.costs.memory, plan.limits)
        detail = f"{over / 1e9:.1f} GB over, {held / 1e9:.1f} GB of states"
        raise EvenloadError("a plan does not fit into memory", detail, "recompute more")
    return judged(plan, chain.context)


def fastest_of(options: Iterable[tuple[PlanChain, int | None]], batch: Batch) -> Row:
    """Of chains with layers to recompute; None: as the plan says. Raises EvenloadError where none fits."""
    results, why = [], None
    for chain, layers in options:
        try:
            plan = chain.plan(batch)
            results.append(result_of(plan if layers is None else with_layers(plan, layers), chain))
        except EvenloadError as error:
            why = error
    if not results:
        raise why or EvenloadError("there is nothing to choose from")
    return min(results, key=lambda one: one["step_s"])


def step_of(setting: Setting, batch: Batch) -> dict[str, Row]:
    """Every column of one batch; a system that cannot run it says why."""
    own, model = THEIRS[setting.model], setting.model
    shares = (setting.context // own.sp * n for n in (1, 2, 4))
    columns: dict[str, list[tuple[PlanChain, int | None]]] = {
        "Megatron": [(megatron(setting, packing), own.megatron_layers) for packing in ("in_order", "best_fit")],
        "DeepSpeed": [(zero_3(model, own.sp, tokens), own.zero_layers) for tokens in shares],
        "FlexSP": [(flexsp(model), own.zero_layers)],
        "Seq1F1B": [(pipeline(model, "fixed_chunks", cap), None) for cap in (CAP, CAP // 16)],
        "Alg. 1": [(pipeline(model, "algorithm_1"), None)],
        "evenload": [(pipeline(model), None)],
        "own states": [(pipeline(model, fsdp=False), None)],
    }
    results: dict[str, Row] = {}
    for name in COLUMNS:
        try:
            results[name] = fastest_of(columns[name], batch)
        except EvenloadError as error:
            results[name] = {"failed": str(error)}
    return results


def row_of(setting: Setting, count: int, size: int) -> Row:
    steps = [step_of(setting, batch) for batch in batches_of(setting, count, size)]
    columns_of: dict[str, Row] = {}
    for name in COLUMNS:
        failed = [one[name] for one in steps if "failed" in one[name]]
        keys = ("step_s", "bubble_frac", "exposed_frac", "recompute_frac", "peak_bytes", "micro_batch_imbalance")
        columns_of[name] = failed[0] if failed else means([{key: one[name][key] for key in keys} for one in steps])
    ours = columns_of["evenload"].get("step_s")
    return {
        "setting": setting.name,
        "paper": setting.paper,
        "lengths": setting.lengths,
        "columns": columns_of,
        "gain": {name: one["step_s"] / ours for name, one in columns_of.items() if ours and "step_s" in one},
    }


def table(result: Row) -> Any:
    def cell(name: str) -> Any:
        def shown(row: Row) -> str:
            one = row["columns"][name]
            if "failed" in one:
                return "does not fit"
            return f"{one['step_s']:.1f}" + (f" ({row['gain'][name]:.2f}x)" if name in row["gain"] else "")

        return shown

    def shares(row: Row) -> str:
        ours = row["columns"]["evenload"]
        return f"{ours['bubble_frac']:.1%}, {ours['recompute_frac']:.1%}" if "step_s" in ours else ""

    cells = {"setting": "{setting}", "paper": "{paper}", **{name: cell(name) for name in COLUMNS}}
    about = "seconds a step (over evenload's); the paper's at most: FlexSP 1.69x, DeepSpeed 2.07x, Megatron-LM 2.60x, "
    about += "Seq1F1B 1.27x at 48K and 1.40x at 96K"
    cells |= {"evenload: bubble, recomputed": shares}
    return columns(f"{result['title']} (predicted)", result["rows"], cells, about)


def benchmark(quick: bool) -> Row:
    if quick:
        rows = [row_of(Setting("llama-13b", "commoncrawl-like", 48 * K), 1, COUNT // 4)]
    else:
        rows = [row_of(setting, 3, COUNT) for setting in settings()]
    return {"title": f"InfiniPipe: {COUNT} sequences a step on 4 x 8 A800", "rows": rows}


if __name__ == "__main__":
    asked = arguments(__doc__)
    finish(benchmark(asked.quick), asked, table)
