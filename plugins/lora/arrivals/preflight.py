"""What can be found wrong with a job before any rank starts; its tenants are looked at when they come."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import NamedTuple

from ....core.errors import EvenloadError, refuse_first, shorten
from ....core.planning.chain import PlanChain
from ....core.recipe.recipe import Recipe, place_of
from ....training.preflight import refuse_other_tokenizer, runnable
from ..config import LoraConfig
from .folder import Folder

logger = logging.getLogger("evenload")


class TenantPreflight(NamedTuple):
    """A recipe whose base can run, and its chain of planners for the layout."""

    recipe: Recipe
    chain: PlanChain


def preflights(
    recipe: Recipe, world_size: int | None = None, against: tuple[str, ...] = (), *, needs_tenants: bool = True
) -> list[TenantPreflight]:
    """Check trainer, layout and base of each replica, and, if any are needed, that there is a folder of tenants. Raises
    EvenloadError; starts nothing.

    ``world_size``: of a job of one replica; others say theirs."""
    refuse_of_models(recipe, against)
    if needs_tenants:
        _refuse_no_tenant(recipe)
    if not recipe.parallel.replicas:
        return [_preflight(recipe, world_size)]
    return [_preflight(own, None) for own in recipe.of_replicas]


def _preflight(recipe: Recipe, world_size: int | None) -> TenantPreflight:
    recipe, layout = runnable(recipe, world_size)
    if recipe.model.vocab_size is None:
        what = "nobody says how large the vocabulary of the base is"
        detail = "model.vocab_size null, and tenants bring data of their own"
        raise EvenloadError(what, detail, "set model.weights, whose config.json says it, or model.vocab_size")
    refuse_other_tokenizer(recipe)
    return TenantPreflight(recipe, PlanChain.of_recipe(recipe, layout))


def _refuse_no_tenant(recipe: Recipe) -> None:
    folder = folder_of_tenants(recipe)
    if not Folder(folder).names and not config_of(recipe).wait:
        do = "put one there, or set plugins.lora.wait=true so that the job waits for them"
        raise EvenloadError("there is no tenant to train", f"no file NAME.yaml in {shorten(str(folder))}", do)


def refuse_of_models(recipe: Recipe, against: tuple[str, ...]) -> None:
    """Raise EvenloadError for what belongs to the training of a whole model."""
    refuse_first(
        (
            bool(against),
            "baselines do not train tenants next to evenload",
            f"--against {','.join(against)}",
            "leave it out, or compare by `evenload plan`, whose times are predicted",
        ),
        (
            recipe.train.export is not None,
            "train.export writes a whole model, and tenants leave adapters",
            f"train.export {recipe.train.export}",
            "leave it out: each tenant's adapter is in plugins.lora.out",
        ),
    )


def config_of(recipe: Recipe) -> LoraConfig:
    """The settings of the plugin that brings the tenants."""
    config = recipe.config_of("lora")
    assert isinstance(config, LoraConfig)
    return config


def folder_of_tenants(recipe: Recipe) -> Path:
    """Raises EvenloadError where the recipe names none."""
    folder = config_of(recipe).tenants
    if folder is None:
        do = "set plugins.lora.tenants to a folder with a YAML file for each tenant"
        raise EvenloadError("nobody says where the tenants are", "plugins.lora.tenants null", do)
    return place_of(folder)


def out_of(recipe: Recipe) -> Path:
    """Where each tenant has a folder. Raises EvenloadError where the recipe names none of tenants."""
    return config_of(recipe).out or folder_of_tenants(recipe).parent / "out"


_OF_TENANTS = {
    "train": "steps max_tokens epochs global_batch_size global_batch_tokens lr min_lr lr_schedule warmup_steps "
    "weight_decay betas eps clip_grad export_prompts",
    "checkpoint": "background best",
    "planner": "refit",
    "log": "trace loads",
}
"""Settings that a job of tenants does not heed, by section; of data, none."""


def say_without_effect(recipe: Recipe) -> None:
    """Warn of settings that tenants have in their own files, or that their loop does not know."""
    if len(recipe.ranks_of_replicas) == 1:
        logger.warning("parallel.replicas names one replica: the same as its degrees in parallel itself")
    idle = [f"data.{key}" for key in recipe.data.model_fields_set]
    for section, names in _OF_TENANTS.items():
        chosen = getattr(recipe, section)
        default = type(chosen)()
        idle += [f"{section}.{key}" for key in names.split() if getattr(chosen, key) != getattr(default, key)]
    if idle:
        text = "%s have no effect where tenants are trained: a tenant's file says what it is trained on, and how"
        logger.warning(text, ", ".join(sorted(idle)))
