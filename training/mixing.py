"""Shares that follow what steps show: how far the policy of a plugin of batches (`core.policies`) has come in a run.

Domains of share 0 stay so, and the policy knows the others alone. It is asked once in so many steps, of their sums. One
batch is drawn ahead, so what a step has shown moves the shares of the batch after next. Pure: the same steps give the
same shares, on any ranks, and what `saved` gives goes on to the last bit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..core.errors import EvenloadError
from ..core.policies import ChosenPolicy, DomainsToMix, Proportions, SeenDomains, State, started, stepped
from ..core.recipe.recipe import Recipe
from ..core.recipe.shares import Shares, shares_of


class MixRun(NamedTuple):
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
    def begin(cls, recipe: Recipe, names: Sequence[str], samples: Sequence[int]) -> MixRun | None:
        """The policy of a recipe before the first step, for domains of so many samples, names ascending; None: shares
        are those that data.mix says. Raises EvenloadError."""
        if (chosen := recipe.mix_policy) is None:
            return None
        own = shares_of(recipe.data)({}, 0)
        places = tuple(place for place, share in enumerate(own) if share > 0)
        columns: Any = (tuple(values[place] for place in places) for values in (names, own, samples))
        of = DomainsToMix(*columns)
        state, answer = started(chosen, of)
        if answer.objective is not None:
            what = f"the mix policy '{chosen.name}' weighs domains in the loss, which no run does for it yet"
            raise EvenloadError(what, f"objective {answer.objective}", "take another policy")
        return cls(chosen, of, places, len(own), state, answer)

    @property
    def shares(self) -> Shares:
        """Shares of all domains of the recipe, names ascending."""
        shares = [0.0] * self.num_domains
        for place, share in zip(self.places, self.answer.shares, strict=True):
            shares[place] = share
        return tuple(shares)

    def shares_at(self, policy: Mapping[str, Any], _: int) -> Shares:
        """Shares of a batch that is drawn under the state that `drawn_by` gives; empty: those of this state."""
        return tuple(policy["shares"]) if policy else self.shares

    @property
    def drawn_by(self) -> dict[str, Any]:
        """What the order of samples keeps of the policy."""
        return {"shares": list(self.shares)}

    def after(self, seen: SeenDomains) -> MixRun:
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
        progress = {"state": self.state, "shares": list(self.answer.shares), "num_waiting": self.num_waiting}
        return {**self._identity, **progress, "waiting": waiting}

    def resumed(self, saved: Mapping[str, Any]) -> MixRun | None:
        """Go on where `saved` was taken; None: that is of another policy, other settings or other domains."""
        if any(saved.get(key) != value for key, value in self._identity.items()):
            return None
        waiting = saved["waiting"] and SeenDomains(*(sums and np.array(sums) for sums in saved["waiting"]))
        answer = Proportions(tuple(saved["shares"]))
        return self._replace(state=saved["state"], answer=answer, waiting=waiting, num_waiting=saved["num_waiting"])

    @property
    def _identity(self) -> dict[str, Any]:
        settings = self.chosen.settings.model_dump(mode="json")
        known = {"domains": list(self.of.names), "places": list(self.places), "of": self.num_domains}
        return {"policy": self.chosen.name, "settings": settings, "every": self.chosen.every, **known}
