"""Who is here: tenants come in, wait for memory, take part, and end; on every rank alike.

Whatever is wrong with a tenant is found when it comes, by all ranks together, and written next to its file; nobody else
notices. Those who do not fit into memory wait in the order in which they came.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from copy import copy
from functools import partial
from typing import Any, TypeVar

from ...core.errors import EvenloadError, shorten
from ...core.input.format import mib
from ...integrations.huggingface.folders.adapters import refuse_other_base
from ...runtime.adapters.places import AdapterState
from ...runtime.world.agreement import all_or_none, everyone, from_first
from ...training.job import logger
from .arrivals.folder import Came, Folder, News
from .arrivals.job import TenantJob, free_bytes
from .arrivals.opening import Entrant, open_tenant
from .records import saving
from .records.output import LAST, Output
from .records.saving import Saved
from .state.tenant import ENDED, ActiveTenant, State
from .sweeps.trials import Sweep, refuse_late_rung, sweep_of
from .tenant_file import Tenant, parse_tenant

Result = TypeVar("Result")


class TenantTable:
    """See the module. ``saved``: what a checkpoint says of an earlier run."""

    def __init__(self, job: TenantJob, output: Output, folder: Folder | None, saved: Saved | None) -> None:
        self._job = job
        self._output = output
        self._folder = folder
        self._saved = saved
        self.tenants: list[ActiveTenant] = []
        """All that have come, in the order of their numbers."""
        self.ended: dict[str, Mapping[str, Any]] = {}
        """How tenants have ended before this run, by name."""
        self.invalid_files: dict[str, EvenloadError] = {}
        """What is wrong with files that are there, by name."""
        self.next_number = saved.next_number if saved else 1
        self.sweeps: dict[str, tuple[Sweep, str]] = {}
        """Those that files ask for, with the digests of the files, by name."""
        self.replaced: set[str] = set()
        """Names of files that were removed in this run: who comes under such a name begins anew."""
        self._looked = False
        self._states: dict[int, AdapterState | None] = {}
        """What adapters of tenants that wait begin with."""
        self.unfinished = set(saved.in_memory.unfinished if saved and saved.in_memory else ())
        """Names of those who take part once more, since what follows their last step was broken off."""

    @property
    def active(self) -> list[ActiveTenant]:
        """Tenants that take part in steps."""
        return [tenant for tenant in self.tenants if tenant.state == "training"]

    @property
    def here(self) -> list[ActiveTenant]:
        """Tenants that have not ended yet."""
        return [tenant for tenant in self.tenants if tenant.state not in ENDED]

    def of_number(self, number: int) -> ActiveTenant:
        return next(tenant for tenant in self.tenants if tenant.number == number)

    def apply(self, news: News) -> None:
        """Let tenants leave whose files are gone, and those come whose files are new. Collective."""
        for name in news.gone:
            self.invalid_files.pop(name, None)
            self.replaced.add(name)
            for tenant in [tenant for tenant in self.here if tenant.file == name]:
                self.end(tenant, "left", "its file was removed")
        if not self._looked:
            self._say_gone({came.name for came in news.came})
        for came in news.came:
            self._receive(came)
        self.tenants.sort(key=lambda tenant: tenant.number)

    def _say_gone(self, files: set[str]) -> None:
        """Who was under way in the checkpoint, and whose file is not there any more, has left."""
        self._looked = True
        for name, row in (self._saved.tenants if self._saved else {}).items():
            if row["state"] not in ENDED and row["file"] not in files:
                self.ended[name] = self._output.gone(row)

    def admit(self) -> bool:
        """Let those who wait for memory take part, as far as there is any; whether anybody does. Collective."""
        waiting = self._for_memory
        for place, tenant in enumerate(waiting):
            if missing := self._missing_bytes(tenant):
                for one in waiting[place:]:
                    self._set_state(one, "waiting", f"for memory: {mib(missing)} are missing")
                return place > 0
            self._job.host.adapters.join(
                tenant.number, tenant.adapter, tenant.config.train, self._states.pop(tenant.number)
            )
            self._job.samples.sources[tenant.number] = tenant.source
            self._set_state(tenant, "training")
        return bool(waiting)

    @property
    def _for_memory(self) -> list[ActiveTenant]:
        """Tenants that wait for memory, and for nothing else."""
        waiting = [tenant for tenant in self.here if tenant.number in self._states]
        return [tenant for tenant in waiting if tenant.step < tenant.until or tenant.name in self.unfinished]

    def evict(self) -> bool:
        """Let those who take part and wait for a verdict make way for those who wait for memory; whether anybody does.
        Collective."""
        suspended = [one for one in self.active if one.step == one.until] if self._for_memory else []
        for tenant in suspended:
            state = self._job.host.adapters.state(tenant.number)
            self.end(tenant, "waiting", "for the other trials of its sweep")
            if tenant.state == "waiting":
                self._states[tenant.number] = state
        return bool(suspended)

    def adapters(self) -> dict[str, Callable[[], AdapterState]]:
        """What gives the adapters, whole, of those who have not ended and have begun, by name; collective calls."""
        host = self._job.host.adapters
        parts: dict[str, Callable[[], AdapterState]] = {}
        for tenant in self.here:
            kept = self._states.get(tenant.number)
            if tenant.number in host.numbers:
                parts[tenant.name] = partial(host.state, tenant.number)
            elif kept is not None:
                parts[tenant.name] = partial(copy, kept)
        return parts

    def in_memory(self) -> tuple[dict[str, Any], dict[str, AdapterState], dict[str, Any]]:
        """Rows and adapters of tenants by name, and how others have ended: of those, too, who were under way when this
        began, and have not been looked at yet. Collective over the replica."""
        here, saved = {tenant.name for tenant in self.tenants}, self._saved
        states = {name: state() for name, state in self.adapters().items()}
        rows: dict[str, Any] = {tenant.name: saving.row_of(tenant, tenant.name in states) for tenant in self.tenants}
        ended = {tenant.name: tenant.status() for tenant in self.tenants if tenant.state in ENDED}
        for name, row in (saved.tenants if saved else {}).items():
            if name not in here and name not in self.ended:
                rows[name] = row
                if saved and row["has_adapter"]:
                    states[name] = saved.adapter(name, row["step"])
        return rows, states, {**self.ended, **ended}

    def end(self, tenant: ActiveTenant, state: State, reason: str = "") -> None:
        """A tenant takes part no longer; its adapter is written out as it is. Collective."""
        adapters = self._job.host.adapters
        if tenant.number in adapters.numbers:
            if unwritten := self._unwritten(tenant, LAST):
                state, reason = "failed", unwritten
            adapters.leave(tenant.number)
            del self._job.samples.sources[tenant.number]
        self._states.pop(tenant.number, None)
        self._set_state(tenant, state, reason)

    def keep(self, tenant: ActiveTenant, name: str) -> bool:
        """Write the adapter of a tenant who takes part, as it is; whose cannot be written has failed. Collective."""
        if unwritten := self._unwritten(tenant, name):
            self.end(tenant, "failed", unwritten)
        return not unwritten

    def _unwritten(self, tenant: ActiveTenant, name: str) -> str:
        """Write a tenant's adapter; why it cannot be written, which its error file says too. Collective."""
        try:
            with self._job.watchdog.working(f"writing the adapter of tenant {tenant.name}", tenant.step):
                self._output.adapter(tenant, name)
        except EvenloadError as error:
            if self._folder:
                self._folder.complain(tenant.file, error)
            return f"its adapter cannot be written: {error}"
        return ""

    def _set_state(self, tenant: ActiveTenant, state: State, reason: str = "") -> None:
        if (tenant.state, tenant.reason) != (state, reason):
            why = f": {reason}" if reason else ""
            logger.info("tenant %s: %s after %d of %d steps%s", tenant.name, state, tenant.step, tenant.steps, why)
        tenant.becomes(state, reason)
        self._output.status(tenant)

    def _receive(self, came: Came) -> None:
        """A file that is new, or other than it was. Collective."""
        digest = hashlib.blake2b(came.text.encode(), digest_size=8).hexdigest()
        here = [tenant for tenant in self.here if tenant.file == came.name]
        if here:
            if any(tenant.digest != digest for tenant in here):
                text = "the file of tenant %s has changed, without effect: take it out and put it in again"
                logger.warning(text, shorten(came.name))
            return
        if came.name not in self.replaced and any(t.file == came.name and t.digest == digest for t in self.tenants):
            return
        try:
            self._enter(came, digest)
        except EvenloadError as error:
            self.invalid_files[came.name] = error
            self._output.refused(came.name, error)
            if self._folder:
                self._folder.complain(came.name, error)
        else:
            self.invalid_files.pop(came.name, None)
            if self._folder:
                self._folder.clear(came.name)

    def _enter(self, came: Came, digest: str) -> None:
        """Raises EvenloadError, on all ranks alike, for a tenant that cannot be trained."""
        if came.error is not None:
            raise came.error
        config, sweep = _tried(lambda: _described(came))
        entrants = entrants_of(came.name, config, digest, sweep)
        self._refuse_same_names(entrants)
        opened = [self._open(entrant) for entrant in entrants if not self._is_past(entrant)]
        for tenant, _ in opened:
            refuse_late_rung(came.name, sweep.halve_every if sweep else None, tenant.steps)
        if sweep:
            self.sweeps[came.name] = sweep, digest
        for tenant, state in opened:
            self._states[tenant.number] = state
            self.tenants.append(tenant)
            self.ended.pop(tenant.name, None)
            self._output.begin(tenant)

    def _refuse_same_names(self, entrants: list[Entrant]) -> None:
        files = {tenant.name: tenant.file for tenant in self.tenants}
        for entrant in entrants:
            if files.get(entrant.name, entrant.file) != entrant.file:
                detail = f"of {files[entrant.name]}.yaml and {entrant.file}.yaml"
                raise EvenloadError(f"two tenants are called {entrant.name}", detail, "rename one of the files")

    def _is_past(self, entrant: Entrant) -> bool:
        """Whether a tenant has ended in an earlier run, which is then said of it. Collective."""
        if entrant.file in self.replaced or self._row_of(entrant):
            return False
        if self._saved and self._saved.in_memory:
            if entrant.name in self._saved.in_memory.ended:
                self.ended[entrant.name] = self._saved.in_memory.ended[entrant.name]
            return entrant.name in self.ended
        if not self._job.recipe.checkpoint.resume:
            return False
        past = from_first(lambda: self._output.past(entrant.name, entrant.digest), "job")
        if past is not None:
            self.ended[entrant.name] = past
            logger.info("tenant %s: %s in an earlier run, and is not trained again", entrant.name, past["state"])
        return past is not None

    def _row_of(self, entrant: Entrant) -> Mapping[str, Any] | None:
        """What the checkpoint says of a tenant that was under way there."""
        row = self._saved.tenants.get(entrant.name) if self._saved else None
        under_way = row is not None and row["digest"] == entrant.digest and row["state"] not in ENDED
        return row if under_way and entrant.file not in self.replaced else None

    def _open(self, entrant: Entrant) -> tuple[ActiveTenant, AdapterState | None]:
        """A tenant, and what its adapter goes on with. Collective. Raises EvenloadError on all ranks alike."""
        row = self._row_of(entrant)
        number = self.next_number if row is None else row["number"]
        with self._job.watchdog.working(f"opening the data of tenant {entrant.name}"):
            opened = all_or_none(lambda: _tried(lambda: self._opened(entrant, number, row)), "job")
        _refuse_other_data(opened[0])
        self._refuse_too_large(opened[0])
        self.next_number = max(self.next_number, number + 1)
        return opened

    def _opened(
        self, entrant: Entrant, number: int, row: Mapping[str, Any] | None
    ) -> tuple[ActiveTenant, AdapterState | None]:
        job, order = self._job, (row["order"] or None) if row else None
        tenant, weights = open_tenant(entrant, number, job.recipe, job.replicas.chains, order)
        state = None
        if weights is not None:
            sizes = job.host.adapters.sizes
            refuse_other_base(weights, sizes, tenant.adapter.targets(sizes))
            state = AdapterState(weights, {}, {}, 0)
        if row is not None:
            saving.restore(tenant, row)
            if row["has_adapter"]:
                assert self._saved is not None
                state = self._saved.adapter(tenant.name, row["step"])
        job.host.adapters.check(tenant.adapter, state)
        return tenant, state

    def _refuse_too_large(self, tenant: ActiveTenant) -> None:
        """Raise EvenloadError for a tenant that would not fit even alone. Collective."""
        if missing := self._missing_bytes(tenant, beside=False):
            what = "the adapter does not fit into memory next to the base and its activations"
            detail = f"{mib(missing)} are missing on a rank"
            raise EvenloadError(what, detail, "lower adapter.r, name fewer target_modules, or lower max_tokens")

    def _missing_bytes(self, tenant: ActiveTenant, *, beside: bool = True) -> float:
        """By how much a tenant does not fit, next to those that take part; 0: it fits. Collective."""
        adapters = self._job.host.adapters
        admitted = [one for one in self.tenants if one.number in adapters.numbers] if beside else []
        longest = max(int(one.source.lengths.max()) for one in (tenant, *admitted))
        taken = sum(adapters.bytes_of(one.adapter) for one in (tenant, *admitted))
        return max(0.0, *everyone(taken - free_bytes(self._job.chain, longest), "job"))


