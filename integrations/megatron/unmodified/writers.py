"""The session of a Megatron-Core loop, whose numbers go to Megatron-LM's writers: TensorBoard and Weights & Biases."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

from ...unmodified.planned_loop import LoopSession

_MODULE = "megatron.training.global_vars"


@dataclass(eq=False, kw_only=True)
class MegatronSession(LoopSession):
    """The training calls of one model."""

    name: str = "Megatron-Core"

    def tell(self) -> None:
        """Write the numbers of a step where Megatron-LM's loop has writers, which it has on its last rank, as often and
        under the number as it writes its own; nothing in other loops, which have none."""
        module: Any = sys.modules.get(_MODULE)
        board = module.get_tensorboard_writer() if module is not None else None
        if board is None:
            return
        args, project = module.get_args(), module.get_wandb_writer()
        iteration = args.curr_iteration + 1
        if iteration % args.tensorboard_log_interval == 0:
            for name, value in self.numbers.items():
                board.add_scalar(name, value, iteration)
            if project is not None:
                project.log(self.numbers, iteration)
