"""CPU milliseconds of a decode step by the number of slots: this engine, and packs with one attention call a sample.

    python benchmarks/generation/decode.py [--trainers megatron deepspeed] [--slots 1 8 64] [--prompt 64] [--tokens 48]
                                           [--repeats 5] [--float64] [--json]

The model of recipes/quickstart.yaml on one rank and one thread. Every sample has a prompt of so many tokens and makes
so many; only steps are counted in which every slot makes one. "step" is all that the engine does of a step: schedule,
pack, model, noise and sampling; "model" the part inside the model's call; "products" the model's matrices alone, each
times as many rows; "packing" schedule and pack. "by packs" is the model's call of one `build_pack` over a
`PrefixStore`, which attends sample by sample, on the same tokens. Seconds are process time, the least of the repeats,
which alternate.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from evenload.api import load_recipe
from evenload.benchmarks.frame import columns, machine, main, options
from evenload.core.plan.step_plan import MicroBatch, Slice
from evenload.patches import bridge_cpu
from evenload.runtime.attention.pack import build_pack
from evenload.runtime.attention.prefix import PrefixStore
from evenload.runtime.generate import engine
from evenload.runtime.generate.request import Generation, Request
from evenload.runtime.world.world import init_world
from evenload.training.hosts import integration

VOCABULARY = 256


class Times(NamedTuple):
    """Milliseconds of a step."""

    step: float
    model: float
    packing: float


def of_engine(decoder: engine.Decoder, slots: int, prompt: int, tokens: int) -> Times:
    """Steps of the engine in which all slots are busy."""
    draw = np.random.default_rng(0)
    requests = [Request(i, tuple(draw.integers(0, VOCABULARY, prompt).tolist()), tokens + 2) for i in range(slots)]
    starts: list[tuple[float, float, float]] = []

    def logits(pack: Any, wanted: torch.Tensor) -> Any:
        begin = time.process_time()
        output = decoder.logits(pack, wanted)
        starts.append((begin, time.process_time(), len(wanted) if len(pack.slices) == pack.num_padded_tokens else 0))
        return output

    watched = engine.Decoder(decoder.device, logits)
    for _ in engine.generate(requests, Generation(slots=slots, step_tokens=prompt * slots), watched):
        pass
    rows = [i for i in range(len(starts) - 1) if starts[i][2] == slots and starts[i + 1][2] == slots][-tokens:]
    step = sum(starts[i + 1][0] - starts[i][0] for i in rows)
    model = sum(starts[i][1] - starts[i][0] for i in rows)
    packs = sum(packing(slots, prompt) for _ in range(8)) / 8
    return Times(1e3 * step / len(rows), 1e3 * model / len(rows), 1e3 * packs)


def packing(slots: int, prompt: int) -> float:
    """Seconds of the schedule and the pack of a step, without a model."""
    cache = engine.KvCache(engine.BlockTables(16))
    requests = [Request(i, (1,) * prompt, 1000) for i in range(slots)]
    schedule = engine.Schedule(requests, Generation(slots=slots, step_tokens=prompt * slots), cache)
    for _ in range(2):
        slices, samples, tokens = schedule.next()
        schedule.computed()
        for sample in samples:
            sample.new.append(1)
    begin = time.process_time()
    slices, samples, tokens = schedule.next()
    pack = engine._pack(slices, tokens, cache, torch.device("cpu"))
    assert pack.cached is not None
    assert len(samples) == slots
    _ = pack.cached.places_2T, [(rows.tables_BGW(2), rows.seen_B1ZL(None, 2)) for rows in pack.cached.short]
    return time.process_time() - begin


@torch.no_grad()
def of_products(weights: Mapping[str, torch.Tensor], slots: int, times: int = 20) -> float:
    """Milliseconds of the products of all matrices but the embedding's with so many rows: what no engine is below."""
    matrices = [weight.float() for name, weight in weights.items() if weight.dim() == 2 and "embed" not in name]
    rows = [torch.randn(slots, matrix.shape[1]) for matrix in matrices]
    begin = time.process_time()
    for _ in range(times):
        for matrix, x in zip(matrices, rows, strict=True):
            torch.nn.functional.linear(x, matrix)
    return 1e3 * (time.process_time() - begin) / times


@torch.no_grad()
def of_packs(decoder: engine.Decoder, slots: int, prompt: int, tokens: int) -> float:
    """The model's call where every sample is attended to by itself."""
    draw = np.random.default_rng(0)
    rows = {i: draw.integers(0, VOCABULARY, prompt + tokens) for i in range(slots)}
    store = PrefixStore(dict.fromkeys(range(slots), prompt + tokens))

    def call(first: int, end: int) -> None:
        slices = tuple(Slice(i, first, end) for i in range(slots))
        pack = build_pack(MicroBatch(slices, (0,)), lambda i: rows[i], prefix=store)
        decoder.logits(pack, torch.arange(slots))

    call(0, prompt)
    begin = time.process_time()
    for place in range(prompt, prompt + tokens):
        call(place, place + 1)
    return 1e3 * (time.process_time() - begin) / tokens


def measured(trainer: str, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each number of slots."""
    dtype = "fp64" if arguments.float64 and trainer == "megatron" else "fp32"
    words = [f"trainer={trainer}", "parallel.dp=1", f"model.vocab_size={VOCABULARY}", f"train.dtype={dtype}"]
    host = integration(trainer).open_host(load_recipe("quickstart", words), init_world())
    rows, weights = [], dict(host.weights())
    with host.decoding() as decoder:
        for slots in arguments.slots:
            case = decoder, slots, arguments.prompt, arguments.tokens
            turns = [(of_engine(*case), of_packs(*case), of_products(weights, slots)) for _ in range(arguments.repeats)]
            best = Times(*map(min, zip(*(turn[0] for turn in turns), strict=True)))
            alone = {"by_packs": min(turn[1] for turn in turns), "products": min(turn[2] for turn in turns)}
            rows.append({"trainer": trainer, "dtype": dtype, "slots": slots, **best._asdict(), **alone})
    host.close()
    for row in rows:
        row["over_one_slot"] = row["step"] / rows[0]["step"]
    return rows


def table(result: dict[str, Any]) -> Any:
    keys = ("step", "model", "products", "packing", "over_one_slot", "by_packs")
    cells = {"trainer": "{trainer}", "slots": "{slots}", **{key.replace("_", " "): f"{{{key}:.2f}}" for key in keys}}
    about = f"torch {result['torch']}, {result['machine']}, one thread"
    return columns("CPU ms of a decode step", result["rows"], cells, about)


def benchmark(asked: argparse.Namespace) -> dict[str, Any]:
    torch.set_num_threads(1)
    bridge_cpu()
    rows = [row for trainer in asked.trainers for row in measured(trainer, asked)]
    return {"rows": rows, "torch": torch.__version__, "machine": machine()}


if __name__ == "__main__":
    sizes = {"slots": [1, 8, 64], "prompt": 64, "tokens": 48, "repeats": 5, "float64": False}
    main(options(__doc__, trainers=["megatron", "deepspeed"], **sizes), benchmark, table)
