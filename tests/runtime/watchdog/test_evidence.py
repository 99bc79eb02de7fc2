"""Work is told from standing still by what a process and its children use."""

import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from evenload.runtime.watchdog.evidence import BYTES_PER_S, Meter, descendants

PATIENCE_S = 60.0
SPIN = "while True: pass"


def becomes(meter, wanted):
    """Whether the meter comes to say so. A thread of the watchdog asks it every 0.2 s, since to look is to read too."""

    def look():
        patience = time.monotonic() + PATIENCE_S
        while time.monotonic() < patience:
            time.sleep(0.2)
            if meter.works() == wanted:
                return True
        return False

    with ThreadPoolExecutor(1, thread_name_prefix="evenload-watchdog") as watchers:
        return watchers.submit(look).result()


def test_standing_still_is_no_work():
    meter = Meter()
    assert becomes(meter, False)


def test_computing_is_work():
    meter = Meter()
    start_s = time.thread_time()
    while time.thread_time() - start_s < 0.5:
        pass
    assert meter.works()


def test_what_the_watchdog_uses_is_no_work():
    stop = threading.Event()

    def spin():
        while not stop.is_set():
            pass

    thread = threading.Thread(target=spin, name="evenload-watchdog")
    thread.start()
    try:
        assert becomes(Meter(), False)
    finally:
        stop.set()
        thread.join()


def test_reading_is_work(tmp_path):
    meter = Meter()
    (tmp_path / "file").write_bytes(bytes(100 * BYTES_PER_S))
    assert meter.works()


@pytest.mark.parametrize("code", [SPIN, f"import subprocess, sys; subprocess.run([sys.executable, '-c', {SPIN!r}])"])
def test_what_children_and_theirs_compute_is_work(code):
    child = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
    try:
        meter = Meter()
        assert becomes(meter, True)
        if code is not SPIN:
            while len(descendants(child.pid)) != 1:
                time.sleep(0.05)
            assert set(descendants(os.getpid())) >= {child.pid, *descendants(child.pid)}
    finally:
        os.killpg(child.pid, 9)
        child.wait()
    assert becomes(meter, False)
