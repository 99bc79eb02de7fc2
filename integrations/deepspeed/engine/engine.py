"""DeepSpeed's engine, driven with any number of micro-batches in any order and reduced once a step.

What the gradients of a step must be is plain: the sum over all ranks and micro-batches. How an engine is brought to
give exactly that differs by ZeRO stage:

    0     `no_sync` around all backwards, then one `allreduce_gradients`; ranks may run different numbers
    1, 2  `coalesce_grad_reduction` around all backwards, which reduces once at its end; ranks may run different numbers
    3     every backward reduces into the shards, so all ranks must run the same order of passes. A backward counts as a
          further one only after `clear_backward_seen_flag`, which DeepSpeed calls at the next *forward*: without it,
          backwards in a row overwrite each other's gradients in silence (relative error 1.3 where this was measured)
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import deepspeed
import deepspeed.ops
import torch
from deepspeed.runtime.zero.stage_1_and_2 import INITIAL_MICRO_STEP_ID
from deepspeed.utils import logger as deepspeed_logger

from ....core.recipe.recipe import Recipe
from .ds_config import ds_config
from .experts import parameter_groups, registry_by_name, section

BUCKET = 500_000_000
"""DeepSpeed's ``reduce_bucket_size`` [values]."""


def make_engine(model: torch.nn.Module, recipe: Recipe, world_size: int) -> Any:
    """A `DeepSpeedEngine` around `model` with torch's AdamW; biases and norms are not decayed, as in Megatron-Core.
    Collective; needs a process group. With ``parallel.ep`` the model's experts are divided, see `experts`."""
    prepare_deepspeed()

    def optimizer(_: Any) -> torch.optim.Optimizer:
        # Called once experts are divided. The bf16 engine of ZeRO 0 runs one update on zero gradients when it is made:
        # at a rate of 0 it moves nothing.
        groups = parameter_groups(model.parameters(), recipe.train.weight_decay)
        return torch.optim.AdamW(groups, lr=0.0, betas=recipe.train.betas, eps=recipe.train.eps)

    config = ds_config(recipe, world_size) | section(recipe, model)
    # ZeRO takes a bucket, in pipelines two, of its full size, 2 GB in float32, however small the model is.
    fitting = min(BUCKET, sum(getattr(p, "ds_numel", p.numel()) for p in model.parameters()))
    config["zero_optimization"].setdefault("reduce_bucket_size", fitting)
    with registry_by_name():
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    # ... but counts as a step in AdamW's bias correction.
    engine.basic_optimizer.state.clear()
    return engine


class Releases:
    """The counters by which ZeRO 3 releases what a backward has gathered. A forward sets them, and each of several
    backwards in a row wants them as they were then. Other stages have none."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        self._counts: dict[Any, int] = {}

    def after_forward(self) -> None:
        """To be called after each forward that will have a backward."""
        if not self._counts:
            # The same after every such forward: how many inputs of the module need gradients.
            modules: Iterator[Any] = self._module.modules()
            self._counts = {m: m.ds_grads_remaining for m in modules if hasattr(m, "ds_grads_remaining")}

    def before_backward(self) -> None:
        """To be called before each backward."""
        for module, count in self._counts.items():
            module.ds_grads_remaining = count


class OneReduction(Releases):
    """What `one_reduction` has to be told while the ``num_backwards`` backwards of this rank in a step run."""

    def __init__(self, engine: Any, num_backwards: int) -> None:
        super().__init__(engine.module)
        self.num_backwards, self.started = num_backwards, 0
        self._engine = engine
        self._sharded = int(engine.zero_optimization_stage()) == 3

    def before_backward(self) -> None:
        self.started += 1
        if self._sharded:
            self._engine.set_gradient_accumulation_boundary(self.started == self.num_backwards)
            self._engine.optimizer.clear_backward_seen_flag()
        super().before_backward()


@contextmanager
def one_reduction(engine: Any, num_backwards: int) -> Iterator[OneReduction]:
    """Run all passes of a step inside; at the exit the engine holds the reduced gradients, ready for `step`. Collective
    at the exit (ZeRO 3: throughout)."""
    stage = int(engine.zero_optimization_stage())
    reduction = OneReduction(engine, num_backwards)
    if stage == 0:
        with engine.no_sync():
            yield reduction
        engine.allreduce_gradients()
    elif stage < 3:
        with engine.coalesce_grad_reduction():
            yield reduction
    else:
        yield reduction
    assert reduction.started == num_backwards, f"{reduction.started} of {num_backwards} backwards ran"


Parameters = Mapping[str, torch.nn.Parameter]


def full_gradients(parameters: Parameters) -> dict[str, torch.Tensor]:
    """Reduced gradients by name, float32 on the CPU; once reduced, before the update. Collective."""
    get = deepspeed.utils.safe_get_full_grad
    return {name: get(p).detach().float().cpu().clone() for name, p in parameters.items()}


def adam_states(engine: Any, parameters: Parameters) -> dict[str, tuple[torch.Tensor, ...]]:
    """By name (weight, first moment, second moment) in the optimizer's precision, whole, on the CPU. Collective."""
    optimizer = engine.optimizer
    if hasattr(optimizer, "_hp_optimizer_states_linked"):
        # A loaded checkpoint puts new tensors into the optimizer, and parameters go on pointing to the old ones.
        optimizer._hp_optimizer_states_linked = False
        optimizer._lazy_init_hp_params_optimizer_state()
    return {name: _adam_state(engine, parameter) for name, parameter in parameters.items()}


