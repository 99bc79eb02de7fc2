"""Kernels of the first hour: the right ones are exact, each wrong one is off, and one that dies is said."""

from dataclasses import replace

import pytest
import torch
from evenload.commands.first_hour import kernels
from evenload.runtime.attention.blocks import BLOCKS
from evenload.runtime.attention.kernels import KERNELS

CPU, BF16, DIM = torch.device("cpu"), torch.bfloat16, 64
SDPA, PLAIN = KERNELS[-1], BLOCKS[-1]
OFF = torch.tensor([[0], [1]])


def status(monkeypatch, run, window=None):
    """What is said of a kernel of whole samples."""
    kernel = replace(SDPA, run=run)
    case = lambda *inputs: kernels._whole(kernel, window, *inputs)  # noqa: E731
    return str(kernels._row(kernel, "a pack", case, (BF16, CPU, DIM))["status"])


def test_what_a_cpu_has_is_exact_and_what_it_has_not_is_said(monkeypatch):
    monkeypatch.setattr(kernels, "DTYPES", (BF16,))
    monkeypatch.setattr(kernels, "HEAD_DIMS", (DIM,))
    rows = kernels.check(CPU)["rows"]
    said = {status: {row["kernel"] for row in rows if row["status"] == status} for status in ("exact", "not here")}
    assert said["exact"] == {"sdpa", "torch_cpu", "plain", "grouped product"}
    assert {"flash_attn", "transformer_engine"} <= said["not here"]
    assert not {row["status"] for row in rows} & {"off", "failed"}
    assert all(0 < row["error"] < row["bound"] for row in rows if row["status"] == "exact")
    assert len({row["case"] for row in rows}) == 6


WRONG = {
    "scale": lambda call: call._replace(scale=call.scale * 1.2),
    "borders": lambda call: call._replace(
        segments=(0, call.segments[-1]),
        cu_seqlens=torch.tensor([0, call.segments[-1]], dtype=torch.int32),
        max_seqlen=call.segments[-1],
    ),
    "key heads": lambda call: call._replace(k_TGD=call.k_TGD.flip(1)),
    "value heads": lambda call: call._replace(v_TGD=call.v_TGD.flip(1)),
}


@pytest.mark.parametrize("fault", WRONG)
def test_a_wrong_kernel_is_off(monkeypatch, fault):
    assert status(monkeypatch, lambda call: SDPA.run(WRONG[fault](call))) == "off"


def test_a_window_of_one_key_too_many_is_off(monkeypatch):
    def wider(call):
        return SDPA.run(call._replace(window=call.window + 1))

    assert status(monkeypatch, SDPA.run, 100) == "exact"
    assert status(monkeypatch, wider, 100) == "off"


def test_no_number_is_off_and_what_dies_is_said(monkeypatch):
    def dies(call):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    assert status(monkeypatch, lambda call: SDPA.run(call) * float("nan")) == "off"
    row = kernels._row(
        SDPA, "a pack", lambda *inputs: kernels._whole(replace(SDPA, run=dies), None, *inputs), (BF16, CPU, DIM)
    )
    assert (row["status"], row["why"]) == (
        "failed",
        "RuntimeError: CUDA error: an illegal memory access was encountered",
    )


@pytest.mark.parametrize("place", range(3))
def test_a_wrong_gradient_of_a_block_is_off(place):
    def backward(*arguments):
        grads = list(PLAIN.backward(*arguments))
        grads[place] = grads[place] * 1.03
        return tuple(grads)

    wrong = replace(PLAIN, backward=backward)
    error = [kernels._part(one, True, None, BF16, CPU, DIM) for one in (PLAIN, wrong)]
    assert error[0] < kernels.ROUNDINGS * torch.finfo(BF16).eps < error[1]


def test_a_product_that_loses_an_expert_is_off(monkeypatch):
    right = kernels.grouped_mm
    monkeypatch.setattr(kernels, "grouped_mm", lambda x, w, offs: right(x, w[[0, 1, 1, 3]], offs=offs))
    assert kernels._grouped(BF16, CPU, DIM) > 0.1
