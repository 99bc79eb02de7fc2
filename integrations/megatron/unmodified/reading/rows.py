"""Rows of TensorDicts, as verl's engine gives them to Megatron's schedule: taken apart, moved, and reassembled.

A row has ragged values (nested tensors in jagged layout: ``input_ids``, ``loss_mask``), values of one shape in all
rows, and objects. What is no row's but the batch's, such as ``batch_num_tokens``, must be the same in all batches of a
step, for rows leave theirs. Known by what they can do: the package tensordict is not imported.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from .....core.errors import EvenloadError
from .....runtime.world.agreement import on_host

INPUT = "input_ids"
MASK = "attention_mask"
Value = TypeVar("Value")


class Row(NamedTuple):
    """One row of a TensorDict."""

    ragged: dict[str, Tensor]
    """[L] or [L, ...] each."""
    rest: Any
    """A TensorDict of one row with all other values."""

    @property
    def length(self) -> int:
        """Tokens of the sample, without padding."""
        if INPUT in self.ragged:
            return len(self.ragged[INPUT])
        mask = self.rest.get(MASK, None)
        return int((mask != 0).sum()) if mask is not None else int(self.rest.get(INPUT).shape[-1])

    def cpu(self) -> Row:
        """On the CPU, without the memory of other rows."""
        return Row({key: value.detach().cpu().clone() for key, value in self.ragged.items()}, self.rest.cpu().clone())


def holds_rows(batch: Any) -> bool:
    """Whether a batch is a TensorDict with input ids."""
    return hasattr(batch, "batch_size") and hasattr(batch, "select") and INPUT in set(batch.keys())


def rows_of(batch: Any) -> list[Row]:
    """The rows of a TensorDict. Raises EvenloadError for values that do not belong to rows."""
    if len(batch.batch_size) != 1 or not batch.batch_size[0]:
        raise EvenloadError(
            "a TensorDict has not one dimension of rows",
            f"batch_size {list(batch.batch_size)}",
            "give micro-batches of at least one row each, batch_size=[rows]",
        )
    ragged: dict[str, Sequence[Tensor]] = {}
    of_batch = []
    for key in sorted(batch.keys()):
        value = batch.get(key)
        if isinstance(value, Tensor) and value.is_nested:
            ragged[key] = _unbound(key, value)
        elif _is_of_batch(value):
            of_batch.append(key)
        elif hasattr(value, "keys") and not type(value).__name__.startswith("NonTensor"):
            raise EvenloadError(
                "a TensorDict holds another one, whose rows are not moved",
                f"{key} {type(value).__name__}",
                "give its values keys of their own, or disable evenload's plugins",
            )
    rest = batch.exclude(*ragged, *of_batch)
    return [Row({key: value[i] for key, value in ragged.items()}, rest[i : i + 1]) for i in range(batch.batch_size[0])]


def of_batch(batch: Any) -> dict[str, Any]:
    """What is the batch's and no row's, as far as it can be compared."""
    values = {key: batch[key] for key in sorted(batch.keys()) if _is_of_batch(batch.get(key))}
    return {key: value for key, value in values.items() if isinstance(value, (bool, int, float, str, type(None)))}


def joined(rows: Sequence[Row], like: Any) -> Any:
    """A TensorDict of these rows, with what is the batch's from ``like``. Raises EvenloadError where rows differ in
    their keys, or in the shape of what is not ragged."""
    first = rows[0]
    for row in rows:
        _refuse_different(first, row)
    where = like.get(INPUT).device
    batch: Any = torch.cat([row.rest.to(where) for row in rows], 0)
    if like.device is None:
        batch.clear_device_()
    for key in first.ragged:
        batch.set(key, torch.nested.as_nested_tensor([row.ragged[key].to(where) for row in rows], layout=torch.jagged))
    for key in sorted(like.keys()):
        if _is_of_batch(value := like.get(key)):
            batch.set(key, type(value)(value.data, batch_size=[len(rows)]))
    return batch


def refuse_uncommon(batches: Sequence[Mapping[str, Any]]) -> None:
    """Raise EvenloadError where what is the batch's (`of_batch`, of all ranks) differs: rows are to change batches."""
    for key in sorted(set().union(*batches)):
        values = sorted({repr(batch.get(key)) for batch in batches})
        if len(values) > 1:
            raise EvenloadError(
                "micro-batches of a step say different things of all their rows, and rows change micro-batches",
                f"{key} {', '.join(values[:4])}",
                f"give {key} the same value on all ranks and in all micro-batches, or give each row its own",
            )


def exchange_objects(
    own: Mapping[int, Value], source: Sequence[int], target: Sequence[int], group: Any
) -> dict[int, Value]:
    """What this rank is to have, by place. Collective; what stays is not copied.

    Args:
        own: what this rank has, by place: picklable, with tensors on the CPU.
        source, target: rank in ``group`` that has, and that is to have, what belongs to each place; the same on all.
    """
    group = on_host(group)
    me, ranks = dist.get_rank(group), range(dist.get_world_size(group))
    parcels = [pickle.dumps({i: own[i] for i in own if target[i] == rank != me}) for rank in ranks]
    sizes = torch.tensor([len(parcel) for parcel in parcels])
    coming = torch.empty_like(sizes)
    dist.all_to_all_single(coming, sizes, group=group)
    sent = torch.frombuffer(bytearray(b"".join(parcels)), dtype=torch.uint8)
    received = sent.new_empty(int(coming.sum()))
    dist.all_to_all_single(received, sent, coming.tolist(), sizes.tolist(), group=group)
    values = {i: own[i] for i in own if target[i] == me}
    for part in torch.split(received, coming.tolist()):
        values |= pickle.loads(part.numpy().tobytes())
    assert values.keys() == {i for i, rank in enumerate(target) if rank == me}, (sorted(values), source)
    return values


def _unbound(key: str, value: Tensor) -> Sequence[Tensor]:
    if value.layout != torch.jagged or getattr(value, "_ragged_idx", 1) != 1:
        raise EvenloadError(
            "rows of a nested tensor cannot be told apart",
            f"{key}: layout {value.layout}, ragged dimension {getattr(value, '_ragged_idx', '?')}",
            "make it with torch.nested.as_nested_tensor(..., layout=torch.jagged), ragged in the dimension of tokens",
        )
    return value.unbind()


def _is_of_batch(value: Any) -> bool:
    return type(value).__name__ == "NonTensorData"


def _refuse_different(first: Row, other: Row) -> None:
    here, there = _shapes(first), _shapes(other)
    if odd := sorted(key for key in here.keys() | there.keys() if here.get(key) != there.get(key)):
        raise EvenloadError(
            "rows of different micro-batches cannot lie in one TensorDict",
            "; ".join(f"{key}: {here.get(key, 'missing')} and {there.get(key, 'missing')}" for key in odd[:4]),
            "pad all micro-batches of a step alike, or give ragged values as nested tensors",
        )


def _shapes(row: Row) -> dict[str, str]:
    rest = {key: str(list(getattr(row.rest.get(key), "shape", ()))) for key in sorted(row.rest.keys())}
    return dict.fromkeys(row.ragged, "ragged") | rest
