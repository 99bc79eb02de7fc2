"""Short runs of the real Trainer: arguments of one that leaves nothing behind, its batches, the gradients before its
updates, and how far those of two runs are apart."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from accelerate.state import AcceleratorState
from evenload.core.errors import EvenloadError
from evenload.core.recipe import recipe as recipes
from evenload.integrations.unmodified import planned_loop, planned_runs
from evenload.patches.session import enabled
from evenload.runtime.attributes import with_attributes
from transformers import TrainerCallback
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

Gradients = dict[str, torch.Tensor]


def recipe(**plugins: dict[str, Any]) -> Any:
    on = {name: {"enabled": True, **settings} for name, settings in plugins.items()}
    return recipes.parse({"trainer": "transformers", "plugins": on})


class Planned(NamedTuple):
    """What was planned inside `planned_by`, and why nothing was."""

    chains: list[Any]
    plans: list[Any]
    idle: list[str]
    said: list[str]
    """The same with the loop's name and what to change."""


@contextmanager
def planned_by(own: Any) -> Iterator[Planned]:
    """Inside, scripts are planned by a recipe."""
    planned_runs._idle.clear()
    seen = Planned([], [], [], [])

    def report(name: str, chain: Any, plan: Any, **_: Any) -> None:
        seen.chains.append(chain)
        seen.plans.append(plan)

    with with_attributes(planned_loop, report_step=report), enabled(own):
        yield seen
    for idle in planned_runs._idle:
        seen.idle.append(idle.why)
        seen.said.append(" ".join(idle))


def ends(train: Callable[[], object], own: Any) -> dict[str, str]:
    """How a run that raises ends by itself and planned, and why it is not planned."""
    found: dict[str, str] = {}
    for name, around in {"stock": nullcontext(), "planned": planned_by(own)}.items():
        with around as seen:
            try:
                train()
                found[name] = "trained"
            except Exception as error:
                found[name] = f"{type(error).__name__}: {error}"
    return found | {"said": " ".join(seen.said)}


NO_PACKS = {"packs_fault": lambda _: EvenloadError("no packs", "here", "")}
"""Of the planned Trainer: as if no packs were exact."""


def arguments(**own: Any) -> dict[str, Any]:
    """Of a Trainer that makes one update on CPUs, and neither writes nor draws anything."""
    quiet = {"output_dir": tempfile.mkdtemp(), "report_to": "none", "save_strategy": "no", "disable_tqdm": True}
    one_step = {"use_cpu": True, "max_steps": 1, "logging_steps": 1, "max_grad_norm": 0.0, "seed": 1, "optim": "sgd"}
    return quiet | one_step | own


def forget_layout() -> None:
    """The next model, Trainer or Accelerator of this process takes its layout as the first one of a process does."""
    AcceleratorState._reset_state(reset_partial_state=True)
    unset_hf_deepspeed_config()
    os.environ |= {"ACCELERATE_USE_DEEPSPEED": "false", "ACCELERATE_USE_FSDP": "false"}


class Keep(TrainerCallback):
    """The gradients right before each update, whole, of all parameters that have one."""

    def __init__(self) -> None:
        self.updates: list[Gradients] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        named = {name.removeprefix("module."): p.grad for name, p in model.named_parameters() if p.grad is not None}
        whole = {name: g.full_tensor() if hasattr(g, "full_tensor") else g for name, g in named.items()}
        self.updates.append({name: gradient.detach().clone() for name, gradient in whole.items()})


def error_of(own: Gradients, wanted: Gradients) -> float:
    """The largest ||own - wanted|| / ||wanted|| of a parameter; not a number where a gradient is none.

    Some gradients are nothing but rounding: of biases that a softmax or a norm takes out again. Theirs are held against
    a millionth of the largest.
    """
    assert own.keys() == wanted.keys()
    assert wanted
    norms = torch.stack([w.double().norm() for w in wanted.values()])
    errors = torch.stack([(own[name] - w).double().norm() for name, w in wanted.items()])
    return float((errors / norms.clamp(min=1e-6 * float(norms.max()))).max())


def collate(rows: list[dict[str, list[int]]], left: bool = False) -> dict[str, torch.Tensor]:
    rows = [{**row, "attention_mask": [1] * len(row["input_ids"])} for row in rows]
    batch = {}
    for key, fill in (("input_ids", 0), ("labels", -100), ("attention_mask", 0)):
        most = max(len(row[key]) for row in rows)
        gaps = [[fill] * (most - len(row[key])) for row in rows]
        parts = zip(gaps, (row[key] for row in rows), strict=True)
        batch[key] = torch.tensor([gap + own if left else own + gap for gap, own in parts])
    return batch