def _refuse_other_data(tenant: ActiveTenant) -> None:
    """Raise EvenloadError for a tenant whose ranks have read different samples. Collective."""
    versions = len(set(everyone((tenant.data, tenant.scored), "job")))
    if versions > 1:
        do = "put the same files in the same place on every host"
        raise EvenloadError("ranks read different samples for this tenant", f"{versions} versions of its data", do)


def entrants_of(file: str, config: Tenant, digest: str, sweep: Sweep | None) -> list[Entrant]:
    """The tenants that a file describes: itself, or the trials of its sweep."""
    if sweep is None:
        return [Entrant(file, file, config, digest)]
    return [Entrant(trial.name, file, trial.tenant, digest) for trial in sweep.trials]


def _described(came: Came) -> tuple[Tenant, Sweep | None]:
    config = parse_tenant(came.text, came.name)
    return config, sweep_of(came.name, config) if config.sweep is not None else None


def _tried(act: Callable[[], Result]) -> Result:
    """What ``act`` gives; whatever it raises as an EvenloadError."""
    try:
        return act()
    except EvenloadError:
        raise
    except Exception as caught:  # of whatever reads a user's data
        what, detail = "the tenant cannot be opened", shorten(f"{type(caught).__name__}: {caught}")
        raise EvenloadError(what, detail, "mend its file or its data") from caught
