"""What tests of commands share: verbs on warm ranks, and a machine without GPUs for processes that are started."""

import socket

import pytest
from harness.verbs import Verbs


@pytest.fixture(scope="session")
def verbs(worlds):
    """``verbs(place, "verify", "recipe.yaml", "key=value", ..., steps=1)`` on ranks that serve all tests."""
    return Verbs(worlds)


@pytest.fixture
def on_cpus(monkeypatch):
    """Processes of this case see no GPU, have a thread each, and meet on this machine alone."""
    for name, value in {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "CUDA_VISIBLE_DEVICES": ""}.items():
        monkeypatch.setenv(name, value)
    if "lo" in (name for _, name in socket.if_nameindex()):
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
