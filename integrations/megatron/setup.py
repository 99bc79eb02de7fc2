"""What must hold before Megatron-Core is used: the right version, a device it accepts, a recipe it can train."""

from __future__ import annotations

import torch
from packaging.requirements import Requirement

from ...core.errors import EvenloadError, Rule, refuse_first
from ...core.recipe.recipe import Recipe
from ..versions import describe_version, is_installed, version_of

SUPPORTED = Requirement("megatron-core>=0.16.1,<0.17")


def check_host() -> str:
    """The version of Megatron-Core. Raises EvenloadError where it is missing or not supported."""
    install = f"pip install '{SUPPORTED}'"
    if not is_installed(SUPPORTED.name):
        raise EvenloadError(
            "Megatron-Core is not installed", f"no {SUPPORTED.name}", f"{install}, or use trainer: deepspeed"
        )
    version = version_of(SUPPORTED.name)
    if version is not None and not SUPPORTED.specifier.contains(version, prereleases=True):
        raise EvenloadError("this version of Megatron-Core is not supported", describe_version(SUPPORTED.name), install)
    try:
        torch.cuda.current_device()
    except (AssertionError, RuntimeError) as error:
        raise EvenloadError(
            "Megatron-Core asks for CUDA and there is none",
            str(error),
            "start with `evenload train`, or call evenload.patches.bridge_cpu() before Megatron-Core is imported",
        ) from error
    return version or describe_version(SUPPORTED.name)


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
        *_rules_of_experts(recipe),
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


def _rules_of_experts(recipe: Recipe) -> list[Rule]:
    """What Megatron-Core's MoE layers do not do, or not with the packs of a plan."""
    moe, p = recipe.model.moe, recipe.parallel
    if moe is None:
        return []
    return [
        (
            p.tp > 1,
            "Megatron-Core wants sequence parallelism where experts and tensor parallelism meet, and torch's norms, "
            "which this model has, know none",
            f"parallel.tp {p.tp}, {moe.num_experts} experts",
            "set parallel.tp=1, and parallel.ep to divide the experts",
        ),
        (
            moe.dispatcher == "allgather" and (p.pp > 1 or (p.ep > 1 and bool(recipe.enabled()))),
            "Megatron-Core's allgather dispatcher takes equally many tokens from all ranks in all micro-batches, and "
            "packs of plugins and of pipelines differ in length",
            f"model.moe.dispatcher allgather, ep {p.ep}, pp {p.pp}, {len(recipe.enabled())} plugins",
            "set model.moe.dispatcher=alltoall",
        ),
        (
            moe.topk == 1 and moe.score == "softmax",
            "the softmax over one chosen expert is 1: its router would learn nothing, and Megatron-Core refuses it",
            "model.moe.topk 1, score softmax",
            "set model.moe.topk to 2 or more, or score=sigmoid",
        ),
    ]
