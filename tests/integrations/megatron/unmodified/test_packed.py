"""Loops that fine-tune on packed samples, as Megatron-LM's --sft and Megatron-Bridge: stock and with evenload, whole.

Megatron-Core's own attention refuses packs, so stock runs have one here that takes each sample by itself.
"""

from __future__ import annotations

import importlib.util
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

SCRIPTS = Path(__file__).parents[3] / "scripts"
RECIPE = {"plugins": {"packing": {"enabled": True, "max_tokens": 48}}}
WHOLE = {"plugins": {"packing": {"enabled": True, "max_tokens": 64, "slices": "off"}}}


def load(name: str, tp: int, pp: int) -> Any:
    """A script as a module, and Megatron ready for this layout."""
    from evenload.patches import bridge_cpu

    bridge_cpu()
    from megatron.core import parallel_state

    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(tp, pp)
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


def by_sample(core, query, key, value, *_: Any, packed_seq_params: Any = None, **__: Any) -> Any:
    """Attention [T, H * D] of packed samples, each by itself; between them there are zeros."""
    import torch

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


def worst(name: str, planned: dict[str, Any], stock: dict[str, Any]) -> float:
    """Largest ||a - b|| / ||b|| over the tensors."""
    return max(float((planned[name][p] - t).norm() / t.norm()) for p, t in stock[name].items())


def errors(tp: int, pp: int, forms: list[str], recipes: list[dict[str, Any]], per_token: bool) -> dict[str, Any]:
    """By form and recipe: the largest gradient error of evenload against stock, and what both report and compute."""
    import evenload
    from evenload.api import load_plugins
    from evenload.core.recipe import recipe as recipes_of
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    script, compared = load("sft_script", tp, pp), {}
    load_plugins()
    for form in forms:
        forward, DotProductAttention.forward = DotProductAttention.forward, by_sample
        stock = script.train(form, per_token=per_token)
        DotProductAttention.forward = forward
        for number, settings in enumerate(recipes):
            with evenload.enabled(recipes_of.parse(settings)):
                planned = script.train(form, per_token=per_token)
            compared[f"{form} {number}"] = {
                "error": worst("gradients", planned, stock),
                "reports": (stock["reports"], planned["reports"]),
                "computed": [sum(b * t for b, t in run["shapes"]) for run in (stock, planned)],
            }
    return compared


FORMS = ["sft", "sft, two rows"]


@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (1, 2), (2, 1)], ids=["dp2", "pp2", "tp2"])
def test_packed_samples_are_regrouped_exactly(world, tp, pp):
    ranks = world(2).run(errors, tp, pp, FORMS if tp * pp == 1 else FORMS[::2], [RECIPE], True)
    for rank in ranks:
        for name, one in rank.items():
            assert one["error"] < 1e-9, (name, one["error"])
    for name in ranks[0]:
        before, after = (sum(rank[name]["computed"][i] for rank in ranks) for i in (0, 1))
        assert after < before, name
