"""The reference that `evenload verify` holds a DeepSpeed run against: plain training, written for the proof.

Same weights, whole sequences one after the other, Transformers' own attention and no mask, no packing, no engine, no
process group, float32. Nothing here knows of plans.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch.nn.functional import cross_entropy

from ...core.recipe import Recipe
from ...core.workload import Sequence
from ...runtime.pack import TokensOf
from .engine_host import EngineHost
from .model import build_model


def reference(
    recipe: Recipe, host: EngineHost, tokens_of: TokensOf, sequences: Iterable[Sequence]
) -> tuple[float, Mapping[str, torch.Tensor]]:
    """Loss and gradients, by parameter name, of the mean token loss of a global batch.

    Collective, because the weights are gathered from `host`; every rank then computes the whole batch.
    """
    model = build_model(recipe, attn_implementation="sdpa")
    model.load_state_dict(host.weights())
    return plain_gradients(model, tokens_of, sequences)


def plain_gradients(
    model: torch.nn.Module, tokens_of: TokensOf, sequences: Iterable[Sequence]
) -> tuple[float, dict[str, torch.Tensor]]:
    """The same of any causal language model, in the precision of its weights."""
    samples = [torch.as_tensor(tokens_of(s.index))[: s.length].long() for s in sequences]
    num_targets = sum(len(sample) - 1 for sample in samples)
    model.zero_grad(set_to_none=True)
    total = 0.0
    for sample in samples:
        if len(sample) < 2:
            continue
        logits_TV = model(input_ids=sample[None, :-1], use_cache=False).logits[0]
        loss = cross_entropy(logits_TV, sample[1:], reduction="sum") / num_targets
        torch.autograd.backward(loss)
        total += float(loss.detach())
    return total, {name: p.grad.detach().clone() for name, p in model.named_parameters() if p.grad is not None}


def relative_error(found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> float:
    """max over parameters of ||g - ref|| / ||ref||; infinite where a gradient is missing."""
    if found.keys() != wanted.keys():
        return float("inf")
    errors = [
        float((found[name].double() - ref.double()).norm() / ref.double().norm().clamp_min(1e-300))
        for name, ref in wanted.items()
    ]
    return max(errors, default=0.0)
