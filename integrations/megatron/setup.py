"""What must hold before Megatron-Core is used: the right version, a device it accepts, its process groups."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import suppress
from importlib import metadata
from typing import Any

import torch
import torch.distributed as dist
from packaging.requirements import Requirement

from ...core.errors import EvenloadError, refuse_first
from ...core.machine.layout import Layout
from ...core.recipe.recipe import Recipe

SUPPORTED = Requirement("megatron-core>=0.16.1,<0.17")


def check_host() -> str:
    """The installed version of Megatron-Core. Raises EvenloadError where it is missing or not supported."""
    try:
        version = metadata.version(SUPPORTED.name)
    except metadata.PackageNotFoundError:
        raise EvenloadError(
            "Megatron-Core is not installed",
            "no megatron-core",
            f"pip install '{SUPPORTED}', or use trainer: deepspeed",
        ) from None
    if not SUPPORTED.specifier.contains(version, prereleases=True):
        raise EvenloadError("this version of Megatron-Core is not supported", version, f"pip install '{SUPPORTED}'")
    try:
        torch.cuda.current_device()
    except (AssertionError, RuntimeError) as error:
        raise EvenloadError(
            "Megatron-Core asks for CUDA and there is none",
            str(error),
            "start with `evenload train`, or call evenload.patches.bridge_cpu() before Megatron-Core is imported",
        ) from error
    return version


def check_recipe(recipe: Recipe) -> None:
    """Raise EvenloadError for what this integration does not do."""
    p, vocabulary = recipe.parallel, recipe.model.vocab_size
    refuse_first(
        (
            p.cp > 1,
            "Megatron's static context parallelism is not used here",
            f"parallel.cp {p.cp}",
            "set parallel.cp=1; the mesh plugin shares sequences between data-parallel ranks",
        ),
        (p.ep > 1, "the recipe's models have no experts", f"parallel.ep {p.ep}", "set parallel.ep=1"),
        (
            recipe.model.config is not None,
            "a Hugging Face config cannot be built with Megatron-Core",
            f"model.config {recipe.model.config}",
            "give the model's sizes in the recipe, or use trainer: deepspeed",
        ),
        (
            vocabulary is None or vocabulary % p.tp != 0,
            "model.vocab_size is not known" if vocabulary is None else "parallel.tp does not divide model.vocab_size",
            f"model.vocab_size {vocabulary}, tp {p.tp}",
            "set it to the tokenizer's number of tokens, rounded up to a multiple of 128",
        ),
    )


def join_groups(layout: Layout, seed: int) -> bool:
    """Make Megatron's process groups for a layout, or take those that are there; whether they were made.

    Megatron's random states are seeded in both cases: its modules draw from them and refuse to run without. Raises
    EvenloadError: groups of another layout exist already.
    """
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    is_ours = not parallel_state.model_parallel_is_initialized()
    if is_ours:
        parallel_state.initialize_model_parallel(layout.tp, layout.pp)
    there = current_layout()
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
    from megatron.core import parallel_state

    return Layout(
        tp=parallel_state.get_tensor_model_parallel_world_size(),
        pp=parallel_state.get_pipeline_model_parallel_world_size(),
        cp=parallel_state.get_context_parallel_world_size(),
        dp=parallel_state.get_data_parallel_world_size(),
    )


def leave_groups() -> None:
    """Destroy every process group that Megatron made, not only its names for them.

    A gloo group owns threads that poll a hundred times a second; Megatron's own `destroy_model_parallel` forgets the
    groups and leaves those running (about 1,000 threads after twenty layouts in one process).
    """
    from megatron.core import parallel_state

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
    elif isinstance(value, dict):
        yield from (group for entry in value.values() for group in _groups_in(entry))
    elif isinstance(value, (list, tuple)):
        yield from (group for entry in value for group in _groups_in(entry))
