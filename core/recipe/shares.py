"""How much of each domain a mixture draws, step by step, and which mixtures a recipe cannot ask for.

    data:
      domains: {code: {source: code.jsonl, share: 3}, prose: {source: prose.jsonl, share: 1}}
      mix: {policy: schedule, points: [{step: 0, shares: {code: 0}}, {step: 500, shares: {code: 3}}]}

A policy is a row of `POLICIES`: from the shares of the domains and the points of a recipe it makes a pure function of
its own state, which a checkpoint keeps, and of the step. Sums and quotients are those of Python, in one order, so that
shares are the same to the last bit on every rank and after every resume.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from ..errors import Rule, nearest, shorten, shown
from ..policies import ChosenPolicy, normalised

Shares = tuple[float, ...]
"""[domains] in the order of their names; they add up to 1."""
SharesOf = Callable[[Mapping[str, Any], int], Shares]
"""From the state of a policy, and the steps before the one that is drawn."""
Points = Sequence[tuple[int, Shares]]
"""(step, shares), by ascending steps."""

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


class Policy(NamedTuple):
    """A form that shares of domains may have over the steps."""

    make: Callable[[Shares, Points], SharesOf]
    changes: bool
    """Shares may be others from step to step."""
    points: bool = False
    """It leads through the points of the recipe."""


def static(own: Shares, _: Points) -> SharesOf:
    """Shares that stay as they are."""
    return lambda state, step: own


def schedule(_: Shares, points: Points) -> SharesOf:
    """From point to point in a straight line."""

    def shares(state: Mapping[str, Any], step: int) -> Shares:
        first, last = points[0], points[-1]
        if not first[0] < step < last[0]:
            return first[1] if step <= first[0] else last[1]
        (start, before), (stop, after) = next(pair for pair in pairwise(points) if step < pair[1][0])
        part = (step - start) / (stop - start)
        return normalised([one + part * (other - one) for one, other in zip(before, after, strict=True)])

    return shares


def recorded(first: Mapping[str, Any]) -> SharesOf:
    """Shares of the record that the state of a mixture has, or of the ``first`` where it has none."""
    return lambda record, _: tuple((record or first)["shares"])


POLICIES: dict[str, Policy] = {
    "static": Policy(static, changes=False),
    "schedule": Policy(schedule, changes=True, points=True),
}


def shares_of(data: Any) -> SharesOf:
    """What the mixture of a recipe's ``data`` draws of its domains, in the order of their names."""
    domains = sorted(data.domains.items())
    points = [
        (point.step, normalised([point.shares.get(name, domain.share) for name, domain in domains]))
        for point in data.mix.points
    ]
    return POLICIES[data.mix.policy].make(normalised([domain.share for _, domain in domains]), points)


def rules_of_mixture(recipe: Any) -> list[Rule]:
    """What is wrong with the domains of a recipe, of its data or of its validation."""
    validation = recipe.data.validation
    rules = _rules_of_validation(validation, recipe.checkpoint.best) if validation else []
    return [*rules, *rules_of_domains(recipe.data, recipe.train, recipe.data_policy("mix"))]


def rules_of_domains(data: Any, train: Any, chosen: ChosenPolicy | None = None) -> list[Rule]:
    """What is wrong with the domains of data that are trained on so long, by shares that a policy moves where one is
    chosen."""
    if data.domains is None:
        said = data.mix != type(data.mix)()
        asked = f"mix policy {chosen.name}" if chosen else ""
        return [
            (said, "data.mix says how domains are mixed, and there are none", "", "set data.domains"),
            (bool(asked), "a policy moves shares of domains, and there are none", asked, "set data.domains"),
        ]
    names, scheduled = _listed(data.domains), POLICIES[data.mix.policy].changes
    moving, mover = scheduled or chosen is not None, chosen.name if chosen else data.mix.policy
    lasts = next((key for key in ("epochs", "max_tokens") if getattr(train, key, None) is not None), "")
    unshared = [name for name, domain in data.domains.items() if domain.share == 0]
    unknown = f"train.{lasts} asks for a number of steps that shares which change do not tell before the first one"
    undrawn, do = "train.epochs draws every sample, and of a domain nothing is drawn", "set train.steps instead"
    return [
        (
            data.source != type(data).model_fields["source"].default,
            "data.source and data.domains say the same thing twice",
            f"source {shown(data.source)}, domains {names}",
            "leave data.source out, or make it a domain",
        ),
        *_rules_of_names(data.domains, "data.domains"),
        *_rules_of_shares(data.domains, data.mix.points),
        *_rules_of_points(data.mix, data.domains),
        (moving and bool(lasts), unknown, f"mix policy {mover}", do),
        (
            scheduled and chosen is not None,
            "a schedule and a policy both move the shares of domains",
            f"data.mix.policy {data.mix.policy}, mix policy {mover}",
            "set data.mix.policy=static, or leave the other policy out",
        ),
        (lasts == "epochs" and bool(unshared), undrawn, f"share 0 of {_listed(unshared)}", do),
    ]


