"""Process groups that a loop passes to Megatron's schedule, as Megatron-Bridge does.

They are passed on as they are; what evenload plans and exchanges goes over those of megatron.core.parallel_state, so
both must hold the same ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state

from .....core.errors import EvenloadError

_GROUPS: dict[str, Callable[[], Any]] = {
    "tp": parallel_state.get_tensor_model_parallel_group,
    "pp": parallel_state.get_pipeline_model_parallel_group,
    "cp": parallel_state.get_context_parallel_group,
    "dp_cp": lambda: parallel_state.get_data_parallel_group(with_context_parallel=True, partial_data_parallel=False),
}


def refuse_groups(pg_collection: Any, p2p_communicator: Any) -> None:
    """Raise EvenloadError for groups of other ranks than those of megatron.core.parallel_state."""
    handed = {name: getattr(pg_collection, name, None) for name in _GROUPS}
    handed |= {"p2p": getattr(p2p_communicator, "pp_group", None)}
    for name, group in handed.items():
        if group is None:
            continue
        own = _GROUPS["pp" if name == "p2p" else name]()
        theirs, ours = dist.get_process_group_ranks(group), dist.get_process_group_ranks(own)
        if theirs != ours:
            raise EvenloadError(
                "the schedule is handed process groups that are not those of megatron.core.parallel_state",
                f"{'p2p_communicator' if name == 'p2p' else f'pg_collection.{name}'} of ranks {theirs}, there {ours}",
                "make both of the same layout (initialize_model_parallel), or disable evenload's plugins",
            )


def collection(pg_collection: Any) -> Any:
    """The groups that Megatron's `finalize_model_grads` takes: the loop's, else those of parallel_state."""
    if pg_collection is not None:
        return pg_collection
    from megatron.core.process_groups_config import ProcessGroupCollection

    groups = ProcessGroupCollection()
    for name in ("tp", "pp", "cp", "dp_cp"):
        setattr(groups, name, _GROUPS[name]())
    # 0.19 counts the tokens of experts with biases over it.
    groups.tp_dp_cp = parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)
    groups.embd = parallel_state.get_embedding_group(check_initialized=False)
    groups.pos_embd = parallel_state.get_position_embedding_group(check_initialized=False)
    return groups
