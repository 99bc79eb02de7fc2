"""Drafts by rounded weights, and rounded keys: what products cost, what is accepted, what a generation takes.

    python benchmarks/generation/quantized.py [--parts products accepted wide keys cards] [--folder runs/quantized]
                                              [--steps 400] [--repeats 5] [--quick] [--json] [--out FILE]

products  CPU milliseconds of one square product on one thread: float32 and bfloat16 as torch has them, and torch's
          packed products of float32 rows with rounded weights, by inputs and rows; the least of repeats that alternate
accepted  models of 1 million parameters in float32, trained for so many steps on the Collatz paths of collect.py and on
          the standard library's source: the share of guesses that the exact model draws as well, guessed one at a time;
          and CPU seconds without drafts and with those that pay, which alternate
wide      the same seconds of two layers of 2,048 with weights as they are drawn, whose samples end by their limit:
          probabilities are nearly even there, so that noise decides and more is accepted than of a trained model
keys      the Collatz model in bfloat16 under a cap of half the bytes that its keys of 16 bits would take at once:
          tokens a second of CPU, and how often a sample is given up for want of blocks
cards     predicted: a decode step of an 8B model at the bandwidth and the peak of four cards, in 16 bits and with
          weights of 4 and keys of 8, as TurboMind (arXiv 2508.15601) serves it. Its 30 % less latency and 58 % more
          throughput are over other engines with the same precisions, which read the same bytes: no roofline can show
          them, it says how much there is to gain from 16 bits. Which cards and models was not read there: assumed.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from evenload.api import load_recipe
from evenload.benchmarks.frame import columns as table_of
from evenload.benchmarks.frame import command, machine, main, options
from evenload.benchmarks.generation.collect import RECIPE, write
from evenload.core.drafters import drafter_of
from evenload.core.recipe.generated import DraftRule
from evenload.patches import bridge_cpu
from evenload.runtime.attributes import with_attributes
from evenload.runtime.generate.dealing import Dealer, GenerationStats
from evenload.runtime.generate.quantized import packed, restored, rounded
from evenload.runtime.generate.request import Completion, Generation, Request, Sampling
from evenload.runtime.generate.schedule import Schedule
from evenload.runtime.world.world import init_world
from evenload.training.hosts import integration
from evenload.training.verbs.export import checkpoint_in
from rich.console import Group
from torch.nn.functional import linear

Row = dict[str, Any]
WIDE = {
    "trainer": "megatron",
    "model": {"num_layers": 2, "hidden_size": 2048, "num_attention_heads": 16, "vocab_size": 256},
    "data": {"max_length": 256},
    "parallel": {"dp": 1},
    "train": {"dtype": "fp32"},
}
TEXT = {"source": "python-stdlib", "max_length": 320, "long_samples": "truncate"}
BEGINNINGS = (
    "import os\n",
    "def ",
    "class A:\n    ",
    "    return ",
    '"""',
    "# ",
    "    if ",
    "for i in ",
    "try:\n",
    "x = ",
)
CARDS = {  # bytes of memory, bytes/s, FLOP/s of dense products in 16 bits: data sheets
    "RTX 4090": (24e9, 1.008e12, 165e12),
    "L40S": (48e9, 0.864e12, 362e12),
    "A100": (80e9, 2.039e12, 312e12),
    "H100": (80e9, 3.35e12, 989e12),
}


