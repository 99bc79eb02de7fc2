"""Ranks that a scheduler has started without torchrun: its variables by torchrun's names.

SLURM's ``srun`` sets the variables of a step in its tasks alone: in a batch script without srun there are none, and
what runs there is no rank. Open MPI names no machine that all ranks can reach, so on several the user has to.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, MutableMapping

from ...core.errors import EvenloadError

_FIRST_PORT, _PORTS = 15_000, 15_000
"""Below those that systems give away."""
Variables = Mapping[str, str]


def adopt(environment: MutableMapping[str, str]) -> None:
    """Add torchrun's variables where a scheduler has started this process as one of several ranks.

    Those that are there stay. Raises EvenloadError where ranks lie on several machines and none is named to meet at.
    """
    if "RANK" in environment or "WORLD_SIZE" in environment:
        return
    for size, read in _SCHEDULERS.items():
        if environment.get(size, "1").strip() != "1":
            environment.update({**read(environment), **_present(environment)})
            return


def _present(environment: Variables) -> dict[str, str]:
    return {name: environment[name] for name in ("MASTER_ADDR", "MASTER_PORT") if name in environment}


def _slurm(environment: Variables) -> dict[str, str]:
    counts = _per_node(environment.get("SLURM_STEP_TASKS_PER_NODE", ""))
    node = int(environment.get("SLURM_NODEID", "0"))
    return {
        "RANK": environment["SLURM_PROCID"],
        "WORLD_SIZE": environment["SLURM_STEP_NUM_TASKS"],
        "LOCAL_RANK": environment.get("SLURM_LOCALID", "0"),
        "LOCAL_WORLD_SIZE": str(counts[node] if node < len(counts) else 1),
        "MASTER_ADDR": _first_node(environment.get("SLURM_STEP_NODELIST", "")),
        "MASTER_PORT": _port(environment.get("SLURM_JOB_ID", "0"), environment.get("SLURM_STEP_ID", "0")),
    }


def _open_mpi(environment: Variables) -> dict[str, str]:
    size, here = environment["OMPI_COMM_WORLD_SIZE"], environment.get("OMPI_COMM_WORLD_LOCAL_SIZE", "1")
    if size != here and not {"MASTER_ADDR", "MASTER_PORT"} <= set(environment):
        do = "mpirun -x MASTER_ADDR=HOST -x MASTER_PORT=29500 ..., HOST being the machine of rank 0"
        raise EvenloadError("mpirun says of no machine that ranks can meet there", f"{here} of {size} ranks here", do)
    return {
        "RANK": environment["OMPI_COMM_WORLD_RANK"],
        "WORLD_SIZE": size,
        "LOCAL_RANK": environment.get("OMPI_COMM_WORLD_LOCAL_RANK", "0"),
        "LOCAL_WORLD_SIZE": here,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": _port(environment.get("PMIX_NAMESPACE", environment.get("OMPI_MCA_orte_hnp_uri", ""))),
    }


_SCHEDULERS: dict[str, Callable[[Variables], dict[str, str]]] = {
    "SLURM_STEP_NUM_TASKS": _slurm,
    "OMPI_COMM_WORLD_SIZE": _open_mpi,
}
"""By the variable that has the number of ranks."""


def _port(*words: str) -> str:
    """A port that is the same on all ranks, and another one for another job."""
    digits = re.sub(r"\D", "", "".join(words))
    return str(_FIRST_PORT + int(digits or 0) % _PORTS)


def _first_node(names: str) -> str:
    """The first of SLURM's ``gpu[003-007,12],head``."""
    head = re.match(r"([^\[,]*)(?:\[([^-,\]]*))?", names)
    return "".join(part or "" for part in head.groups()) if head else ""


def _per_node(counts: str) -> list[int]:
    """The tasks of each node, from SLURM's ``4(x2),3``."""
    rows = re.findall(r"(\d+)(?:\(x(\d+)\))?", counts)
    return [int(count) for count, times in rows for _ in range(int(times or 1))]
