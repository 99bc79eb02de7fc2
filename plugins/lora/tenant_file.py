"""The file of a tenant: what its adapter is trained on, and how.

    data:    {source: clients/acme.jsonl, max_length: 4096}
    adapter: {r: 16, lora_alpha: 32, target_modules: [q_proj, v_proj]}
    train:   {steps: 200, batch_size: 8, lr: 2e-4}

The name of the file is the tenant's.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from ...core.errors import refuse_first, shorten
from ...core.input import bounds, reading
from ...core.input.validation import refused
from ...core.recipe.adapter import Adapter, TenantTrain
from ...core.recipe.policies import rules_of_divisor
from ...core.recipe.sections import Data, FilePath, Section
from ...core.recipe.shares import rules_of_domains


class TenantData(Data):
    """Where a tenant's samples come from: the settings of a recipe's data. Validation is ``evaluate``'s; no groups."""

    source: str = ""
    """One of source and domains."""
    group: None = None
    validation: None = None


class Evaluate(Section):
    """Samples that are scored and never trained on."""

    source: str
    every: bounds.Count = 20
    """Steps of this tenant between two evaluations; there is one before its first step and one after its last, too."""
    batches: bounds.Count | None = None
    """So many times train.batch_size samples, the same ones each time; null: all of them."""
    patience: bounds.Count | None = None
    """Evaluations without a new lowest loss after which the tenant stops; null: it does not."""


class Tenant(Section):
    """The file of a tenant."""

    data: TenantData
    adapter: Adapter = Adapter()
    train: TenantTrain = TenantTrain()
    evaluate: Evaluate | None = None
    start: FilePath | None = Field(default=None, alias="from")
    """A folder of PEFT whose adapter goes on; its rank, targets and scaling must be those of ``adapter``, which may be
    left out."""
    sweep: Mapping[str, Any] | None = None
    """Values to try: dotted keys of this file with lists, and ``halve_every``, steps between rungs at which the worse
    half of the trials ends."""

    def opens(self) -> dict[str, str]:
        """What is opened for it, by the keys of its file that say so."""
        specs = {f"data.domains.{name}.source": spec for name, spec in (self.data.domain_sources or {}).items()}
        specs |= {"data.tokenizer": self.data.tokenizer} | ({} if specs else {"data.source": self.data.source})
        specs |= {"evaluate.source": self.evaluate.source} if self.evaluate else {}
        return specs | ({"from": str(self.start)} if self.start else {})


def read_tenant(path: Path) -> Tenant:
    """The tenant that a file describes. Raises EvenloadError."""
    what = f"the tenant {shorten(path.stem)}"
    return _validated(reading.read_yaml(path, what, "give a YAML file"), what)


def parse_tenant(text: str, name: str) -> Tenant:
    """The tenant that the content of a file describes; ``name``: the tenant's. Raises EvenloadError."""
    what = f"the tenant {shorten(name)}"
    return _validated(reading.parse_yaml(text, what), what)


def _validated(data: Any, what: str) -> Tenant:
    try:
        tenant = Tenant.model_validate(reading.mapping(data, what, "write at least data: {source: FILE}"))
    except ValidationError as error:
        raise refused(error, Tenant, what) from error
    refuse_unmixed(tenant)
    return tenant


def refuse_unmixed(tenant: Tenant) -> None:
    """Raise EvenloadError for a tenant without data, with domains that cannot be mixed, or a divisor of no weights."""
    data, do = tenant.data, "write data: {source: FILE}, or data: {domains: {NAME: {source: FILE}}}"
    without_data = not data.source and data.domains is None
    refuse_first((without_data, "data.source is missing", "neither data.source nor data.domains", do))
    refuse_first(*rules_of_domains(data, tenant.train), *rules_of_divisor(data, {}))
