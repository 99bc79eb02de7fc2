"""Transformer Engine's own package under evenload's packs, on one GPU: gradients of a loop, off against on.

    python benchmarks/gpu/transformer_engine.py [--json] [--tokens 4096] [--limit seconds] [--tiny]

A Megatron-Core loop that knows nothing of evenload trains one step on ragged samples, with Transformer Engine's layer
spec in bf16: first as it is, then with whole samples in packs, then with samples cut into slices. Rows: plain causal
attention, fused rotary embeddings, a sliding window, latent attention, and fp8.

    thd, sbhd      calls of Transformer Engine's attention in each format: packs of whole samples are thd; packs of
                   slices are computed by evenload's packed attention and call it less
    error          largest ||on - off|| / ||off|| over the gradients of all tensors
    rounding       the same between two runs of the loop as it is, in micro-batches of one and of two samples: what
                   another grouping alone changes. An error of about this size is none of evenload's.

``--limit`` starts nothing new after so many seconds. ``--tiny`` tries all of it out without a GPU, in fp64, over
whatever ``transformer_engine`` can be imported (the tests have a stand-in).
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from typing import Any, NamedTuple

import evenload
import torch
from evenload.api import load_plugins
from evenload.benchmarks.frame import Row, options, show
from evenload.benchmarks.gpu.card import about, asked_for, attempted, device_here, relative, with_failures
from evenload.core.recipe.recipe import parse
from evenload.patches import bridge_cpu
from evenload.runtime.attributes import with_attributes
from evenload.runtime.world.world import close_world, init_world
from torch import Tensor

LATENT = {"q_lora_rank": 256, "kv_lora_rank": 128, "qk_head_dim": 64, "qk_pos_emb_head_dim": 32, "v_head_dim": 64}
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "fused rotary": {"apply_rope_fusion": True},
    "window": {"window_attn_skip_freq": 2},
    "latent": {"multi_latent_attention": True, "rope_type": "rope", "original_max_position_embeddings": 4096, **LATENT},
    "fp8": {"fp8": "hybrid", "fp8_recipe": "delayed"},
}


class Shape(NamedTuple):
    """The model and its samples."""

    tokens: int
    """Of the longest sample."""
    hidden: int = 512
    heads: int = 8
    samples: int = 8
    dtype: torch.dtype = torch.bfloat16

    def batches(self, size: int) -> Iterator[dict[str, Tensor]]:
        """Samples padded to the longest, so many in a batch."""
        generator = torch.Generator().manual_seed(1)
        rows = []
        for number in range(self.samples):
            length = self.tokens >> (number % 4)
            text = torch.randint(0, 128, (self.tokens + 1,), generator=generator)
            mask = (torch.arange(self.tokens) < length).float()
            rows.append((text[:-1], text[1:], mask, torch.arange(self.tokens)))
        names = "tokens", "labels", "loss_mask", "position_ids"
        for first in range(0, self.samples, size):
            fields = zip(*rows[first : first + size], strict=True)
            yield {name: torch.stack(field) for name, field in zip(names, fields, strict=True)}


def build(shape: Shape, case: dict[str, Any]) -> Any:
    """A GPTModel with Transformer Engine's layer spec, the same weights at every call."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    torch.manual_seed(1)
    model_parallel_cuda_manual_seed(1)
    latent = bool(case.get("multi_latent_attention"))
    groups = shape.heads if latent else shape.heads // 2
    config = (MLATransformerConfig if latent else TransformerConfig)(
        num_layers=4,
        hidden_size=shape.hidden,
        num_attention_heads=shape.heads,
        num_query_groups=groups,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        add_bias_linear=False,
        bias_dropout_fusion=False,
        params_dtype=shape.dtype,
        pipeline_dtype=shape.dtype,
        bf16=shape.dtype == torch.bfloat16,
        calculate_per_token_loss=True,
        **case,
    )
    spec = get_gpt_layer_with_transformer_engine_spec(multi_latent_attention=latent)
    return GPTModel(config, spec, 128, shape.tokens, position_embedding_type="rope").to(
        torch.cuda.current_device(), shape.dtype
    )


