"""The state of each part of a Megatron optimizer, also where it was saved in another number of parts.

With expert parallelism Megatron chains two optimizers, one of them for experts, and saves the state of each under its
number; on one expert-parallel rank there is one, saved as it is. Tensors are saved by parameter and reshard by
themselves; what lies beside them, the step and the settings of parameter groups, is carried over here.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

from megatron.core.dist_checkpointing.dict_utils import merge

State = dict[Any, Any]


def states_of_parts(parts: Sequence[Any], state: State) -> list[State]:
    """What each part is to load.

    Args:
        parts: the optimizers that are to be loaded.
        state: as it came from a checkpoint: by the number of the part where there are several, here or in the
            checkpoint.
    """
    numbers = sorted(key for key in state if isinstance(key, int))
    alone = {key: value for key, value in state.items() if key not in numbers}
    if not numbers:
        return [alone]
    if not alone:
        return [state[number] for number in numbers]
    if len(parts) > 1:
        return [_adopted(part, alone, state[number]) for part, number in zip(parts, numbers, strict=True)]
    return [_adopted(parts[0], state[numbers[0]], alone)]


def _adopted(part: Any, saved: State, tensors: State) -> State:
    """The tensors of a part with what another part saved beside its own."""
    result: State = merge(deepcopy(saved), {key: value for key, value in tensors.items() if key != "param_groups"})
    holder, own = result.get("optimizer", result), part.state_dict()
    of_decay = {group["wd_mult"]: group for group in holder["param_groups"]}
    groups = own.get("optimizer", own)["param_groups"]
    kept = {"params", "is_expert_parallel"}
    holder["param_groups"] = [
        {**of_decay[group["wd_mult"]], **{key: group[key] for key in kept & group.keys()}} for group in groups
    ]
    return result
