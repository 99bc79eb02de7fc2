"""The steps of a proof: what they were off by, which branches they took, and what all of them say together."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from ...core.errors import EvenloadError
from ...core.plan.step_plan import StepPlan
from ...core.planning.chain import PlanChain
from ...core.planning.exercised import Exercised
from ...core.recipe.recipe import Recipe
from ...core.recipe.traits import trainer_called
from ...core.registry import LayerPlugin
from ...integrations.host.host import Host
from ..preflight import preflight, runnable
from ..progress import Progress
from .reach import opened
from .steps import Proven

_WORST = ("loss_rel_err", "norm_rel_err", "update_rel_err")
_COUNTS = ("tokens", "targets", "tokens_missing", "tokens_repeated", "routes_differ", "samples_wrong")


class ProvenSteps:
    """``steps``: updates that were asked for; batches for further branches come on top."""

    def __init__(self, steps: int, progress: Progress) -> None:
        self.steps = steps
        self.proven: list[Proven] = []
        self.branches = Counter[str]()
        """How often each was taken."""
        self.host: dict[str, Any] = {}
        self.resumed: dict[str, Any] | None = None
        self._opened: set[str] = set()
        self._exercised = Exercised()
        self._progress = progress

    def begin(self, host: Host, chain: PlanChain) -> None:
        self.host = host.describe()
        self._opened = set(opened(chain))

    def resume(self, host: Host, step: int) -> None:
        layout = host.layout
        self.resumed = {"at_step": step, "tp": layout.tp, "pp": layout.pp, "ep": layout.ep, "dp": layout.dp}

    def add(self, chain: PlanChain, plan: StepPlan, proven: Proven) -> None:
        self.proven.append(proven)
        self.branches.update(proven.branches)
        self._exercised.note(chain, plan, proven.branches)
        self._progress("verify", len(self.proven), None, "exact" if proven.exact else "NOT exact")

    @property
    def missing(self) -> set[str]:
        """Branches that are open, and that no step has taken."""
        return self._opened - set(self.branches)

    def summary(self) -> dict[str, Any]:
        """All steps together; of errors the worst. What is not finite is named, and null in JSON."""
        worst = max(self.proven, key=lambda one: one.grad_rel_err / (one.tolerance or 1.0))
        first, numbered = self.proven[0], list(enumerate(self.proven))
        return {
            "exact": all(one.exact for one in self.proven),
            **{name: max(getattr(one, name) for one in self.proven) for name in _WORST},
            "grad_rel_err": worst.grad_rel_err,
            "worst_parameter": worst.worst_parameter,
            "tolerance": worst.tolerance,
            **{name: sum(getattr(one, name) for one in self.proven) for name in _COUNTS},
            "uncompared_parameters": sorted({name for one in self.proven for name in one.uncompared}),
            "not_finite": sorted({name for one in self.proven for name in one.not_finite}),
            "over": [f"step {number}: {text}" for number, one in numbered for text in one.over],
            "planners_failed": [f"step {number}: {text}" for number, one in numbered for text in one.failed],
            "steps": self.steps,
            "batches": len(self.proven),
            "loss": first.loss,
            "sequences": first.sequences,
            "planner": first.planner,
            "each": [asdict(one) for one in self.proven],
            "branches": dict(sorted(self.branches.items())),
            "branches_not_taken": sorted(self.missing),
            "not_exercised": self._exercised.idle,
            "resumed": self.resumed,
            "host": self.host,
        }


def other_layout(recipe: Recipe, world_size: int) -> Recipe | None:
    """The recipe on another layout of the same ranks, on which its checkpoints load too; None where there is none.

    Tensor parallelism stays, so that plain training rounds as before; checkpoints of some trainers load on the layout
    that wrote them, or on another number of ranks. Where planners of layers are on, ranks that share experts go on
    sharing them: else nothing of what they plan would be proved after the resume.
    """
    p = recipe.parallel
    if p.replicas:
        return None
    # A stage of another layout might have frozen parameters alone.
    if not trainer_called(recipe.trainer).reshards or world_size == p.tp * p.cp or recipe.train.freeze:
        return None
    stages, experts = 1 if p.pp > 1 else 2, 1 if p.ep > 1 else 2
    regroups = recipe.model.moe and not recipe.enabled_of(LayerPlugin)
    tries = [(stages, experts), (p.pp, experts)] if regroups else []
    without_v = {"plugins.pipeline.v_shape": False} if recipe.v_shape else {}
    for pp, ep in (*tries, (stages, p.ep)):
        with suppress(EvenloadError):
            dp = world_size // (p.tp * p.cp * pp)
            layers = {"parallel.layers": p.layers if pp == p.pp else None}
            other = recipe.changed({"parallel.pp": pp, "parallel.ep": ep, "parallel.dp": dp, **layers, **without_v})
            (runnable if recipe.adapts else preflight)(other, world_size)
            return other
    return None
