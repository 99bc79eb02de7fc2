"""The steps of a proof: what they were off by, which branches they took, and what all of them say together."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from typing import Any

from ...core.plan.step_plan import StepPlan
from ...core.planning.chain import PlanChain
from ...core.planning.exercised import Exercised
from ...integrations.host.host import Host
from ..progress import Progress
from .reach import opened
from .steps import Proven


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
            "loss_rel_err": max(one.loss_rel_err for one in self.proven),
            "grad_rel_err": worst.grad_rel_err,
            "worst_parameter": worst.worst_parameter,
            "tolerance": worst.tolerance,
            "norm_rel_err": max(one.norm_rel_err for one in self.proven),
            "update_rel_err": max(one.update_rel_err for one in self.proven),
            "tokens_missing": sum(one.tokens_missing for one in self.proven),
            "tokens_repeated": sum(one.tokens_repeated for one in self.proven),
            "routes_differ": sum(one.routes_differ for one in self.proven),
            "samples_wrong": sum(one.samples_wrong for one in self.proven),
            "uncompared_parameters": sorted({name for one in self.proven for name in one.uncompared}),
            "not_finite": sorted({name for one in self.proven for name in one.not_finite}),
            "over": [f"step {number}: {text}" for number, one in numbered for text in one.over],
            "planners_failed": [f"step {number}: {text}" for number, one in numbered for text in one.failed],
            "steps": self.steps,
            "batches": len(self.proven),
            "loss": first.loss,
            "sequences": first.sequences,
            "tokens": sum(one.tokens for one in self.proven),
            "targets": sum(one.targets for one in self.proven),
            "planner": first.planner,
            "each": [asdict(one) for one in self.proven],
            "branches": dict(sorted(self.branches.items())),
            "branches_not_taken": sorted(self.missing),
            "not_exercised": self._exercised.idle,
            "resumed": self.resumed,
            "host": self.host,
        }
