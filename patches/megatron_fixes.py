"""Upstream faults of Megatron-Core's distributed optimizer with torch's Adam, mended as rows.

All three lie on the way from a checkpoint into a fresh optimizer, where neither Transformer Engine nor Apex is
installed, and are for training loops that we cannot edit. The third is silent: all parameters come back with *one*
step tensor, Adam counts it up once per parameter, and from the second resumed step on the losses are wrong.
"""

from __future__ import annotations

from functools import partial
from importlib.util import find_spec
from typing import Any

from .cpu_bridge import MEGATRON
from .row import Patch

_OPTIMIZER = "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer"


def torch_adam() -> bool:
    """Whether Megatron falls back to torch's Adam, for want of Transformer Engine and Apex."""
    return not find_spec("transformer_engine") and not find_spec("apex")


def rows(_: object = None) -> tuple[Patch, ...]:
    """The three rows, in the order in which a load meets the faults."""
    fix = partial(Patch, supports=MEGATRON, when=torch_adam)
    return (
        fix(
            name="megatron.adam.fresh_state",
            target=f"{_OPTIMIZER}.state_dict",
            why="A fresh optimizer has no state, and `sharded_state_dict(is_loading=True)` fails on a bare assert. "
            "Fills in the zeros with which torch's Adam would begin, and only where there is no state at all.",
            wrapper=_with_state,
            expects=("self",),
        ),
        fix(
            name="megatron.adam.load_param_state",
            target=f"{_OPTIMIZER}._set_main_param_and_optimizer_states",
            why="Every checkpoint format loads through it; it wants 'step' from tensors that have none (KeyError) and "
            "copies into leaves with gradients on. Hands it the parameter's own step, which came with the settings of "
            "groups, and not the zero of a fresh optimizer; other optimizers are left alone.",
            wrapper=_load_param_state,
            expects=("model_param", "tensors"),
        ),
        fix(
            name="megatron.adam.own_steps",
            target=f"{_OPTIMIZER}.load_state_dict",
            why="Upstream puts one step tensor into the state of all parameters; afterwards each gets its own. Loops "
            "that restore torch's optimizer by themselves are not reached.",
            wrapper=_load_with_own_steps,
            expects=("state_dict",),
        ),
    )


def _with_state(wrapped: Any, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    import torch

    adam = optimizer.optimizer
    if isinstance(adam, torch.optim.Adam) and not adam.state:
        for param in (param for group in adam.param_groups for param in group["params"]):
            moments = {name: torch.zeros_like(param) for name in ("exp_avg", "exp_avg_sq")}
            adam.state[param] = {"step": torch.tensor(0.0), **moments}
    return wrapped(*args, **kwargs)


def _load_param_state(wrapped: Any, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    import torch

    if not isinstance(optimizer.optimizer, torch.optim.Adam):
        return wrapped(*args, **kwargs)

    def load(model_param: Any, tensors: dict[str, Any]) -> Any:
        group, order = optimizer.model_param_group_index_map[model_param]
        main_param = optimizer.optimizer.param_groups[group]["params"][order]
        step = optimizer.optimizer.state[main_param].get("step")
        with torch.no_grad():
            # The own one is the checkpoint's; `dp_reshardable` hands over the zero with which this process began.
            return wrapped(model_param, tensors if step is None else {**tensors, "step": step})

    return load(*args, **kwargs)


def _load_with_own_steps(wrapped: Any, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    import torch

    result = wrapped(*args, **kwargs)
    for state in optimizer.optimizer.state.values():
        if torch.is_tensor(state.get("step")):
            state["step"] = state["step"].clone()
    return result
