"""What planners must know of Hugging Face's Trainer, and what it cannot run. Imports neither it nor torch.

Weights, gradients and optimizer states are divided as DeepSpeed's of the same ``deepspeed.zero_stage`` are (0: DDP, 3:
also FSDP's full shard). Every rank runs equally many micro-batches under any of them: the Trainer takes as many on one
rank as on the other, and weights that are divided are gathered by all ranks together in every pass.
"""

from __future__ import annotations

from dataclasses import replace

from ...core.errors import Rule
from ...core.recipe.recipe import Recipe
from ...core.recipe.traits import SCRIPTS, Loop, Trainer, TrainerTraits
from ...core.registry import LayerPlugin
from ..deepspeed.engine import traits as deepspeed


def traits(recipe: Recipe) -> TrainerTraits:
    return traits_of(recipe.deepspeed.zero_stage, recipe.train.dtype)


def traits_of(stage: int, dtype: str) -> TrainerTraits:
    """What a precision (``train.dtype``) and weights divided as under a ZeRO stage make of the Trainer."""
    return replace(deepspeed.traits_of(stage, dtype), all_in_step=True)


def rules(recipe: Recipe) -> list[Rule]:
    """What the Trainer cannot run planned."""
    p = recipe.parallel
    return [
        (
            recipe.adapts,
            "trainer transformers trains no adapters of several tenants together",
            "plugins.lora.enabled true",
            "use trainer: megatron or deepspeed, or disable it",
        ),
        rule_of_layers(recipe),
        (
            p.tp > 1 or p.pp > 1,
            "trainer transformers is planned over data-parallel ranks alone",
            f"parallel.tp {p.tp}, parallel.pp {p.pp}",
            "set both to 1, or use trainer: megatron",
        ),
    ]


def rule_of_layers(recipe: Recipe) -> Rule:
    """No planner of layers has anything to plan in the Trainer, whose ranks have all experts."""
    name = next((plugin.name for plugin in recipe.enabled_of(LayerPlugin)), "")
    return (
        bool(name),
        f"trainer transformers has no plugins.{name}: no rank shares its experts with another",
        f"plugins.{name}.enabled true",
        "disable it, or use trainer: megatron or deepspeed with parallel.ep above 1",
    )


TRANSFORMERS = Trainer(
    traits,
    rules,
    runs_any_model=True,
    packages=("transformers", "accelerate"),
    loops=(
        Loop("Transformers' Trainer", SCRIPTS, copies=False),
        Loop("a loop of Accelerate", SCRIPTS, cuts=False, copies=False),
    ),
    first_imports=("transformers", "accelerate"),
    planned_where="train by transformers.Trainer, or by a trainer made from it",
    patches=("evenload.patches.ranks", "evenload.patches.transformers"),
    says=lambda recipe: (f"TrainingArguments: gradient_checkpointing={recipe.train.recompute}",),
)
