"""Which replicas of a job that come and go a command starts, and where they meet; needs no torch."""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from typing import NamedTuple

from ...core.errors import EvenloadError, refuse_first
from ...core.recipe.recipe import Recipe
from ...runtime.world.variables import MEETING_PLACE, REPLICA


class Elastic(NamedTuple):
    """What --elastic, --replica and --meet ask for."""

    holds: bool
    """It holds the meeting place (``--elastic``)."""
    replica: int | None
    """The one that it starts (``--replica``); None: all of the recipe."""
    meet: str
    """HOST:PORT of the meeting place (``--meet``); empty: one that is free here."""

    def numbers(self, recipe: Recipe) -> list[int]:
        """The replicas that this command starts."""
        return list(range(len(recipe.parallel.replicas or ()))) if self.replica is None else [self.replica]

    def refuse(self, recipe: Recipe, num_ranks: int | None, against: Sequence[str]) -> None:
        """Raise EvenloadError for what cannot be."""
        count, chosen = len(recipe.parallel.replicas or ()), self.replica
        place, _, port = self.meet.rpartition(":")
        refuse_first(
            (
                count < 2,
                "replicas come and go where there are several, each a whole model",
                f"parallel.replicas of {count}",
                "name at least two in parallel.replicas, such as [{tp: 2}, {dp: 1}]; without, use torchrun "
                "--max-restarts and checkpoint.dir",
            ),
            (
                not self.holds and (chosen is None or not self.meet),
                "a replica joins others by its number and their meeting place",
                f"--replica {'not given' if chosen is None else chosen}, --meet {self.meet or 'not given'}",
                "give both --replica N and --meet HOST:PORT, or --elastic to start all replicas here",
            ),
            (
                chosen is not None and chosen >= count,
                "there is no such replica",
                f"--replica {chosen}, parallel.replicas has 0 to {count - 1}",
                "name it there, with its shape",
            ),
            (
                bool(self.meet) and not (place and port.isdigit() and 0 < int(port) < 65536),
                "--meet is no place where replicas meet",
                self.meet,
                "give HOST:PORT",
            ),
            (
                bool(against),
                "baselines do not train next to replicas that come and go",
                f"--against {','.join(against)}",
                "leave it out, or leave --elastic out",
            ),
            (
                num_ranks is not None,
                "replicas that come and go say how many ranks they have",
                f"--nproc {num_ranks}",
                "leave --nproc out",
            ),
        )

    def name(self, environment: MutableMapping[str, str], recipe: Recipe) -> None:
        """Let this rank, which torchrun or the like has started, be of its replica. Raises EvenloadError."""
        if MEETING_PLACE in environment:  # `elastic` has started it
            return
        if self.holds or self.replica is None:
            what = "--elastic starts processes by itself, and this one is a rank already"
            do = "under torchrun or srun start each replica with --replica N --meet HOST:PORT, and hold the meeting "
            raise EvenloadError(what, "RANK is set", f"{do}place by --elastic --replica 0 --meet HOST:PORT elsewhere")
        self.refuse(recipe, None, ())
        environment.update({MEETING_PLACE: self.meet, REPLICA: str(self.replica)})
