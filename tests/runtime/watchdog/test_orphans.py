"""A process that asked for it ends with the one that started it."""

import signal
import subprocess
import sys
import time
from pathlib import Path

CHILD = """
import time
from evenload.runtime.watchdog.orphans import die_with_parent
die_with_parent()
print("ready", flush=True)
time.sleep(1000)
"""
PARENT = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdout=subprocess.PIPE, text=True)
child.stdout.readline()
print(child.pid, flush=True)
time.sleep(1000)
"""


def runs(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_it_ends_when_its_parent_is_killed():
    command = [sys.executable, "-c", PARENT, CHILD]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        child = int(parent.stdout.readline())
        assert runs(child)
    finally:
        parent.send_signal(signal.SIGKILL)
        parent.communicate()
    patience = time.monotonic() + 30
    while runs(child):
        assert time.monotonic() < patience
        time.sleep(0.01)
