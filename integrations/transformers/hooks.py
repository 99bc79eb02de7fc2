"""Hooks of a script's own on parameters: a stock run hands them the gradient of a batch, a planned one that of a pack.

A hook that is linear (masks, factors) gives the same sum either way, and one that only looks changes nothing. Whether a
hook is either is measured where it changes a gradient for the first time: it is called again with the gradient in
another size and with the sum of two. A loop with hooks runs its first step as it is, and stays so where one is not
linear; a hook that comes later and is not linear is refused before the update.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...core.errors import EvenloadError
from ...runtime.world.agreement import first_error
from ..unmodified.planned_runs import is_checking

_OF_FRAMEWORKS = ("torch.", "deepspeed.", "accelerate.")
"""Modules whose hooks reduce or offload gradients, and do not change them."""

_TOLERANCE = 1e-2
_SMALL = 1e-6
"""Largest difference that is rounding, in half precision too: in units of the entry, and of the largest one."""


class GradientHooks:
    """The hooks on the parameters of one model, watched while plans run."""

    def __init__(self) -> None:
        self.are_known = is_checking()
        """They have changed the gradients of a step, and all in proportion; a check takes one step alone."""
        self._fault: str | None = None
        self._watched: dict[Any, tuple[dict[Any, Any], Any, Any]] = {}
        """By the hook that stands in place of a script's: where it stands, and the script's."""

    def watch(self, model: torch.nn.Module) -> bool:
        """Watch all hooks that there are by now; whether there are any."""
        for name, parameter in model.named_parameters():
            for kind, watched in (("_backward_hooks", self._linear), ("_post_accumulate_grad_hooks", self._idle)):
                hooks = getattr(parameter, kind, None) or {}
                for key, hook in list(hooks.items()):
                    owner = getattr(hook, "func", hook)
                    if hook not in self._watched and not str(owner.__module__).startswith(_OF_FRAMEWORKS):
                        hooks[key] = watched(hook, f"{getattr(owner, '__qualname__', owner)} on {name}")
                        self._watched[hooks[key]] = (hooks, key, hook)
        return bool(self._watched)

    def refuse_unlike(self) -> None:
        """Raise EvenloadError on all ranks where a hook of one is not linear. Collective."""
        for rank, fault in first_error(self._fault):
            raise EvenloadError(
                "a hook on a parameter changes gradients, and not in proportion to them",
                f"{fault}, on rank {rank}",
                "change gradients once, after the last backward of a step (Trainer: on_pre_optimizer_step of a "
                "callback), or leave evenload off",
            )
        self.are_known = True

    def release(self) -> None:
        """Give every hook its place back."""
        for hooks, key, hook in self._watched.values():
            if key in hooks:
                hooks[key] = hook
        self._watched.clear()

    def _linear(self, hook: Callable[[Tensor], Tensor | None], name: str) -> Callable[[Tensor], Tensor | None]:
        proven = False

        def watched(gradient: Tensor) -> Tensor | None:
            nonlocal proven
            before = None if proven else gradient.clone()
            result = hook(gradient)
            after = gradient if result is None else result
            if before is not None and not torch.equal(after, before):
                proven = _is_linear(hook, before, after)
                self._fault = self._fault if proven else name
            return result

        return watched

    def _idle(self, hook: Callable[[Tensor], None], name: str) -> Callable[[Tensor], None]:
        def watched(parameter: Tensor) -> None:
            before = None if parameter.grad is None else parameter.grad.clone()
            hook(parameter)
            if before is not None and (parameter.grad is None or not torch.equal(parameter.grad, before)):
                self._fault = name

        return watched


def _is_linear(hook: Callable[[Tensor], Tensor | None], gradient: Tensor, result: Tensor) -> bool:
    """Whether a hook that made `result` of a gradient makes multiples and sums of what it makes of the parts."""

    def of(part: Tensor) -> Tensor:
        changed = hook(one := part.clone())
        return one if changed is None else changed

    other = 3 * gradient.flip(tuple(range(gradient.dim())))
    with torch.random.fork_rng([gradient.device] if gradient.device.type == "cuda" else []):  # of hooks that add noise
        more = of(other)
        pairs = (
            (of(4 * gradient), 4 * result, result.abs()),
            (of(gradient + other), result + more, result.abs() + more.abs()),
        )
    return all(bool(((a - b).abs() <= _TOLERANCE * size + _SMALL * size.max()).all()) for a, b, size in pairs)
