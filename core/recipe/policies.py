"""What a recipe may ask of policies of data (`core.policies`): which fields a run shows them, and what does not go
together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import Rule
from ..policies import ChosenPolicy, Kind
from .sizes import shape_of
from .traits import trainer_called

SHOWN: dict[Kind, tuple[str, ...]] = {
    "mix": ("losses", "targets", "samples"),
    "select": ("losses", "gradients"),
    "weight": ("losses", "targets"),
}
"""What a run shows a policy of each kind, besides what `data.validation` is for and what the recipe names a file of."""

_WHOLE = "turn sequence parallelism off, or set parallel.tp=1"

_BY_VALIDATION: dict[Kind, tuple[str, ...]] = {"mix": (), "select": ("query_gradients",), "weight": ("vectors",)}
"""What is shown where there is a validation, whose samples say what is wanted."""


def rules_of_policies(recipe: Any) -> list[Rule]:
    """What is wrong with the policies of data of a recipe."""
    chosen = {kind: recipe.data_policy(kind) for kind in SHOWN}
    select = chosen["select"]
    lacking = [rule for kind, one in chosen.items() if one for rule in _rules_of_lacking(recipe, kind, one)]
    by_gradient = rules_of_gradients(recipe) if select and "gradients" in select.policy.needs else ()
    own = [*(_rules_of_selection(recipe, select) if select else ()), *by_gradient]
    weights = *_rules_of_weights(recipe, chosen["weight"]), *rules_of_divisor(recipe.data, chosen)
    return [*lacking, *own, *weights]


def rules_of_divisor(data: Any, chosen: Mapping[Kind, ChosenPolicy | None]) -> list[Rule]:
    """What a divisor of weighted losses needs, and what it does not go with."""
    divides, asked = data.weight_divisor is not None, f"data.weight_divisor {data.weight_divisor}"
    kind = next((kind for kind in ("mix", "weight") if chosen.get(kind)), "")
    what = f"a {kind} policy needs a loss that is divided by what its weights add up to"
    without = "data.weight_divisor divides losses with weights from the data, and there are none"
    do = "leave data.weight_divisor out, or"
    return [
        (divides and data.weight_column is None, without, asked, f"{do} set data.weight_column"),
        (divides and bool(kind), what, asked, f"{do} the policy"),
    ]


def _rules_of_weights(recipe: Any, chosen: ChosenPolicy | None) -> list[Rule]:
    what = "weights by likeness need the last hidden states of a pack whole on each tensor-parallel rank"
    by_likeness = chosen is not None and "vectors" in chosen.policy.needs
    return [(by_likeness and _divides_tokens(recipe), what, f"parallel.tp {recipe.parallel.tp}", _WHOLE)]


def _divides_tokens(recipe: Any) -> bool:
    return trainer_called(recipe.trainer).traits(recipe).divides_tokens


def rules_of_gradients(recipe: Any) -> list[Rule]:
    """What keeps a run from taking gradients of its samples."""
    p = recipe.parallel
    return [
        (
            shape_of(recipe.model).experts is not None,
            "gradients of samples are by low-rank matrices on the linear layers of dense models: experts have none",
            f"model.family {recipe.model.family}",
            "score with a dense model",
        ),
        (
            p.cp > 1,
            "gradients of samples do not go with static context parallelism",
            f"parallel.cp {p.cp}",
            "set parallel.cp=1 and give its ranks to parallel.dp; plugins.mesh shares long sequences",
        ),
        (
            _divides_tokens(recipe),
            "gradients of samples need all tokens of a pack on each tensor-parallel rank",
            f"parallel.tp {p.tp}",
            _WHOLE,
        ),
        (
            p.tp > 1 and p.pp > 1,
            "gradients of samples are not proven where tensor parallelism and stages come together",
            f"parallel.tp {p.tp}, parallel.pp {p.pp}",
            "set parallel.tp=1 or parallel.pp=1",
        ),
    ]


def _rules_of_lacking(recipe: Any, kind: Kind, chosen: ChosenPolicy) -> list[Rule]:
    shown = (*SHOWN[kind], *(_BY_VALIDATION[kind] if recipe.data.validation else ()), *chosen.files)
    lacking = [name for name in chosen.policy.needs if name not in shown]
    what = f"the {kind} policy '{chosen.name}' needs what no run shows it"
    detail = f"needs {', '.join(lacking)}; a run shows {', '.join(shown)}"
    files = {"excess": "reference", "embeddings": "select.embeddings", "queries": "select.queries"}
    settings = {name: f"plugins.data.{key}" for name, key in files.items()}
    settings |= dict.fromkeys(_BY_VALIDATION[kind], "data.validation")
    names = [settings[name] for name in lacking if name in settings]
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
