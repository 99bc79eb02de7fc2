"""A verb's work on its ranks: this process is one of them, or it checks the request, starts them and waits for them.

Local ranks are started as torchrun would, with our own endings. Each is the same command again with torchrun's
variables in its environment, so a rank does not know who started it. Everything that ranks print goes to stderr; rank 0
hands its result over in a file.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from ...core.errors import EvenloadError, RankError
from ...core.input.bounds import LOCAL_RANKS
from ...core.machine.replicas import named_rank
from ...core.recipe.recipe import Recipe
from ...core.recipe.sections import Safety
from ...runtime.files import refuse_taken
from ...runtime.watchdog import marks
from ...runtime.watchdog.orphans import die_with_parent
from ...runtime.watchdog.store_socket import STORE_SOCKET, bound
from ...runtime.world.variables import RESULT, job_variables
from ..adapting import adapter_training
from ..early_end import BEGAN, BEGAN_S
from ..preflight import num_ranks_of
from ..progress import PROGRESS_SOCKET, Progress, inherited_progress, pass_on_progress, progress_sockets, silent
from ..verbs import TRAIN, VERIFY, RankWork
from .processes import LOOK_S, REAP_S, RanksFailed, is_stopped, start_rank, terminable
from .replica_choice import Elastic
from .verdict import Rank, RankWatch, Verdict

_MEMORY = Path("/dev/shm")


def is_rank() -> bool:
    """Whether this process is one of a job's ranks, started by `launch` or torchrun."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def on_ranks(
    work: RankWork,
    recipe: Recipe,
    words: Sequence[str],
    num_ranks: int | None,
    progress: Progress,
    elastic: Elastic | None = None,
    **arguments: Any,
) -> dict[str, Any] | None:
    """What the verb gives on rank 0; None on other ranks, and where the launcher takes it.

    ``words``: the command line by which local ranks do the same. ``elastic``: replicas come and go. Raises
    EvenloadError, and SystemExit where ranks that this has started have said themselves what is wrong.
    """
    if work is TRAIN and recipe.train.export is not None:
        refuse_taken(recipe.train.export)
    if work.refuse and RESULT not in os.environ:  # else `launch` was asked the same, and has checked it
        resolve_name(work.refuse)(recipe, **arguments)
    if is_rank():
        job_variables()  # before anything is loaded that takes long
        if elastic:
            elastic.name(os.environ, recipe)
        if RESULT in os.environ:  # `launch` started this rank, which ends when the launcher does, however that ends
            die_with_parent()
        progress = inherited_progress() or (progress if os.environ["RANK"].strip() == "0" else silent)
        return resolve_name(work.function)(recipe, progress=progress, **arguments)  # type: ignore[no-any-return]
    against = arguments.get("against", ())
    if elastic:
        elastic.refuse(recipe, num_ranks, against)
    size = _checked(work, recipe, num_ranks, against)
    if elastic:
        from .elastic import launch_replicas  # and torch, whose store it holds

        return launch_replicas(words, recipe, elastic, progress)
    if size > LOCAL_RANKS:
        do = f"start them with torchrun -m evenload {work.verb} on several machines"
        raise EvenloadError(f"one machine runs at most {LOCAL_RANKS} ranks", f"parallel.* needs {size}", do)
    return launch(words, size, recipe.safety, progress, recipe.ranks_of_replicas)


def _checked(work: RankWork, recipe: Recipe, num_ranks: int | None, against: tuple[str, ...]) -> int:
    """How many ranks a recipe needs that can run on its data, with these baselines. Raises EvenloadError."""
    if not work.needs_data:
        return recipe.layout(num_ranks).world_size
    if recipe.adapts:
        return adapter_training(recipe).preflight(recipe, num_ranks, against, proof=work is VERIFY)
    if work not in (TRAIN, VERIFY):
        recipe.refuse_replicas()
    return num_ranks_of(recipe, num_ranks, against)


def launch(
    arguments: Sequence[str],
    num_ranks: int,
    safety: Safety,
    progress: Progress = silent,
    replicas: Sequence[int] = (),
) -> dict[str, Any]:
    """Run ``python -m evenload ARGUMENTS`` on ``num_ranks`` local ranks and return rank 0's result; ``replicas``: ranks
    of each, where there are several.

    Raises RanksFailed where the ranks have said themselves what went wrong, or where they were told to end before their
    first step, else RankError.
    """
    memory = _MEMORY if os.access(_MEMORY, os.W_OK) else None
    ranks: list[subprocess.Popen[bytes]] = []
    with (
        terminable(ranks) as passed_on,
        tempfile.TemporaryDirectory(prefix="evenload-") as folder,
        tempfile.TemporaryDirectory(prefix="evenload-", dir=memory) as places,
    ):
        result = Path(folder) / "result.json"
        shared = {RESULT: str(result), marks.MARKS: places, BEGAN: str(BEGAN_S)}
        own_end, other_end = progress_sockets()
        with bound() as store, other_end:
            of_first = {STORE_SOCKET: store, PROGRESS_SOCKET: other_end}
            ranks += [start_rank(arguments, rank, num_ranks, shared, of_first, num_ranks) for rank in range(num_ranks)]
        try:
            look = partial(pass_on_progress, own_end, progress)
            verdict = _wait(
                ranks, Path(places), safety, look, [named_rank(replicas, rank) for rank in range(num_ranks)]
            )
        finally:
            own_end.close()
            for rank in ranks:
                rank.kill()
            for rank in ranks:
                with suppress(subprocess.TimeoutExpired):
                    rank.wait(REAP_S)
        if verdict and passed_on:
            raise RanksFailed(128 + passed_on[0])
        if isinstance(verdict, RankError):
            raise verdict
        if verdict:
            raise RanksFailed(verdict)
        if not result.exists():
            raise RankError("the ranks ended without a result", f"exit codes {[r.returncode for r in ranks]}")
        return json.loads(result.read_text())  # type: ignore[no-any-return]


def _wait(
    ranks: list[subprocess.Popen[bytes]],
    places: Path,
    safety: Safety,
    look: Callable[[], object],
    names: Sequence[str],
) -> Verdict:
    watch = RankWatch(safety, LOOK_S)
    while True:
        time.sleep(LOOK_S)
        seen = [Rank(one.poll(), is_stopped(one), "", name) for one, name in zip(ranks, names, strict=True)]
        if any(rank.code is not None or rank.stopped for rank in seen):  # where they are matters only then
            seen = [one._replace(where=marks.read(places, rank)) for rank, one in enumerate(seen)]
        look()  # after that: what a rank has sent before it ended is there
        verdict = watch.look(seen)
        if verdict is not None:
            return verdict
