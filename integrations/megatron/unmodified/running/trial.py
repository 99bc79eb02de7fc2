"""A script's function on a pack before the first planned step, forward only: what it makes of packs shows then.

An error in the middle of a schedule leaves pipeline stages waiting for each other. So it is kept, the pass goes on with
zeros in place of what is missing, and after the pass all ranks are told of it. Nothing of the model changes: it is in
evaluation mode, without gradients, and the generators stand afterwards where they stood.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.utils import get_model_config

from .....core.errors import EvenloadError
from .....runtime.attributes import with_attributes
from .....runtime.world.agreement import everyone

Answer = tuple[Any, Callable[..., Any] | None]
"""What a ``forward_step_func`` returns."""


class FunctionTrial:
    """What the calls of a function, and of its loss function, have raised first."""

    def __init__(self) -> None:
        self.trouble: EvenloadError | None = None

    def answer(self, call: Callable[[], Answer], tokens: int, config: Any) -> Answer:
        """What a call returns; zeros of as many ``tokens`` as its pack has where it raises."""
        try:
            output, loss_func = call()
        except Exception as error:
            self._keep(error)
            shares = config.tensor_model_parallel_size if config.sequence_parallel else 1
            dtype = config.pipeline_dtype or config.params_dtype
            device = torch.cuda.current_device()
            zeros = torch.zeros(tokens // shares, 1, config.hidden_size, dtype=dtype, device=device)
            return zeros, lambda output, *_, **__: _no_loss(output)
        return output, loss_func and self._around(loss_func)

    def _around(self, loss_func: Callable[..., Any]) -> Callable[..., Any]:
        def tried(output: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                return loss_func(output, *args, **kwargs)
            except Exception as error:
                self._keep(error)
                return _no_loss(output)

        return tried

    def _keep(self, error: Exception) -> None:
        if not isinstance(error, EvenloadError):
            error = EvenloadError(
                "forward_step, or its loss function, does not run on packed samples",
                f"{type(error).__name__}: {error}",
                "take the shape of a batch from its tokens, or disable evenload's plugins",
            )
        self.trouble = self.trouble or error


def _no_loss(output: Any) -> tuple[Any, Any, dict[str, Any]]:
    return output.sum() * 0.0, torch.ones((), dtype=torch.int, device=output.device), {}


def try_first(chunks: Sequence[Any], run: Callable[[FunctionTrial], object]) -> None:
    """Run what a training call would, forward only. Collective; raises EvenloadError on all ranks for one.

    Args:
        chunks: of the model on this rank.
        run: runs the schedule, with ``forward_only=True`` and all calls of its function through the trial.
    """
    trial = FunctionTrial()
    with _evaluating(chunks):
        run(trial)
    for trouble in filter(None, everyone(trial.trouble)):
        raise trouble


@contextmanager
def _evaluating(chunks: Sequence[Any]) -> Any:
    training = [module for chunk in chunks for module in chunk.modules() if module.training]
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    for module in training:
        module.training = False
    try:
        sizes = with_attributes(get_model_config(chunks[0]), variable_seq_lengths=True)
        with torch.random.fork_rng(devices), torch.no_grad(), sizes:
            yield
    finally:
        for module in training:
            module.training = True
