"""Galvatron (arXiv 2504.21411): its search on its own llama2-7b profile, all samples of its one length, and ours.

    python benchmarks/peers/galvatron.py CHECKOUT [--batches 16,64] [--memory 36] [--limit-s 60]
                                         [--json] [--out FILE]

CHECKOUT is Hetu-Galvatron @ cea12ffb, whose engine and cost model run as they are, on its profile of a node of 8 A100:
samples of 2,048 tokens, bf16, 1F1B; it needs scipy. Its seconds are those of its cost model, ours those of the
simulator under the same forward seconds (recipes/costs/galvatron-llama2-7b.yaml) and the same bandwidth of 8 ranks: the
two share no scale, so each is compared within itself.

    two        strategies by layer (tp or Ulysses, dp, ZeRO 2 or 3, checkpoint): the best division of the layers, alike
               in each stage, between two of them
    one        what its engine gives where all layers have one strategy
    stock      of these, what Megatron-Core or DeepSpeed run as they are: no Ulysses, ZeRO 3 without tp and pp
    bound      no strategies by layer take less in its cost model, whoever finds them: for every layout and number of
               micro-batches, each stage's linear program over (seconds, MB) of strategies, switching between layers
               free, put into its formula of 1F1B
    ours       the best of `evenload search` over both trainers, and what its layout takes in Galvatron's cost model
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt
import yaml
from evenload.api import load_plugins
from evenload.commands.tables.show import emit, grid
from evenload.core.input.format import seconds
from evenload.core.machine import cluster as clusters
from evenload.core.plan.step_plan import as_lengths
from evenload.core.planning.setting import Setting, costs_of
from evenload.core.recipe.recipe import RECIPES, parse
from evenload.core.search.answer import said
from evenload.core.search.best_first import best_first
from evenload.core.search.space import SearchBatch, space_of

MODEL = {"num_layers": 32, "hidden_size": 4096, "num_attention_heads": 32, "num_query_groups": 32}
LENGTH, RANKS, PROFILE = 2048, 8, "galvatron-llama2-7b"
KEPT = 0.8
"""Of its memory, what its engine plans with, the rest being the allocator's."""
BEGINS_AT_S = 5
"""Times its limit that a search may take for a first answer."""

Floats = npt.NDArray[np.float64]
Result = dict[str, Any]


def least_by_layer(cost_s: Floats, memory: Floats, layers: int, budget: float) -> float:
    """The least seconds of so many equal layers in so much memory if a layer could be divided among strategies [S].

    A linear program with one constraint: at most two strategies, so all pairs are tried. Infinite where nothing fits.
    """
    each = budget / layers
    fits = memory <= each
    if not fits.any():
        return math.inf
    values = [float(cost_s[fits].min())]
    for small in np.flatnonzero(fits):
        for large in np.flatnonzero(~fits):
            share = (each - memory[small]) / (memory[large] - memory[small])
            values.append(float(cost_s[small] + share * (cost_s[large] - cost_s[small])))
    return layers * min(values)


def step_s(stages_s: Floats, summed_s: Floats, chunks: int) -> Floats:
    """Its formula with what gradient sums add: stages' seconds without and with them [..., stages]."""
    late = (summed_s - np.cumsum(stages_s, axis=-1)).max(axis=-1)
    return least_of_stages(stages_s, chunks) + np.maximum(0.0, late)


def least_of_stages(stages_s: Floats, chunks: int) -> Floats:
    """Its formula of 1F1B (`pipeline_costmodel`) of stages' seconds [..., stages] without gradient sums."""
    count, first_s, rest_s = stages_s.shape[-1], stages_s[..., 0], stages_s[..., 1:].sum(axis=-1)
    # A third is forward, two are backward.
    filled = np.maximum(min(count - 1, chunks - 1) * first_s, rest_s)
    return np.maximum(
        first_s + rest_s + stages_s[..., -1] * (chunks - 1), filled + first_s * max(0, chunks + 1 - count)
    )


