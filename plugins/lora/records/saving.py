"""Checkpoints of tenants: adapters, moments and data orders, without the base (`training.checkpoint.checkpoints`).

    root/step00000050/trainer/NAME/    a PEFT folder, and optimizer.safetensors
    root/step00000050/evenload.json    the manifest, with how each tenant stands

Tensors are whole, so a tenant goes on with another layout, world or trainer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from safetensors.torch import load_file, save_file
from torch import Tensor

from ....core.errors import EvenloadError
from ....data.content import are_same
from ....integrations.huggingface.folders.adapters import read_adapter, write_adapter
from ....runtime.adapters.places import AdapterState
from ....runtime.world.agreement import all_or_none
from ....training.checkpoint import checkpoints
from ....training.job import logger
from ....training.run.writers import Entry
from ..arrivals.job import TenantJob
from ..state.tenant import ActiveTenant

OPTIMIZER = "optimizer.safetensors"
_FIRST, _SECOND = "first.", "second."
_MOST_LOSSES = 4096
_KEPT = ("number", "name", "file", "digest", "steps", "until", "step", "best", "best_step", "tokens", "seconds")


class InMemory(NamedTuple):
    """What a job goes on with whose replicas have changed, besides what a checkpoint says."""

    states: Mapping[str, AdapterState]
    """Adapters by the tenants' names."""
    ended: Mapping[str, Mapping[str, Any]]
    """How tenants have ended, by name."""
    unfinished: tuple[str, ...]
    """Tenants that were trained in the last step, and of which nobody has said whether that was their last one."""
    rows: Sequence[Any]
    """Of all steps."""
    last_rows: tuple[Entry, Mapping[str, Mapping[str, Any]]] | None
    """What logs get of the last step, and what its tenants' own get."""


class Saved(NamedTuple):
    """What a checkpoint says of the job."""

    step: int
    """Steps of the job."""
    tenants: Mapping[str, Mapping[str, Any]]
    """Rows of tenants by their names."""
    next_number: int
    folder: Path | None
    """None: it is no checkpoint, but what a job has in memory, whose replicas have changed."""
    races: Mapping[str, Any]
    """How far sweeps have come, by name."""
    in_memory: InMemory | None = None

    def adapter(self, name: str, steps: int) -> AdapterState:
        """The adapter of a tenant with its moments. Raises EvenloadError."""
        if self.folder is None:
            assert self.in_memory is not None
            return self.in_memory.states[name]
        folder = self.folder / "trainer" / name
        _, weights = read_adapter(folder)
        moments = load_file(folder / OPTIMIZER)
        return AdapterState(weights, _of_kind(moments, _FIRST), _of_kind(moments, _SECOND), steps)


def save(
    job: TenantJob,
    step: int,
    tenants: Iterable[ActiveTenant],
    adapters: Mapping[str, Callable[[], AdapterState]],
    more: Mapping[str, Any],
) -> None:
    """Write a checkpoint after so many steps of the job. Collective. Raises RankError, and the last one stays.

    Args:
        adapters: what gives the adapters of tenants that go on, by name.
        more: ``next_number`` and ``races`` of `Saved`.
    """
    root = job.recipe.checkpoint.dir
    assert root is not None
    rows = {tenant.name: row_of(tenant, tenant.name in adapters) for tenant in tenants}
    kept = {tenant.name: tenant for tenant in tenants}

    def write(directory: Path) -> None:
        for name, adapter in adapters.items():
            state = adapter()
            if job.is_rank0:
                _write(directory / name, kept[name], state, job.recipe.model.weights)

    state = {"tenants": rows, "recipe": job.recipe.model_dump(mode="json"), **more}

    def save_all() -> None:
        if job.replicas.own == 0:  # the others hold the same adapters
            checkpoints.save(root, step, state, write, job.recipe.checkpoint.keep)

    with job.watchdog.working("saving the checkpoint", step):
        all_or_none(save_all, "job")


def resume(job: TenantJob) -> Saved | None:
    """The last good checkpoint of the recipe's folder, if it resumes. Collective. Raises EvenloadError."""
    config = job.recipe.checkpoint
    if config.dir is None or not config.resume:
        return None
    with job.watchdog.working("verifying the checkpoint"):
        newest = checkpoints.newest_whole(config.dir, verify=config.verify)
    if newest is None:
        return None
    folder, state = newest[0], newest[1].state
    if not isinstance(state.get("tenants"), dict):
        do = "choose another checkpoint.dir, or set checkpoint.resume=false"
        raise EvenloadError("the checkpoint holds a model and no tenants", str(folder), do)
    logger.info("resumed from %s at step %d", folder, state["step"])
    return Saved(state["step"], state["tenants"], state["next_number"], folder, state["races"])


def row_of(tenant: ActiveTenant, has_adapter: bool) -> dict[str, Any]:
    """What a checkpoint says of a tenant."""
    row = {key: getattr(tenant, key) for key in _KEPT}
    own = {"data": tenant.data, "held_out": tenant.scored}
    data = {"order": dict(tenant.order), **own, "losses": tenant.losses[-_MOST_LOSSES:]}
    return {**row, **data, "state": tenant.state, "reason": tenant.reason, "has_adapter": has_adapter}


def restore(tenant: ActiveTenant, row: Mapping[str, Any]) -> None:
    """Bring a tenant, whose file and data are those of before, to where a checkpoint has it. Raises EvenloadError."""
    if not are_same(row["data"], tenant.data, f"the data of tenant {tenant.name}"):
        detail = f"fingerprint {row['data']} in the checkpoint, {tenant.data} now"
        do = "restore the data, or change the tenant's file, so that it begins anew"
        raise EvenloadError("the data are not those of the checkpoint", detail, do)
    for key in ("until", "step", "best", "best_step", "tokens", "seconds", "order"):
        setattr(tenant, key, row[key])
    tenant.losses = list(row["losses"])
    if not are_same(row.get("held_out", tenant.scored), tenant.scored, f"evaluate.source of tenant {tenant.name}"):
        logger.info("evaluate.source of tenant %s is other data: its lowest loss is found anew", tenant.name)
        tenant.best, tenant.best_step = None, 0


def _of_kind(moments: Mapping[str, Tensor], kind: str) -> dict[str, Tensor]:
    return {key.removeprefix(kind): tensor for key, tensor in moments.items() if key.startswith(kind)}


def _write(folder: Path, tenant: ActiveTenant, state: AdapterState, base: Path | None) -> None:
    write_adapter(folder, tenant.adapter, state.weights, str(base) if base else None)
    moments = {f"{_FIRST}{name}": tensor.contiguous() for name, tensor in state.first.items()}
    moments |= {f"{_SECOND}{name}": tensor.contiguous() for name, tensor in state.second.items()}
    save_file(moments, folder / OPTIMIZER)
