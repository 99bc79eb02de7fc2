"""What the busy clock counts: its own work, forward and backward apart, and no waiting."""

import time

import pytest
import torch
from evenload.runtime.measure.busy import Busy, BusyClock, cpu_clock

CPU = torch.device("cpu")


@pytest.fixture
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


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


@pytest.mark.parametrize("kind", ["R", "W"])
def test_replays_and_weight_gradients_are_parts_of_the_backward(one_thread, kind):
    clock = BusyClock(CPU)
    x = torch.randn(256, 256)
    with clock.running(kind, 1):
        x @ x
    found = clock.read()
    assert found.forward_s == 0
    assert found.backward_s > 0


def test_an_output_without_gradient_is_not_watched():
    BusyClock(CPU).watch_backward(torch.zeros(3))


def test_waiting_is_not_counted(one_thread):
    clock = BusyClock(CPU)
    with clock.running("F"):
        time.sleep(0.3)
    assert clock.read().forward_s < 0.1


def test_spans_lie_on_the_wall_clock_and_are_kept_only_on_request(one_thread):
    for record in (True, False):
        clock = BusyClock(CPU, record=record)
        x = torch.randn(64, 64, requires_grad=True)
        time.sleep(0.02)
        with clock.running("R", 3):
            output = x @ x
            time.sleep(0.02)
        clock.watch_backward(output, 4)
        output.sum().backward()
        with clock.noting("G"):
            time.sleep(0.02)
        spans = clock.spans(1, 2)
        assert clock.read().forward_s == 0, "a forward that is run again is part of backward"
        if not record:
            assert spans == ()
            continue
        again, backward, gradients = spans
        assert again[:4] == (1, 2, "R", 3)
        assert backward[:4] == (1, 2, "B", 4)
        assert gradients[:4] == (1, 2, "G", -1)
        assert 0.02 <= again.start_s <= again.end_s - 0.02
        assert again.end_s <= backward.start_s < backward.end_s <= gradients.start_s
        assert clock.read().total_s < gradients.end_s - 0.04, "waiting is on the wall clock and not in the sums"


def test_several_threads_are_timed_by_the_wall(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    assert cpu_clock() is time.perf_counter
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert cpu_clock() is time.thread_time