def _adam_state(engine: Any, parameter: torch.nn.Parameter) -> tuple[torch.Tensor, ...]:
    whole = (
        deepspeed.utils.safe_get_full_fp32_param(parameter),
        deepspeed.utils.safe_get_full_optimizer_state(parameter, "exp_avg"),
        deepspeed.utils.safe_get_full_optimizer_state(parameter, "exp_avg_sq"),
    )
    if whole[0] is None:  # ZeRO 0 in float32: the optimizer is torch's and holds the parameter itself
        state = engine.basic_optimizer.state[parameter]
        whole = (parameter, state["exp_avg"], state["exp_avg_sq"])
    shape = getattr(parameter, "ds_shape", parameter.shape)  # ZeRO 3 holds a shard
    return tuple(tensor.detach().float().cpu().clone().view(shape) for tensor in whole)


def discard_gradients(engine: Any) -> None:
    """Forget the gradients of a step that is not taken, as DeepSpeed does after an overflow."""
    stage = int(engine.zero_optimization_stage())
    if stage == 0:
        engine.zero_grad()
        return
    optimizer = engine.optimizer
    optimizer.clear_backward_seen_flag()
    optimizer.zero_grad(set_to_none=True)
    if stage < 3:
        optimizer._release_preflattened_grad_buffers()
        # In place: every parameter's gradient is read through this very dictionary.
        optimizer.averaged_gradients.update(dict.fromkeys(optimizer.averaged_gradients))
        optimizer.micro_step_id = INITIAL_MICRO_STEP_ID
    else:
        optimizer.averaged_gradients.clear()
        optimizer._pre_step()


def full_weights(engine: Any, parameters: Parameters) -> dict[str, torch.Tensor]:
    """The weights as the forward uses them, in its precision, by name, on the CPU. Collective."""
    sharded = int(engine.zero_optimization_stage()) == 3
    with deepspeed.zero.GatheredParameters(list(parameters.values()), enabled=sharded):
        return {name: p.detach().cpu().clone() for name, p in parameters.items()}


def prepare_deepspeed() -> None:
    """Logs to stderr from warnings up, and no C++ compiler; before `deepspeed.initialize`. Once is enough."""
    # stdout belongs to --json; DeepSpeed logs there.
    deepspeed_logger.setLevel(logging.WARNING)
    for handler in deepspeed_logger.handlers:
        if isinstance(handler, logging.StreamHandler) and handler.stream is sys.stdout:
            handler.setStream(sys.stderr)
    # Built with a C++ compiler at every first start on a CPU (36 s), used by inference alone, fatal without a compiler.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    # DeepSpeed insists on torchrun's variable, also in a world of one.
    os.environ.setdefault("LOCAL_RANK", "0")