def forward_step(batches: Iterator[dict[str, Tensor]], model: Any) -> tuple[Tensor, Any]:
    """As the author of a loop would write it."""
    batch = {name: value.to(torch.cuda.current_device()) for name, value in next(batches).items()}
    output = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])
    return output, partial(summed, batch["loss_mask"])


def summed(loss_mask: Tensor, losses: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    total, count = (losses * loss_mask).sum(), loss_mask.sum().int()
    return total, count, {"loss": torch.stack([total.detach(), count])}


def gradients(shape: Shape, model: Any, size: int = 2) -> dict[str, Tensor]:
    """Of one step in micro-batches of so many samples."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    model.zero_grad(set_to_none=True)
    get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=shape.batches(size),
        model=[model],
        num_microbatches=shape.samples // size,
        seq_length=shape.tokens,
        micro_batch_size=size,
        forward_only=False,
    )
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def worst(planned: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    assert planned.keys() == wanted.keys()
    return max(relative(planned[name], gradient) for name, gradient in wanted.items())


@contextmanager
def counted() -> Iterator[dict[str, int]]:
    """Counts the calls of Transformer Engine's attention by format, while it holds."""
    counts = {"thd": 0, "sbhd": 0}
    attention = importlib.import_module("transformer_engine.pytorch").DotProductAttention
    stock = attention.forward

    def forward(module: Any, *args: Any, **kwargs: Any) -> Any:
        counts[kwargs.get("qkv_format") or "sbhd"] += 1
        return stock(module, *args, **kwargs)

    with with_attributes(attention, forward=forward):
        yield counts


def measure(name: str, shape: Shape) -> dict[str, Any]:
    """One case: the loop as it is, with whole samples, and with slices."""
    window = {"window_size": (shape.tokens // 8, 0)} if name == "window" else {}
    model = build(shape, {**CASES[name], **window})
    stock = gradients(shape, model)
    row: Row = {"rounding": worst(gradients(shape, model, 1), stock)}
    for plan, slices, cap in (("whole", "off", 2 * shape.tokens), ("slices", "even", shape.tokens // 2)):
        recipe = parse({"plugins": {"packing": {"enabled": True, "max_tokens": cap, "slices": slices}}})
        with evenload.enabled(recipe), counted() as counts:
            row[plan] = {"error": worst(gradients(shape, model), stock), **counts}
    return row


def benchmark(shape: Shape, limit_s: float) -> Row:
    """All cases; one that fails is recorded."""
    from megatron.core import parallel_state

    until, world = time.monotonic() + limit_s, init_world()
    parallel_state.initialize_model_parallel()
    load_plugins()
    rows = [attempted({"case": name}, partial(measure, name, shape), until) for name in CASES]
    close_world(world)
    version = str(importlib.import_module("transformer_engine").__version__)
    return {**about(device_here()), "transformer_engine": version, "rows": rows}


def table(result: Row) -> Any:
    cells = {
        "case": "{case}",
        "whole: thd": "{whole[thd]}",
        "whole: error": "{whole[error]:.1e}",
        "slices: thd": "{slices[thd]}",
        "slices: error": "{slices[error]:.1e}",
        "rounding": "{rounding:.1e}",
    }
    title = f"Transformer Engine {result['transformer_engine']} on {result['device']}"
    return with_failures(title, result["rows"], cells)


def measured(asked: Any) -> Row:
    if find_spec("transformer_engine") is None:
        do = "pip install --no-build-isolation transformer_engine[pytorch]"
        raise SystemExit(f"Transformer Engine is not installed: {do}")
    bridge_cpu()
    tiny = Shape(64, hidden=32, heads=4, dtype=torch.float64)
    return benchmark(tiny if asked.tiny else Shape(asked.tokens), asked.limit)


if __name__ == "__main__":
    asked = asked_for(options(__doc__, tokens=4096, limit=float("inf"), tiny=False))
    show(measured(asked), asked, table)
