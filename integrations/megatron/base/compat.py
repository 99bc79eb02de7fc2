"""Where supported versions of Megatron-Core differ: decided here, by what is there, and nowhere else.

0.16, 0.17   the MLP of a layer's spec is a ModuleSpec
0.18 on      it is a functools.partial of its class
0.16         ``backward_step`` wants the model's type
to 0.18      a save writes what is no tensor to common.pt
0.19         it hands that to the writer of tensors; every version reads common.pt where it is there
to 0.18      losses of routers are multiplied by the tokens of a rank's share where token losses are summed
0.19         they are by all tokens of the micro-batch; what is printed of them goes to an object
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import megatron.core
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.pipeline_parallel import schedules
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.utils import get_model_config, get_model_type
from packaging.version import Version
from torch import Tensor

_COMMON_STATE, _COMMON_FILE = "common_state", "common.pt"
ROUTERS_COUNT_ALL = Version(megatron.core.__version__).release >= (0, 19)
"""Whether losses of routers are multiplied by all tokens of a micro-batch: nothing but the number tells."""
_WANTS_TYPE = "model_type" in inspect.signature(schedules.backward_step).parameters


def backward_step(received: Tensor | None, output: Tensor, gradient: Tensor | None, model: Any) -> Tensor | None:
    """Megatron's backward of one micro-batch of a stage: the gradient of what it received."""
    kind = (get_model_type(model),) if _WANTS_TYPE else ()
    handed_down: Tensor | None = schedules.backward_step(received, output, gradient, *kind, get_model_config(model))
    return handed_down


def save_common_state(sharded_state: dict[str, Any], directory: Path) -> None:
    """Write what is no tensor of a state that Megatron saves as all versions read it, where it has not done so."""
    common = sharded_state.pop(_COMMON_STATE, None)
    if common is not None and dist.get_rank() == 0:
        torch.save(common.data, directory / _COMMON_FILE)


@contextmanager
def reading_common_state() -> Iterator[None]:
    """Inside, 0.19 reads common.pt without its warning that a later version will not."""
    log = logging.getLogger(f"{dist_checkpointing.__name__}.strategies.common")
    disabled, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = disabled


def submodules_of_experts(layer_spec: Any) -> Any:
    """Megatron's ``MoESubmodules`` in the spec of a layer that has experts; None for a dense layer."""
    mlp = layer_spec.submodules.mlp
    if isinstance(mlp, partial):
        return mlp.keywords["submodules"] if mlp.func is MoELayer else None
    return mlp.submodules if mlp.module is MoELayer else None


def report_router_loss(name: str, value: Tensor, layer: int, num_layers: int, **groups: Any) -> None:
    """Add a loss of a layer (from 1) to what a loop prints of them; ``groups``: ``reduce_group`` or ``avg_group``."""
    if hasattr(moe_utils, "get_moe_metrics_tracker"):
        moe_utils.get_moe_metrics_tracker().record(name, value, layer, num_layers, **groups)
    else:
        moe_utils.save_to_aux_losses_tracker(name, value, layer, num_layers, **groups)
