"""Each rule of the rehearsal by an act that breaks it, and one that does not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

TESTS = Path(__file__).parents[1]
ACTS: dict[str, tuple[str, str]] = {
    "an op on both sides": ("gpu + torch.ones(3)", "on both sides"),
    "an index of the device on the host": ("torch.ones(3)[torch.zeros(1, dtype=torch.int64, device='cuda')]", "both"),
    "NumPy of a tensor on the device": ("gpu.numpy()", "can't convert cuda"),
    "a device of another rank": ("torch.ones(3, device='cuda:1')", "another rank's"),
    "a host tensor in a group of cuda:nccl": (
        "dist.all_reduce(torch.ones(3), group=nccl)",
        "on the host in a group of cuda:nccl",
    ),
    "a device tensor in a group of cpu:gloo": (
        "dist.all_reduce(gpu, group=gloo)",
        "on the device in a group of cpu:gloo,cuda:gloo",
    ),
    "flash attention in float32": ("flash(torch.float32, 16)", "q of torch.float32"),
    "flash attention of an odd head": ("flash(torch.bfloat16, 12)", "head dimension 12"),
    "flash attention of a stride": ("flash(torch.bfloat16, 16, strided=True)", "not contiguous"),
    "page-locked memory that is written to while it is read": (
        "page = torch.ones(3, pin_memory=True); page.to('cuda', non_blocking=True); page.zero_();"
        "torch.cuda.synchronize()",
        "page-locked memory was written to",
    ),
}
FINE: dict[str, str] = {
    "a number on the host": "assert (gpu * torch.tensor(2.0)).sum().item() == 6",
    "an index on the host": "assert gpu[torch.tensor([0, 1])].is_cuda",
    "a gradient comes back": (
        "x = torch.ones(3, requires_grad=True); (x.cuda() * gpu).sum().backward(); assert not x.grad.is_cuda"
    ),
    "a checkpoint knows its device": (
        "import io; f = io.BytesIO(); torch.save(gpu, f); f.seek(0); assert torch.load(f).is_cuda; f.seek(0);"
        "assert not torch.load(f, map_location='cpu').is_cuda"
    ),
    "a side stream that is waited for": (
        "with torch.cuda.stream(side): y = gpu * 2\n"
        "assert y[0].item() != 2\ntorch.cuda.current_stream().wait_stream(side)\nassert y.tolist() == [2, 2, 2]"
    ),
    "an event that is waited for": (
        "with torch.cuda.stream(side): y = gpu * 2; event = side.record_event(); z = y + 1\n"
        "event.wait()\nassert y.tolist() == [2, 2, 2]\nassert z.tolist() != [3, 3, 3]"
    ),
    "memory that is freed too early": (
        "x = torch.ones(3, device='cuda')\nwith torch.cuda.stream(side): y = x * 2\n"
        "del x\nside.synchronize()\nassert y.tolist() != [2, 2, 2]"
    ),
    "memory that its stream keeps": (
        "x = torch.ones(3, device='cuda')\nx.record_stream(side)\nwith torch.cuda.stream(side): y = x * 2\n"
        "del x\nside.synchronize()\nassert y.tolist() == [2, 2, 2]"
    ),
    "a copy to the host that nobody waited for": (
        "page = torch.zeros(3, pin_memory=True)\nwith torch.cuda.stream(side): page.copy_(gpu, non_blocking=True)\n"
        "assert page.tolist() == [0, 0, 0]\nside.synchronize()\nassert page.tolist() == [1, 1, 1]"
    ),
    "a copy to the host beside the main stream": (
        "page = gpu.to('cpu', non_blocking=True); event = torch.cuda.current_stream().record_event()\n"
        "assert page.tolist() != [1, 1, 1]\nassert not event.query()\nevent.synchronize()\n"
        "assert page.tolist() == [1, 1, 1]\nassert len(ledger.counts['waits']) == 1"
    ),
    "an event that has passed": (
        "event = torch.cuda.current_stream().record_event(); gpu.sum().item(); event.synchronize()\n"
        "assert event.query()\nassert len(ledger.counts['waits']) == 1"
    ),
    "an event of a side stream that waited for the main one": (
        "page = gpu.to('cpu', non_blocking=True); own = torch.cuda.current_stream().record_event()\n"
        "side.wait_stream(torch.cuda.current_stream()); side.record_event().synchronize(); own.synchronize()\n"
        "assert page.tolist() == [1, 1, 1]\nassert len(ledger.counts['waits']) == 1"
    ),
    "an event of a side stream that did not": (
        "page = gpu.to('cpu', non_blocking=True)\nside.record_event().synchronize()\nassert page.tolist() != [1, 1, 1]"
    ),
    "a copy to the host that the device reads": (
        "page = gpu.to('cpu', non_blocking=True); assert page.to('cuda', non_blocking=True).tolist() == [1, 1, 1]"
    ),
    "a thread has the device, too": (
        "import threading; seen = []\n"
        "thread = threading.Thread(target=lambda: seen.append((gpu + 1).device.type)); thread.start(); thread.join()\n"
        "assert seen == ['cuda']"
    ),
    "a boolean index waits": "gpu[gpu > 0]; assert ledger.counts['waits']",
    "an offset does not": "gpu[:2].add_(1); assert not ledger.counts['waits']",
}
HEAD = """
import sys, os
sys.path.insert(0, {tests!r})
os.environ.update(MASTER_ADDR="127.0.0.1", LOCAL_WORLD_SIZE="2", LOCAL_RANK="0", GLOO_SOCKET_IFNAME="lo")
import rehearsal
rehearsal.install()
import torch, torch.distributed as dist
from rehearsal import ledger
from torch.nn.attention.varlen import varlen_attn
dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
nccl, gloo = dist.new_group([0], backend="nccl"), dist.new_group([0], backend="gloo")

