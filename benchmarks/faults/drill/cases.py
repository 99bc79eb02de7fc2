"""The drill as data: which fault, in which phase, on which rank, of which trainer and plugin."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

SMALL = (
    *("model.hidden_size=32", "model.num_attention_heads=4", "model.num_query_groups=2", "model.num_layers=2"),
    *("data.max_length=512", "train.global_batch_size=8", "train.steps=6", "checkpoint.every=2", "checkpoint.keep=9"),
    *("safety.gone_s=4", "safety.stuck_s=40"),
    "planner.budget_ms=60000",  # a plan that is late gives way to a simpler one, whose sums round otherwise
)
LEFT_BYTES = 20_000
"""Of a disk that is filled: less than a checkpoint."""
BEFORE_STEPS = ("start", "meeting", "data", "build", "resume")
"""Phases in which nobody listens to signals."""
TERMINATED = (*BEFORE_STEPS, "plan", "load", "forward", "backward", "gradient sum", "update", "compare", "save")
FAULTY_STEP = 3
"""Counted from 0: one checkpoint is there, of two steps, and the next is due after this step."""


@dataclass(frozen=True)
class Setting:
    """A trainer with a plugin, on two ranks."""

    name: str
    trainer: str
    recipe: str
    overrides: tuple[str, ...]

    @property
    def arguments(self) -> tuple[str, ...]:
        """After the path of the recipe."""
        return (*SMALL, *self.overrides)


_MESH = ("plugins.packing.enabled=false", "plugins.mesh.enabled=true", "plugins.mesh.max_tokens=256")
_PACKING = "plugins.packing.max_tokens=1024"
SETTINGS = (
    Setting("megatron packing", "megatron", "quickstart.yaml", (_PACKING,)),
    Setting("megatron mesh", "megatron", "quickstart.yaml", _MESH),
    Setting("megatron pipeline", "megatron", "pipeline.yaml", ()),
    Setting("zero 1 packing", "deepspeed", "deepspeed.yaml", (_PACKING,)),
    Setting("zero 1 mesh", "deepspeed", "deepspeed.yaml", _MESH),
    Setting("zero 1 pipeline", "deepspeed", "pipeline.yaml", ("trainer=deepspeed", "deepspeed.zero_stage=1")),
    Setting("zero 3 packing", "deepspeed", "deepspeed.yaml", (_PACKING, "deepspeed.zero_stage=3")),
    Setting("zero 3 mesh", "deepspeed", "deepspeed.yaml", (*_MESH, "deepspeed.zero_stage=3")),
)


@dataclass(frozen=True)
class Phase:
    """A place in a run; see plant.py for ``at`` and ``where``."""

    name: str
    at: str
    where: str
    step: int = FAULTY_STEP
    delay_s: float = 0.0
    begins: str = "fresh"
    """fresh; resume: from a checkpoint of two steps; convert: from one that a single rank wrote."""


PHASES = (
    Phase("start", "start", "", 0),
    Phase("meeting", "call", "init_process_group", 0),
    Phase("data", "mark", "opening the data", 0),
    Phase("build", "mark", "building the model", 0),
    Phase("plan", "mark", "waiting for the plan"),
    Phase("load", "call", "Source.tokens"),
    Phase("forward", "mark", "forward"),
    Phase("backward", "mark", "backward"),
    Phase("ring", "call", "Plane.post"),
    Phase("hand-over", "call", "isend"),
    Phase("gradient sum", "mark", "gradient"),
    Phase("update", "mark", "update"),
    Phase("compare", "mark", "comparing times"),
    Phase("save", "mark", "saving the checkpoint"),
    Phase("save, later", "mark", "saving the checkpoint", delay_s=0.03),
    Phase("end", "mark", "end", 0),
    Phase("resume", "mark", "loading the checkpoint", 0, begins="resume"),
    Phase("convert", "mark", "converting the checkpoint", 0, begins="convert"),
    Phase("convert, later", "mark", "converting the checkpoint", 0, delay_s=1.5, begins="convert"),
    Phase("log", "mark", "update", 0),  # before there is a line of it
)
BY_NAME = {phase.name: phase for phase in PHASES}


@dataclass(frozen=True)
class Case:
    """One run of the drill."""

    setting: Setting
    phase: Phase
    how: str
    victim: int

    @property
    def name(self) -> str:
        return f"{self.setting.name}, {self.phase.name}, {self.how} rank {self.victim}"

    @property
    def ends(self) -> bool:
        """Whether the job cannot go on."""
        return self.how != "slow" and self.phase.name != "log"

    @property
    def ended_after(self) -> tuple[int, ...]:
        """Steps after which a job may end that is told to in this phase, as a signal takes its time; none: at once."""
        if self.phase.name in BEFORE_STEPS:
            return ()
        first = FAULTY_STEP + (2 if self.phase.name == "save" else 1)
        return first, first + 1

    def fault(self, stamp: str, disk: str) -> dict[str, Any]:
        phase = self.phase
        place = {"rank": self.victim, "how": self.how, "at": phase.at, "where": phase.where, "step": phase.step}
        left = 0 if phase.name == "log" else LEFT_BYTES
        return {**place, "delay_s": phase.delay_s, "stamp": stamp, "disk": disk, "left": left}


def _phases(setting: Setting) -> Iterator[str]:
    """Every phase that a setting has, but for its collectives."""
    yield from ("start", "meeting", "data", "build", "plan", "load", "forward", "update", "compare")
    yield from ("save", "save, later", "end", "resume")
    if setting.name != "megatron packing":  # Megatron's own schedule runs such plans, and marks nothing inside
        yield "gradient sum"
    if "mesh" in setting.name:
        yield from ("backward", "ring")
    if "pipeline" in setting.name:
        yield from ("backward", "hand-over")
    if setting.name in ("zero 1 packing", "zero 3 packing"):
        yield from ("convert", "convert, later")


def cases_of(setting: Setting, collectives: Iterable[str]) -> Iterator[Case]:
    """All of a setting; ``collectives``: what its ranks call in a step."""
    for name in _phases(setting):
        for how, victim in (("kill", 1), ("stop", 0), ("raise", 1)):
            late = BY_NAME[name].delay_s > 0
            if not (late and how == "raise"):  # a thread of its own would raise it
                # Rank 0 alone converts.
                yield Case(setting, BY_NAME[name], how, 0 if name.startswith("convert") else victim)
    for name in ("forward", "save"):
        for how, victim in (("kill", 0), ("stop", 1), ("hang", 1), ("slow", 0)):
            yield Case(setting, BY_NAME[name], how, victim)
    for name in ("forward", "update"):
        yield Case(setting, BY_NAME[name], "nan", 1)
    for name in ("save", "log"):
        yield Case(setting, BY_NAME[name], "disk", 0)
    for name in TERMINATED:
        if name in _phases(setting):
            yield Case(setting, BY_NAME[name], "terminate", 0)
    for name in collectives:
        phase = Phase(f"in {name}", "call", name)
        yield from (Case(setting, phase, "kill", 1), Case(setting, phase, "stop", 0))


QUICK = (
    ("megatron packing", "meeting", "kill", 1),
    ("megatron packing", "forward", "stop", 0),
    ("megatron packing", "update", "nan", 1),
    ("megatron mesh", "ring", "kill", 1),
    ("megatron pipeline", "hand-over", "stop", 0),
    ("zero 3 packing", "convert, later", "kill", 0),
    ("zero 1 packing", "forward", "terminate", 0),
)


def quick_cases() -> list[Case]:
    """One for each way in which a job waits for a rank, and one of numbers; what raises, and full disks, end alone."""
    settings = {setting.name: setting for setting in SETTINGS}
    return [Case(settings[name], BY_NAME[phase], how, victim) for name, phase, how, victim in QUICK]
