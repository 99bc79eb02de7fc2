"""evenload in scripts of Transformers' Trainer, as rows; what they do is in `integrations.transformers.trainer`."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

from ..core.recipe.recipe import Recipe
from ..integrations.host.versions import is_installed, requirement
from .ledger import put_back
from .row import Patch, from_module

log = logging.getLogger("evenload")

TRANSFORMERS = requirement("transformers")
ACCELERATE = requirement("accelerate")
_TRAINER = "transformers.trainer:Trainer"
_LOOP = "..integrations.transformers.trainer"
_ACCELERATE = "..integrations.transformers.accelerate_loop"


def rows(recipe: Recipe | None = None) -> tuple[Patch, ...]:
    """The rows; ``recipe`` says what to plan, and without one they only describe themselves."""
    return (
        Patch(
            name="transformers.attention",
            target="transformers.modeling_utils:AttentionInterface._global_mapping[evenload]",
            supports=TRANSFORMERS,
            why="A model can only be set to an attention that Transformers knows. Adds a name; no model uses it unless "
            "it is set to it.",
            replace=_attention,
            fills_gap=True,
        ),
        Patch(
            name="transformers.batches",
            target=f"{_TRAINER}.get_batch_samples",
            supports=TRANSFORMERS,
            why="The Trainer takes the batches of one optimizer step there, before any of it runs, which says how many "
            "belong together. Evaluation does not come here.",
            wrapper=from_module(f"{_LOOP}:get_batch_samples", recipe),
            expects=("epoch_iterator", "num_batches", "device"),
        ),
        Patch(
            name="transformers.step",
            target=f"{_TRAINER}.training_step",
            supports=TRANSFORMERS,
            why="Forward, loss and backward of one batch, the script's own overrides included: on packs it is a pass "
            "of the plan. Batches that were not planned run as they are.",
            wrapper=from_module(f"{_LOOP}:training_step"),
            expects=("model", "inputs", "num_items_in_batch"),
        ),
        Patch(
            name="transformers.train",
            target=f"{_TRAINER}.train",
            supports=TRANSFORMERS,
            why="Unsloth assigns the two methods above anew when it loads a model, from the source of what it finds. "
            "Before a run they are looked at, and wrapped again where they are others; the run itself is left alone. A "
            "run that planned nothing says why when it ends.",
            wrapper=partial(_train, recipe),
        ),
        *_of_accelerate(recipe),
    )


def _of_accelerate(recipe: Recipe | None) -> tuple[Patch, ...]:
    return (
        Patch(
            name="transformers.prepare",
            target="accelerate.accelerator:Accelerator.prepare",
            supports=ACCELERATE,
            why="A loop of Accelerate without a Trainer calls the model that this returns: there each training batch "
            "is planned, after whatever the loop does to it. Models of a Trainer, in evaluation (not in training mode, "
            "or without gradients), and those that cannot be planned compute what they always did.",
            wrapper=from_module(f"{_ACCELERATE}:prepare", recipe),
            expects=("device_placement",),
            when=accelerate_installed,
        ),
        Patch(
            name="transformers.backward",
            target="accelerate.accelerator:Accelerator.backward",
            supports=ACCELERATE,
            why="A planned batch counts its tokens in the model's loss; a loss that is not a multiple of it would be "
            "wrong, and is refused here. A loop in which nothing is planned says so at its first backward.",
            wrapper=from_module(f"{_ACCELERATE}:backward", recipe),
            expects=("loss",),
            when=accelerate_installed,
        ),
    )


def _train(recipe: Recipe | None, wrapped: Any, trainer: Any, args: Any, kwargs: Any) -> Any:
    """`Trainer.train`, whose steps come to evenload whatever was assigned since it was switched on."""
    steps = [
        row for row in rows(recipe) if row.target in (f"{_TRAINER}.get_batch_samples", f"{_TRAINER}.training_step")
    ]
    for lost in put_back(steps):
        log.info("somebody has assigned a method anew, and evenload is put on again around it: %s", lost)
    result = wrapped(*args, **kwargs)
    from ..integrations.transformers.trainer import ended

    if recipe is not None and recipe.enabled():
        ended(trainer)
    return result


def accelerate_installed() -> bool:
    """Whether there is Accelerate, which scripts of DeepSpeed alone need not have."""
    return is_installed("accelerate")


def _attention(_: Any) -> Any:
    from ..integrations.huggingface import attention

    return attention.attention
