"""Faults in what trainers share, planted around a run of a host: a proof that none of them can fail proves nothing."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from evenload.runtime.attention import pack as pack_module
from evenload.runtime.attention.pack import IGNORE, Pack
from evenload.runtime.attention.prefix import PrefixStore
from evenload.runtime.attention.sharing.ring import Ring
from evenload.runtime.stage.deferred import WgradStore
from evenload.runtime.stage.executor import Executor
from evenload.runtime.stage.tape import Tape
from evenload.runtime.world.plane import Pending

Planted = Callable[[], AbstractContextManager[Any]]


def fault(name: str = "") -> Planted:
    """What plants the fault of this name, one of `FAULTS`; without a name nothing."""
    return FAULTS[name] if name else nullcontext


def around(place: Any, attribute: str, changed: Callable[..., Any]) -> AbstractContextManager[Any]:
    """``changed(stock, ...)`` is called in place of a function."""
    stock = getattr(place, attribute)
    return patch.object(place, attribute, lambda *args, **named: changed(stock, *args, **named))


@contextmanager
def changed_packs(change: Callable[..., Pack]) -> Iterator[None]:
    """Trainers get ``change(pack, micro_batch, build)`` for each pack; ``build`` makes that of another micro-batch."""
    stock = pack_module.build_pack

    def changed(micro_batch: Any, *args: Any, **named: Any) -> Pack:
        return change(stock(micro_batch, *args, **named), micro_batch, lambda other: stock(other, *args, **named))

    with ExitStack() as stack:
        for name, module in list(sys.modules.items()):
            if name.startswith("evenload.integrations.") and vars(module).get("build_pack") is stock:
                stack.enter_context(patch.object(module, "build_pack", changed))
        yield


def _restarted_positions(pack: Pack, *_: Any) -> Pack:
    return _shifted(pack, lambda start: start)


def _positions_of_pieces(pack: Pack, *_: Any) -> Pack:
    """Every piece counts from the start of its neighbour, as if the pieces of a rank were one."""
    return _shifted(pack, lambda start: start // 2)


def _shifted(pack: Pack, by: Callable[[int], int]) -> Pack:
    positions = pack.positions_T.clone()
    for piece, first in zip(pack.slices, pack.segments, strict=False):
        positions[first : first + piece.length] -= by(piece.start)
    return replace(pack, positions_T=positions)


def _restarted_inside(pack: Pack, *_: Any) -> Pack:
    """In the middle of a sequence: a shift of all its positions would change nothing, since RoPE is relative."""
    middle, end = pack.segments[1] // 2, pack.segments[1]
    positions = pack.positions_T.clone()
    positions[middle:end] -= middle
    return replace(pack, positions_T=positions)


def _moved_border(pack: Pack, *_: Any) -> Pack:
    if len(pack.slices) < 2:
        return pack
    cu_seqlens = pack.cu_seqlens.clone()
    cu_seqlens[1] += 1
    return replace(pack, cu_seqlens=cu_seqlens, segments=tuple(cu_seqlens.tolist()))


def _dropped_token(pack: Pack, *_: Any) -> Pack:
    labels = pack.labels_T.clone()
    labels[0] = IGNORE
    return replace(pack, labels_T=labels, num_targets=int((labels != IGNORE).sum()))


def _border_labels(pack: Pack, *_: Any) -> Pack:
    """The last token of every piece has no target, as if its sequence ended there."""
    labels = pack.labels_T.clone()
    for piece, first in zip(pack.slices, pack.segments, strict=False):
        labels[first + piece.length - 1] = IGNORE
    return replace(pack, labels_T=labels, num_targets=int((labels != IGNORE).sum()))


def _wrong_place(pack: Pack, micro_batch: Any, build: Any) -> Pack:
    """The first two ranks that share have each other's tokens, where their pieces are as long."""
    if pack.shared is None:
        return pack
    first, second, *others = micro_batch.ranks
    other = build(micro_batch._replace(ranks=(second, first, *others)))
    return replace(other, shared=pack.shared) if other.segments == pack.segments else pack


def _settle_own_only(settle: Any, store: Any, layer: int, piece: Any, dk: Any, dv: Any) -> Any:
    """The gradients of a slice without what later slices left for it."""
    own = dk[piece.start :].clone(), dv[piece.start :].clone()
    settle(store, layer, piece, dk, dv)
    return own


def _booked_twice(with_graph: Any, executor: Any, action: Any, loaded: Any, received: Any) -> Any:
    if action.kind == "recompute_forward":
        with torch.no_grad():
            executor._trainer.forward(loaded, received, action)
    return with_graph(executor, action, loaded, received)


def _without_grad(replay: Any, executor: Any, action: Any) -> Any:
    with torch.no_grad():
        return replay(executor, action)


def _weights_of_nothing(run: Any, store: Any, number: int) -> None:
    store._left[number] = [item._replace(dy=torch.zeros_like(item.dy)) for item in store._left[number]]
    run(store, number)


def _shifted_tape(gather: Any, tape: Any, slices: Any, segments: Any, like: Any, **named: Any) -> Any:
    return like.copy_(gather(tape, slices, segments, like, **named).roll(1, 0))


def _lost_hop(which: int) -> Planted:
    """What comes in a ring's hops counts as nothing: keys and values (0), or their gradients (1)."""

    def pass_on(stock: Any, ring: Any, message: Any, hop: int, kind: int) -> Any:
        coming = stock(ring, message, hop, kind)
        return (lambda: torch.zeros_like(coming())) if kind == which else coming

    return lambda: around(Ring, "_pass_on", pass_on)


@contextmanager
def _lost_message(where: str) -> Iterator[None]:
    """The first tensor that comes from another rank in a kind of pass is nothing but zeros, once a step."""
    looks = [False]

    def running(run: Any, executor: Any, action: Any) -> None:
        looks[0] = action.op.micro_batch == 0
        run(executor, action)
        looks[0] = False

    def losing(wait: Any, pending: Any) -> Any:
        came = wait(pending)
        floats = [t for t in came.values() if t.is_floating_point()]
        if looks[0] and floats:
            floats[0].zero_()
            looks[0] = False
        return came

    with around(Executor, where, running), around(Pending, "wait", losing):
        yield


FAULTS: dict[str, Planted] = {
    **{
        name: lambda change=change: changed_packs(change)  # type: ignore[misc]
        for name, change in {
            "restarted positions": _restarted_positions,
            "restarted position": _restarted_inside,
            "positions of pieces": _positions_of_pieces,
            "moved border": _moved_border,
            "dropped token": _dropped_token,
            "labels at borders": _border_labels,
            "wrong place": _wrong_place,
        }.items()
    },
    "dropped accumulator": lambda: around(PrefixStore, "settle", _settle_own_only),
    "loss booked twice": lambda: around(Executor, "_with_graph", _booked_twice),
    "replay without grad": lambda: around(Executor, "_recompute_forward", _without_grad),
    "weights of nothing": lambda: around(WgradStore, "run", _weights_of_nothing),
    "shifted tape": lambda: around(Tape, "gather", _shifted_tape),
    "lost keys": _lost_hop(0),
    "lost gradients of keys": _lost_hop(1),
    "lost in forward": lambda: _lost_message("_forward"),
    "lost in backward": lambda: _lost_message("_backward"),
}
