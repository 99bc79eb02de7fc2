"""Which moments host memory waits for, and the order in which streams are told to wait."""

from __future__ import annotations

from contextlib import contextmanager

import torch
from evenload.runtime.stage.copier import Copier, HostMemory, StreamCopier

CPU = torch.device("cpu")


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
