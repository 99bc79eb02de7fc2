"""Packed fine-tuning in a Megatron loop on two CPU ranks: rows as --sft pads them, best-fit rows, and evenload.

    python benchmarks/hosts/sft_packs.py [--rounds 6] [--out FILE]

A step has the conversations of 16 lines of a file, one to three a line; lengths are lognormal with a median of 128
tokens, the longest near 1,024, of which three quarters carry loss. The model has 4 layers, hidden size 256 and 2,048
words, in float32; a step is one training call of `tests/scripts/sft_script.py`, without an update.

    padded      a line a row, filled up to 1,024 tokens, 8 rows a rank, as Megatron-LM's SFTDataset does it
    best fit    the same conversations in as few rows as best-fit-decreasing finds, as many on each rank
    + evenload  each of them with packs of up to 1,024 tokens, so no micro-batch is longer than a stock one

All variants have the same conversations in each step, alternate inside one process a rank, and attend by the same
kernel: Megatron-Core's own refuses packs, so stock steps have evenload's there. The first of the three steps of a turn
is not counted, and neither is the first round. A token is one of a conversation: padding is none.
"""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
import sys
import time
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from evenload.benchmarks.frame import ROOT, columns, main, options, started

RANKS, LINES, ROW, STEPS = 2, 16, 1024, 3
SHAPE = {"num_layers": 4, "hidden_size": 256, "num_attention_heads": 8, "num_query_groups": 8}
VARIANTS = ("padded", "padded + evenload", "best fit", "best fit + evenload")
PLUGINS = {"plugins": {"packing": {"enabled": True, "max_tokens": ROW}}}


def lines_of(step: int) -> list[list[int]]:
    """Lengths of the conversations of each line of a step."""
    import numpy as np

    random = np.random.default_rng(step)
    lines = []
    for _ in range(LINES):
        drawn = np.exp(random.normal(np.log(128), 0.9, random.integers(1, 4))).astype(int).clip(8, ROW)
        lines.append(drawn[: max(1, int((drawn.cumsum() <= ROW).sum()))].tolist())
    return lines


