"""Loops on batches of other forms, stock and with evenload, in one process of a rank.

Megatron-Core's own attention refuses packed samples, so stock runs have one here that takes each sample by itself.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from megatron_float64 import all_in_float64

SCRIPTS = Path(__file__).parents[2] / "scripts"


def _load(name: str, tp: int, pp: int) -> Any:
    """A script as a module, and Megatron ready for this layout."""
    from evenload.api import load_plugins
    from megatron.core import parallel_state

    load_plugins()
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(tp, pp)
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


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


@contextmanager
def _packed_attention() -> Iterator[None]:
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    forward, DotProductAttention.forward = DotProductAttention.forward, _by_sample
    try:
        yield
    finally:
        DotProductAttention.forward = forward


def _enabled(plugins: dict[str, Any]) -> Any:
    import evenload
    from evenload.core.recipe import recipe

    return evenload.enabled(recipe.parse({"plugins": plugins}))


def _error(planned: dict[str, Any], stock: dict[str, Any]) -> float:
    """Largest ||a - b|| / ||b|| over the gradients."""
    gradients = planned["gradients"]
    return max(float((gradients[p] - g).norm() / g.norm()) for p, g in stock["gradients"].items())


def packed_samples(_: Any, tp: int, pp: int, cases: list[tuple[str, bool, dict[str, Any]]]) -> list[dict[str, Any]]:
    """Of each (form, loss by token, plugins): the largest gradient error, and what both runs report and compute."""
    script, results, stock = _load("sft_script", tp, pp), [], {}
    for form, per_token, plugins in cases:
        if (form, per_token) not in stock:
            with _packed_attention(), all_in_float64():
                stock[form, per_token] = script.train(form, per_token=per_token)
        before = stock[form, per_token]
        with _enabled(plugins), all_in_float64():
            after = script.train(form, per_token=per_token)
        results.append(
            {
                "case": f"{form}, {'tokens' if per_token else 'means'}",
                "error": _error(after, before),
                "reports": (before["reports"], after["reports"]),
                "computed": tuple(sum(b * t for b, t in run["shapes"]) for run in (before, after)),
            }
        )
    return results


def borders_left_out(_: Any, pp: int, plugins: dict[str, Any]) -> dict[str, Any]:
    """A loop that tells its last stage no borders, as Megatron-LM 0.16 tells those in the middle, against one that
    tells them to all: gradients of both under plans and of the first one stock, and what is said."""
    from megatron.core import parallel_state
    from megatron_user_jobs import listening

    script = _load("sft_script", 1, pp)
    step, results, lines = script.sft_step, {}, {}

    def forgetful(shapes: Any, data: Any, model: Any) -> Any:
        def call(*args: Any, packed_seq_params: Any, **more: Any) -> Any:
            kept = None if parallel_state.is_pipeline_last_stage() else packed_seq_params
            return model(*args, packed_seq_params=kept, **more)

        return step(shapes, data, call)

    with _packed_attention(), all_in_float64(), patch.object(script, "sft_step", forgetful):
        results["stock"] = script.train("sft")
    for name, function in (("forgetful", forgetful), ("telling", step)):
        with (
            _enabled(plugins),
            all_in_float64(),
            patch.object(script, "sft_step", function),
            listening() as lines[name],
        ):
            results[name] = script.train("sft")
    said = {name: [line for line in heard if "on purpose" in line] for name, heard in lines.items()}
    both, stock = results["telling"], results["stock"]
    return {"said": said, "apart": _error(results["forgetful"], both), "mixed": _error(stock, both)}


def tensor_dicts(_: Any, tp: int, pp: int, cases: list[tuple[str, bool]], plugins: dict[str, Any]) -> list[Any]:
    """Of each (loss, by token): gradient errors, losses and what was said, stock and planned; or the refusal."""
    from evenload.core.errors import EvenloadError

    script, results = _load("verl_script", tp, pp), []
    with _packed_attention(), all_in_float64():
        for loss, per_token in cases:
            stock = script.train(loss, per_token)
            try:
                with _enabled(plugins):
                    planned = script.train(loss, per_token)
            except EvenloadError as error:
                results.append(str(error))
                continue
            said = [float((a - b).abs().max()) for a, b in zip(planned["said"], stock["said"], strict=True)]
            results.append(
                {
                    "case": f"{loss}, by token {per_token}",
                    "error": _error(planned, stock),
                    "said": max(said, default=0.0),
                    "losses": (stock["losses"], planned["losses"]),
                    "shapes": (stock["shapes"], planned["shapes"]),
                }
            )
    return results


def odd_tensor_dicts(_: Any, plugins: dict[str, Any]) -> list[str]:
    """What two data-parallel ranks are told where the second brings what cannot be planned, thing by thing."""
    from evenload.core.errors import EvenloadError

    script, told = _load("verl_script", 1, 1), []
    odd = torch.distributed.get_rank() == 1

    def nested(batches: list[Any]) -> list[Any]:
        batches[-1]["more"] = batches[-1].select("input_ids")
        return batches

    def wider(batches: list[Any]) -> list[Any]:
        for batch in batches:
            batch["seen"] = torch.zeros(len(batch), 3 if odd else 2)
        return batches

    def fewer(batches: list[Any]) -> list[Any]:
        return batches[:-1]

    chunked = script.chunked
    for change, all_ranks in ((nested, False), (wider, True), (fewer, False)):
        try:
            with _packed_attention(), _enabled(plugins):
                if odd or all_ranks:
                    script.chunked = lambda batch, change=change: change(chunked(batch))
                script.train("sft", False)
            told.append("no error")
        except EvenloadError as error:
            told.append(str(error))
        finally:
            script.chunked = chunked
    return told


def tensor_dicts_of_some(_: Any, plugins: dict[str, Any]) -> str:
    """What two tensor-parallel ranks are told of which one alone has TensorDicts."""
    from evenload.core.errors import EvenloadError

    script = _load("verl_script", 2, 1)
    if torch.distributed.get_rank():
        script.iter = lambda batches: None
    try:
        with _enabled(plugins):
            script.train("sft", True)
    except EvenloadError as error:
        return str(error)
    finally:
        vars(script).pop("iter", None)
    return "no error"
