"""Loops on batches of other forms, stock and with evenload, in one process of a rank.

Megatron-Core's own attention refuses packed samples, so stock runs have one here that takes each sample by itself.
"""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import evenload
import torch
from evenload.core.errors import EvenloadError
from megatron.core import parallel_state
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron_tests.float64 import all_in_float64
from megatron_tests.telling import required, told
from megatron_tests.user_jobs import listening, loaded_script, recipe, worst


def _by_sample(core, query, key, value, attention_mask, packed_seq_params=None, **_: Any) -> torch.Tensor:
    """Attention [T, H * D] of packed samples, each by itself; between them there are zeros."""
    if packed_seq_params is None:  # of a row that is one sample
        return _whole(core, query, key, value, attention_mask)
    params, out = packed_seq_params, torch.zeros_like(query)
    places = params.cu_seqlens_q if params.cu_seqlens_q_padded is None else params.cu_seqlens_q_padded
    lengths = [b - a for a, b in pairwise(params.cu_seqlens_q.tolist())]
    for start, length in zip(places.tolist(), lengths, strict=False):
        q, k, v = (x[start : start + length].transpose(0, 1) for x in (query, key, value))
        k, v = (x.repeat_interleave(len(q) // len(x), dim=0) for x in (k, v))
        mask = torch.ones(length, length, dtype=torch.bool).tril()
        out[start : start + length] = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, scale=core.softmax_scale
        ).transpose(0, 1)
    return out.flatten(1)


def _whole(core, query, key, value, attention_mask):
    ends = torch.tensor([0, len(query)])
    one = SimpleNamespace(cu_seqlens_q=ends, cu_seqlens_q_padded=None)
    return _by_sample(core, query[:, 0], key[:, 0], value[:, 0], attention_mask, one)[:, None]


def packed_attention() -> Any:
    """Megatron-Core's attention takes packed samples."""
    return patch.object(DotProductAttention, "forward", _by_sample)


def _enabled(plugins: dict[str, Any]) -> Any:
    return evenload.enabled(recipe(**plugins))


def packed_samples(
    world: Any, *, tp: int, pp: int, cases: list[tuple[str, bool, dict[str, Any]]]
) -> list[dict[str, Any]]:
    """Of each (form, loss by token, plugins): the largest gradient error, and what both runs report and compute."""
    results, stock = [], {}
    with loaded_script("sft_script", tp, pp) as script, all_in_float64():
        for form, per_token, plugins in cases:
            if (form, per_token) not in stock:
                with packed_attention():
                    stock[form, per_token] = script.train(form, per_token=per_token)
            before = stock[form, per_token]
            with _enabled(plugins):
                after = script.train(form, per_token=per_token)
            results.append(
                {
                    "case": f"{form}, {'tokens' if per_token else 'means'}",
                    "error": worst(after, before),
                    "reports": (before["reports"], after["reports"]),
                    "computed": tuple(sum(b * t for b, t in run["shapes"]) for run in (before, after)),
                }
            )
    return results


def borders_left_out(world: Any, *, pp: int, plugins: dict[str, Any]) -> dict[str, Any]:
    """A loop that tells its last stage no borders, as Megatron-LM 0.16 tells those in the middle, against one that
    tells them to all: gradients of both under plans and of the first one stock, and what is said."""
    results, lines = {}, {}
    with loaded_script("sft_script", 1, pp) as script, all_in_float64():
        step = script.sft_step

        def forgetful(shapes: Any, data: Any, model: Any) -> Any:
            def call(*args: Any, packed_seq_params: Any, **more: Any) -> Any:
                kept = None if parallel_state.is_pipeline_last_stage() else packed_seq_params
                return model(*args, packed_seq_params=kept, **more)

            return step(shapes, data, call)

        with packed_attention(), patch.object(script, "sft_step", forgetful):
            results["stock"] = script.train("sft")
        for name, function in (("forgetful", forgetful), ("telling", step)):
            with _enabled(plugins), patch.object(script, "sft_step", function), listening() as lines[name]:
                results[name] = script.train("sft")
    said = {name: [line for line in heard if "on purpose" in line] for name, heard in lines.items()}
    both, stock = results["telling"], results["stock"]
    return {"said": said, "apart": worst(results["forgetful"], both), "mixed": worst(stock, both)}


def tensor_dicts(world: Any, *, tp: int, pp: int, cases: list[tuple[str, bool]], plugins: dict[str, Any]) -> list[Any]:
    """Of each (loss, by token): gradient errors, losses and what was said, stock and planned; or the refusal."""
    results: list[Any] = []
    with loaded_script("verl_script", tp, pp) as script, packed_attention(), all_in_float64():
        for loss, per_token in cases:
            stock = script.train(loss, per_token)
            try:
                with required(), _enabled(plugins):
                    planned = script.train(loss, per_token)
            except EvenloadError as error:
                results.append(str(error))
                continue
            said = [float((a - b).abs().max()) for a, b in zip(planned["said"], stock["said"], strict=True)]
            results.append(
                {
                    "case": f"{loss}, by token {per_token}",
                    "error": worst(planned, stock),
                    "said": max(said, default=0.0),
                    "losses": (stock["losses"], planned["losses"]),
                    "shapes": (stock["shapes"], planned["shapes"]),
                }
            )
    return results


def odd_tensor_dicts(world: Any, *, plugins: dict[str, Any]) -> list[str]:
    """What two data-parallel ranks are told where the second brings what cannot be planned, thing by thing."""
    odd = world.rank == 1

    def nested(batches: list[Any]) -> list[Any]:
        batches[-1]["more"] = batches[-1].select("input_ids")
        return batches

    def wider(batches: list[Any]) -> list[Any]:
        for batch in batches:
            batch["seen"] = torch.zeros(len(batch), 3 if odd else 2)
        return batches

    def fewer(batches: list[Any]) -> list[Any]:
        return batches[:-1]

    with loaded_script("verl_script") as script, packed_attention():
        chunked = script.chunked

        def told_of(change: Any, all_ranks: bool) -> str:
            changed = (lambda batch: change(chunked(batch))) if odd or all_ranks else chunked
            with patch.object(script, "chunked", changed):
                return told(lambda: script.train("sft", False), _enabled(plugins))

        return [told_of(change, all_ranks) for change, all_ranks in ((nested, False), (wider, True), (fewer, False))]


def tensor_dicts_of_some(world: Any, *, plugins: dict[str, Any]) -> str:
    """What two tensor-parallel ranks are told of which one alone has TensorDicts."""
    with loaded_script("verl_script", 2, 1) as script:
        if world.rank:
            script.iter = lambda batches: None
        return told(lambda: script.train("sft", True), _enabled(plugins))
