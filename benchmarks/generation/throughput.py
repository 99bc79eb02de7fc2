"""Tokens a second of whole rollouts on two ranks: this engine beside what DeepSpeed and Transformers have.

    python benchmarks/generation/throughput.py [--weights FOLDER] [--trainers deepspeed megatron] [--prompts 16]
                                               [--samples 8] [--slots 64] [--limit 1024] [--repeats 3] [--quick]

groups       evenload, each prompt's samples on one rank, prompts in turn: what `Host.generate` does of whole requests
spread       evenload, samples in turn, whatever their prompt: the same, asked for one sample a request
deepspeed    HybridEngineRollout.generate: decodes every row to the limit, and cuts behind the ends
padded       Transformers' generate with ends: rows in batches of --slots, until the last one of a batch has ended
continuous   Transformers' generate_batch (continuous batching), as many requests at once

The model of `collatz.py` (trained first where no folder is given), temperature 1, the same prompts, samples and limit
for all; prompts in turn for the last three. Ranks exchange nothing on the way, so that a rollout ends with its busiest
rank: seconds are that rank's process time, and its wall time beside it. Counted are the tokens that are kept, up to an
end. Variants alternate; each repeat draws other samples. Rates are of all repeats together, spreads of single ones.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from evenload.benchmarks.frame import begun, columns, main, options, result_of
from evenload.benchmarks.generation.collatz import BELOW, END, PADDING, prompt_of, train

RANKS = 2
Lengths = list[int]


def prompts_of(count: int, seed: int) -> list[list[int]]:
    numbers = np.random.default_rng(seed).integers(2, BELOW, count)
    return [prompt_of(int(number)) for number in numbers]


def kept(rows: torch.Tensor) -> Lengths:
    """Tokens of each row up to its end, that included."""
    return [int(ends[0]) + 1 if len(ends := (row == END).nonzero()[:, 0]) else len(row) for row in rows]


class Peers:
    """What others generate with the module of DeepSpeed's engine, which attends as Transformers has it meanwhile."""

    def __init__(self, host: Any, asked: argparse.Namespace) -> None:
        self._engine, self._asked, self._rank = host.engine, asked, host.world.rank

    def own(self, seed: int) -> list[list[int]]:
        return prompts_of(self._asked.prompts, seed)[self._rank :: RANKS]

    @contextmanager
    def stock(self) -> Iterator[Any]:
        from evenload.integrations.huggingface.attention import NAME, set_attention

        module = self._engine.module
        set_attention(module, "sdpa")
        module.config.use_cache = module.generation_config.use_cache = True
        module.eval()
        try:
            yield module
        finally:
            module.train()
            module.config.use_cache = False
            set_attention(module, NAME)

    def config(self) -> Any:
        draws: dict[str, Any] = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
        return transformers.GenerationConfig(
            max_new_tokens=self._asked.limit, eos_token_id=END, pad_token_id=PADDING, use_cache=True, **draws
        )

    def deepspeed(self, seed: int) -> Lengths:
        from deepspeed.runtime.rollout.base import RolloutRequest, SamplingConfig
        from deepspeed.runtime.rollout.hybrid_engine_rollout import HybridEngineRollout

        class Ends:
            pad_token_id, eos_token_id = PADDING, END

        tokens, mask = padded_before(self.own(seed))
        sampling = SamplingConfig(self._asked.limit, n_samples_per_prompt=self._asked.samples)
        with self.stock():
            rollout = HybridEngineRollout(self._engine, Ends()).generate(RolloutRequest(tokens, mask), sampling)
        return rollout.attention_mask[:, tokens.shape[1] :].sum(1).tolist()

    def padded(self, seed: int) -> Lengths:
        rows = [row for row in self.own(seed) for _ in range(self._asked.samples)]
        lengths: Lengths = []
        with self.stock() as module, torch.no_grad():
            for first in range(0, len(rows), self._asked.slots):
                tokens, mask = padded_before(rows[first : first + self._asked.slots])
                outputs = module.generate(tokens, attention_mask=mask, generation_config=self.config())
                lengths += kept(outputs[:, tokens.shape[1] :])
        return lengths

    def continuous(self, seed: int) -> Lengths:
        asked, rows = self._asked, [row for row in self.own(seed) for _ in range(self._asked.samples)]
        how = transformers.ContinuousBatchingConfig(
            page_size=32,
            num_blocks=asked.slots * (asked.limit // 32 + 2),
            max_batch_tokens=512,
            max_requests_per_batch=asked.slots,
            seed=seed,
        )
        with self.stock() as module:
            outputs = module.generate_batch(rows, generation_config=self.config(), continuous_batching_config=how)
        return [len(one.generated_tokens) for one in outputs.values()]


def padded_before(rows: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and mask [B, T], padded before, as generate wants them."""
    longest = max(map(len, rows))
    tokens = torch.tensor([[PADDING] * (longest - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])
    return tokens, mask


def ours(host: Any, asked: argparse.Namespace, seed: int, *, whole: bool) -> Lengths:
    """This engine: whole requests, or one sample a request."""
    from evenload.runtime.generate.request import Generation, Request

    numbers = range(asked.samples)
    parts = [tuple(numbers)] if whole else [(number,) for number in numbers]
    requests = [
        Request(i, tuple(row), asked.limit, part)
        for i, row in enumerate(prompts_of(asked.prompts, seed))
        for part in parts
    ]
    lengths: Lengths = []
    settings = Generation(seed=seed, end_tokens=frozenset({END}), slots=asked.slots)
    host.generate(requests, settings, ended=lambda sample: lengths.append(len(sample.tokens)))
    return lengths


def variants(host: Any, trainer: str, asked: argparse.Namespace) -> dict[str, Callable[[int], Lengths]]:
    own: dict[str, Callable[[int], Lengths]] = {
        "groups": lambda seed: ours(host, asked, seed, whole=True),
        "spread": lambda seed: ours(host, asked, seed, whole=False),
    }
    if trainer != "deepspeed":
        return own
    peers = Peers(host, asked)
    return {**own, "deepspeed": peers.deepspeed, "padded": peers.padded, "continuous": peers.continuous}


def on_rank(asked: argparse.Namespace) -> None:
    import torch.distributed as dist
    from evenload.api import load_recipe
    from evenload.patches import bridge_cpu
    from evenload.runtime.world.world import init_world
    from evenload.training.hosts import integration

    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    bridge_cpu()
    world, (trainer,) = init_world(), asked.trainers
    sizes = ["model.vocab_size=128", "model.ffn_hidden_size=384", "data.max_length=2048", f"parallel.dp={RANKS}"]
    host = integration(trainer).open_host(
        load_recipe("quickstart", [f"trainer={trainer}", f"model.weights={asked.weights}", *sizes]), world
    )
    rows = []
    for repeat in range(asked.repeats):
        for name, run in variants(host, trainer, asked).items():
            dist.barrier()
            torch.manual_seed(1000 * repeat + world.rank)
            wall_s, cpu_s = time.perf_counter(), time.process_time()
            lengths = run(repeat)
            spent = {"cpu_s": time.process_time() - cpu_s, "wall_s": time.perf_counter() - wall_s}
            of_ranks: list[Any] = [None] * RANKS
            dist.all_gather_object(of_ranks, {**spent, "lengths": lengths})
            load = os.getloadavg()[0]
            rows.append({"trainer": trainer, "variant": name, "repeat": repeat, "load": load, "ranks": of_ranks})
            if world.rank == 0:
                print(json.dumps(summary(rows[-1:], trainer, name)), file=sys.stderr, flush=True)
    host.close()
    if world.rank == 0:
        print(json.dumps({"rows": rows}))


def summary(rows: list[dict[str, Any]], trainer: str, name: str) -> dict[str, Any]:
    """A variant's rates over all repeats."""
    own = [row for row in rows if (row["trainer"], row["variant"]) == (trainer, name)]
    lengths = [n for row in own for rank in row["ranks"] for n in rank["lengths"]]
    busiest = {kind: [max(rank[kind] for rank in row["ranks"]) for row in own] for kind in ("cpu_s", "wall_s")}
    work_s = sum(rank["cpu_s"] for row in own for rank in row["ranks"])
    rates = [sum(sum(rank["lengths"]) for rank in r["ranks"]) / s for r, s in zip(own, busiest["cpu_s"], strict=True)]
    return {
        "trainer": trainer,
        "variant": name,
        "samples": len(lengths),
        "tokens": sum(lengths),
        "mean": statistics.mean(lengths),
        "longest": max(lengths),
        "cpu_s": sum(busiest["cpu_s"]),
        "wall_s": sum(busiest["wall_s"]),
        "idle": 1 - work_s / RANKS / sum(busiest["cpu_s"]),
        "rate": sum(lengths) / sum(busiest["cpu_s"]),
        "rates": rates,
        "load": statistics.mean(row["load"] for row in own),
    }


def benchmark(asked: argparse.Namespace) -> dict[str, Any]:
    if asked.quick:
        asked.prompts, asked.samples, asked.slots, asked.limit, asked.repeats = 4, 2, 3, 12, 1
    with tempfile.TemporaryDirectory() as folder:
        if asked.weights is None:
            asked.weights = Path(folder)
            with redirect_stdout(sys.stderr):
                train(asked.weights, 1 if asked.quick else 400)
        names = ("prompts", "samples", "slots", "limit", "repeats", "weights")
        words = [word for name in names for word in (f"--{name}", str(getattr(asked, name)))]
        rows = []
        for trainer in asked.trainers:  # each in processes of its own
            rows += result_of(begun(__file__, [*words, "--trainers", trainer], RANKS))["rows"]
    pairs = dict.fromkeys((row["trainer"], row["variant"]) for row in rows)
    return {
        "rows": [summary(rows, *pair) for pair in pairs],
        "limit": asked.limit,
        "settings": {name: getattr(asked, name) for name in names if name != "weights"},
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def table(result: dict[str, Any]) -> Any:
    cells = {
        "trainer": "{trainer}",
        "variant": "{variant}",
        "samples": "{samples}",
        "mean": "{mean:.0f}",
        "longest": "{longest}",
        "tokens/s": "{rate:.0f}",
        "each": lambda row: f"{min(row['rates']):.0f}-{max(row['rates']):.0f}",
        "CPU s": "{cpu_s:.1f}",
        "wall s": "{wall_s:.1f}",
        "idle": "{idle:.0%}",
        "load": "{load:.0f}",
    }
    title = f"Rollouts on {RANKS} ranks, limit {result['limit']}"
    return columns(title, result["rows"], cells, f"torch {result['torch']}")


if __name__ == "__main__":
    sizes = {"prompts": 16, "samples": 8, "slots": 64, "limit": 1024, "repeats": 3}
    own = options(__doc__, weights=Path, trainers=["deepspeed", "megatron"], **sizes, quick=False)
    main(own, on_rank=on_rank, benchmark=benchmark, table=table)
