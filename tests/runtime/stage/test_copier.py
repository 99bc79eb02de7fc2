"""Host memory in blocks of one size, and the order in which streams are told to wait."""

from __future__ import annotations

from contextlib import contextmanager

import torch
from evenload.runtime.stage.copier import Copier, HostMemory, StreamCopier
from hypothesis import given
from hypothesis import strategies as st

CPU = torch.device("cpu")


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=12), st.integers(100, 1000), st.randoms())
def test_what_is_stored_comes_back_whatever_is_given_back_between(sizes, block, random):
    copier, held = Copier(), []
    host = HostMemory(copier, block, 4 * block)
    for size in sizes:
        taken = host.take(size)
        blocks, after = taken
        assert (len(blocks), after) == (-(-size // block), [])
        data = torch.randint(0, 256, (size,), dtype=torch.uint8)
        copier.out(data, blocks, after)
        held.append((data, blocks))
        if random.random() < 0.4:
            _, blocks = held.pop(random.randrange(len(held)))
            host.give(blocks, None)
    for data, blocks in held:
        target = torch.zeros_like(data)
        copier.back(blocks, target, [])
        assert torch.equal(target, data)
        host.give(blocks, None)
    assert len(host._free) * block == host.num_bytes
    assert host.num_bytes <= 4 * block * (1 + sum(-(-size // block) for size in sizes) // 4)


def test_only_moments_to_come_are_waited_for():
    class Half(Copier):
        def done(self, moment):
            return bool(moment == "passed")

    host = HostMemory(Half(), 10, 40)
    taken = host.take(40)
    blocks, _ = taken
    to_come = "to come"
    for block, moment in zip(blocks, (to_come, "passed", to_come, None), strict=True):
        host.give([block], moment)
    assert host.take(40) == (blocks, [to_come])


class FakeStream:
    """Writes down what is asked of it."""

    def __init__(self, log, name):
        self._log, self.name = log, name

    def wait_stream(self, other):
        self._log.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event):
        self._log.append(f"{self.name} waits for the end of {event}")


def test_streams_wait_before_they_copy(monkeypatch):
    """CUDA's calls replaced by ones that write down their order."""
    log = []
    names = iter(["out", "back"])
    main = FakeStream(log, "main")

    class Event:
        def record(self, stream):
            self.name = f"copy {stream.name}"
            log.append(f"end of {self.name}")

        def query(self):
            return False

        def __str__(self):
            return self.name

    @contextmanager
    def on(stream):
        log.append(f"on {stream.name}")
        yield

    monkeypatch.setattr(torch.cuda, "Stream", lambda device: FakeStream(log, next(names)))
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: main)
    monkeypatch.setattr(torch.cuda, "stream", on)
    copier = StreamCopier(CPU)
    source, blocks = torch.arange(10, dtype=torch.uint8), [torch.zeros(6, dtype=torch.uint8) for _ in range(2)]
    away = copier.out(source, blocks, [])
    target = torch.zeros(10, dtype=torch.uint8)
    here = copier.back(blocks, target, [away])
    copier.wait(here)
    assert torch.equal(target, source)
    assert not copier.done(here)
    assert log == [
        *("out waits for main", "on out", "end of copy out"),
        *("back waits for main", "back waits for the end of copy out", "on back", "end of copy back"),
        "main waits for the end of copy back",
    ]
