"""Prove on the user's own recipe that its samples are those of plain generation, token for token.

Plain generation (`plain_samples`) runs first. Then the host generates the same samples in several arrangements
(`arrangements`): orders, 1 to 64 slots, a cache that cannot hold them, prompts in chunks, an interruption; each token,
end and log-probability is compared. Last, the recipe's own planned forward, as training runs it, gives the
log-probabilities of the same texts once more. Where tenants have adapters, prompts are theirs in turn, and the
model's without one; plain generation has each product in its weights.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from ...core.errors import EvenloadError
from ...core.plan.step_plan import as_lengths
from ...core.planning.forward_only import forward_only
from ...core.recipe.recipe import Recipe
from ...integrations.host.generating import refuse_unfit
from ...integrations.reference.textbook_sampling import log_probs
from ...runtime.attention.cached import block_tokens_on
from ...runtime.generate.request import Completion, Request
from ...runtime.watchdog.watchdog import Watchdog
from ...runtime.world.agreement import everyone
from ...runtime.world.world import World
from ..adapting import ProvenTenant, adapter_training
from ..hosts import integration
from ..job import VerbJob, in_world, open_trainer
from ..progress import Progress
from .arrangements import Arranged, Arrangement, arranged, arrangements
from .plain_samples import TIES, PlainSamples
from .prompting import Prompting

ALLOWED = {"fp64": 1e-9, "fp32": 1e-5}
"""How far a log-probability may be off, by the precision of a run."""
SAMPLES = (0, 1, 2)
_TEXTS = 16
"""Whose logits rank 0 holds at once."""


def verify_generation(recipe: Recipe, asked: Prompting, progress: Progress) -> dict[str, Any] | None:
    """Verify on this rank; rank 0 gives what was compared."""
    if recipe.train.dtype not in ALLOWED:
        what, do = "tokens are proved where rounding turns few of them", "add train.dtype=fp32, or fp64"
        raise EvenloadError(what, f"train.dtype {recipe.train.dtype}", do)

    def work(world: World, watchdog: Watchdog) -> dict[str, Any]:
        with _opened(recipe, world, watchdog) as (job, tenants):
            return _Proof(job, tenants, asked, progress).run()

    return in_world(recipe, work)


@contextmanager
def _opened(recipe: Recipe, world: World, watchdog: Watchdog) -> Iterator[tuple[VerbJob, list[ProvenTenant]]]:
    """The trainer, with its tenants; without any there is one that is nobody."""
    if not recipe.adapts:
        with open_trainer(recipe, world, watchdog) as job:
            yield job, [ProvenTenant(source=job.source)]
        return
    with adapter_training(recipe).company(recipe, world, watchdog) as (of_tenants, tenants):
        yield of_tenants, [*tenants, ProvenTenant(source=tenants[0].source)]


class _Proof:
    """A host's samples against plain ones. Everything is collective."""

    def __init__(self, job: VerbJob, tenants: Sequence[ProvenTenant], asked: Prompting, progress: Progress) -> None:
        self._job, self._progress = job, progress
        self._tenants = tenants
        self._by_number = {one.number: one for one in tenants}
        self._block = block_tokens_on(job.host.device)
        self._requests = self._of_file(asked) if asked.prompts else self._of_data(asked)
        self._settings, self._allowed = asked.settings, ALLOWED[job.recipe.train.dtype]
        refuse_unfit(job.host, self._requests, self._settings)
        self._over: list[str] = []

    def run(self) -> dict[str, Any]:
        job, base = self._job, self._job.host.weights()
        plain = integration(job.recipe.trainer).PlainModel(job.recipe, job.host)

        def adapted(number: int | None) -> None:
            alone = self._by_number[number].alone
            if alone is None:
                plain.load(base)
            else:
                alone.plain = plain
                alone.merged()

        with job.watchdog.working("plain generation"):
            tie = TIES[job.recipe.train.dtype]
            samples = PlainSamples(plain, self._requests, self._settings, tie, adapted)
        rows: list[dict[str, Any]] = []
        results: list[Arranged] = []
        every = arrangements(self._requests, samples.settings, self._block, [*samples.samples.values()])
        for number, one in enumerate(every):
            results.append(arranged(job.host, self._requests, one, job.watchdog.at))
            with job.watchdog.working("comparing samples"):
                rows.append(self._row(one, results[-1], samples))
            self._progress("verify", number + 1, len(every), "exact" if not self._over else "NOT exact")
        with job.watchdog.working("a planned forward of the texts"):
            trained = self._of_training(results[0].samples)
        plain.close()
        return self._result(rows, [*samples.samples.values()], trained)

    def _of_data(self, asked: Prompting) -> list[Request]:
        """Beginnings of samples, whose continuations cross the borders of the cache's blocks, and one token."""
        block, most = self._block, self._job.recipe.data.max_length
        lengths = (block - 3, 1, 2 * block, block // 2, 2 * block - 5, block + 1)
        limit = min(asked.limit, max(1, most // 2))
        requests = []
        for number, length in enumerate(lengths):
            tenant = self._tenants[number % len(self._tenants)]
            assert tenant.source is not None
            tokens = tenant.source.tokens(number % len(tenant.source.lengths))[: min(length, most - limit)]
            requests.append(Request(number, tuple(tokens.tolist()), limit, SAMPLES, tenant.number))
        return requests

    def _of_file(self, asked: Prompting) -> list[Request]:
        numbers, requests = {one.name: one.number for one in self._tenants}, []
        for number, row in enumerate(asked.prompts or ()):
            if row.tenant and row.tenant not in numbers:
                what = f"prompt {number} is of a tenant that the recipe has not"
                raise EvenloadError(what, row.tenant, f"tenants: {', '.join(filter(None, numbers)) or 'none'}")
            own = numbers[row.tenant] if row.tenant else self._tenants[number % len(self._tenants)].number
            requests.append(Request(number, row.tokens, row.limit, SAMPLES, own))
        return requests

    def _row(self, arrangement: Arrangement, done: Arranged, plain: PlainSamples) -> dict[str, Any]:
        """What an arrangement gave against plain generation."""
        name, settings, *_ = arrangement
        judged = [plain.judge(sample) for sample in done.samples if sample[:2] in plain.samples]
        missing = [key for key in plain.samples if not done.times[key]]
        repeated = [key for key, times in done.times.items() if times > 1 or key not in plain.samples]
        error = max((one.error for one in judged), default=0.0)
        self._over += [f"{name}: {one.fault}" for one in judged if one.fault]
        self._over += [f"{name}: sample {s} of prompt {p} is missing" for p, s in missing]
        self._over += [f"{name}: sample {s} of prompt {p} has ended twice, or is not asked for" for p, s in repeated]
        self._over += [f"{name}: log-probabilities are off by {error:.2e}"] if not error <= self._allowed else []
        prefilled = sum(len(request.tokens) - 1 for request in self._requests)
        needed = prefilled + sum(len(sample.tokens) for sample in done.samples)
        return {
            "name": name,
            **{key: getattr(settings, key) for key in ("slots", "cache_tokens", "step_tokens")},
            "samples_before": done.before,
            "forwards": done.forwards,
            "tokens_again": done.computed - needed - (done.drafts.drafted - done.drafts.accepted),
            "samples_wrong": sum(bool(one.fault) for one in judged),
            "samples_missing": len(missing),
            "samples_repeated": len(repeated),
            "flips": sum(one.flips for one in judged),
            "log_prob_err": error,
            "drafted": done.drafts.drafted,
            "accepted": done.drafts.accepted,
        }

    def _of_training(self, samples: Sequence[Completion]) -> float:
        """The largest difference to log-probabilities of the recipe's own planned forward of the same texts."""
        job, requests = self._job, {request.number: request for request in self._requests}
        chain, error, adapts = forward_only(job.chain), 0.0, job.recipe.adapts
        samples = [one for one in samples if not adapts or requests[one.prompt].tenant is not None]
        for first in range(0, len(samples), _TEXTS):
            some = samples[first : first + _TEXTS]
            texts = [np.array([*requests[sample.prompt].tokens, *sample.tokens], dtype=np.int64) for sample in some]
            tenants = as_lengths(requests[sample.prompt].tenant for sample in some) if adapts else None
            plan = chain.plan(as_lengths(map(len, texts)), tenants)
            logits = job.host.logits(plan, texts.__getitem__)
            for place, of_text in logits.items():
                sample = some[place]
                behind = of_text[-len(sample.tokens) - 1 : -1].double().numpy()
                pairs = zip(behind, sample.tokens, sample.log_probs, strict=True)
                error = max(error, *(abs(float(log_probs(row)[token]) - known) for row, token, known in pairs))
        error = max(everyone(error))
        self._over += [f"a planned forward is off by {error:.2e}"] if not error <= self._allowed else []
        return error

    def _result(self, rows: list[dict[str, Any]], samples: Sequence[Completion], trained: float) -> dict[str, Any]:
        counts = ("samples_wrong", "samples_missing", "samples_repeated", "flips")
        names = [one.name for one in self._tenants if one.name]
        return {
            "exact": not self._over,
            **{key: sum(row[key] for row in rows) for key in counts},
            "log_prob_err": max(row["log_prob_err"] for row in rows),
            "training_log_prob_err": trained,
            "allowed": self._allowed,
            "over": self._over,
            "prompts": len(self._requests),
            "samples": len(samples),
            "tokens": sum(len(sample.tokens) for sample in samples),
            "ended": dict(Counter(sample.ended for sample in samples)),
            "arrangements": rows,
            **({"tenants": names} if names else {}),
            "host": self._job.host.describe(),
        }
