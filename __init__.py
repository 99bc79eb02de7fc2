"""evenload evens the load of LLM training inside Megatron-Core and DeepSpeed.

    with evenload.enabled("recipe.yaml"):      # code you cannot edit: hooks in, work, hooks out
        train()

    plan = evenload.plan("recipe.yaml", lengths)      # pure planning: no torch, no trainer

    evenload.train("recipe.yaml")                     # what `evenload train` does, on local ranks

Importing this package imports neither torch nor a trainer; names load what they need when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .api import load_recipe, plan
    from .core.errors import EvenloadError
    from .core.plan.step_plan import MicroBatch, Sequence, Slice, StepPlan
    from .core.recipe.recipe import Recipe
    from .core.registry import (
        DataPlugin,
        LayerPlugin,
        PlanningContext,
        Plugin,
        PluginConfig,
        SlicePlugin,
        StepPlugin,
        register,
        unregister,
    )
    from .data.samples.sampler import MixtureSampler
    from .patches.session import Session, disable, enable, enabled
    from .plugins.rollout import RolloutPlan, RolloutRequest, plan_cascade, plan_rollout
    from .plugins.verdicts import grounded_prompts
    from .training.api import train, verify
    from .training.sampling.reward import cascade

__version__ = "0.1.0"

_HOMES = {
    "DataPlugin": ".core.registry",
    "EvenloadError": ".core.errors",
    "LayerPlugin": ".core.registry",
    "MicroBatch": ".core.plan.step_plan",
    "MixtureSampler": ".data.samples.sampler",
    "PlanningContext": ".core.registry",
    "Plugin": ".core.registry",
    "PluginConfig": ".core.registry",
    "Recipe": ".core.recipe.recipe",
    "RolloutPlan": ".plugins.rollout",
    "RolloutRequest": ".plugins.rollout",
    "Sequence": ".core.plan.step_plan",
    "Session": ".patches.session",
    "Slice": ".core.plan.step_plan",
    "SlicePlugin": ".core.registry",
    "StepPlan": ".core.plan.step_plan",
    "StepPlugin": ".core.registry",
    "cascade": ".training.sampling.reward",
    "disable": ".patches.session",
    "enable": ".patches.session",
    "enabled": ".patches.session",
    "grounded_prompts": ".plugins.verdicts",
    "load_recipe": ".api",
    "plan": ".api",
    "plan_cascade": ".plugins.rollout",
    "plan_rollout": ".plugins.rollout",
    "register": ".core.registry",
    "train": ".training.api",
    "unregister": ".core.registry",
    "verify": ".training.api",
}

__all__ = [
    "DataPlugin",
    "EvenloadError",
    "LayerPlugin",
    "MicroBatch",
    "MixtureSampler",
    "PlanningContext",
    "Plugin",
    "PluginConfig",
    "Recipe",
    "RolloutPlan",
    "RolloutRequest",
    "Sequence",
    "Session",
    "Slice",
    "SlicePlugin",
    "StepPlan",
    "StepPlugin",
    "__version__",
    "cascade",
    "disable",
    "enable",
    "enabled",
    "grounded_prompts",
    "load_recipe",
    "plan",
    "plan_cascade",
    "plan_rollout",
    "register",
    "train",
    "unregister",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name], __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
