"""Megatron's process groups, and which of their ranks exchange tensors in our own way."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_block import get_num_layers_to_build

from ....core.aliases import Ranks
from ....core.errors import EvenloadError
from ....core.machine.layout import Layout, unless_equal
from ....runtime.stage.stage_links import StageLinks, v_links
from ....runtime.world.agreement import rows_of_all, time_limit
from ....runtime.world.plane import Plane


def open_plane(node_ranks: int = 0) -> Plane:
    """This rank's plane: Megatron's data-parallel ranks, who hold the same part of the model. Collective.
    ``node_ranks``: neighbouring plane ranks that share a node; 0: all do."""
    return Plane.make(_rows(parallel_state.get_data_parallel_group(with_context_parallel=True)), node_ranks)


def stage_links() -> StageLinks:
    """The links to the neighbouring pipeline stages. Collective."""
    return StageLinks(_pipelines())


def links_of_device(layout: Layout) -> Sequence[StageLinks]:
    """The links of each stage of this device, where there are several stages. Collective."""
    if layout.v_shape:
        return v_links(_pipelines())
    return (stage_links(),) if layout.pp > 1 else ()


def _pipelines() -> list[Ranks]:
    return _rows(parallel_state.get_pipeline_model_parallel_group())


def _rows(group: Any) -> list[Ranks]:
    return rows_of_all(dist.get_process_group_ranks(group))


def join_groups(layout: Layout, seed: int) -> bool:
    """Make Megatron's process groups for a layout, or take those that are there; whether they were made.

    Megatron's random states are seeded in both cases: its modules draw from them and refuse to run without. Raises
    EvenloadError: groups of another layout exist already.
    """
    is_ours = not parallel_state.model_parallel_is_initialized()
    if is_ours:
        parallel_state.initialize_model_parallel(
            layout.tp,
            layout.pp,
            expert_model_parallel_size=layout.ep,
            distributed_timeout_minutes=time_limit().total_seconds() / 60,
        )
    there = replace(current_layout(), v_shape=layout.v_shape, layers=layout.layers)
    if there != layout:
        raise EvenloadError(
            "Megatron's process groups were made for another layout",
            f"{there}; the recipe asks for {layout}",
            "call megatron.core.parallel_state.destroy_model_parallel() first, or change parallel.*",
        )
    model_parallel_cuda_manual_seed(seed)
    return is_ours


def current_layout() -> Layout:
    """The layout of Megatron's process groups."""
    return Layout(
        tp=parallel_state.get_tensor_model_parallel_world_size(),
        pp=parallel_state.get_pipeline_model_parallel_world_size(),
        cp=parallel_state.get_context_parallel_world_size(),
        ep=parallel_state.get_expert_model_parallel_world_size(),
        dp=parallel_state.get_data_parallel_world_size(),
    )


def layers_of_pipeline(config: Any, num_stages: int) -> tuple[int, ...]:
    """Layers of each stage of a model that Megatron builds by a TransformerConfig, where they are unequal; empty where
    all have as many, or stages are virtual."""
    if num_stages == 1 or config.virtual_pipeline_model_parallel_size is not None:
        return ()
    return unless_equal(tuple(get_num_layers_to_build(config, pp_rank=stage) for stage in range(num_stages)))


def leave_groups() -> None:
    """Destroy every process group that Megatron made, not only its names for them.

    A gloo group owns threads that poll a hundred times a second; Megatron's own `destroy_model_parallel` forgets the
    groups and leaves those running (about 1,000 threads after twenty layouts in one process).
    """
    world = dist.group.WORLD
    opened = {id(group): group for value in vars(parallel_state).values() for group in _groups_in(value)}
    parallel_state.destroy_model_parallel()
    for group in opened.values():
        if group is not world:
            with suppress(ValueError):  # Megatron has destroyed some itself
                dist.destroy_process_group(group)
    opened.clear()
    gc.collect()  # Megatron's modules hold groups in cycles, and a group's threads end with its last reference


def _groups_in(value: Any) -> Iterator[dist.ProcessGroup]:
    """The process groups in a module global of parallel_state: a group, or a list or mapping of some."""
    if isinstance(value, dist.ProcessGroup):
        yield value
    elif isinstance(value, (dict, list, tuple)):
        for entry in value.values() if isinstance(value, dict) else value:
            yield from _groups_in(entry)
