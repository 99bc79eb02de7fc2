"""The training loop of many tenants on one base.

A step plans the union of the tenants' own batches, trains it, and takes down what came of each. Before a step begins
the ranks agree on what has changed: whose file has come or gone, whose data cannot be read. Then what was drawn and not
trained on is put back, the members change, and the step is drawn anew; so a change counts for the very next step.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ...core.planning.exercised import Exercised
from ...core.planning.planner import Planned
from ...integrations.host.trained import TenantResult
from ...runtime.world.agreement import agree, everyone
from ...runtime.world.replicas import own_rank
from ...training.early_end import EarlyEnd, reason_of, say_ended
from ...training.eras import refuse_to_go_on_alone, settled
from ...training.garbage import Collect
from ...training.job import logger
from ...training.measuring import measure_step
from ...training.metrics import MeasuredStep
from ...training.replicas import COMPARED_EVERY, compare_replicas, digest_of, whole_of
from ...training.run.variant import as_rank_error
from ...training.run.writers import Write
from .arrivals.folder import STOP, Folder, News
from .arrivals.job import TenantJob
from .members import TenantTable
from .records import saving
from .records.output import LAST, Output
from .records.rows import JobRow, Live, entry_of_step, tenant_row
from .records.saving import InMemory, Saved
from .state.drawing import TenantDrawing, own_draws
from .state.status import leave_word
from .state.tenant import ENDED, ActiveTenant
from .sweeps.sweeps import Sweeps

_LOOK_AGAIN_S = 0.5
"""Between two looks into the folder while nobody trains."""


class Change(NamedTuple):
    """What the ranks have agreed has happened since the last step."""

    news: News
    faults: Mapping[int, str]
    """What is wrong with the data of tenants, by their numbers."""
    ends: str
    """Why the job ends now, where a signal or its minutes say so."""

    def __bool__(self) -> bool:
        return bool(self.news or self.faults or self.ends)


class TenantLoop:
    """See the module. ``saved``: the checkpoint to go on from."""

    def __init__(
        self, job: TenantJob, saved: Saved | None, write: Write, live: Live, ending: EarlyEnd, collect: Collect
    ) -> None:
        self._job = job
        self._ending = ending
        self._write = write
        self._live, self._collect = live, collect
        self._folder = Folder(job.folder) if job.is_rank0 else None
        self._output = Output(job)
        if job.is_rank0:
            leave_word(job.folder, job.out)
        self.members = TenantTable(job, self._output, self._folder, saved)
        self.sweeps = Sweeps(job, self._output, self.members, write, saved.races if saved else None)
        self._drawing = TenantDrawing(lambda: self.members.active, job.replicas.part_of)
        self._planner = job.planner(self._drawing)
        self.step = saved.step if saved else 0
        """Steps of the job so far."""
        in_memory = saved.in_memory if saved else None
        self.rows: list[JobRow] = list(in_memory.rows if in_memory else ())
        self._last_rows = in_memory.last_rows if in_memory else None
        self._repeats_rows = bool(self._last_rows)
        self._unfinished = set(in_memory.unfinished if in_memory else ())
        """Names of those whose last step is not followed up yet."""
        self.ended_early = ""
        """Why, where a signal or the job's minutes ended it."""
        self._stops = self._idles = False
        self._exercised = Exercised()

    def run(self) -> None:
        """Train until every tenant has ended, and none is waited for. Collective."""
        goes_on = True
        while goes_on:
            with as_rank_error(self._job, begun=bool(self.rows)):
                goes_on = self._turn()
        self._exercised.say()
        if not self._stops:
            self._keep()

    def _turn(self) -> bool:
        """Heed a change, train a step, or wait; whether the job goes on. Collective."""
        planned = self._plan()
        if change := self._agree(planned):
            self._apply(change)
        elif planned is not None:
            self._train(planned)
        elif not self._waits():
            return False
        self._live.end(self.members.tenants)
        if not self._stops:
            settled(self.step)
        return not self._stops

    def _plan(self) -> Planned | None:
        """The plan of the next step, and the one after it begun; None where nobody has a batch. Collective."""
        if not (self._drawing.more or self._drawing.num_open):
            return None
        self._job.watchdog.at("waiting for the plan", self.step)
        planned = self._planner.next(ahead=0)
        if self._drawing.more:
            self._planner.prepare()
        return planned

    def _agree(self, planned: Planned | None) -> Change:
        """What all ranks know together. Collective."""
        faults = self._job.samples.read(planned, self._job.host.dp_cp_rank) if planned else {}
        news = self._folder.look() if self._folder else News()
        self._job.watchdog.at("agreeing on tenants", self.step, waits=True)
        step_s = self.rows[-1].step_s if self.rows else 0.0
        own = news, faults, self._ending.stop_code(step_s), digest_of(planned.draw) if planned else b""
        all_news, all_faults, stop_codes, digests = zip(*everyone(own, "job"), strict=True)
        if len(set(digests)) > 1:
            agree(digests[own_rank()], "batches", self.step, "job")
        by_number = {number: text for of_rank in reversed(all_faults) for number, text in of_rank.items()}
        return Change(all_news[0], by_number, reason_of(max(stop_codes)))

    def _apply(self, change: Change) -> None:
        """Let the members change. Collective."""
        self._draw_anew()
        for number, text in change.faults.items():
            self.members.end(self.members.of_number(number), "failed", text)
        self.members.apply(change.news)
        self.sweeps.race()
        self.members.evict()
        self._seat()
        self._finish()
        if change.news.stop or change.ends:
            self._stop(change.ends)

    def _finish(self) -> None:
        """Do what the last step has left undone where a replica was lost after it. Collective."""
        here = {tenant.name: tenant for tenant in self.members.here}
        if self._repeats_rows and self._last_rows:
            for name in here.keys() & self._last_rows[1].keys():
                self._output.row_again(here[name], self._last_rows[1][name])
        self._repeats_rows = False
        unfinished = [here[name] for name in sorted(self.members.unfinished & here.keys())]
        self.members.unfinished = set()
        if unfinished:
            self._end(unfinished, {})

    def in_memory(self) -> Saved:
        """What the job goes on with when its replicas have changed. Collective over the replica."""
        members = self.members
        rows, states, ended = members.in_memory()
        more = InMemory(states, ended, tuple(self._unfinished), self.rows, self._last_rows)
        return Saved(self.step, rows, members.next_number, None, self.sweeps.state(), more)

    def _train(self, planned: Planned) -> None:
        """One step of all who take part. Collective."""
        self._idles = False
        draws = own_draws(planned.draw)
        tenants = [self.members.of_number(number) for number in draws]
        rates = {tenant.number: tenant.rate for tenant in tenants}
        taken = measure_step(self._job, planned, self.step, record=False, rates=rates)
        self._exercised.note(planned.chain, planned.plan, None)
        self._drawing.trained()
        for tenant in tenants:
            result = taken.result.tenants[tenant.number]
            if not result.failed:
                tenant.took(draws[tenant.number], result.loss, taken.step_s)
        self._unfinished = {tenant.name for tenant in tenants}
        self._tell(planned, taken, tenants, rates)
        self.step += 1
        refuse_to_go_on_alone()
        if taken.replicas and self.step % COMPARED_EVERY == 0:
            compare_replicas(self._job.host, "adapters", self.step)
        self._collect(self.step)
        self._end(tenants, taken.result.tenants)
        if self.step % self._job.recipe.checkpoint.every == 0:
            self._keep()

    def _end(self, tenants: Sequence[ActiveTenant], results: Mapping[int, TenantResult]) -> None:
        """Let those go who are done, have failed or are stopped, and others take their place. Collective."""
        failed = [tenant for tenant in tenants if tenant.number in results and results[tenant.number].failed]
        for tenant in failed:
            self.members.end(tenant, "failed", f"{results[tenant.number].failed} in step {tenant.step}")
        self.sweeps.after([tenant for tenant in tenants if tenant not in failed], self.step)
        for tenant in tenants:
            if tenant.state not in ENDED and tenant.step == tenant.steps:
                self.members.end(tenant, "done")
        self._follow(tenants)
        self._unfinished = set()

    def _follow(self, tenants: Sequence[ActiveTenant]) -> None:
        """What comes of tenants that have ended, or have not: verdicts, and others who take their place. Collective."""
        decided = self.sweeps.race()
        ended = [tenant for tenant in tenants if tenant.state in ENDED]
        changed = self.members.evict() or decided or bool(ended)
        if (changed and self._seat()) or decided or any(tenant.step < tenant.steps for tenant in ended):
            self._draw_anew()

    def _seat(self) -> bool:
        """Let those who wait take part, and begin; whether anybody does. Collective."""
        anybody = False
        while self.members.admit():
            anybody = True
            self.sweeps.begin(self.step)
        return anybody

    def _tell(
        self,
        planned: Planned,
        taken: MeasuredStep,
        tenants: Sequence[ActiveTenant],
        rates: Mapping[int, float],
    ) -> None:
        """Write what the step came to, of all and of each."""
        lengths, num_tenants = whole_of(planned.draw).lengths, len(own_draws(planned.draw))
        more = {"num_tenants": num_tenants, "sequences": len(lengths)}
        row = JobRow.of(self.step, planned, taken, **more)
        self.rows.append(row)
        own = {t.name: tenant_row(t, planned, taken, rates[t.number]) for t in tenants}
        self._last_rows = entry_of_step(row, own), own
        self._write(self._last_rows[0])
        for tenant in tenants:
            self._output.row(tenant, own[tenant.name])
            self._output.status(tenant, now=False)
            self._live.tick(tenant)

    def _draw_anew(self) -> None:
        """What was drawn and not trained on is drawn again, by whoever is there now."""
        self._drawing.put_back()
        self._planner.forget()

    def _keep(self) -> None:
        """Write adapters as they are, and the checkpoint where the recipe names a folder. Collective."""
        lost = [tenant for tenant in self.members.active if not self.members.keep(tenant, LAST)]
        if lost:
            self._follow(lost)
        if self._job.recipe.checkpoint.dir is not None and self.step:
            more = {"next_number": self.members.next_number, "races": self.sweeps.state()}
            saving.save(self._job, self.step, self.members.tenants, self.members.adapters(), more)

    def _waits(self) -> bool:
        """Whether the job stays for tenants to come; then some time has passed."""
        if self._job.stays:
            self._job.watchdog.at("waiting for tenants", self.step)
            if self._job.is_rank0 and not self._idles:
                text = "nobody trains: waiting for files NAME.yaml in %s; a file %s there ends the job"
                logger.info(text, self._job.folder, STOP)
            self._idles = True
            time.sleep(_LOOK_AGAIN_S)
        return self._job.stays

    def _stop(self, ends: str) -> None:
        """End the job as it is: whoever takes part goes on when it is started again. Collective."""
        self._keep()
        for tenant in self.members.here:
            self.members.end(tenant, "waiting", f"the job was ended by {ends or f'the file {STOP}'}")
        if ends:
            say_ended(ends, self.step, self._job.recipe)
        self.ended_early = ends
        self._stops = True