def _rules_of_names(domains: Mapping[str, Any], where: str) -> list[Rule]:
    odd = next((name for name in domains if not _NAME.fullmatch(name)), None)
    do = "use 64 letters, digits, '_' and '-' at most: the name is part of keys of a recipe and of its logs"
    return [
        (not domains, f"{where} names no domain", "{}", "name one or more, or leave it out"),
        (odd is not None, f"{where} has a domain whose name is none", shown(odd), do),
    ]


def _rules_of_shares(domains: Mapping[str, Any], points: Sequence[Any]) -> list[Rule]:
    own = {name: domain.share for name, domain in domains.items()}
    lists = {"data.domains": own} | {f"data.mix.points at step {p.step}": {**own, **p.shares} for p in points}
    nothing = next((where for where, shares in lists.items() if not any(shares.values())), "")
    what, detail = f"nothing would be drawn of any domain in {nothing}", f"shares 0 of {_listed(domains)}"
    return [(bool(nothing), what, detail, "give one a share above 0")]


def _rules_of_points(mix: Any, domains: Mapping[str, Any]) -> list[Rule]:
    steps, policy, wants = [point.step for point in mix.points], mix.policy, POLICIES[mix.policy].points
    odd = next((name for point in mix.points for name in point.shares if name not in domains), None)
    unknown = f"data.mix.points has a share of a domain that is not there: {shown(odd)}"
    none = f"data.mix.policy {policy} leads through points, and there are none"
    idle, falls = f"data.mix.points have no effect under the policy {policy}", any(b <= a for a, b in pairwise(steps))
    do = "give data.mix.points, e.g. [{step: 0, shares: {...}}, {step: 1000, shares: {...}}]"
    listed = f"steps {', '.join(map(str, steps))}"
    return [
        (odd is not None, unknown, f"domains {_listed(domains)}", nearest(odd or "", domains)),
        (wants and not steps, none, "data.mix.points is empty", do),
        (not wants and bool(steps), idle, listed, "set data.mix.policy=schedule, or leave the points out"),
        (falls, "the steps of data.mix.points do not ascend", listed, "order the points, one a step"),
    ]


def _rules_of_validation(validation: Any, best: bool | str) -> list[Rule]:
    domains, source, names = validation.domains, validation.source, _listed(validation.domains or ())
    what, do = "data.validation needs a source, or domains, and not both", "set data.validation.source, or .domains"
    unknown = f"checkpoint.best names what is not validated: {shown(best)}"
    sampled = validation.generate
    figures = (*(domains or ()), *(sampled.figures if sampled else ()))
    odd = isinstance(best, str) and best not in figures
    most = f"k {max(sampled.counts)}, samples {sampled.samples}" if sampled else ""
    return [
        ((source is None) == (domains is None), what, f"source {shown(source)}, domains {names}", do),
        *(_rules_of_names(domains, "data.validation.domains") if domains is not None else ()),
        (
            sampled is not None and max(sampled.counts) > sampled.samples,
            "data.validation.generate.k asks for more samples than are drawn of a prompt",
            most,
            "raise samples, or lower k",
        ),
        (odd, unknown, f"domains and figures: {_listed(figures)}", nearest(str(best), figures)),
    ]


def _listed(names: Any) -> str:
    return shorten(", ".join(names)) or "none"
