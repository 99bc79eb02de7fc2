"""Whether every rank of a job runs evenload, with this version and these plugins: asked once, in a script of one's own.

A launcher that drops the variables of `evenload run` on one node leaves ranks that never join our exchanges, and the
others would wait for them until the collectives' timeout. So each rank leaves word in the job's store when its process
group is made, long before its first planned step, and looks there for that of all others before its first exchange.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from functools import partial
from hashlib import blake2b
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from ...core.errors import RankError
from ...core.recipe.carried import VARIABLE
from ...core.recipe.recipe import Recipe
from ...runtime.watchdog.store_client import read_all
from ...runtime.world import agreement
from ..host.versions import version_of
from .planned_runs import on_release

_WAIT_S = 15.0
"""Ranks leave `init_process_group` together, so those that come later than this do not come."""
_LOOK_S = 0.1
_DO = "start the command of every node by `evenload run` with the same recipe and version"
_CARRIED = f"PYTHONPATH and {VARIABLE}"
_CARRIERS = {
    "RAY_JOB_ID": f"give all of Ray's workers {_CARRIED}: `evenload env --export ray` prints their runtime_env",
    "OMPI_COMM_WORLD_RANK": f"let mpirun carry {_CARRIED}: mpirun -x PYTHONPATH -x {VARIABLE}",
    "PMI_RANK": f"let mpirun carry {_CARRIED}: mpirun -genvlist PYTHONPATH,{VARIABLE}",
    "SLURM_PROCID": f"let srun carry {_CARRIED}: srun --export=ALL",
}
"""What to do, by the variable that a launcher leaves in its processes."""
_ON_EACH = f"where one launcher starts all nodes, let it carry {_CARRIED}, which `evenload env` prints"


def init_process_group(wrapped: Any, _: Any, args: Any, kwargs: Any, recipe: Recipe) -> Any:
    """`torch.distributed.init_process_group`, after which this rank leaves word."""
    result = wrapped(*args, **kwargs)
    leave_word(recipe)
    return result


def leave_word(recipe: Recipe) -> None:
    """Tell the other ranks what runs here, and ask for theirs before the first exchange."""
    if not dist.is_initialized() or dist.get_world_size() == 1 or dist.get_backend() == "fake":
        return
    plugins = json.dumps(recipe.model_dump(mode="json", include={"trainer", "plugins"}), sort_keys=True)
    word = f"evenload {version_of('evenload')}, plugins {blake2b(plugins.encode(), digest_size=4).hexdigest()}"
    _get_default_store().set(_key(dist.get_rank()), word)
    agreement.before_first = partial(_await_all, word)


def _await_all(word: str) -> None:
    """Raise RankError, on every rank that runs evenload, if others run without it or with another recipe or version."""
    store, size, until_s = _get_default_store(), dist.get_world_size(), time.monotonic() + _WAIT_S
    while (words := read_all(store, [_key(rank) for rank in range(size)])) != [
        word
    ] * size and time.monotonic() < until_s:
        time.sleep(_LOOK_S)
    if missing := [rank for rank, other in enumerate(words) if not other]:
        runs = "run" if len(missing) > 1 else "runs"
        what, detail = f"{agreement.name_ranks(missing)} of {size} {runs} without evenload", f"no word in {_WAIT_S:g} s"
        raise RankError(what, detail, f"{_DO}; {_how_to_carry(os.environ)}")
    if set(words) != {word}:
        sides = {one: agreement.name_ranks(r for r, other in enumerate(words) if other == one) for one in words}
        detail = "; ".join(f"{ranks}: {one}" for one, ranks in sides.items())
        raise RankError("the ranks run different versions of evenload, or recipes with other plugins", detail, _DO)


def _how_to_carry(environment: Mapping[str, str]) -> str:
    """What lets the launcher of these processes switch evenload on in all of them."""
    return next((do for name, do in _CARRIERS.items() if name in environment), _ON_EACH)


def _key(rank: int) -> str:
    return f"evenload/runs/{rank}"


@on_release
def release() -> None:
    """Nothing is asked once evenload is off."""
    agreement.before_first = None