def best_fit(lengths: list[int]) -> list[list[int]]:
    """The longest first, each into the fullest row that has room for it."""
    rows: list[list[int]] = []
    for length in sorted(lengths, reverse=True):
        fitting = [row for row in rows if sum(row) + length <= ROW]
        if fitting:
            max(fitting, key=sum).append(length)
        else:
            rows.append([length])
    while len(rows) % RANKS:  # as many rows on each rank
        halved = max((row for row in rows if len(row) > 1), key=len)
        rows.append([halved.pop() for _ in range(len(halved) // 2)])
    return rows


def batch_of(row: list[int]) -> dict[str, Any]:
    """A row in the form of --sft."""
    import torch

    borders = torch.tensor([0, *row], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    used = int(borders[-1])
    loss_mask = torch.zeros(ROW)
    for start, length in zip(borders.tolist(), row, strict=False):
        loss_mask[start + length // 4 : start + length - 1] = 1.0
    borders[-1] = ROW
    positions = torch.cat([torch.arange(b - a) for a, b in pairwise(borders.tolist())])
    tokens = (torch.arange(ROW) * 7919 + used) % 2000 + 1
    fields = {"tokens": tokens, "labels": tokens.roll(-1), "loss_mask": loss_mask, "position_ids": positions}
    longest = (borders[1:] - borders[:-1]).max()
    return {name: value[None] for name, value in {**fields, "cu_seqlens": borders, "max_seqlen": longest}.items()}


def rows_of(variant: str, step: int) -> list[list[int]]:
    lines = lines_of(step)
    return best_fit([n for line in lines for n in line]) if variant.startswith("best fit") else lines


def on_rank(asked: argparse.Namespace) -> None:
    """One rank: all variants in turns; rank 0 prints seconds and tokens."""
    import torch
    from evenload.api import load_plugins
    from evenload.patches import bridge_cpu

    bridge_cpu()
    load_plugins()
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    sys.path.append(str(ROOT / "tests" / "scripts"))
    script = importlib.import_module("sft_script")
    vars(script).update(SHAPE=SHAPE, SEQ_LENGTH=ROW, VOCABULARY=2048)
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(1)
    model = script.build(torch.float32, True)
    rank = torch.distributed.get_rank()
    results: dict[str, list[tuple[float, int, int]]] = {variant: [] for variant in VARIANTS}
    for turn in range(asked.rounds + 1):
        for variant in VARIANTS:
            measured = list(turn_of(script, model, variant, rank, turn))
            results[variant] += measured[1:] if turn else []
    if rank == 0:
        print(json.dumps(results))


def turn_of(script: Any, model: Any, variant: str, rank: int, turn: int) -> Iterator[tuple[float, int, int]]:
    """(seconds, tokens of conversations, places of input on this rank) of each step of a turn."""
    import evenload
    import torch
    from evenload.core.recipe import recipe

    planned = variant.endswith("evenload")
    with evenload.enabled(recipe.parse(PLUGINS)) if planned else stock_attention():
        for step in range(turn * STEPS, (turn + 1) * STEPS):
            rows = rows_of(variant, step)
            own = [batch_of(row) for row in rows[rank::RANKS]]
            shapes: list[tuple[int, int]] = []
            model.zero_grad_buffer()
            torch.distributed.barrier()
            begun = time.perf_counter()
            script.call("sft", model, iter(own), shapes, num_microbatches=len(own))
            torch.distributed.barrier()
            yield time.perf_counter() - begun, sum(map(sum, rows)), sum(b * t for b, t in shapes)


def stock_attention() -> Any:
    """Megatron-Core's attention takes packs of whole samples, by the kernel that evenload has."""
    from evenload.runtime.attention.attention import packed_attention
    from evenload.runtime.attention.pack import Pack
    from evenload.runtime.attributes import with_attributes
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    def forward(core: Any, query: Any, key: Any, value: Any, _: Any, packed_seq_params: Any = None, **__: Any) -> Any:
        import torch

        pack = vars(packed_seq_params).get("pack_of_benchmark")
        if pack is None:
            borders = packed_seq_params.cu_seqlens_q.tolist()
            lengths = [b - a for a, b in pairwise(borders)]
            empty = torch.zeros(borders[-1], dtype=torch.int64)
            rows = {"tokens_T": empty, "labels_T": empty, "positions_T": empty}
            rows["cu_seqlens"] = packed_seq_params.cu_seqlens_q.int()
            pack = Pack.of(lengths, tuple(borders), **rows, num_targets=0, slices=())
            packed_seq_params.pack_of_benchmark = pack
        return packed_attention(query, key, value, pack, core.layer_number, core.softmax_scale).flatten(1)

    return with_attributes(DotProductAttention, forward=forward)


def benchmark(asked: argparse.Namespace) -> dict[str, Any]:
    results = started(__file__, RANKS)
    rates = {name: sum(t for _, t, _ in steps) / sum(s for s, _, _ in steps) for name, steps in results.items()}
    rows = [
        {
            "variant": name,
            "tokens_per_s": rates[name],
            "over_padded": rates[name] / rates["padded"],
            "step_s": statistics.median(s for s, _, _ in steps),
            "places": sum(p for _, _, p in steps),
        }
        for name, steps in results.items()
    ]
    return {"rows": rows, "steps": results}


def table(result: dict[str, Any]) -> Any:
    cells = {"variant": "{variant}", "tokens/s": "{tokens_per_s:,.0f}", "over padded": "{over_padded:.2f}x"}
    cells |= {"s a step": "{step_s:.2f}", "places, rank 0": "{places:,}"}
    return columns("Rows of --sft on two CPU ranks", result["rows"], cells)


if __name__ == "__main__":
    main(options(__doc__, rounds=6), benchmark, table, on_rank)
