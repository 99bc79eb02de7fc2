"""Process groups of a rank that runs many cases: made once, taken again by the next case that makes the same.

Making and destroying a gloo group takes some 6 CPU ms, and a host makes more than forty. Each also listens on a device
of its own, whose thread polls a hundred times a second for as long as the group is there. Here all groups of a process
share one device, and `GroupPool` keeps those that a case has destroyed for the next one. They are gloo's own groups,
and no two users have the same group at a time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import GroupMember, ProcessGroupGloo


class _OnOneDevice(type):
    """Of a class that makes gloo groups of this process on one device, and is otherwise gloo's own."""

    _device: Any = None

    def __call__(cls, store: Any, rank: int, size: int, timeout: Any) -> Any:
        if cls._device is None:
            cls._device = ProcessGroupGloo.create_default_device()
        options = ProcessGroupGloo._Options()
        options._devices, options._timeout = [cls._device], timeout
        return ProcessGroupGloo(store, rank, size, options)

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, ProcessGroupGloo)

    def __getattr__(cls, name: str) -> Any:
        return getattr(ProcessGroupGloo, name)


def share_device() -> None:
    """All gloo groups that this process and its forks make from now on share a device, one a process."""

    class OnOneDevice(metaclass=_OnOneDevice):
        pass

    distributed_c10d.ProcessGroupGloo = OnOneDevice  # type: ignore[assignment, misc]


_BOOKS = ("pg_map", "pg_names", "pg_group_ranks", "pg_backend_config", "pg_to_tag")
"""What torch keeps of each group, by group."""

Key = tuple[Any, ...]


@dataclass
class _Made:
    """A group that this case has made or taken; of a rank outside of it, that it is there."""

    key: Key
    group: Any
    books: dict[str, Any] = field(default_factory=dict)
    """Of a group that was destroyed."""
    kept: bool = False
    """Its user is to live on after the case."""

    @property
    def is_open(self) -> bool:
        return self.group is not GroupMember.NON_GROUP_MEMBER and not self.books


class GroupPool:
    """Takes the place of ``torch.distributed.new_group`` and ``destroy_process_group`` in a rank.

    All ranks make groups in the same order, so the pools of all ranks agree. Groups that only some ranks know of
    (``use_local_synchronization``) are not pooled.
    """

    def __init__(self) -> None:
        self._idle: dict[Key, list[_Made]] = defaultdict(list)
        self._made: list[_Made] = []
        self._new, self._destroy = dist.new_group, dist.destroy_process_group
        for module in (dist, distributed_c10d):
            module.new_group, module.destroy_process_group = self.new_group, self.destroy  # type: ignore[assignment]

    def new_group(
        self,
        ranks: Iterable[int] | None = None,
        timeout: Any = None,
        backend: str | None = None,
        pg_options: Any = None,
        use_local_synchronization: bool = False,
        group_desc: str | None = None,
        device_id: Any = None,
    ) -> Any:
        """As torch's; a group of an earlier case where it made the same and has destroyed it."""
        ranks = None if ranks is None else list(ranks)
        how = (ranks, timeout, backend, pg_options, use_local_synchronization, group_desc, device_id)
        if use_local_synchronization or pg_options is not None or device_id is not None:
            return self._new(*how)
        key = (None if ranks is None else tuple(ranks), timeout, backend, group_desc)
        made = self._idle[key].pop(0) if self._idle[key] else _Made(key, self._new(*how))
        for book, entry in made.books.items():
            getattr(distributed_c10d._world, book)[made.group] = entry
        made.books = {}
        self._made.append(made)
        return made.group

    def destroy(self, group: Any = None) -> None:
        """As torch's, but the group is kept for a later case."""
        made = next((one for one in self._made if one.group is group and one.is_open), None)
        if group is None or made is None:
            self._destroy(group)
            return
        world = distributed_c10d._world
        made.books = {book: getattr(world, book).pop(group) for book in _BOOKS}
        world.pg_coalesce_state.pop(group, None)

    def keep(self, *holders: Any) -> None:
        """Groups in these modules, or all that are open, are not left open by the case: their users live on."""
        held = {id(group) for holder in holders for value in vars(holder).values() for group in _groups_in(value)}
        for made in self._made:
            made.kept = made.is_open and (made.kept or not holders or id(made.group) in held)

    def open_places(self) -> list[int]:
        """Places of the open groups in the order in which all ranks have made them."""
        return [place for place, made in enumerate(self._made) if made.is_open]

    def left_open(self) -> list[str]:
        """Those that nobody keeps, in words."""
        return [f"ranks {made.key[0] or 'all'}: {made.key[3]}" for made in self._made if made.is_open and not made.kept]

    def settle(self, open_places: Iterable[int]) -> None:
        """The case has ended on every rank; the groups at these places are still open on some rank."""
        still = set(open_places)
        for place, made in enumerate(self._made):
            if place not in still:
                self._idle[made.key].append(made)
        self._made = [made for place, made in enumerate(self._made) if place in still]


def _groups_in(value: Any) -> Iterator[dist.ProcessGroup]:
    if isinstance(value, dist.ProcessGroup):
        yield value
    elif isinstance(value, (dict, list, tuple, set)):
        for entry in value.values() if isinstance(value, dict) else value:
            yield from _groups_in(entry)


@contextmanager
def giving_groups_back() -> Iterator[None]:
    """Destroy the process groups that DeepSpeed makes inside and leaves, but for those that its modules keep."""
    from deepspeed.comm import comm
    from deepspeed.utils import groups

    new, made = dist.new_group, list[Any]()

    def recorded(*how: Any, **named: Any) -> Any:
        made.append(new(*how, **named))
        return made[-1]

    with patch.object(dist, "new_group", recorded):
        yield
    kept = {id(group) for module in (groups, comm) for value in vars(module).values() for group in _groups_in(value)}
    for group in made:
        if id(group) not in kept and group in distributed_c10d._world.pg_map:
            dist.destroy_process_group(group)
