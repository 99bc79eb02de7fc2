"""Work of a replica with others that come and go: from one roster to the next, as if it went on from a checkpoint.

Between two changes of who is there (an era) a job is one of replicas that stay. When it changes, whoever has the state
of the job begins the next era with what a checkpoint would keep, from memory, and gives it to who has come.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import TypeVar

import torch.distributed as dist

from ..core.machine.replicas import Roster
from ..core.recipe.recipe import Recipe
from ..runtime.watchdog.watchdog import Watchdog
from ..runtime.world.agreement import everyone
from ..runtime.world.replicas import JobGroup, ReplicasChangedError, job_group, leads
from ..runtime.world.roster import Membership, Standing, membership

logger = logging.getLogger("evenload")
State = TypeVar("State")
Result = TypeVar("Result")

_OF_A_REPLICA = ("parallel", "cluster", "costs", "log")
"""Sections of a recipe that may be others in other replicas."""


def about(recipe: Recipe, **more: str) -> dict[str, str]:
    """What has to be the same in all replicas of a job, in short."""
    data = recipe.model_dump(mode="json")
    sections = {name: _digest(json.dumps(data[name], sort_keys=True)) for name in data if name not in _OF_A_REPLICA}
    return {"evenload": version("evenload"), "torch": version("torch"), **sections, **more}


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def recipe_of(recipe: Recipe, roster: Roster) -> Recipe:
    """The recipe with those replicas that take part."""
    return recipe.changed({"parallel.replicas": [dict(one.shape) for one in roster.members]})


def in_eras(
    watchdog: Watchdog,
    work: Callable[[Roster | None, State | None], Result],
    own_state: Callable[[], State],
    receive: Callable[[JobGroup, int], object],
) -> Result:
    """Do a job's work, in as many eras as it takes. Collective over the replica.

    Args:
        work: gets who takes part (None: a job whose replicas stay) and the state to go on with (None: there is none but
            on the disk). It says by `Membership.stands_at` when it has it, and by `Membership.next_step` what it did.
        own_state: gives the state of this replica, which has taken part; its first rank's counts.
        receive: brings what the state does not say (weights, moments) from the rank with the state to all that lack it.
            Collective over the job.
    """
    member = membership()
    if member is None:
        return work(None, None)
    result: Result | None = None
    while True:
        try:
            watchdog.at("meeting the other replicas", waits=True)
            standings = member.meet()
            if not standings:  # what broke at the very end was only the last word of the others
                assert result is not None, "a job was done before this replica took part"
                return result
            result = work(member.roster, _handed(member, standings, own_state, receive))
            everyone(None, "job")
            return result
        except ReplicasChangedError:
            watchdog.at("replicas have changed", waits=True)


def _handed(
    member: Membership,
    standings: Sequence[Standing],
    own_state: Callable[[], State],
    receive: Callable[[JobGroup, int], object],
) -> State | None:
    """The state that the job goes on with; None where no replica has any."""
    member.begin()
    logger.setLevel(logging.INFO if leads(dist.get_rank()) else logging.ERROR)
    job, own = job_group(), own_state() if member.has_state else None
    assert job is not None
    source = next((rank for rank, one in enumerate(standings) if one.step >= 0), None)
    if source is None:
        return None
    state = job.from_rank(source, own)
    if any(one.step < 0 for one in standings):
        receive(job, source)
    return state


def settled(step: int) -> None:
    """A step is done, with all that follows it: the next one may be done with other replicas. Collective over the job.
    Raises ReplicasChangedError."""
    if member := membership():
        member.next_step(step)


def begins(step: int) -> None:
    """This replica has the state after so many steps."""
    if member := membership():
        member.stands_at(step)


def refuse_to_go_on_alone() -> None:
    """Raise ReplicasChangedError where a replica was lost after a step was settled: what follows it is done anew."""
    if membership() and job_group() is None:
        raise ReplicasChangedError("another replica is gone")
