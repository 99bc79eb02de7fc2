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
import importlib.util
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

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


def serve(rank: int, rounds: int, out: Path) -> None:
    """One rank: all variants in turns; rank 0 writes seconds and tokens."""
    import torch
    from evenload.api import load_plugins
    from evenload.patches import bridge_cpu

    bridge_cpu()
    load_plugins()
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    path = Path(__file__).resolve().parents[2] / "tests" / "scripts" / "sft_script.py"
    spec = importlib.util.spec_from_file_location("sft_script", path)
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    sys.modules["sft_script"] = script
    spec.loader.exec_module(script)
    vars(script).update(SHAPE=SHAPE, SEQ_LENGTH=ROW, VOCABULARY=2048)
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(1)
    model = script.build(torch.float32, True)
    results: dict[str, list[tuple[float, int, int]]] = {variant: [] for variant in VARIANTS}
    for turn in range(rounds + 1):
        for variant in VARIANTS:
            measured = list(turn_of(script, model, variant, rank, turn))
            results[variant] += measured[1:] if turn else []
    if rank == 0:
        out.write_text(json.dumps(results))


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


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--rounds", type=int, default=6)
    options.add_argument("--out", type=Path, default=Path("sft_packs.json"))
    asked = options.parse_args()
    if "RANK" in os.environ:
        serve(int(os.environ["RANK"]), asked.rounds, asked.out)
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = {"WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", __file__, "--rounds", str(asked.rounds), "--out", str(asked.out)]
    ranks = [subprocess.Popen(command, env={**os.environ, **common, "RANK": str(r)}) for r in range(RANKS)]
    codes = [rank.wait() for rank in ranks]
    if any(codes):
        raise SystemExit(f"ranks ended with {codes}")
    results = json.loads(asked.out.read_text())
    base = sum(t for _, t, _ in results["padded"]) / sum(s for s, _, _ in results["padded"])
    for variant, steps in results.items():
        speed = sum(t for _, t, _ in steps) / sum(s for s, _, _ in steps)
        median = statistics.median(s for s, _, _ in steps)
        places = sum(p for _, _, p in steps)
        print(f"{variant:20} {speed:8.0f} tokens/s  {speed / base:.2f}  {median:.2f} s a step  {places} places, rank 0")


if __name__ == "__main__":
    main()
