"""What is known of a user's model between its training calls: its sizes, the planner, what its plans may ask of it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from megatron.core.utils import get_model_config

from .....core.machine.layout import Layout
from .....core.machine.shape import ExpertShape, Shape
from .....core.planning.chain import PlanChain
from .....core.recipe.recipe import Recipe
from .....runtime.world.agreement import everyone
from ...base.families import ATTENTION, EXPERTS, MLP, pattern_of
from ...base.plane import current_layout, layers_of_pipeline
from ...base.traits import traits_of
from ...model.linears import why_in_backward
from ..reading.batches import BatchSource
from ..reading.context_parallel import OneContextRank
from ..refusals.layers import refuse_experts, why_whole
from ..refusals.supported import Trouble, bare_model, why_stock
from ..running.experts import with_experts_in_step
from ..running.reports import Kinds
from ..writers import MegatronSession

log = logging.getLogger("evenload")


@dataclass(eq=False, kw_only=True)
class UserLoop(MegatronSession):
    """What is known of a user's model between its training calls."""

    by_token: bool
    """Its packs may hold parts of samples."""
    only_stock: Trouble | None
    """Why Megatron's own schedule must run its plans."""
    source: BatchSource
    kinds: Kinds | None = None
    """What the values of its reports are, after the first call."""
    one_context: OneContextRank | None = None
    """What stands in for Megatron's context parallelism in a training call."""
    mixes_rows: bool | None = None
    """Whether samples of one row see each other in some stage of the stock loop; None: not asked yet."""
    rows: MegatronSession | None = None
    """Its calls on TensorDicts, from the first one on."""

    @classmethod
    def of(
        cls,
        recipe: Recipe,
        chunks: Sequence[Any],
        foreign_owner: str,
        warn: bool,
        source: BatchSource,
    ) -> UserLoop:
        """The loop with these model chunks, which calls for the first time. Collective; raises EvenloadError. ``warn``:
        this rank says what is left out."""
        stock, gpts, config = current_layout(), [bare_model(chunk) for chunk in chunks], get_model_config(chunks[0])
        layout = replace(stock, cp=1, dp=stock.dp * stock.cp)
        shares = bool(recipe.deciding("shares"))
        # A stage may hold what others do not, and all of them must make one plan.
        own = [(why_stock(chunks, foreign_owner), why_whole(gpt, shares=shares), why_in_backward(gpt)) for gpt in gpts]
        reasons = [one for rank in everyone(own) for one in rank]
        only_stock, borders, together = (next(filter(None, one), one[0]) for one in zip(*reasons, strict=True))
        whole = only_stock is not None or bool(borders)
        if whole and warn:
            why = borders or (only_stock and " ".join(only_stock[:2]))
            log.warning("no sample is cut in this loop: %s", why)
        planned, in_step = with_experts_in_step(layout, config)
        chain = chain_of(recipe, gpts[0], planned, warn=warn, whole=whole)
        if together and warn:
            log.info("weight gradients stay in the backward: %s", together)
        if chain.of_layers and layout.ep > 1:
            refuse_experts(gpts[0], len(gpts))
        splits = chain.limits.splits_backward and not together
        chain = replace(chain, limits=replace(chain.limits, splits_backward=splits, in_step=in_step))
        loop = cls(planners=chain, by_token=not borders, only_stock=only_stock, source=source)
        loop.one_context = loop.group(OneContextRank) if stock.cp > 1 else None
        return loop


def chain_of(recipe: Recipe, gpt: Any, layout: Layout, *, warn: bool, whole: bool = True) -> PlanChain:
    """The planners of a recipe for a GPTModel; `PlanChain.of_model` has the arguments. Raises EvenloadError."""
    dtype = {torch.float32: "fp32", torch.float64: "fp64"}.get(gpt.config.params_dtype, "bf16")
    config, pattern = gpt.config, pattern_of(gpt)
    layers = () if pattern else layers_of_pipeline(config, layout.pp)
    layout = replace(layout, layers=() if 0 in layers else layers)
    shape = shape_of(config, gpt.vocab_size, 1 if layout.layers else layout.pp, pattern)
    # Both want the tokens of this rank, each with all its experts, where rows for a node are.
    needs_all = ("moe_permute_fusion", "moe_shared_expert_overlap")
    dedups_per_node = not any(getattr(config, name, False) for name in needs_all)
    divides_tokens = config.sequence_parallel and config.tensor_model_parallel_size > 1
    traits = traits_of(dtype, recipe.megatron, divides_tokens=divides_tokens)
    traits = replace(traits, dedups_per_node=dedups_per_node)
    return PlanChain.of_model(recipe, shape, layout, traits, warn=warn, whole=whole)


def shape_of(config: Any, vocab_size: int, num_stages: int, pattern: str | None = None) -> Shape:
    """The sizes that a TransformerConfig tells. ``pattern``: of a hybrid model (`pattern_of`), whose layers have
    attention or an MLP: planners are given their mean."""
    kinds, layers = (pattern or "").split("/")[0], config.num_layers
    attention = mlp = 1.0
    if kinds:
        layers, experts = len(kinds), kinds.count(EXPERTS)
        attention = sum(map(kinds.count, ATTENTION)) / layers
        mlp = kinds.count(MLP) / max(1, layers - experts)
    return Shape(
        # Where no order runs for the layers that stages have, costs are those of the next equal number.
        -(-layers // num_stages) * num_stages,
        config.hidden_size,
        round(mlp * config.ffn_hidden_size),
        round(attention * config.kv_channels * config.num_attention_heads),
        round(attention * config.kv_channels * config.num_query_groups),
        vocab_size,
        config.gated_linear_unit,
        _experts_of(config, kinds),
        heads=config.num_attention_heads,
    )


def _experts_of(config: Any, kinds: str) -> ExpertShape | None:
    if not config.num_moe_experts:
        return None
    every = [kind == EXPERTS for kind in kinds] if kinds else config.moe_layer_freq
    layers = range(len(kinds) or config.num_layers)
    return ExpertShape(
        config.num_moe_experts,
        config.moe_router_topk,
        config.moe_ffn_hidden_size or config.ffn_hidden_size,
        config.moe_shared_expert_intermediate_size or 0,
        tuple(layer for layer in layers if (layer % every == 0 if isinstance(every, int) else every[layer])),
    )
