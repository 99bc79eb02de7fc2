"""What the busy clock counts: its own work, forward and backward apart, and no waiting."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from evenload.runtime.busy import Busy, BusyClock, cpu_clock

CPU = torch.device("cpu")


class Noted(torch.autograd.Function):
    """Identity that notes the threads of its backward."""

    threads: set[int] = set()  # noqa: RUF012

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        Noted.threads.add(threading.get_ident())
        return gradient


@pytest.fixture
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_backward_runs_in_the_calling_thread(one_thread):
    """The reason why CPU time of this thread is all of the work."""
    x = torch.randn(64, 64, requires_grad=True)
    Noted.apply(x @ x).sum().backward()
    assert Noted.threads == {threading.get_ident()}


def test_forward_and_backward_are_counted_apart(one_thread):
    clock = BusyClock(CPU)
    assert clock.read() == Busy(0.0, 0.0)
    x = torch.randn(256, 256, requires_grad=True)
    with clock.running("F"):
        output = x @ x @ x
    clock.watch_backward(output)
    forward_s, backward_s = clock.read()
    assert forward_s > 0
    assert backward_s == 0
    output.sum().backward()
    after = clock.read()
    assert after.forward_s == forward_s
    assert after.backward_s > 0
    assert after.total_s == after.forward_s + after.backward_s


def test_an_output_without_gradient_is_not_watched():
    BusyClock(CPU).watch_backward(torch.zeros(3))


def test_waiting_is_not_counted(one_thread):
    clock = BusyClock(CPU)
    with clock.running("F"):
        time.sleep(0.3)
    assert clock.read().forward_s < 0.1


def test_several_threads_are_timed_by_the_wall(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    assert cpu_clock() is time.perf_counter
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert cpu_clock() is time.thread_time
