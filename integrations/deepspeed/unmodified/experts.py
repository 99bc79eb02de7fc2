"""Experts that AutoEP divides in a loop that nobody edits: count headers before each exchange, copies of a plan."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ....core.errors import EvenloadError
from ....core.recipe.recipe import Recipe
from ....core.registry import layer_planner
from ....runtime.attention.pack import Pack
from ....runtime.attributes import with_attributes
from ...host.step import no_mark
from ..engine.expert_gate import GatedExperts
from ..engine.experts import COMM_BACKEND, AutoEPMoELayer
from .batches import PlannedMicroBatch


def gated_experts(module: Any, recipe: Recipe) -> GatedExperts | None:
    """The layers of a live model whose experts are divided, behind a gate; None where none are. Raises EvenloadError:
    they exchange tokens by other means than those that copies are made for."""
    layers = [layer for layer in module.modules() if isinstance(layer, AutoEPMoELayer) and layer.ep_size > 1]
    copying = [plugin.name for plugin in recipe.enabled() if plugin.place == "layers"]
    odd = next((layer.comm_backend for layer in layers if layer.comm_backend != COMM_BACKEND), "")
    if odd and copying:
        raise EvenloadError(
            f"plugins.{copying[0]} runs on AutoEP's own exchange of tokens",
            f"ds_config: expert_parallel.comm_backend {odd}",
            f"set comm_backend to {COMM_BACKEND}, or disable the plugin",
        )
    return GatedExperts(module, layers[0].ep_group) if layers else None


@contextmanager
def running(gated: GatedExperts | None, planned: PlannedMicroBatch, pack: Pack) -> Iterator[None]:
    """Inside, the forward of a micro-batch of a plan runs."""
    if gated is None:
        yield
        return
    plan = planned.plan
    if planned.place == 0:
        gated.gate.begin(plan.digest, no_mark, plan.experts, layer_planner(plan.experts.planner))
    gated.gate.enter(f"micro-batch {planned.place}")
    with with_attributes(gated, pack=pack):
        yield
