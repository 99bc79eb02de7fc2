"""Megatron's context parallelism in a loop that nobody edits: its ranks are data ranks of the plan in a training call.

Megatron cuts every sample of a batch into 2 C chunks and gives a rank of C two of them, whatever the sample's length
("zig-zag"). A plan places samples, and shares those that deserve it, over all data x context ranks instead. So inside a
training call there is one context-parallel rank:

    parallel_state      the context-parallel group is this rank alone, the tensor x context one is the tensor group:
                        what the loop's own code and Megatron's schedules ask for
    modules             wherever one of them, or its ``pg_collection``, holds these groups
    configs             ``context_parallel_size`` 1

Gradients are summed over the same ranks as usual: Megatron divides them over data x context ranks in any case. After
the call, also after one that raised, all is as it was; evaluation runs as Megatron has it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from copy import copy
from dataclasses import dataclass
from typing import Any, NoReturn

import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from .....core.errors import EvenloadError, Rule
from .....core.plan.step_plan import Slice
from .....runtime.attributes import with_attributes

_CONTEXT, _TENSOR_AND_CONTEXT = "_CONTEXT_PARALLEL_GROUP", "_TENSOR_AND_CONTEXT_PARALLEL_GROUP"
_STANDS_FOR = {_CONTEXT: "alone", "_HIERARCHICAL_CONTEXT_PARALLEL_GROUPS": "alone", _TENSOR_AND_CONTEXT: "tensor"}
"""What takes the place of each group of parallel_state."""
_NAMES = {"cp": _CONTEXT, "cp_group": _CONTEXT, "tp_cp": _TENSOR_AND_CONTEXT, "tp_cp_group": _TENSOR_AND_CONTEXT}
"""Of attributes that hold such a group."""
_SHARE = "set context_parallel_size=1 and let plugins.mesh share samples, or disable evenload's plugins"


@dataclass(frozen=True, eq=False)
class CpShards:
    """What the context-parallel ranks of the stock loop have of the sequences of a step: a *cp shard* each.

    Under the mean of micro-batch means each of these ranks divides by its own tokens with loss, and each reports them.
    """

    ranks: int
    """Context-parallel ranks."""
    rows: Sequence[int]
    """Tokens that the stock loop has of each sequence, padding included: a multiple of 2 ``ranks``."""

    @property
    def count(self) -> int:
        return len(self.rows) * self.ranks

    def number(self, sequence: int, rank: int) -> int:
        """The number of the shard that a context-parallel rank has of a sequence."""
        return sequence * self.ranks + rank

    def of(self, piece: Slice) -> list[tuple[int, Slice]]:
        """The parts of a slice, each with the number of its shard."""
        if self.ranks == 1:
            return [(piece.sequence, piece)]
        chunks = 2 * self.ranks
        size = self.rows[piece.sequence] // chunks
        bounds = [(max(piece.start, k * size), min(piece.stop, (k + 1) * size)) for k in range(chunks)]
        return [
            (self.number(piece.sequence, min(k, chunks - 1 - k)), piece._replace(start=start, stop=stop))
            for k, (start, stop) in enumerate(bounds)
            if start < stop
        ]


def rules_of_context(config: Any) -> Iterator[Rule]:
    """What is not known to compose with context-parallel ranks as data ranks."""
    if config.context_parallel_size == 1:
        return
    coefficients = config.moe_aux_loss_coeff if config.num_moe_experts else 0.0
    weighed = any(coefficients if isinstance(coefficients, (list, tuple)) else [coefficients])
    virtual = config.virtual_pipeline_model_parallel_size
    settings = (
        ("virtual_pipeline_model_parallel_size", virtual, "virtual pipeline stages are not checked there"),
        ("multi_latent_attention", config.multi_latent_attention, "latent attention is not checked there"),
        ("mtp_num_layers", config.mtp_num_layers, "multi-token prediction looks across its borders"),
        ("moe_aux_loss_coeff", weighed, "balance losses of experts are means over its parts of samples"),
        ("moe_z_loss_coeff", config.num_moe_experts and config.moe_z_loss_coeff, "the z-loss is weighed by its ranks"),
    )
    for name, value, why in settings:
        detail = f"context_parallel_size {config.context_parallel_size}, {name} {getattr(config, name)}"
        yield bool(value), f"context parallelism is taken over by the plan, and {why}", detail, _SHARE


def refuse_form(what: str) -> NoReturn:
    """Raise EvenloadError: a loop with context parallelism has batches that hold ``what`` besides rows of samples."""
    raise EvenloadError(
        "context parallelism is taken over by the plan, and only where each row of a batch is a sample",
        f"context_parallel_size {parallel_state.get_context_parallel_world_size()}, batches of {what}",
        _SHARE,
    )


def refuse_together(config: Any, why: str) -> None:
    """Raise EvenloadError for a loop with context parallelism whose micro-batches stay as they are, as ``why`` says."""
    if config.context_parallel_size > 1:
        raise EvenloadError(
            "context parallelism is taken over by the plan, and not where micro-batches stay as they are",
            f"context_parallel_size {config.context_parallel_size}, {why}",
            "set context_parallel_size=1, or disable evenload's plugins",
        )


def data_rank() -> int:
    """This rank's place among all data x context ranks, the plane of a plan."""
    return int(parallel_state.get_data_parallel_rank(with_context_parallel=True))


