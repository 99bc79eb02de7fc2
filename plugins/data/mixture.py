"""Shares that follow what steps show: how far their policy (`core.policies`) has come in a run.

Domains of share 0 stay so, and the policy knows the others alone. It is asked once in so many steps, of their sums. One
batch is drawn ahead, so what a step has shown moves the shares of the batch after next. Pure: the same steps give the
same shares, on any ranks, and what `saved` gives goes on to the last bit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ...core.errors import EvenloadError
from ...core.policies import ChosenPolicy, DomainsToMix, Proportions, SeenDomains, State, started, stepped
from ...core.recipe.recipe import Recipe
from ...core.recipe.shares import shares_of


class MixtureState(NamedTuple):
    """The policy of a run's shares after some steps."""

    chosen: ChosenPolicy
    of: DomainsToMix
    places: tuple[int, ...]
    """Of the domains that it knows, among those of the recipe."""
    num_domains: int
    state: State
    answer: Proportions
    waiting: SeenDomains | None = None
    """Sums of the steps since it was asked."""
    num_waiting: int = 0

    @classmethod
    def begin(cls, recipe: Recipe, chosen: ChosenPolicy, names: Sequence[str], samples: Sequence[int]) -> MixtureState:
        """The policy of a recipe before the first step, for domains of so many samples, names ascending. Raises
        EvenloadError."""
        own = shares_of(recipe.data)({}, 0)
        places = tuple(place for place, share in enumerate(own) if share > 0)
        columns: Any = (tuple(values[place] for place in places) for values in (names, own, samples))
        of = DomainsToMix(*columns)
        state, answer = started(chosen, of)
        both = [name for name, domain in (recipe.data.domains or {}).items() if domain.weight != 1]
        if answer.objective is not None and (both or recipe.data_policy("weight")):
            what = f"the mix policy '{chosen.name}' weighs domains in the loss, and so does the recipe"
            detail = f"data.domains.{both[0]}.weight" if both else "plugins.data.weight"
            raise EvenloadError(what, detail, "leave it out, or take another policy")
        return cls(chosen, of, places, len(own), state, answer)

    @property
    def outcome(self) -> dict[str, float] | None:
        """Shares by domain that the policy has found for a later run; None: it looks for none."""
        outcome = self.chosen.policy.outcome
        return None if outcome is None else dict(zip(self.of.names, map(float, outcome(self.state)), strict=True))

    @property
    def share_record(self) -> dict[str, list[float]]:
        """What the drawing is told of the policy and keeps with the batches, of all domains of the recipe: their
        shares, and the objective if there is one."""
        answers = {name: values for name, values in self.answer._asdict().items() if values is not None}
        known = {name: dict(zip(self.places, values, strict=True)) for name, values in answers.items()}
        return {name: [own.get(place, 0.0) for place in range(self.num_domains)] for name, own in known.items()}

    def after(self, seen: SeenDomains) -> MixtureState:
        """One step later, which has shown that of all domains of the recipe."""
        own = seen.at(self.places)
        waiting = self.waiting.plus(own) if self.waiting else own
        num_waiting = self.num_waiting + 1
        if num_waiting < self.chosen.every:
            return self._replace(waiting=waiting, num_waiting=num_waiting)
        state, answer = stepped(self.chosen, self.state, waiting, self.answer)
        return self._replace(state=state, answer=answer, waiting=None, num_waiting=0)

    @property
    def progress(self) -> dict[str, Any]:
        """What a step changes, by field: what a rank tells the others."""
        return {name: getattr(self, name) for name in ("state", "answer", "waiting", "num_waiting")}

    def saved(self) -> dict[str, Any]:
        """What a checkpoint keeps, ready for JSON."""
        waiting = self.waiting and [None if sums is None else sums.tolist() for sums in self.waiting]
        progress = {"state": self.state, **self.answer._asdict(), "num_waiting": self.num_waiting}
        return {**self._identity, **progress, "waiting": waiting}

    def resumed(self, saved: Mapping[str, Any]) -> MixtureState:
        """Go on where `saved` was taken. Raises ValueError for a state of another policy, other settings or domains."""
        if any(saved.get(key) != value for key, value in self._identity.items()):
            raise ValueError("the policy, its settings or the domains are others")
        waiting = saved["waiting"] and SeenDomains(*(sums and np.array(sums) for sums in saved["waiting"]))
        objective = saved.get("objective")
        answer = Proportions(tuple(saved["shares"]), objective and tuple(objective))
        return self._replace(state=saved["state"], answer=answer, waiting=waiting, num_waiting=saved["num_waiting"])

    @property
    def _identity(self) -> dict[str, Any]:
        settings = self.chosen.settings.model_dump(mode="json")
        known = {"domains": list(self.of.names), "places": list(self.places), "of": self.num_domains}
        return {"policy": self.chosen.name, "settings": settings, "every": self.chosen.every, **known}


def first_shares(recipe: Recipe, names: Sequence[str], samples: Sequence[int]) -> dict[str, Any]:
    """The share record before the first step; empty where no policy moves the shares of a recipe. Raises EvenloadError
    where the policy and the recipe both weigh domains."""
    chosen = recipe.data_policy("mix")
    return MixtureState.begin(recipe, chosen, names, samples).share_record if chosen else {}
