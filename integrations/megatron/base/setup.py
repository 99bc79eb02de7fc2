"""What must hold before Megatron-Core is used: the right version, a device it accepts, a recipe it can train."""

from __future__ import annotations

import torch

from ....core.errors import EvenloadError, refuse_first
from ....core.recipe.recipe import Recipe
from ...host.versions import describe_version, is_installed, supported, version_of, what_to_install
from .traits import run_rules

MEGATRON = "megatron-core"


def check_host() -> str:
    """The version of Megatron-Core. Raises EvenloadError where it is missing or not supported."""
    wanted = supported(MEGATRON)
    if not is_installed(MEGATRON):
        do = f"pip install '{MEGATRON}{wanted}', or use trainer: deepspeed"
        raise EvenloadError("Megatron-Core is not installed", f"no {MEGATRON}", do)
    version = version_of(MEGATRON)
    if version is not None and not wanted.contains(version, prereleases=True):
        do = what_to_install(MEGATRON, version, wanted)
        raise EvenloadError("this version of Megatron-Core is not supported", describe_version(MEGATRON), do)
    try:
        torch.cuda.current_device()
    except (AssertionError, RuntimeError) as error:
        raise EvenloadError(
            "Megatron-Core asks for CUDA and there is none",
            str(error),
            "start with `evenload train`, or call evenload.patches.bridge_cpu() before Megatron-Core is imported",
        ) from error
    return version or describe_version(MEGATRON)


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
        *run_rules(recipe),
        (
            recipe.model.config is not None,
            "a Hugging Face config cannot be built with Megatron-Core",
            f"model.config {recipe.model.config}",
            "give the model's sizes in the recipe, or use trainer: deepspeed",
        ),
        (
            vocabulary is None or (vocabulary % p.tp != 0 and recipe.model.weights is None),
            "model.vocab_size is not known" if vocabulary is None else "parallel.tp does not divide model.vocab_size",
            f"model.vocab_size {vocabulary}, tp {p.tp}",
            "set it to the tokenizer's number of tokens, rounded up to a multiple of 128",
        ),
    )
