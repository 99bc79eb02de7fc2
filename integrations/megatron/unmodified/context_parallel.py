"""Megatron's context parallelism in a loop that nobody edits: its ranks are data ranks of the plan in a training call.

Megatron cuts every sample of a batch into 2 C chunks and gives a rank of C two of them, whatever the sample's length
("zig-zag"). A plan places samples, and shares those that deserve it, over all data x context ranks instead. So inside a
training call there is one context-parallel rank:

    parallel_state      the context-parallel group is this rank alone, the tensor x context one is the tensor group:
                        what the loop's own code and Megatron's schedules ask for
    modules             wherever one of them, or its ``pg_collection``, holds these groups
    configs             ``context_parallel_size`` 1

Gradients are summed over the same ranks as ever: Megatron divides them over data x context ranks in any case. Behind
the call, also behind one that raised, all is as it was; evaluation runs as Megatron has it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from copy import copy
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state

from ....core.plan.step_plan import Slice
from ....runtime.attributes import with_attributes

_CONTEXT, _TENSOR_AND_CONTEXT = "_CONTEXT_PARALLEL_GROUP", "_TENSOR_AND_CONTEXT_PARALLEL_GROUP"
_STANDS_FOR = {_CONTEXT: "alone", "_HIERARCHICAL_CONTEXT_PARALLEL_GROUPS": "alone", _TENSOR_AND_CONTEXT: "tensor"}
"""What takes the place of each group of parallel_state."""
_NAMES = {"cp": _CONTEXT, "cp_group": _CONTEXT, "tp_cp": _TENSOR_AND_CONTEXT, "tp_cp_group": _TENSOR_AND_CONTEXT}
"""Of attributes that hold such a group."""
_COLLECTION = "pg_collection"


def columns(piece: Slice, row: int, ranks: int) -> list[tuple[int, Slice]]:
    """The parts of a slice by the context-parallel rank that has them in the stock loop.

    Args:
        row: tokens that the stock loop has of the sample, padding included, a multiple of 2 ``ranks``.
        ranks: context-parallel ranks.
    """
    if ranks == 1:
        return [(0, piece)]
    chunks, size = 2 * ranks, row // (2 * ranks)
    bounds = (
        (max(piece.start, k * size), min(piece.stop, (k + 1) * size), min(k, chunks - 1 - k)) for k in range(chunks)
    )
    return [(column, piece._replace(start=start, stop=stop)) for start, stop, column in bounds if start < stop]


class OneContextRank:
    """The groups that stand in while a training call runs, of one process."""

    def __init__(self) -> None:
        # A group of this rank alone concerns no other one, so it needs no meeting of all.
        self.alone: Any = dist.new_group([dist.get_rank()], use_local_synchronization=True)

    @contextmanager
    def inside(self, gpt: Any, configs: Iterable[Any]) -> Iterator[None]:
        """The GPTModel, whoever asks `parallel_state`, and these configs know one context-parallel rank."""
        with ExitStack() as undo:
            for owner in _owners(gpt):
                undo.enter_context(with_attributes(owner, **self._changes(owner)))
            for config in {id(one): one for one in (*configs, *_configs(gpt))}.values():
                undo.enter_context(with_attributes(config, context_parallel_size=1))
            # Last: it says what stands in for what.
            changes = {**self._changes(parallel_state), "_CONTEXT_PARALLEL_GLOBAL_RANKS": [dist.get_rank()]}
            undo.enter_context(with_attributes(parallel_state, **changes))
            yield

    def of_schedule(self, pg_collection: Any) -> Any:
        """The process groups that a loop passes to the schedule, with one context-parallel rank; None stays None."""
        if pg_collection is None:
            return None
        groups = copy(pg_collection)
        for name, stand_in in self._changes(groups).items():
            setattr(groups, name, stand_in)
        return groups

    def close(self) -> None:
        """Destroy the group. Call it with nothing under way."""
        if self.alone is not None and dist.is_initialized():
            dist.destroy_process_group(self.alone)
        self.alone = None

    def _changes(self, owner: Any) -> dict[str, Any]:
        """The attributes of ``owner`` that know of further context-parallel ranks, with what stands in for them."""
        tensor = parallel_state.get_tensor_model_parallel_group()
        megatron = {name: getattr(parallel_state, name, None) for name in _STANDS_FOR}
        changes = {}
        for name, value in vars(owner).items():
            # By name, too: a model may have been built on groups that parallel_state does not know.
            kind = next((k for k, group in megatron.items() if group is value and group is not None), _NAMES.get(name))
            if kind is not None and value is not None:
                changes[name] = self.alone if _STANDS_FOR[kind] == "alone" else tensor
        return changes


def _owners(gpt: Any) -> Iterator[Any]:
    """What may hold a process group: modules, and the collections that they share."""
    known: set[int] = set()
    for module in gpt.modules():
        for owner in (module, *(v for n, v in vars(module).items() if n.endswith(_COLLECTION) and v is not None)):
            if id(owner) not in known:
                known.add(id(owner))
                yield owner


def _configs(gpt: Any) -> Iterator[Any]:
    for module in gpt.modules():
        config = vars(module).get("config")
        if hasattr(config, "context_parallel_size"):
            yield config
