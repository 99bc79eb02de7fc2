"""Lora: many tenants on one frozen base, each trained exactly as if alone (LobRA)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...core import verbs
from ...core.plan.branches import OF_TENANTS
from ...core.registry import Shown, SlicePlugin, register
from . import config, plan

if TYPE_CHECKING:
    from ...training.adapting import AdapterTraining


def _training() -> AdapterTraining:
    from . import run

    return run


register(
    SlicePlugin(
        name="lora",
        summary="adapters of many tenants over one frozen base, in shared micro-batches",
        papers=("LobRA, arXiv 2509.01193",),
        stage=50,
        config=config.LoraConfig,
        plan=plan.plan,
        shown=Shown("tenants", by=(OF_TENANTS,)),
        adapts=_training,
        clashes=("moe",),
    )
)
verbs.register(verbs.Verb("lora", "evenload.plugins.lora.verb:lora", order=100))
for _verb, _tables in {"train": "trained", "plan": "planned", "verify": "proven"}.items():
    verbs.register_tables(_verb, "tenants", f"evenload.plugins.lora.tables:{_tables}")
