"""The tenants of one plan, and what they save by sharing steps: all together against one after another, on the same
ranks. Predicted, from their files and the lengths of their samples; needs no torch.

    saving  = sum over tenants of the step that the chain plans for each alone / the step that it plans for all
    at most = that sum / the least that any plan of them all could take

What a tenant takes alone is planned as well as what all take together, by the same plugins, and with its own adapter.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...core.aliases import Ints
from ...core.errors import EvenloadError, refuse_first, shorten
from ...core.input.bounds import refuse_endless
from ...core.plan.step_plan import StepPlan, as_lengths
from ...core.planning.chain import PlanChain
from ...core.planning.judge import certified_s, outcome_of
from ...core.planning.planner import Draw
from ...core.recipe.recipe import Recipe, place_of
from ...core.recipe.sizes import shape_of
from ...data.formats import refuse_outside
from ...data.lengths import read_lengths
from ...data.samples.cut import cut
from ...data.samples.order import BatchSize
from ...data.sources import Source
from ...training.drawing import Domains, Drawing
from ...training.preflight import open_all
from .arrivals.preflight import config_of
from .config import LoraConfig
from .costs import TenantLoad, adapter_weights, with_tenants
from .state.drawing import next_of, steps_of, union
from .sweeps.trials import sweep_of
from .tenant_file import Tenant, TenantData, read_tenant

_Counts = NDArray[np.int64]
_MEANS = ("samples", "tokens", "share", "alone_s")
"""Of a tenant over the steps that it takes part in."""


class Member(NamedTuple):
    """A tenant that is planned."""

    name: str
    config: Tenant
    lengths: _Counts
    """Tokens of each of its samples."""
    targets: _Counts | None
    """Of these, those that carry loss; None: each but the first one."""
    domains: Domains | None = None
    """What they are a mixture of; None: they are of one source."""

    @property
    def steps(self) -> int:
        """Updates that the tenant's adapter gets."""
        return steps_of(self.config.train, self.lengths, self.domains)

    @property
    def tokens_of_step(self) -> float:
        """Tokens of a step of the tenant, on average."""
        return self.config.train.batch_size * float(self.lengths.mean())

    def drawing(self, chain: PlanChain) -> Drawing:
        """Its batches, as training draws them."""
        size, seed, targets = BatchSize(self.config.train.batch_size), self.config.train.seed, self.targets
        return Drawing(None, self.lengths, size, chain, seed=seed, targets=targets, domains=self.domains)


class SharedPlan:
    """The tenants that a recipe plans together, as `training.adapting.PlannedTenants` says.

    ``lengths``: files of lengths by tenant; none: their own data. Raises EvenloadError.
    """

    def __init__(self, recipe: Recipe, lengths: Any) -> None:
        if not isinstance(lengths, Mapping):
            do = "write --lengths NAME=FILE once for each tenant, or leave it out: their own data are opened"
            raise EvenloadError("lengths of tenants are given by name", "lengths without a name", do)
        self._shape = shape_of(recipe.model)
        self.members = members_of(recipe, lengths)
        self._loads = [TenantLoad(one.config.adapter, one.tokens_of_step) for one in self.members]

    @property
    def lengths(self) -> Ints:
        """Lengths of all samples of all tenants."""
        return np.concatenate([member.lengths for member in self.members])

    def adapted(self, chain: PlanChain) -> PlanChain:
        """The chain of the base with what all adapters cost."""
        return with_tenants(chain, self._shape, self._loads)

    def draws(self, chain: PlanChain) -> Iterator[Draw]:
        """Step by step the batches of all tenants that have another step, side by side."""
        drawings = [member.drawing(chain) for member in self.members]
        for member in self.members:
            with naming(member.name):
                refuse_endless(member.lengths, chain.largest_slice)
        for step in range(max(member.steps for member in self.members)):
            here = [number for number, member in enumerate(self.members) if step < member.steps]
            draws = {number: next_of(drawings[number]) for number in here}
            delay_steps = float(np.mean([draw.delay_steps for draw in draws.values()]))
            yield union(draws)._replace(delay_steps=delay_steps)

    def saving(self, chain: PlanChain, plans: Sequence[StepPlan]) -> dict[str, Any]:
        """What plans of all come to, next to each tenant alone on all ranks. Raises EvenloadError."""
        context = self.adapted(chain).context
        alone = [with_tenants(chain, self._shape, [load]) for load in self._loads]
        parts: list[list[dict[str, float]]] = [[] for _ in self.members]
        alone_s = 0.0
        for plan in plans:
            sequence_s = context.costs.sequence_s(plan.lengths)
            for number in np.unique(plan.tenants).tolist():
                own, planners = plan.tenants == number, alone[number]
                lengths = plan.lengths[own]
                own_s = outcome_of(planners.plan(as_lengths(lengths)), planners.context).step_s
                share = float(sequence_s[own].sum() / sequence_s.sum())
                values = (len(lengths), int(lengths.sum()), share, own_s)
                parts[number].append(dict(zip(_MEANS, values, strict=True)))
                alone_s += own_s
        together_s = sum(outcome_of(plan, context).step_s for plan in plans)
        bounds_s = [certified_s(plan, context) for plan in plans]
        bound_s = sum(bounds_s) if all(bounds_s) else None
        return {
            "predicted": True,
            "tenants": [
                {
                    "name": member.name,
                    "number": number,
                    "steps": len(part),
                    "adapter_weights": adapter_weights(self._shape, member.config.adapter),
                    **{key: float(np.mean([one[key] for one in part])) if part else 0.0 for key in _MEANS},
                }
                for number, (member, part) in enumerate(zip(self.members, parts, strict=True))
            ],
            "together_s": together_s,
            "one_after_another_s": alone_s,
            "saving": alone_s / together_s,
            "bound_s": bound_s,
            "saving_at_most": bound_s and alone_s / bound_s,
        }


