"""What the ranks of a test world run: every function here is a case of test_accelerate.py."""

from __future__ import annotations

import os
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from evenload.core.errors import EvenloadError
from evenload.core.recipe import recipe as recipes
from evenload.integrations.huggingface import accelerate_loop
from evenload.patches.session import enabled
from evenload.runtime.attributes import with_attributes
from torch.utils.data import DataLoader

LENGTHS = [61, 5, 17, 33, 9, 50, 3, 40, 26, 11, 44, 7, 12, 30, 21, 8]
PLUGINS = {"packing": {"enabled": True, "max_tokens": 256}}


def recipe() -> Any:
    return recipes.parse({"trainer": "transformers", "plugins": PLUGINS})


def run(trainers: Any, accumulated: int, other_loss: bool = False) -> dict[str, Any]:
    """A loop as users write it, over an epoch, with an evaluation inside; gradients before the last update."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    os.environ["ACCELERATE_USE_DEEPSPEED"] = os.environ["ACCELERATE_USE_FSDP"] = "false"
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulated)
    rows, model = trainers.samples_of(LENGTHS, masked=True), trainers.build_model()
    model.loss_function = mean_loss
    loaders = [DataLoader(part, batch_size=2, collate_fn=trainers.collate) for part in (rows, rows[:4])]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader, held_out = accelerator.prepare(model, optimizer, *loaders)
    losses, evaluated = [], []
    for batch in loader:
        model.train()
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss * 2 if other_loss else loss)
            losses.append(float(accelerator.gather(loss.detach()).mean()))
            gradients = {n.removeprefix("module."): p.grad.clone() for n, p in model.named_parameters()}
            optimizer.step()
            optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            evaluated.append([float(model(**batch).loss) for batch in held_out])
    return {"losses": losses, "evaluated": evaluated, "gradients": gradients}


def mean_loss(logits: Any, labels: Any, **_: Any) -> Any:
    """`ForCausalLMLoss` of a whole batch without its cast to float32."""
    shifted = torch.nn.functional.pad(labels, (0, 1), value=-100)[..., 1:]
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), shifted.flatten(), ignore_index=-100)


def exactness(load: Any, accumulated: int) -> dict[str, Any]:
    """Errors against the stock loop; steps that were planned."""
    trainers, steps = load("rank_trainer"), []
    trainers._join()
    stock = run(trainers, accumulated)
    with with_attributes(accelerate_loop, report_step=lambda *_: steps.append(1)), enabled(recipe()):
        own = run(trainers, accumulated)
    return {
        "grad": trainers.relative_error(own["gradients"], stock["gradients"]),
        "loss": max(abs(a - b) for a, b in zip(own["losses"], stock["losses"], strict=True)),
        "evaluated": _difference(own["evaluated"], stock["evaluated"]),
        "planned": len(steps),
    }


def _difference(own: list[list[float]], stock: list[list[float]]) -> float:
    return max(abs(a - b) for mine, theirs in zip(own, stock, strict=True) for a, b in zip(mine, theirs, strict=True))


def other_loss(load: Any) -> str:
    """What is said where the loss that comes to backward is not the model's."""
    trainers = load("rank_trainer")
    trainers._join()
    with enabled(recipe()):
        try:
            run(trainers, 1, other_loss=True)
        except EvenloadError as error:
            return str(error)
    return ""
