"""A name for each attempt of a job that torchrun restarts.

The agent's store outlives an attempt, with the addresses of dead ranks and the failure that ended them. Its count of
restarts names no attempt: every node's agent counts its own failures. So each rank draws a word, rank 0 puts the words
together, and the name holds once every rank has found its own among them. What a dead rank wrote is overwritten by the
one in its place, and a dead rank does not agree.
"""

from __future__ import annotations

import os
import sys
import time
import uuid
from hashlib import blake2b

from torch.distributed import Store  # type: ignore[attr-defined]

from ...core.errors import RankError
from ..world.agreement import name_ranks
from .store_client import read_all, within

_LOOK_S = 0.05
_ASK_S = 30.0
"""Rank 0 asks after the missing ones aloud, then again after twice as long, and so on."""
_COURTESY_S = 2.0
"""The others wait longer than rank 0, which knows who is missing."""

_name = ""


def attempt() -> str:
    """What the ranks have agreed on, else torchrun's count."""
    return _name or os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")


def agree_on_attempt(store: Store, rank: int, size: int, timeout_s: float, answer_s: float) -> str:
    """Make `attempt` a name that the ranks which are alive have in common. Collective.

    Raises RankError: a rank did not come within ``timeout_s``, or the store gave no answer for ``answer_s``.
    """
    global _name
    word, missing = uuid.uuid4().hex, [0]
    start_s, ask_s = time.monotonic(), _ASK_S
    until_s = start_s + timeout_s + (_COURTESY_S if rank else 0.0)
    while time.monotonic() < until_s:
        seen = within(answer_s, lambda: _look(store, rank, size, word))
        if seen is None:
            do = "look whether torchrun's agent, which holds the store, is stopped or has ended"
            raise RankError(f"rank {rank} gets no answer from the store of the job", f"none in {answer_s:g} s", do)
        name, missing = seen
        if name:
            _name = name
            return name
        if not rank and time.monotonic() - start_s > ask_s:
            who, waits = name_ranks(missing), f"rank 0 has waited {ask_s:g} s and gives up after {timeout_s:g} s"
            print(f"evenload: {who} of {size} did not come yet; {waits}", file=sys.stderr, flush=True)
            ask_s *= 2
        time.sleep(_LOOK_S)
    do = "look at the end of their output"
    raise RankError(f"{name_ranks(missing)} of {size} did not come", f"rank {rank} waited {timeout_s:g} s", do)


def _look(store: Store, rank: int, size: int, word: str) -> tuple[str, list[int]]:
    """The name if it holds, else nothing, and who is missing as far as this rank knows."""
    _write(store, "word", rank, word)
    words = _read(store, "words", 1)[0].split() if rank else _read(store, "word", size)
    missing = [one for one in range(size) if not words[one]] if not rank else [] if word in words else [0]
    if missing:
        return "", missing
    name = blake2b(" ".join(words).encode(), digest_size=8).hexdigest()
    _write(store, "agrees", rank, name)
    if not rank:
        _write(store, "words", 0, " ".join(words))
    names = _read(store, "name", 1) if rank else _read(store, "agrees", size)
    missing = [one for one, other in enumerate(names) if other != name]
    if not rank and not missing:
        _write(store, "name", 0, name)
    return "" if missing else name, missing


def _write(store: Store, kind: str, rank: int, text: str) -> None:
    store.set(f"evenload/attempt/{kind}/{rank}", text)


def _read(store: Store, kind: str, num_ranks: int) -> list[str]:
    """What the first so many ranks have written; empty where one has not."""
    return read_all(store, [f"evenload/attempt/{kind}/{rank}" for rank in range(num_ranks)])
