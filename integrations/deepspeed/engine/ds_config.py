"""The ds_config of a recipe: what evenload owns, and the user's further keys merged in.

Every key whose meaning depends on how micro-batches are counted, weighted or cast is evenload's; a user's value there
would be ignored or, worse, change the mathematics, so it is refused. ``gradient_clipping`` is always written: DeepSpeed
0.19 clips at 1.0 where the key is absent.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ....core.errors import EvenloadError, shown
from ....core.recipe.recipe import Recipe

OWNED: dict[str, str] = {
    "train_batch_size": "set train.global_batch_size",
    "train_micro_batch_size_per_gpu": "set train.micro_batch_size or plugins.packing.max_tokens",
    "gradient_accumulation_steps": "leave it out: the plan decides how many micro-batches a rank runs",
    "managed_gradient_accumulation": "leave it out: evenload sets the boundary of a step",
    "gradient_allreduce_op": "leave it out: gradients are summed, the loss carries the weight",
    "gradient_predivide_factor": "leave it out: gradients are summed, the loss carries the weight",
    "prescale_gradients": "leave it out: gradients are summed, the loss carries the weight",
    "gradient_clipping": "set train.clip_grad",
    "optimizer": "set train.lr and train.weight_decay",
    "scheduler": "set train.lr_schedule, train.warmup_steps and train.min_lr",
    "fp16": "set train.dtype",
    "bf16": "set train.dtype",
    "bfloat16": "set train.dtype",
    "amp": "set train.dtype",
    "torch_autocast": "set train.dtype",
    "data_types": "set train.dtype",
    "data_efficiency": "leave it out: the plan decides which samples run when",
    "curriculum_learning": "leave it out: the plan decides which samples run when",
    "tensor_parallel": "use trainer: megatron for tensor parallelism",
    "pipeline": "set parallel.pp; plugins.pipeline decides what is recomputed",
    "expert_parallel": "set parallel.ep",
    "sequence_parallel_size": "leave it out: a whole sequence runs on one rank",
    "data_parallel_size": "leave it out: every rank is data-parallel",
    "compile": "leave it out: a compiled step cannot change its micro-batches",
    "evenload": "set plugins.* of the recipe; the section is for scripts with a ds_config of their own",
}
"""Keys that a recipe's ``deepspeed.config`` may not hold, and what to do instead."""

_OWNED_OF_ZERO = {
    "stage": "set deepspeed.zero_stage",
    "offload_optimizer": "leave it out: evenload brings torch's AdamW",
    "zenflow": "leave it out: it updates weights outside the step",
    "compute_grad_norm": "leave it out: every step reports the norm of its gradient",
}
"""The same of its section ``zero_optimization``."""

SHARDED = 3
"""The stage of ZeRO that divides parameters, too."""

_TIMED = ("wall_clock_breakdown", "flops_profiler")
"""Keys whose timers of DeepSpeed 0.19 end a pipeline's first backward: its engine and its hooks both start them."""


def ds_config(recipe: Recipe, world_size: int) -> dict[str, Any]:
    """The dictionary that `deepspeed.initialize` is given. Raises EvenloadError: ``deepspeed.config`` holds a key that
    evenload owns, or what ends a pipeline."""
    extra = recipe.deepspeed.config
    _refuse_owned(extra, OWNED)
    for key in _TIMED if recipe.parallel.pp > 1 else ():
        value = extra.get(key)
        if value.get("enabled") if isinstance(value, Mapping) else value:
            detail = f"{key} = {shown(value)}, parallel.pp {recipe.parallel.pp}"
            do = "leave it out, or set parallel.pp=1"
            raise EvenloadError(f"'{key}' of DeepSpeed 0.19 fails in pipelines", detail, do)
    zero = extra.get("zero_optimization", {})
    if not isinstance(zero, Mapping):
        raise EvenloadError(
            "deepspeed.config.zero_optimization is no mapping", shown(zero), "see DeepSpeed's ds_config"
        )
    _refuse_owned(zero, _OWNED_OF_ZERO, "zero_optimization.")
    stage = recipe.deepspeed.zero_stage
    owned: dict[str, Any] = {
        # A formality: the boundary of a step is set by hand, so these two only have to multiply to the first.
        "train_batch_size": world_size,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": recipe.train.clip_grad,
        "bf16": {"enabled": recipe.train.dtype == "bf16"},
        "zero_optimization": {**zero, "stage": stage},
    }
    if stage < SHARDED:
        # ZeRO 3 only averages; there the loss is multiplied by the number of ranks instead.
        owned["gradient_allreduce_op"] = "sum"
    return {"steps_per_print": None, **extra, **owned}


def _refuse_owned(section: Mapping[str, Any], owned: Mapping[str, str], above: str = "") -> None:
    for key, do in owned.items():
        if key in section:
            raise EvenloadError(f"deepspeed.config may not set '{above}{key}'", f"{key} = {shown(section[key])}", do)
