"""evenload's numbers in the writers of Megatron-LM's training loop: TensorBoard and Weights & Biases."""

from __future__ import annotations

import sys
from typing import Any

from ...unmodified.planned_loop import PlannedLoop

_MODULE = "megatron.training.global_vars"


def tell_writers(loop: PlannedLoop) -> None:
    """Write the numbers of a step where that loop has writers, which it has on its last rank, as often and under the
    number as it writes its own; nothing in other loops, which have none."""
    module: Any = sys.modules.get(_MODULE)
    board = module.get_tensorboard_writer() if module is not None else None
    if board is None:
        return
    args, project = module.get_args(), module.get_wandb_writer()
    iteration = args.curr_iteration + 1
    if iteration % args.tensorboard_log_interval == 0:
        for name, value in loop.numbers.items():
            board.add_scalar(name, value, iteration)
        if project is not None:
            project.log(loop.numbers, iteration)
