"""What a training loop of the user's own must look like for its micro-batches to be regrouped exactly."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.fp4_utils import get_fp4_align_size
from megatron.core.fp8_utils import get_fp8_align_size
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_model_config

from .....core.errors import EvenloadError, Rule, refuse_first
from .....core.plan.step_plan import StepPlan
from ...base.families import MODELS, pattern_of, unwrapped_chunk
from ...base.plane import layers_of_pipeline
from ..reading.context_parallel import rules_of_context
from .layers import refuse_attention

log = logging.getLogger("evenload")

Trouble = tuple[str, str, str]
"""The parts of an `EvenloadError`."""

_GROUPS: dict[str, Callable[[], Any]] = {
    "tp": parallel_state.get_tensor_model_parallel_group,
    "pp": parallel_state.get_pipeline_model_parallel_group,
    "cp": parallel_state.get_context_parallel_group,
    "dp_cp": lambda: parallel_state.get_data_parallel_group(with_context_parallel=True, partial_data_parallel=False),
}
"""What a loop may pass to Megatron's schedule, as Megatron-Bridge does. The groups are passed on as they are; what is
planned and exchanged goes over those of parallel_state, so both must hold the same ranks."""


def refuse_loop(chunk: Any, rest: dict[str, Any]) -> None:
    """Raise EvenloadError for a model, its config or arguments of the schedule that evenload cannot honour."""
    config = get_model_config(chunk)
    refuse_groups(rest.get("pg_collection"), rest.get("p2p_communicator"))
    overlap = bool(getattr(getattr(chunk, "ddp_config", None), "overlap_grad_reduce", False))
    refuse_first(
        (
            overlap and config.no_sync_func is None,
            "overlapped gradient reduction would start before the last of a changing number of micro-batches",
            "overlap_grad_reduce=True, no_sync_func=None",
            "set config.no_sync_func = model.no_sync, or overlap_grad_reduce=False",
        ),
        (
            rest.get("adjust_tensor_shapes_fn") is not None,
            "packs set the shapes that pipeline stages exchange",
            "adjust_tensor_shapes_fn",
            "leave it out, or disable evenload's plugins",
        ),
        (
            bool(pattern_of(unwrapped_chunk(chunk)) and config.virtual_pipeline_model_parallel_size),
            "packs of a hybrid model do not run in virtual pipeline stages",
            f"virtual_pipeline_model_parallel_size {config.virtual_pipeline_model_parallel_size}",
            "leave it unset, or disable evenload's plugins for this model",
        ),
        *_model_rules(config),
    )


def refuse_groups(pg_collection: Any, p2p_communicator: Any) -> None:
    """Raise EvenloadError for groups of other ranks than those of megatron.core.parallel_state."""
    handed = {f"pg_collection.{name}": (getattr(pg_collection, name, None), own) for name, own in _GROUPS.items()}
    handed["p2p_communicator"] = getattr(p2p_communicator, "pp_group", None), _GROUPS["pp"]
    ranks_of = dist.get_process_group_ranks
    for name, (group, own) in handed.items():
        if group is not None and (theirs := ranks_of(group)) != (ours := ranks_of(own())):
            raise EvenloadError(
                "the schedule is handed process groups that are not those of megatron.core.parallel_state",
                f"{name} of ranks {theirs}, there {ours}",
                "make both of the same layout (initialize_model_parallel), or disable evenload's plugins",
            )


def collection(pg_collection: Any) -> Any:
    """The groups that Megatron's `finalize_model_grads` takes: the loop's, else those of parallel_state."""
    if pg_collection is not None:
        return pg_collection
    return ProcessGroupCollection(
        **{name: own() for name, own in _GROUPS.items()},
        # 0.19 counts the tokens of experts with biases over it.
        tp_dp_cp=parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True),
        embd=parallel_state.get_embedding_group(check_initialized=False),
        pos_embd=parallel_state.get_position_embedding_group(check_initialized=False),
    )


def bare_model(chunk: Any) -> Any:
    """The GPTModel, or hybrid model, inside its wrappers. Raises EvenloadError for another model, or attention that
    takes no packs."""
    model = unwrapped_chunk(chunk)
    if not isinstance(model, MODELS) or "packed_seq_params" not in inspect.signature(model.forward).parameters:
        raise EvenloadError(
            "evenload packs the batches of Megatron-Core's GPTModel and HybridModel",
            f"a model of type {type(model).__name__}",
            "disable evenload's plugins",
        )
    refuse_attention(model)
    return model


def why_stock(chunks: Sequence[Any], foreign_owner: str) -> Trouble | None:
    """What keeps a loop in Megatron's own schedule, so that no order of a plan can run in it; None: nothing.
    ``foreign_owner``: who made the schedule that the loop would run, if not Megatron-Core."""
    chunk = chunks[0]
    config, ddp = get_model_config(chunk), getattr(chunk, "ddp_config", None)
    if foreign_owner:
        return (
            "the host's schedule is already patched by someone else, and an order of a plan would take its place",
            foreign_owner,
            "take that change off, or make it around evenload's by applying it after evenload is enabled, or disable "
            "plugins.pipeline and set plugins.packing.slices=off",
        )
    do = "leave it off, or disable plugins.pipeline and set plugins.packing.slices=off"
    settings = (
        ("defer_embedding_wgrad_compute", False, "the output layer's weight gradients wait for Megatron's schedule"),
        ("fine_grained_activation_offloading", False, "activations are offloaded in the order of Megatron's schedule"),
        ("num_microbatches_with_partial_activation_checkpoints", None, "Megatron's schedule says what is recomputed"),
        ("overlap_p2p_comm", False, "hand-over between stages is Megatron's"),
        ("mtp_num_layers", None, "the last stage predicts further tokens"),
    )
    if len(chunks) > 1:
        return "an order of a plan cannot run where stages have several chunks", f"{len(chunks)} model chunks", do
    if pattern := pattern_of(model := unwrapped_chunk(chunk)):
        layers, stages = len(model.decoder.layers), config.pipeline_model_parallel_size
        if layers * stages != len(pattern):
            why = "an order of a plan cannot run where stages have unequal numbers of layers"
            return why, f"{layers} layers here of the pattern {pattern}", do
    elif 0 in (own := layers_of_pipeline(config, config.pipeline_model_parallel_size)):
        return "an order of a plan cannot run where a stage has no layers", f"{list(own)} layers", do
    for name, wanted, why in settings:
        if (value := getattr(config, name, wanted)) != wanted:
            return f"an order of a plan cannot run where {why}", f"{name} {value}", do
    if ddp is not None and not isinstance(chunk, DistributedDataParallel):
        detail = f"{type(chunk).__module__}.{type(chunk).__qualname__}"
        return "an order of a plan runs in Megatron's DistributedDataParallel, or in none", detail, do
    return None


def tokens_multiple(config: Any) -> int:
    """What the tokens of a pack are padded to a multiple of: sequence parallelism divides them among tensor-parallel
    ranks, and matrix products in 8 or 4 bits want a multiple of their own on each."""
    shares = config.tensor_model_parallel_size if config.sequence_parallel else 1
    if config.fp8:
        return shares * int(get_fp8_align_size(config.fp8_recipe))
    return shares * int(get_fp4_align_size(config.fp4_recipe) if config.fp4 else 1)


def warn_of_dropout(config: Any) -> None:
    """Say that dropout draws other numbers: there is no equality to show then, though the distribution is the same."""
    if config.hidden_dropout > 0 or config.attention_dropout > 0:
        log.warning(
            "hidden_dropout %g, attention_dropout %g: a packed step draws other dropout masks than a stock one",
            config.hidden_dropout,
            config.attention_dropout,
        )


def refuse_replays(plan: StepPlan, config: Any) -> None:
    """Raise EvenloadError for replays under dropout: they draw other masks than the keys and values that were kept."""
    if plan.replayed and (config.hidden_dropout > 0 or config.attention_dropout > 0):
        raise EvenloadError(
            "a plan with replayed micro-batches cannot run a model with dropout",
            f"hidden_dropout {config.hidden_dropout:g}, attention_dropout {config.attention_dropout:g}, "
            f"{len(plan.replayed)} replays",
            "set both to 0, or plan without replays (packing.asymmetric false, no activation cap)",
        )


def _model_rules(config: Any) -> Iterable[Rule]:
    do = "disable evenload's plugins for this model"
    settings = (
        ("experimental_attention_variant", None, "its layers are not known to keep packed samples apart"),
        ("mtp_standalone", False, "a stage of multi-token prediction alone hands on more than the tokens of a pack"),
        ("hybrid_context_parallel", False, "hybrid context parallelism plans micro-batches by itself"),
        ("cuda_graph_impl", "none", "CUDA graphs need one shape for all micro-batches"),
    )
    groups, tp = config.num_query_groups, config.tensor_model_parallel_size
    yield groups % tp != 0, "tensor-parallel ranks share key-value heads", f"{groups} query groups, tp {tp}", do
    overlap = config.num_moe_experts is not None and getattr(config, "overlap_moe_expert_parallel_comm", False)
    why, detail = "Megatron runs layers of two micro-batches at once", "overlap_moe_expert_parallel_comm True"
    yield bool(overlap), why, detail, "switch it off, or disable evenload's plugins"
    yield (
        bool(config.mtp_num_layers and config.num_moe_experts),
        "the routers of multi-token prediction do not know packs",
        f"mtp_num_layers {config.mtp_num_layers}, num_moe_experts {config.num_moe_experts}",
        do,
    )
    yield from rules_of_context(config)
    for name, wanted, why in settings:
        value = getattr(config, name, wanted)
        yield value != wanted, why, f"{name} {value}", do
