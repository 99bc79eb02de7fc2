"""evenload in DeepSpeed scripts that nobody edits, as rows of wrapped symbols.

What the wrappers do is in `integrations.deepspeed.unmodified.loop`.

The rows act on an engine whose ds_config has an ``evenload`` section, or on every engine where a recipe is given.
Methods of the class are wrapped and not `deepspeed.initialize`: scripts copy that name before anybody could.
"""

from __future__ import annotations

import sys

from ..core.recipe.recipe import Recipe
from ..integrations.host.versions import requirement
from .row import Patch, from_module

DEEPSPEED = requirement("deepspeed")
_ENGINE = "deepspeed.runtime.engine:DeepSpeedEngine"
_LOOP = "..integrations.deepspeed.unmodified.loop"
_EXPERTS = "..integrations.deepspeed.engine.experts"
_REGISTRY = "transformers.utils.output_capturing:_CanRecordRegistry"


def rows(recipe: Recipe | None = None) -> tuple[Patch, ...]:
    """The rows; `recipe` is used by scripts whose ds_config has no ``evenload`` section."""
    return (
        Patch(
            name="deepspeed.loader",
            target=f"{_ENGINE}.deepspeed_io",
            supports=DEEPSPEED,
            why="Reaches training_data= of deepspeed.initialize and direct calls, of all engines by inheritance. "
            "Evaluation loaders and engines without the section get the stock loader.",
            wrapper=from_module(f"{_LOOP}:deepspeed_io", recipe),
            expects=("dataset", "route", "data_sampler", "collate_fn"),
        ),
        Patch(
            name="deepspeed.forward",
            target=f"{_ENGINE}.forward",
            supports=DEEPSPEED,
            why="The pack must travel with its batch, whatever the script does with the batch in between. Engines "
            "without a planned loader, and passes without gradients, run as they are.",
            wrapper=from_module(f"{_LOOP}:forward"),
        ),
        Patch(
            name="deepspeed.backward",
            target=f"{_ENGINE}.backward",
            supports=DEEPSPEED,
            why="The script's loss is a mean over its own micro-batch; only here can it be weighted without changing "
            "what the script prints.",
            wrapper=from_module(f"{_LOOP}:backward"),
        ),
        Patch(
            name="deepspeed.step",
            target=f"{_ENGINE}.step",
            supports=DEEPSPEED,
            why="loss.backward() would go past the weighting unseen; the step then raises instead of training wrongly.",
            wrapper=from_module(f"{_LOOP}:step"),
            expects=("lr_kwargs",),
        ),
        *(
            Patch(
                name=f"deepspeed.autoep.{verb}",
                target=f"{_REGISTRY}.{method}",
                supports=requirement("transformers"),
                why=f"DeepSpeed's AutoEP {what} by its name, where Transformers since 5.23 takes a model, and fails. "
                "Names are looked up as they stand; a model is looked up as usual.",
                wrapper=from_module(f"{_EXPERTS}:{verb}_by_name"),
                when=registry_takes_models,
            )
            for verb, method, what in (
                ("get", "get", "asks what a class records"),
                ("set", "__setitem__", "puts back what a class records"),
            )
        ),
    )


def registry_takes_models() -> bool:
    """Whether this Transformers has the registry that takes models; asked once its module is there."""
    module = sys.modules.get(_REGISTRY.partition(":")[0])
    return hasattr(module, "_CanRecordRegistry")