def targets_of_columns(loss_mask: Tensor, ranks: int) -> list[float]:
    """The sum of a batch's loss mask [b, s] on each context-parallel rank of the stock loop."""
    if ranks == 1:
        return [float(loss_mask.sum())]
    chunks = [float(chunk.sum()) for chunk in loss_mask.tensor_split(2 * ranks, dim=1)]
    return [chunks[rank] + chunks[-1 - rank] for rank in range(ranks)]


class OneContextRank:
    """The group that stands in for the context-parallel one while a training call runs, of this process."""

    def __init__(self) -> None:
        # A group of this rank alone concerns no other one, so it needs no meeting of all.
        self._alone: Any = dist.new_group([dist.get_rank()], use_local_synchronization=True)

    @contextmanager
    def inside(self, gpts: Sequence[Any], config: Any) -> Iterator[None]:
        """The GPTModels, whoever asks `parallel_state`, and this config know one context-parallel rank."""
        modules = [module for gpt in gpts for module in gpt.modules()]
        with ExitStack() as undo:
            for owner in _owners(modules):
                undo.enter_context(with_attributes(owner, **self._changes(owner)))
            configs = (config, *(vars(module).get("config") for module in modules))
            for one in {id(one): one for one in configs if hasattr(one, "context_parallel_size")}.values():
                undo.enter_context(with_attributes(one, context_parallel_size=1))
            # Last: it says what stands in for what.
            changes = {**self._changes(parallel_state), "_CONTEXT_PARALLEL_GLOBAL_RANKS": [dist.get_rank()]}
            undo.enter_context(with_attributes(parallel_state, **changes))
            yield

    def of_schedule(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """The arguments of a schedule, whose process groups, if it is handed some, have one context-parallel rank."""
        if arguments.get("pg_collection") is None:
            return arguments
        groups = copy(arguments["pg_collection"])
        for name, stand_in in self._changes(groups).items():
            setattr(groups, name, stand_in)
        return {**arguments, "pg_collection": groups}

    def close(self) -> None:
        """Destroy the group; call it with nothing under way."""
        dist.destroy_process_group(self._alone)

    def _changes(self, owner: Any) -> dict[str, Any]:
        """The attributes of ``owner`` that know of further context-parallel ranks, with what stands in for them."""
        tensor = parallel_state.get_tensor_model_parallel_group()
        megatron = {name: getattr(parallel_state, name, None) for name in _STANDS_FOR}
        changes = {}
        for name, value in vars(owner).items():
            # By name, too: a model may have been built on groups that parallel_state does not know.
            kind = next((k for k, group in megatron.items() if group is value), _NAMES.get(name))
            if kind is not None and value is not None:
                changes[name] = self._alone if _STANDS_FOR[kind] == "alone" else tensor
        return changes


def _owners(modules: Sequence[Any]) -> Iterable[Any]:
    """What may hold a process group: modules, and the collections that they share."""
    values = (item for module in modules for item in vars(module).items())
    collections = (value for name, value in values if name.endswith("pg_collection"))
    return {id(owner): owner for owner in (*modules, *collections) if owner is not None}.values()
