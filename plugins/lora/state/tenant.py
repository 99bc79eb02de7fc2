"""A tenant while a job runs: what its adapter is trained on, how far that is, and what has become of it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ....core.planning.planner import Draw
from ....core.recipe.adapter import Adapter
from ....data.sources import Source
from ....training.drawing import Drawing
from ....training.measuring import learning_rate
from ..tenant_file import Tenant
from .status import ENDED as ENDED
from .status import State as State


@dataclass(eq=False)
class ActiveTenant:
    """Changes from step to step, on every rank alike."""

    number: int
    """Its own for as long as the job runs; nobody gets it again."""
    name: str
    config: Tenant
    source: Source
    drawing: Drawing
    """Its own batches, as if it were alone."""
    steps: int
    """After which it is done."""
    adapter: Adapter
    """``config.adapter``, or that of the folder it goes on from."""
    file: str = ""
    """Name of its file: its own, or that of the sweep whose trial it is."""
    until: int = 0
    """It takes part up to so many steps, and then waits until there are more."""
    held_out: Source | None = None
    """What it is evaluated on."""
    data: str = ""
    """Fingerprint of its source."""
    scored: str = ""
    """Of what it is evaluated on."""
    digest: str = ""
    """Of its file: another one is another tenant."""
    order: Mapping[str, Any] = field(default_factory=dict)
    """Its data order after its last step (`Draw.state`): what a checkpoint keeps."""
    step: int = 0
    """Updates of its adapter so far."""
    losses: list[float] = field(default_factory=list)
    """Of each step of this run of the job."""
    best: float | None = None
    """Lowest loss of an evaluation."""
    best_step: int = 0
    """Updates before that evaluation."""
    tokens: int = 0
    seconds: float = 0.0
    """Of the steps that it took part in."""
    state: State = "waiting"
    reason: str = ""
    """Why it waits or has ended, where the state does not say."""

    def __post_init__(self) -> None:
        self.file, self.until = self.file or self.name, self.until or self.steps
        self.data = self.source.fingerprint
        self.scored = self.held_out.fingerprint if self.held_out else ""

    @property
    def rate(self) -> float:
        """The learning rate of its next step."""
        return learning_rate(self.step, self.config.train, self.steps)

    @property
    def left_s(self) -> float | None:
        """Seconds until it is done, by its steps so far; None before the first."""
        return self.seconds / self.step * (self.steps - self.step) if self.step else None

    def took(self, draw: Draw, loss: float, step_s: float) -> None:
        """It was trained on a batch of its own."""
        self.step += 1
        self.losses.append(loss)
        self.tokens += int(draw.lengths.sum())
        self.seconds += step_s
        self.order = draw.state

    def becomes(self, state: State, reason: str = "") -> None:
        """What it does from now on, or what has become of it: then its data are let go."""
        if state in ENDED and self.state not in ENDED:
            del self.source, self.drawing, self.held_out
        self.state, self.reason = state, reason

    def status(self) -> dict[str, Any]:
        """What ``status.json`` says, ready for JSON."""
        loss = self.losses[-1] if self.losses else None
        keys = ("name", "state", "reason", "step", "steps", "best", "best_step", "tokens", "seconds")
        return {
            **{key: getattr(self, key) for key in keys},
            "loss": loss if loss is not None and math.isfinite(loss) else None,
            "left_s": self.left_s if self.state == "training" else None,
            "file": self.digest,
        }