def alternating(calls: dict[str, partial[Any]], repeats: int) -> dict[str, float]:
    """The least CPU seconds of each call."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(repeats + 1):
        for name, call in calls.items():
            begin = time.process_time()
            call()
            if turn or repeats == 1:
                seconds[name].append(time.process_time() - begin)
    return {name: min(own) for name, own in seconds.items()}


@torch.no_grad()
def products(asked: argparse.Namespace) -> list[Row]:
    rows = []
    for size in (512,) if asked.quick else (512, 1024, 2048, 4096):
        weight = torch.randn(size, size)
        in_half = weight.bfloat16()
        kinds = {"packed": packed, "restored": restored}
        calls_of = {
            f"{kind} {bits}": make(rounded(weight, bits)) for kind, make in kinds.items() for bits in ("int8", "int4")
        }
        for count in (1, 4, 16, 64):
            x = torch.randn(count, size)
            calls = {"float32": partial(linear, x, weight), "bfloat16": partial(linear, x.bfloat16(), in_half)}
            calls |= {name: partial(call, x) for name, call in calls_of.items()}
            seconds = alternating(calls, asked.repeats)
            rows.append({"size": size, "rows": count, "ms": {name: 1e3 * own for name, own in seconds.items()}})
    return rows


class Counting(Dealer):
    def ran(self, stats: GenerationStats) -> None:
        self.drafts = stats.drafts


@contextmanager
def host_of(recipe: Any, checkpoint: Path | None = None) -> Iterator[Any]:
    host = integration(recipe.trainer).open_host(recipe, init_world())
    try:
        if checkpoint is not None:
            host.load(checkpoint_in(checkpoint) / "trainer")
        yield host
    finally:
        host.close()


def generated(
    host: Any, requests: list[Request], settings: Generation, by: DraftRule | None
) -> tuple[Row, list[Completion]]:
    dealer, begin = Counting(), time.process_time()
    samples = host.generate(requests, replace(settings, drafter=drafter_of(by)), dealer=dealer)
    row = {"cpu_s": time.process_time() - begin, "tokens": sum(len(one.tokens) for one in samples)}
    row |= {"drafted": dealer.drafts.drafted, "accepted": dealer.drafts.accepted}
    return row, [(*one[:2], one.tokens) for one in samples]


def compared(host: Any, name: str, requests: list[Request], settings: Generation, repeats: int) -> list[Row]:
    """Drafts that pay beside none, in the number of slots."""
    rules = {"none": None, **{bits: DraftRule(by="quantized", weights=bits) for bits in ("int8", "int4")}}
    rows: dict[str, Row] = {}
    texts = []
    for _ in range(repeats):
        for bits, rule in rules.items():
            row, text = generated(host, requests, settings, rule)
            texts.append(text)
            if bits not in rows or row["cpu_s"] < rows[bits]["cpu_s"]:
                rows[bits] = row
    same = [sum(own == first for own, first in zip(text, texts[0], strict=True)) for text in texts]
    rows = {bits: {"of": name, "slots": settings.slots, "drafts": bits, **row} for bits, row in rows.items()}
    for row in rows.values():
        row |= {"over_none": rows["none"]["cpu_s"] / row["cpu_s"], "samples": len(texts[0]), "same": min(same)}
    return list(rows.values())


def trained(asked: argparse.Namespace, name: str) -> Path:
    folder: Path = asked.folder / name
    if not (folder / "kept").exists():
        steps = 4 if asked.quick else asked.steps
        write(folder, 16, steps)
        if name == "text":
            lines = [json.dumps({"prompt": begin}) + "\n" for begin in BEGINNINGS]
            (folder / "prompts.jsonl").write_text("".join(lines))
            (folder / "recipe.yaml").write_text(
                json.dumps(RECIPE | {"data": TEXT, "train": {**RECIPE["train"], "global_batch_size": 8}})
            )
        command("train", "recipe.yaml", folder=folder)
    return folder


def asked_of(folder: Path, asked: argparse.Namespace) -> tuple[Any, list[Request], Generation]:
    """The recipe of a folder, its prompts, and how they are continued."""
    recipe = load_recipe(folder / "recipe.yaml", [])
    if folder.name == "paths":
        recipe = recipe.changed({"data.source": str(folder / "paths.jsonl")})
    limit, lines = 40 if asked.quick else 300, (folder / "prompts.jsonl").read_text().splitlines()
    prompts = [json.loads(line)["prompt"].encode() for line in lines[: 2 if asked.quick else None]]
    requests = [Request(number, tuple(prompt), limit, (0, 1)) for number, prompt in enumerate(prompts)]
    return recipe, requests, Generation(seed=1, end_tokens=frozenset({10} if folder.name == "paths" else ()), slots=32)


def accepted(asked: argparse.Namespace) -> Row:
    rows, seconds = [], []
    for name in ("paths", "text"):
        folder = trained(asked, name)
        recipe, requests, own = asked_of(folder, asked)
        with host_of(recipe, folder / "kept") as host:
            for temperature, bits in product((1.0, 0.0), ("int8", "int4")):
                how = replace(own, sampling=Sampling(temperature), priced=False)
                row, _ = generated(host, requests, how, DraftRule(by="quantized", weights=bits, most=1))
                row["share"] = row["accepted"] / row["drafted"]
                rows.append({"of": name, "temperature": temperature, "weights": bits, **row})
            for slots in (1, 32):
                some, repeats = (requests[:4] if slots == 1 else requests), 1 if asked.quick else 4
                seconds += compared(host, name, some, replace(own, slots=slots), repeats)
    return {"rows": rows, "seconds": seconds}


def wide(asked: argparse.Namespace) -> list[Row]:
    rows, limit = [], 8 if asked.quick else 200
    asked.folder.mkdir(parents=True, exist_ok=True)
    (asked.folder / "wide.yaml").write_text(json.dumps(WIDE))
    with host_of(load_recipe(asked.folder / "wide.yaml", [])) as host:
        for slots in (1, 4):
            requests = [Request(number, tuple(range(1, 33)), limit) for number in range(slots)]
            rows += compared(host, "wide", requests, Generation(slots=slots), 1 if asked.quick else 3)
    return rows


def keys(asked: argparse.Namespace) -> list[Row]:
    folder, rows = trained(asked, "paths"), []
    recipe, requests, settings = asked_of(folder, asked)
    dim = recipe.model.hidden_size // recipe.model.num_attention_heads
    bytes_of = {None: 2 * dim, "int8": dim + 8, "int4": dim // 2 + 8}
    with host_of(recipe, folder / "kept") as host:
        weights = host.weights()
    with host_of(recipe.changed({"train.dtype": "bf16"})) as host, torch.no_grad():
        for name, weight in host.model.named_parameters():
            weight.copy_(weights[name])
        _, texts = generated(host, requests, settings, None)
        lengths = [len(tokens) for *_, tokens in texts]
        whole = max(sum((4 + at) * (length >= at) for length in lengths) for at in range(max(lengths)))
        real = Schedule._give_up
        for _ in range(2):
            for bits, size in bytes_of.items():
                cap, given_up = max(432, int(whole * bytes_of[None] / 2 / size)), []

                def counted(self: Schedule, one: Any, given_up: list[int] = given_up) -> None:
                    given_up.append(one.length)
                    real(self, one)

                with with_attributes(Schedule, _give_up=counted):
                    row, _ = generated(host, requests, replace(settings, keys=bits, cache_tokens=cap), None)
                about = {"keys": bits or "16 bits", "bytes": size, "cap_tokens": cap}
                rows.append({**about, "given_up": len(given_up), "again": sum(given_up), **row})
    best = {
        row["keys"]: min((one for one in rows if one["keys"] == row["keys"]), key=lambda one: one["cpu_s"])
        for row in rows
    }
    return list(best.values())


def cards(_: argparse.Namespace) -> list[Row]:
    """Predicted. Llama-3-8B's form: 32 layers, 8 groups of 128, samples of 1,024 keys; ranges of 4 bytes a head."""
    weights, heads = 8.03e9, 1024 * 2 * 32 * 8
    forms = {"16 bits": (2.0 * weights, 256.0 * heads), "W4 KV8": ((0.5 + 4 / 128) * weights, 132.0 * heads)}
    rows = []
    for name, (memory, bandwidth, peak) in CARDS.items():
        of = {}
        for form, (weight_bytes, key_bytes) in forms.items():
            most = int((0.9 * memory - weight_bytes) / key_bytes)
            one_s, most_s = (
                max((weight_bytes + batch * key_bytes) / bandwidth, 2 * weights * batch / peak) for batch in (1, most)
            )
            of[form] = {"one_s": one_s, "most": most, "tokens_per_s": most / most_s}
        half, mixed = of.values()
        gained = {"latency": mixed["one_s"] / half["one_s"] - 1}
        rows.append(
            {"card": name, "forms": of, **gained, "throughput": mixed["tokens_per_s"] / half["tokens_per_s"] - 1}
        )
    return rows


