"""What the ranks of unmodified/test_hybrid.py do beside random plans."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import evenload
import torch
from evenload.integrations.megatron.base.families import pattern_of, unwrapped_chunk
from evenload.integrations.megatron.stage import recomputing
from evenload.integrations.megatron.unmodified.planning.user_loop import shape_of
from evenload.integrations.megatron.unmodified.refusals.supported import why_stock
from megatron_tests.telling import told
from megatron_tests.user_jobs import recipe, user_loop


def forwards_of_layers(world: Any, *, layers: int, **loop: Any) -> list[int]:
    """How often each layer runs in a forward and backward of which the first ``layers`` are recomputed."""
    with user_loop(**loop) as user:
        gpt = unwrapped_chunk(user.model)
        counts = [0] * len(gpt.decoder.layers)

        def count(number: int) -> Any:
            return lambda *_: counts.__setitem__(number, counts[number] + 1)

        for number, layer in enumerate(gpt.decoder.layers):
            # What a layer begins with, for its own hooks are around a recomputation.
            next(m for m in layer.modules() if list(m.parameters(False))).register_forward_pre_hook(count(number))
        tokens = torch.arange(8)[None]
        with recomputing(gpt, layers):
            losses = gpt(tokens, tokens, torch.ones(1, 1, 8, 8).triu(1).bool(), labels=tokens)
        losses.sum().backward()
        return counts


def sizes_and_order(world: Any, **loop: Any) -> tuple[Any, str]:
    """What planners are told of a model, and why no order can run, if so."""
    with user_loop(**loop) as user:
        gpt = unwrapped_chunk(user.model)
        shape = shape_of(gpt.config, gpt.vocab_size, loop.get("pp", 1), pattern_of(gpt))
        trouble = why_stock([user.model], "")
        experts = shape.experts and shape.experts.layers
        return (*shape[:5], experts), trouble[0] if trouble else ""


def refused_hybrids(world: Any, **loop: Any) -> dict[str, str]:
    """What a loop is told of settings and layers that a hybrid model cannot have."""
    with user_loop(**loop) as user:
        gpt = unwrapped_chunk(user.model)
        stranger = patch.dict(gpt.decoder.layers[0]._modules, self_attention=torch.nn.Identity())
        virtual = patch.object(user.model.config, "virtual_pipeline_model_parallel_size", 2)
        said = {}
        for name, change in (("virtual", virtual), ("stranger", stranger)):
            with change:
                said[name] = told(user.step, evenload.enabled(recipe()))
        return said