def members_of(recipe: Recipe, files: Mapping[str, Path]) -> list[Member]:
    """The tenants of a recipe's folder, trials of sweeps each by itself.

    ``files``: files of lengths by tenant instead, whose data then need not be there; who has no file in the folder has
    the settings of an empty one. Raises EvenloadError.
    """
    config = config_of(recipe)
    folder = _folder_of(config)
    if files:
        return [member for name, file in files.items() for member in _of_file(folder, name, file)]
    if folder is None:
        do = "set plugins.lora.tenants to a folder with a YAML file for each, or give --lengths NAME=FILE for each"
        raise EvenloadError("nobody says which tenants are to be planned", "plugins.lora.tenants null", do)
    paths = sorted(path for path in folder.glob("*.yaml") if not path.name.startswith("."))
    if not paths:
        do = "put a file NAME.yaml there for each tenant, or give --lengths NAME=FILE for each"
        raise EvenloadError("there is no tenant to plan", f"no file NAME.yaml in {shorten(str(folder))}", do)
    opened: dict[str, Source] = {}
    members = []
    for path in paths:
        for name, tenant in _read(path):
            data = tenant.data.model_dump_json()
            if data not in opened:
                with naming(name):
                    if config.root is not None:
                        refuse_outside(config.root, tenant.opens())
                    specs, weights = tenant.data.domain_sources, recipe.model.weights
                    opened[data] = open_all(tenant.data, tenant.data.source, specs, weights)
            source = opened[data]
            domains = Domains.of_data(tenant.data, BatchSize(tenant.train.batch_size), source)
            members.append(_checked(Member(name, tenant, source.lengths, source.targets, domains)))
    return members


def _folder_of(config: LoraConfig) -> Path | None:
    """Raises EvenloadError where the recipe names a folder that is none."""
    folder = None if config.tenants is None else place_of(config.tenants)
    if folder is not None and not folder.is_dir():
        what, do = "the folder of tenants is not there", "name a folder in plugins.lora.tenants"
        raise EvenloadError(what, shorten(str(folder)), do)
    return folder


def _of_file(folder: Path | None, name: str, file: Path) -> list[Member]:
    path = None if folder is None else folder / f"{name}.yaml"
    known = path is not None and path.is_file()
    trials = _read(path) if known and path else [(name, Tenant(data=TenantData(source=str(file))))]
    lengths = read_lengths(file)
    members = []
    for trial, tenant in trials:
        data = tenant.data
        what, do = f"the tenant {shorten(name)} has domains, and a file of lengths says none", "plan it by its own data"
        refuse_first((data.domains is not None, what, f"--lengths {shorten(f'{name}={file}')}", do))
        samples = cut(lengths, data.max_length, data.long_samples, data.min_length).length
        if not len(samples):
            detail = f"{len(lengths)} lengths, all below data.min_length {data.min_length} or left out"
            raise EvenloadError(f"the tenant {shorten(name)} has no sample", detail, "check its file and its lengths")
        members.append(_checked(Member(trial, tenant, samples, None)))
    return members


def _read(path: Path) -> list[tuple[str, Tenant]]:
    """The tenant of a file, or the trials of its sweep, by their names."""
    with naming(path.stem):
        tenant = read_tenant(path)
        if tenant.sweep is None:
            return [(path.stem, tenant)]
        return [(trial.name, trial.tenant) for trial in sweep_of(path.stem, tenant).trials]


@contextmanager
def naming(name: str) -> Iterator[None]:
    """Errors inside name the tenant."""
    try:
        yield
    except EvenloadError as error:
        tenant = f"tenant {shorten(name)}"
        what = error.what if tenant in error.what else f"the {tenant}: {error.what}"
        raise EvenloadError(what, error.found, error.do) from error


def _checked(member: Member) -> Member:
    """Raises EvenloadError for fewer samples than a batch."""
    count, wanted = len(member.lengths), member.config.train.batch_size
    what = f"the tenant {shorten(member.name)} has fewer samples than one batch"
    refuse_first((count < wanted, what, f"{count} samples, train.batch_size {wanted}", "lower its train.batch_size"))
    return member