PARTS: dict[str, Callable[[argparse.Namespace], Any]] = {
    "products": products,
    "accepted": accepted,
    "wide": wide,
    "keys": keys,
    "cards": cards,
}


def benchmark(asked: argparse.Namespace) -> Row:
    torch.set_num_threads(1)
    bridge_cpu()
    asked.folder = Path(asked.folder).resolve()
    about = f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}, {machine()}, one thread"
    return {"about": about, **{part: PARTS[part](asked) for part in PARTS if part in asked.parts}}


def _accepted(rows: list[Row], about: str) -> Any:
    cells = {
        "of": "{of}",
        "temperature": "{temperature}",
        "weights": "{weights}",
        "guesses": "{drafted:,}",
        "accepted": "{share:.3f}",
    }
    return table_of("guesses of a trained model that are accepted", rows, cells, about)


def _seconds(rows: list[Row], about: str) -> Any:
    keys = {
        "of": "{of}",
        "slots": "{slots}",
        "drafts": "{drafts}",
        "CPU s": "{cpu_s:.2f}",
        "over none": "{over_none:.2f}x",
    }
    keys |= {"drafted": "{drafted:,}", "accepted": "{accepted:,}", "samples, the same": "{samples}, {same}"}
    return table_of("a generation with drafts that pay", rows, keys, about)


