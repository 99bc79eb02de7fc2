"""What is checked before Megatron-Core is touched; no process is started and Megatron-Core is not imported."""

from __future__ import annotations

import pytest
import torch
from evenload.core.errors import EvenloadError
from evenload.integrations.megatron.base import setup


def _installed(monkeypatch, version):
    monkeypatch.setattr(setup, "is_installed", lambda name: version is not None)
    monkeypatch.setattr(setup, "version_of", lambda name: version)
    monkeypatch.setattr(setup, "describe_version", lambda name: f"{name} {version}")


@pytest.mark.parametrize("version", ["0.15.3", "0.16.0", "0.20.0"])
def test_another_version_is_refused(monkeypatch, version):
    _installed(monkeypatch, version)
    with pytest.raises(EvenloadError) as caught:
        setup.check_host()
    assert caught.value.found == f"megatron-core {version}"
    assert "pip install" in caught.value.do


def test_a_missing_host_is_told(monkeypatch):
    _installed(monkeypatch, None)
    with pytest.raises(EvenloadError, match="not installed"):
        setup.check_host()


def test_a_machine_without_cuda_is_told_of_the_bridge(monkeypatch):
    def no_cuda():
        raise AssertionError("Torch not compiled with CUDA enabled")

    _installed(monkeypatch, "0.16.1")
    monkeypatch.setattr(torch.cuda, "current_device", no_cuda)
    with pytest.raises(EvenloadError) as caught:
        setup.check_host()
    assert "bridge_cpu" in caught.value.do
