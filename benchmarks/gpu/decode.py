"""Rows of one token over blocks of keys, by every kernel that is there; and whole rollouts against vLLM, where it is.

    python benchmarks/gpu/decode.py [--json] [--rows 64] [--keys 4096] [--layers 16] [--tokens 512] [--tiny]

Kernels: one query each of so many rows, 32 heads over 8 of 64, keys in blocks as a rollout leaves them; rows of equal
lengths, and heavy-tailed ones. Error: relative, against float64. Milliseconds are medians of runs after two to warm up,
by CUDA events (wall time on the CPU); GB/s count the keys and values that rows have, each once a row.

Rollouts: a llama of random weights, hidden 2,048, bfloat16; prompts of 128 tokens and rows of ``--tokens``, without an
end; tokens a second of evenload's engine over Transformers' model, and of vLLM on the same weights. ``--tiny`` tries it
out without a GPU, in float32.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from evenload.benchmarks.frame import Row, options, show
from evenload.benchmarks.gpu.card import (
    GROUPS,
    HEAD_DIM,
    HEADS,
    about,
    asked_for,
    attempted,
    device_here,
    half_on,
    milliseconds,
    relative,
    with_failures,
)
from evenload.core.plan.step_plan import Slice
from evenload.runtime.attention.block_tables import BlockTables
from evenload.runtime.attention.cached import DECODERS, DecodeCall, DecodeKernel, block_tokens_on
from evenload.runtime.attention.kv_cache import CachedRows, KvCache
from evenload.runtime.attention.scores import ScoreForm
from evenload.runtime.generate.engine import Decoder, generate
from evenload.runtime.generate.request import Generation, Request
from torch import Tensor

DIM, PROMPT = HEAD_DIM, 128


def lengths_of(rows: int, keys: int) -> dict[str, list[int]]:
    tail = np.random.default_rng(0).lognormal(np.log(keys / 4), 0.9, rows)
    return {"even": [keys] * rows, "heavy tail": np.clip(tail, 1, keys).astype(int).tolist()}


def call_of(lengths: list[int], dtype: torch.dtype, device: torch.device) -> DecodeCall:
    """Rows whose blocks were taken in turn, as they grew."""
    cache, draw = KvCache(BlockTables(block_tokens_on(device))), torch.Generator().manual_seed(1)
    size = cache.tables.block_tokens
    for end in range(size, max(lengths) + size, size):
        for row, length in enumerate(lengths):
            cache.tables.grow(row, min(end, length))
    rows = CachedRows.of(cache, [Slice(row, n - 1, n) for row, n in enumerate(lengths)], device)
    new = torch.zeros(len(lengths), GROUPS, DIM, dtype=dtype, device=device)
    pools = cache.write(0, rows, new, new)
    for pool in pools:
        pool.copy_(torch.randn(pool.shape, generator=draw))
    queries = torch.randn(len(lengths), HEADS, DIM, generator=draw).to(device, dtype)
    (short,) = rows.short
    return DecodeCall(short.filled(queries), pools, short, ScoreForm(DIM**-0.5))


def exact(call: DecodeCall) -> Tensor:
    """Attention by its definition in float64, row by row [B, 1, H, D]."""
    out = []
    for query, piece in zip(call.q_BQHD[:, 0].double(), call.rows.slices, strict=True):
        blocks = call.rows.block_tables[piece.sequence]
        k, v = (pool[blocks].flatten(0, 1)[: piece.stop].double() for pool in call.pools)
        k, v = (x.repeat_interleave(HEADS // GROUPS, 1) for x in (k, v))
        out.append(torch.einsum("hm,mhd->hd", (torch.einsum("hd,mhd->hm", query, k) * DIM**-0.5).softmax(-1), v))
    return torch.stack(out)[:, None]


def kernel_row(kernel: DecodeKernel, call: DecodeCall, device: torch.device) -> Row:
    keys = sum(piece.stop for piece in call.rows.slices)
    error = relative(kernel.run(call), exact(call))
    taken = milliseconds(lambda: kernel.run(call), device)
    moved = 2 * keys * GROUPS * DIM * call.q_BQHD.element_size()
    return {"keys": keys, "error": error, "ms": taken, "gb_per_s": moved / taken / 1e6}


def model_of(asked: argparse.Namespace, dtype: torch.dtype, device: torch.device) -> Any:
    import transformers
    from evenload.integrations.huggingface import attention

    attention.register()
    hidden = 64 if asked.tiny else HEADS * DIM
    config = transformers.LlamaConfig(
        vocab_size=512 if asked.tiny else 32000,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=asked.layers,
        num_attention_heads=4 if asked.tiny else HEADS,
        num_key_value_heads=2 if asked.tiny else GROUPS,
        max_position_embeddings=PROMPT + asked.tokens,
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM._from_config(config, attn_implementation=attention.NAME, dtype=dtype)
    return model.to(device).eval()


def own_rate(model: Any, asked: argparse.Namespace, device: torch.device) -> float:
    """Tokens a second of this engine."""
    prompts = np.random.default_rng(0).integers(0, model.config.vocab_size, (asked.rows, PROMPT)).tolist()
    requests = [Request(i, tuple(tokens), asked.tokens) for i, tokens in enumerate(prompts)]

    def logits(pack: Any, slots: Tensor) -> Tensor:
        words = {"input_ids": pack.tokens_T[None], "position_ids": pack.positions_T[None], "use_cache": False}
        chosen: Tensor = model(**words, evenload_pack=pack, logits_to_keep=slots).logits[0]
        return chosen

    begin, count = time.perf_counter(), 0
    for sample in generate(requests, Generation(slots=asked.rows), Decoder(device, logits)):
        count += len(sample.tokens)
        if time.perf_counter() - begin > asked.limit:
            break
    return count / (time.perf_counter() - begin)


def vllm_rate(model: Any, asked: argparse.Namespace) -> float:
    """Tokens a second of vLLM on the same weights."""
    import vllm

    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(Path(folder))
        engine = vllm.LLM(folder, skip_tokenizer_init=True, max_model_len=PROMPT + asked.tokens)
        prompts = np.random.default_rng(0).integers(0, model.config.vocab_size, (asked.rows, PROMPT)).tolist()
        settings = vllm.SamplingParams(temperature=1.0, max_tokens=asked.tokens, ignore_eos=True, detokenize=False)
        begin = time.perf_counter()
        outputs = engine.generate([{"prompt_token_ids": tokens} for tokens in prompts], settings)
        count = sum(len(output.outputs[0].token_ids) for output in outputs)
        return count / (time.perf_counter() - begin)


def benchmark(asked: argparse.Namespace) -> Row:
    if asked.tiny:
        asked.rows, asked.keys, asked.layers, asked.tokens = 4, 70, 1, 3
    device = device_here()
    dtype = half_on(device)
    calls = {name: call_of(lengths, dtype, device) for name, lengths in lengths_of(asked.rows, asked.keys).items()}
    there = [row for row in DECODERS if row.supports(dtype, device, DIM) and row.available()]
    rows = [
        attempted({"kernel": kernel.name, "rows": name}, partial(kernel_row, kernel, call, device))
        for kernel in there
        for name, call in calls.items()
    ]
    model = model_of(asked, dtype, device)
    rates = {"evenload": own_rate(model, asked, device)}
    if device.type == "cuda" and find_spec("vllm"):
        rates = attempted(rates, lambda: {"vllm": vllm_rate(model, asked)})
    return {**about(device), "rows": rows, "tokens_per_s": rates}


def table(result: Row) -> Any:
    cells = {"kernel": "{kernel}", "rows": "{rows}", "ms": "{ms:.3f}", "GB/s": "{gb_per_s:.0f}", "error": "{error:.1e}"}
    caption = f"tokens a second of a rollout: {result['tokens_per_s']}"
    return with_failures(f"rows of one token on {result['device']}", result["rows"], cells, caption, about=2)


if __name__ == "__main__":
    sizes = {"rows": 64, "keys": 4096, "layers": 16, "tokens": 512, "limit": 60}
    asked = asked_for(options(__doc__, **sizes, tiny=False))
    show(benchmark(asked), asked, table)