def table(result: Row) -> Group:
    about, tables = result["about"], []
    if rows := result.get("products"):
        names = {name: (lambda row, name=name: f"{row['ms'][name]:.3f}") for name in rows[0]["ms"]}
        cells = {"inputs, outputs": "{size:,}", "rows": "{rows}", **names}
        tables.append(table_of("CPU ms of a product", rows, cells, about))
    if "accepted" in result:
        tables += [_accepted(result["accepted"]["rows"], about), _seconds(result["accepted"]["seconds"], about)]
    if "wide" in result:
        tables.append(_seconds(result["wide"], about))
    if rows := result.get("keys"):
        cells = {
            "keys": "{keys}",
            "bytes of a head": "{bytes}",
            "cap, tokens": "{cap_tokens:,}",
            "given up": "{given_up}",
        }
        cells |= {
            "tokens computed again": "{again:,}",
            "tokens/CPU s": lambda row: f"{row['tokens'] / row['cpu_s']:.0f}",
        }
        tables.append(
            table_of("rounded keys under half the bytes; approximate but for the first row", rows, cells, about)
        )
    if rows := result.get("cards"):
        cells = {
            "card": "{card}",
            "latency of one sample": "{latency:percent}",
            "throughput, memory full": "{throughput:percent}",
        }
        caption = "published, over engines of the same precisions: -30 % and +58 %, which bytes cannot show"
        tables.append(table_of("W4 KV8 over 16 bits, predicted", rows, cells, caption))
    return Group(*tables)


if __name__ == "__main__":
    sizes = {"folder": "runs/quantized", "steps": 400, "repeats": 5, "quick": False}
    main(options(__doc__, parts=list(PARTS), **sizes), benchmark, table)
