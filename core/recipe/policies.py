"""What a recipe may ask of policies of data (`core.policies`): which fields a run shows them, and what does not go
together."""

from __future__ import annotations

from typing import Any

from ..errors import Rule
from ..policies import ChosenPolicy, Kind

SHOWN: dict[Kind, tuple[str, ...]] = {
    "mix": ("losses", "targets", "samples"),
    "select": ("losses",),
    "weight": ("losses", "targets"),
}
"""What a run shows a policy of each kind, beside what the recipe names a file of."""


def rules_of_policies(recipe: Any) -> list[Rule]:
    """What is wrong with the policies of data of a recipe."""
    chosen = {kind: recipe.data_policy(kind) for kind in SHOWN}
    select = chosen["select"]
    lacking = [rule for kind, one in chosen.items() if one for rule in _rules_of_lacking(kind, one)]
    return [*lacking, *(_rules_of_selection(recipe, select) if select else ())]


def _rules_of_lacking(kind: Kind, chosen: ChosenPolicy) -> list[Rule]:
    lacking = [name for name in chosen.policy.needs if name not in (*SHOWN[kind], *chosen.files)]
    what = f"the {kind} policy '{chosen.name}' needs what no run shows it"
    detail = f"needs {', '.join(lacking)}; a run shows {', '.join((*SHOWN[kind], *chosen.files))}"
    files = {"excess": "reference", "embeddings": "select.embeddings", "queries": "select.queries"}
    names = [f"plugins.data.{files[name]}" for name in lacking if name in files]
    return [(bool(lacking), what, detail, f"set {', '.join(names)}" if names else "take another policy")]


def _rules_of_selection(recipe: Any, chosen: ChosenPolicy) -> list[Rule]:
    train, asked = recipe.train, f"select policy {chosen.name}"
    lasts = next((key for key in ("epochs", "max_tokens") if getattr(train, key) is not None), "")
    unlike = f"the select policy '{chosen.name}' takes from the same samples in every update"
    return [
        (
            bool(lasts),
            f"train.{lasts} asks for a number of steps that a selection does not tell before the first one",
            asked,
            "set train.steps instead",
        ),
        (
            train.global_batch_tokens is not None,
            "a selection takes samples, and train.global_batch_tokens counts tokens",
            asked,
            "set train.global_batch_size instead",
        ),
        (
            recipe.data.group is not None,
            "a selection takes samples one by one, and groups stay whole",
            asked,
            "no group",
        ),
        (chosen.policy.same_pool and chosen.pool is not None, unlike, f"pool {chosen.pool}", "leave select.pool out"),
    ]
