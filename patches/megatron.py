"""evenload in Megatron-Core training loops that nobody edits, as rows; what they do is in
`integrations.megatron.unmodified.loop`.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from ..core.recipe.recipe import Recipe
from ..integrations.host.versions import is_installed
from .cpu_bridge import MEGATRON
from .row import Patch, Wrapper, from_module
from .slots import foreign_owner

_SCHEDULES = "megatron.core.pipeline_parallel"


def rows(recipe: Recipe | None = None) -> tuple[Patch, ...]:
    """The rows; ``recipe`` says what to plan, and without one they only describe themselves."""
    orders = recipe is not None and bool(recipe.deciding("orders"))
    return (
        Patch(
            name="megatron.schedule",
            target=f"{_SCHEDULES}.schedules:get_forward_backward_func",
            supports=MEGATRON,
            why="Every training loop asks it for the function that runs a step's micro-batches, so packs, their "
            "number and their order can be set there and nowhere deeper. Forward-only calls, and functions asked for "
            "earlier, are left alone; plugins.pipeline refuses a schedule that someone else has patched.",
            wrapper=_planned(recipe),
            expects=("pp_size", "vp_size"),
            owner="megatron.core" if orders else None,
            aliases=(f"{_SCHEDULES}:get_forward_backward_func",),
        ),
        Patch(
            name="megatron.attention",
            target="megatron.core.transformer.dot_product_attention:DotProductAttention.forward",
            supports=MEGATRON,
            why="The attention of the local layer spec refuses packed sequences. Reaches packs that evenload has made; "
            "every other call runs as it is. Transformer Engine's attention is wrapped on its "
            "modules, for as long as a training call.",
            wrapper=from_module("..integrations.megatron.unmodified.running.attention:attention"),
            expects=("query", "key", "value", "attention_mask", "packed_seq_params"),
        ),
        Patch(
            name="megatron.batch",
            target="megatron.training.utils:get_batch_on_this_tp_rank",
            supports=MEGATRON,
            why="Megatron-LM's scripts broadcast each batch inside the tensor-parallel group, in the one shape of "
            "their arguments. Inside a planned step every rank has its pack already; evaluation runs as it is.",
            wrapper=from_module("..integrations.megatron.unmodified.running.forward_step:batch_on_tensor_ranks"),
            expects=("data_iterator",),
            only="<0.18",
            when=has_training,
        ),
        Patch(
            name="megatron.batch.core",
            target="megatron.core.utils:get_batch_on_this_tp_rank",
            supports=MEGATRON,
            why="The same from 0.18 on, where the script itself takes the batch from its iterator, hands it over, and "
            "reads every key by its name.",
            wrapper=from_module("..integrations.megatron.unmodified.running.forward_step:batch_of_core"),
            expects=("batch", "broadcast_group", "seq_length"),
            only=">=0.18",
        ),
    )


def has_training() -> bool:
    """Whether Megatron-LM's own loop is there: a checkout has it, the wheel of Megatron-Core 0.16 does not."""
    return is_installed("megatron-training")


def _planned(recipe: Recipe | None) -> Wrapper:
    @cache
    def planned_steps() -> Any:
        from ..integrations.megatron.unmodified import loop as unmodified

        assert recipe is not None, "rows(None) are for the support table"
        return unmodified.PlannedSteps(recipe)

    def call(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        planned, stock = planned_steps(), wrapped(*args, **kwargs)
        return planned.around(stock, foreign_owner(stock, "megatron.core"))

    return call