class Engine:
    """Its search engine on the published profile."""

    def __init__(self, checkout: Path, folder: Path, batch: int, memory: int) -> None:
        from galvatron.core.search_engine.args_schema import GalvatronSearchArgs
        from galvatron.core.search_engine.search_engine import GalvatronSearchEngine

        self._args = GalvatronSearchArgs.model_validate(
            {
                "model_info": {"hidden_size": MODEL["hidden_size"], "num_layers": MODEL["num_layers"]},
                "parallelism_info": {"default_dp_type": "zero2", "pipeline_type": "pipedream_flush"},
                "common_train_info": {"seq_length": LENGTH, "sequence_parallel": True, "global_memory_buffer": True},
                "hardware_info": {"num_nodes": 1, "num_gpus_per_node": RANKS, "memory_constraint": memory},
                "batch_size_info": {"settle_bsz": batch},
                "profiling_info": {"time_profile_mode": "batch", "memory_profile_mode": "static"},
                "options_info": {"log_dir": str(folder / "logs"), "output_config_path": str(folder)},
            }
        )
        self._engine: Any = GalvatronSearchEngine(self._args)
        layers = {"hidden_size": MODEL["hidden_size"], "layer_num": MODEL["num_layers"], "seq_len": LENGTH}
        self._engine.set_search_engine_info(str(checkout / "galvatron" / "models" / "gpt"), [layers], "llama2-7b")
        self._engine.initialize_search_engine()
        self._all = list(self._engine.layer_strategy_list)
        self._batch, self._folder, self._budget = batch, folder, memory * 1024 - int(memory * 1024 * 0.2)

    def best(self, only: Any = None) -> Result:
        """What it finds with one strategy for all layers: seconds, that strategy and micro-batches."""
        self._args.options_info.fine_grained_mode = 0
        self._engine.layer_strategy_list = [one for one in self._all if only is None or only(one)]
        for old in self._folder.glob("galvatron_config_*.json"):
            old.unlink()
        begin = time.process_time()
        rate = self._engine.parallelism_optimization()
        cpu_s = time.process_time() - begin
        if rate <= 0:
            return {"step_s": math.inf, "chunks": None, "strategies": "nothing fits", "cpu_s": cpu_s}
        (path,) = self._folder.glob("galvatron_config_*.json")
        config = json.loads(path.read_text())
        keys = "tp_sizes_enc", "use_sp", "dp_types_enc", "checkpoint"
        columns = zip(*(config[key].split(",") for key in keys), strict=True)
        counts: dict[str, int] = {}
        for tp, ulysses, zero3, again in columns:
            name = f"{'Ulysses' if ulysses == '1' else 'TP'} {tp}{', ZeRO 3' * int(zero3)}{', again' * int(again)}"
            counts[name] = counts.get(name, 0) + 1
        names = "; ".join(f"{count} x {name}" for name, count in counts.items())
        pp = config["pp_deg"]
        return {
            "step_s": self._batch / rate,
            "chunks": config["chunks"],
            "strategies": f"PP {pp}: {names}" if pp > 1 else names,
            "cpu_s": cpu_s,
        }

    def bound_s(self) -> float:
        """What no strategies by layer take less than in its cost model."""
        return min(least for task in self._tasks() for least in self._least_s(*task))

    def two(self) -> Result:
        """The best division of layers between two strategies: seconds, how many layers have each, micro-batches."""
        return min(
            (row for task in self._tasks() for row in self._divided(*task)), key=lambda row: float(row["step_s"])
        )

    def _tasks(self) -> Iterator[tuple[list[Any], list[Any], int, int]]:
        """Strategies of layers, of embedding and output layer, micro-batches and stages that go together."""
        for chunks in (n for n in range(1, self._batch + 1) if self._batch % n == 0):
            for pp in sorted({one.pp_size for one in self._all}):
                most_dp = max(1, min(self._batch // chunks, RANKS // pp))
                here, heads = (
                    [one for one in some if one.pp_size == pp and one.dp_size <= most_dp]
                    for some in (self._all, self._engine.embedding_lmhead_strategy_list)
                )
                if pp <= chunks and here:
                    yield here, heads, chunks, pp

    def _costs(self, strategies: list[Any], chunks: int, pp: int) -> tuple[Floats, Floats, Floats]:
        """Of a layer by strategy: seconds with and without its gradient sum [S], MB in each stage [stages, S]."""
        with_sum, without = np.array([self._time(one, chunks) for one in strategies]).T
        memory = np.array([[self._memory(one, chunks, stage) for one in strategies] for stage in range(pp)])
        return with_sum, without, memory

    def _divided(self, strategies: list[Any], heads: list[Any], chunks: int, pp: int) -> Iterator[Result]:
        with_sum, without, memory = self._costs(strategies, chunks, pp)
        layers, costs = MODEL["num_layers"] // pp, [self._head(head, chunks) for head in heads]
        head_s, head_mb = (np.array([one[i] for one in costs]) for i in (0, 1))  # [heads, stages]
        counts = np.arange(1, layers + 1)[:, None, None]
        for a, b in product(range(len(strategies)), repeat=2):
            plain, summed = (counts * each[a] + (layers - counts) * each[b] for each in (without, with_sum))
            buffers = [self._buffer_mb([strategies[a], strategies[b], head], chunks, pp) for head in heads]
            held = counts * memory[:, a] + (layers - counts) * memory[:, b] + np.ceil(head_mb)
            taken_s = step_s(plain + head_s, np.broadcast_to(summed, (layers, 1, pp)), chunks)  # [counts, heads]
            taken_s[(held.max(axis=-1) + buffers) > self._budget] = math.inf
            count = int(taken_s.min(axis=1).argmin()) + 1
            text = "; ".join(f"{n} x {_named(strategies[i])}" for i, n in ((a, count), (b, layers - count)) if n)
            names = f"PP {pp}: {text}" if pp > 1 else text
            yield {"step_s": float(taken_s.min()), "chunks": chunks, "strategies": names}

    def _buffer_mb(self, strategies: list[Any], chunks: int, pp: int) -> float:
        """What its engine counts for gathered inputs where any strategy is tensor-parallel."""
        if all(one.tp_size == 1 for one in strategies):
            return 0.0
        dp = RANKS // pp // max(one.tp_sp_size for one in strategies)
        return math.ceil(self._batch / chunks / dp * MODEL["hidden_size"] * LENGTH * 2 / 2**20)

    def _least_s(self, strategies: list[Any], heads: list[Any], chunks: int, pp: int) -> Iterator[float]:
        """For each strategy of the embedding and output layer, the least of all by layer.

        The buffer of gathered inputs is left out of memory, which lets more fit.
        """
        with_sum, without, memory = self._costs(strategies, chunks, pp)
        layers = MODEL["num_layers"] // pp
        for head in heads:
            head_s, head_mb = self._head(head, chunks)
            budgets = [self._budget - math.ceil(mb) for mb in head_mb]
            if any(memory[i].min() * layers > budgets[i] for i in range(pp)):  # nothing fits
                yield math.inf
                continue
            stages = np.array([least_by_layer(without, memory[i], layers, budgets[i]) for i in range(pp)]) + head_s
            first_s = least_by_layer(with_sum, memory[0], layers, budgets[0])
            if pp == 1:
                all_but_one = least_by_layer((chunks - 1) * without + with_sum, memory[0], layers, budgets[0])
                summed_s = all_but_one + (chunks - 1) * head_s[0]
            else:
                summed_s = first_s + stages[1:].sum() + (chunks - 1) * stages[-1]
            yield max(float(least_of_stages(stages, chunks)), summed_s)

    def _models(self, *names: str) -> dict[str, Any]:
        return {name: getattr(self._engine, f"{name}_list")[0] for name in names}

    def _time(self, strategy: Any, chunks: int) -> tuple[float, float]:
        from galvatron.core.cost_model.components.layer_cost import TimeCostModelBase as Model

        names = "model_args", "train_args", "parallel_args", "profile_model_args", "profile_hardware_args"
        one: tuple[float, float] = Model(strategy, self._batch, chunks, **self._models(*names)).gen_result()
        return one

    def _memory(self, strategy: Any, chunks: int, stage: int) -> float:
        from galvatron.core.cost_model.components.layer_cost import MemoryCostModelBase as Model

        names = "model_args", "train_args", "parallel_args", "profile_model_args"
        of = Model(strategy, self._batch, chunks, stage, **self._models(*names)).get_memory_cost()
        return math.ceil(of["enc_total"])

    def _head(self, strategy: Any, chunks: int) -> tuple[list[float], list[float]]:
        """Seconds without gradient sum and MB of embedding and output layer by stage."""
        from galvatron.core.cost_model.components import embedding_lmhead_cost as costs

        names = "model_args", "train_args", "parallel_args", "profile_model_args"
        more = self._models(*names, "profile_hardware_args")
        size = {"global_batch_size": self._batch, "chunks": chunks}
        time_of = costs.EmbeddingLMHeadTimeCostModel(strategy, **size, sequence_length_list=[LENGTH], **more)
        memory = costs.EmbeddingLMHeadMemoryCostModel(strategy, **size, **self._models(*names)).get_memory_cost()
        return time_of.gen_result()[1], memory["enc_total"]


def _named(one: Any) -> str:
    kind = f"Ulysses {one.sp_size}" if one.sp_size > 1 else f"TP {one.tp_size}"
    return f"{kind}{', ZeRO 3' * (one.dp_type.name == 'ZERO3')}{', again' * one.checkpoint}"


def stock(strategy: Any) -> bool:
    """Whether Megatron-Core or DeepSpeed run it as it is, for all layers."""
    sharded = strategy.dp_type.name == "ZERO3"
    return strategy.sp_size == 1 and not (sharded and (strategy.tp_size > 1 or strategy.pp_size > 1))


def ours(checkout: Path, folder: Path, batch: int, memory: int, limit_s: float) -> Result:
    """The best of our searches of both trainers for the same lengths, in the memory that its engine plans with."""
    links = checkout / "galvatron" / "profile_hardware" / "hardware_configs"
    rates = json.loads((links / f"allreduce_bandwidth_1nodes_{RANKS}gpus_per_node.json").read_text())
    cluster = yaml.safe_load((RECIPES / "clusters" / "a100.yaml").read_text())
    cluster["intra"]["bytes_per_s"] = rates[f"allreduce_size_{RANKS}_consec_1"] * 1e9
    path = folder / "cluster.yaml"
    path.write_text(yaml.safe_dump(cluster))
    rows = [searched(trainer, path, batch, memory, limit_s) for trainer in ("megatron", "deepspeed")]
    return min(rows, key=lambda row: float(row["step_s"]))


def searched(trainer: str, cluster: Path, batch: int, memory: int, limit_s: float) -> Result:
    """The best setting of a trainer, under the profile's seconds and counted bytes: the profile's are of its own."""
    recipe = parse(
        {
            "trainer": trainer,
            "model": {**MODEL, "ffn_hidden_size": 11008, "vocab_size": 32000},
            "train": {"dtype": "bf16", "global_batch_size": batch},
            "data": {"max_length": LENGTH},
            "cluster": str(cluster),
            "memory_gib": memory * KEPT,
        }
    )
    machines = clusters.load(str(cluster), cluster.parent)
    counted = costs_of(Setting.of_recipe(recipe), machines)
    profile = costs_of(Setting.of_recipe(recipe.changed({"costs": PROFILE})), machines)
    costs = profile.model_copy(update={"memory": counted.memory})
    path = cluster.with_name(f"{trainer}.costs.yaml")
    path.write_text(yaml.safe_dump(costs.model_dump(exclude_none=True)))
    choices = space_of(recipe.changed({"costs": str(path)}), RANKS, {}).choices
    begin, best = time.process_time(), None
    for state in best_first(choices, [SearchBatch(as_lengths([LENGTH] * batch))]):
        best, taken_s = state.best, time.process_time() - begin
        if state.gap <= 0.01 or (taken_s > limit_s and (best or taken_s > BEGINS_AT_S * limit_s)):
            break
    if best is None:
        return {"trainer": trainer, "step_s": math.inf, "gap": math.inf, "picks": "nothing fits", "tp": 0, "pp": 0}
    layout = best.choice.chain.context.layout
    own = {"step_s": best.mean_s, "gap": state.gap, "picks": said(best.choice.values)}
    return {"trainer": trainer, **own, "tp": layout.tp, "pp": layout.pp}


def row_of(checkout: Path, batch: int, memory: int, limit_s: float) -> Result:
    """A batch of so many samples."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        own = ours(checkout, folder, batch, memory, limit_s)
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):  # it prints every strategy
            engine = Engine(checkout, folder, batch, memory)
            result = {
                "two": engine.two(),
                "one": engine.best(),
                "stock": engine.best(stock),
                "bound_s": engine.bound_s(),
                "our_layout": engine.best(
                    lambda one: stock(one) and (one.tp_size, one.pp_size) == (own["tp"], own["pp"])
                ),
            }
    return {"batch": batch, "memory": memory, "ours": own, **result}


def table(result: Result) -> Any:
    """A row a batch."""
    rows = []
    for row in result["rows"]:
        bound_s = row["bound_s"]
        cells = (
            f"{seconds(row[key]['step_s'])}, {row[key]['step_s'] / bound_s:.3f}x, {row[key]['strategies']}"
            for key in ("two", "one", "stock", "our_layout")
        )
        best = row["ours"]
        own = f"{seconds(best['step_s'])} ({best['gap']:.1%}), {best['trainer']} {best['picks']}"
        rows.append((str(row["batch"]), seconds(bound_s), *cells, own))
    heads = (
        "samples",
        "bound",
        "by layer",
        "two",
        "one for all",
        "of these, stock",
        "our layout in it",
        "ours, simulated",
    )
    return grid("llama2-7b on 8 A100 in Galvatron's cost model (predicted), over its bound", heads, rows)


def prepared(checkout: Path) -> None:
    """Let its packages be imported."""
    sys.path.insert(0, str(checkout))
    # Its search takes argument classes from its runtime, whose own beginning loads kernels for GPUs.
    runtime = ModuleType("galvatron.core.runtime")
    runtime.__path__ = [str(checkout / "galvatron" / "core" / "runtime")]
    sys.modules[runtime.__name__] = runtime


def main(words: Iterable[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--batches", default="16,64")
    parser.add_argument("--memory", type=int, default=36, help="GiB of a device")
    parser.add_argument("--limit-s", type=float, default=60.0, help="CPU seconds of our search")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args(None if words is None else list(words))
    prepared(asked.checkout)
    load_plugins()
    batches = [int(word) for word in asked.batches.split(",")]
    rows = [row_of(asked.checkout, batch, asked.memory, asked.limit_s) for batch in batches]
    result: Result = {"predicted": True, "rows": rows}
    if asked.out:
        asked.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    emit(result, asked.json, table)


if __name__ == "__main__":
    main()