def flash(dtype, width, strided=False):
    x = torch.ones(4, 2, width * 2, dtype=dtype, device="cuda")
    x = x[..., ::2] if strided else x[..., :width].contiguous()
    borders = torch.tensor([0, 4], dtype=torch.int32, device="cuda")
    return varlen_attn(x, x, x, borders, borders, 4, 4)

results = {{}}
for name, act in {acts!r}.items():
    gpu, side = torch.ones(3, device="cuda"), torch.cuda.Stream()
    for count in ledger.counts.values():
        count.clear()
    try:
        exec(act)
        results[name] = ""
    except Exception as error:
        results[name] = f"{{type(error).__name__}}: {{error}}"
import json
print("RESULTS" + json.dumps(results), flush=True)
os._exit(0)
"""


@pytest.fixture(scope="module")
def results() -> dict[str, str]:
    """What each act raised, all in one process."""
    acts = {name: act for name, (act, _) in ACTS.items()} | FINE
    program = HEAD.format(tests=str(TESTS), acts=acts)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert "RESULTS" in done.stdout, done.stderr[-3000:]
    found: dict[str, str] = json.loads(done.stdout.partition("RESULTS")[2])
    return found


@pytest.mark.parametrize("name", ACTS)
def test_what_cuda_refuses_is_refused(results: dict[str, str], name: str) -> None:
    assert ACTS[name][1] in results[name]


@pytest.mark.parametrize("name", FINE)
def test_what_cuda_does_is_done(results: dict[str, str], name: str) -> None:
    assert results[name] == ""


def test_collectives_in_another_order_are_noticed() -> None:
    from .groups import unlike

    same: list[Any] = [{"[0, 1] a": ["all_reduce float32", "broadcast int64"]}] * 2
    assert unlike(same) == []
    other = [same[0], {"[0, 1] a": ["broadcast int64", "all_reduce float32"]}]
    assert unlike(other) == ["[0, 1] a"]
    assert unlike([same[0], {}]) == ["[0, 1] a"]
