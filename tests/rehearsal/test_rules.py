"""Each rule of the rehearsal by an act that breaks it, and one that does not."""

import json
import re

import pytest

from .conftest import said_by

pytestmark = pytest.mark.slow

HANDED = (
    "side.wait_stream(torch.cuda.current_stream())\nwith torch.cuda.stream(side): y = gpu * 2\n"
    "torch.cuda.current_stream().wait_stream(side)\n"
)
CAPTURED = "graph = torch.cuda.CUDAGraph()\nwith torch.cuda.graph(graph): y = gpu * 2\n"
ACTS = {
    "an op on both sides": ("gpu + torch.ones(3)", "on both sides"),
    "an index of the device on the host": ("torch.ones(3)[torch.zeros(1, dtype=torch.int64, device='cuda')]", "both"),
    "NumPy of a tensor on the device": ("gpu.numpy()", "can't convert cuda"),
    "a device of another rank": ("torch.ones(3, device='cuda:0')", "another rank's"),
    "a device that a thread has not set": (
        "in_thread(lambda: torch.ones(3, device='cuda'))",
        "a tensor on cuda:0, which is another rank's",
    ),
    "a watchdog that asks the device": ("in_thread(lambda: gpu + 1, 'evenload-watchdog')", "a thread that watches"),
    "a watchdog that waits for the device": (
        "in_thread(torch.cuda.synchronize, 'evenload-watchdog')",
        "torch.cuda.synchronize in a thread that watches",
    ),
    "a collective of a second thread": (
        "dist.all_reduce(gpu, group=nccl); in_thread(lambda: dist.all_reduce(gpu, group=nccl))",
        "all_reduce float32 RedOpType.SUM 3 that a second thread asks of nccl",
    ),
    "a collective of a type that NCCL does not know": (
        "dist.all_reduce(gpu.to(torch.int16), group=nccl)",
        "all_reduce of torch.int16",
    ),
    "a collective of what is not contiguous": (
        "dist.all_reduce(torch.ones(2, 3, device='cuda').T, group=nccl)",
        "all_reduce of a tensor that is not contiguous",
    ),
    "a collective that nobody waits for": (
        "work = dist.all_reduce(gpu, group=nccl, async_op=True); y = gpu * 2",
        "mul reads on the main stream what is written on nccl",
    ),
    "a tensor that is written to while it is gathered": (
        "out = torch.empty(3, device='cuda'); work = dist.all_gather_into_tensor(out, gpu, group=nccl, async_op=True);"
        "gpu.zero_()",
        "zero_ writes to on the main stream what is read on nccl",
    ),
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
        "page = torch.ones(3, pin_memory=True); there = page.to('cuda', non_blocking=True); page.zero_()",
        "zero_ writes to on the host what is read on the main stream",
    ),
    "page-locked memory that NumPy writes to while it is read": (
        "page = torch.ones(3, pin_memory=True); host = page.numpy(); there = page.to('cuda', non_blocking=True);"
        "host[0] = 2; torch.cuda.synchronize()",
        "page-locked memory was written to",
    ),
    "a side stream that does not wait for what it reads": (
        "gpu.add_(1)\nwith torch.cuda.stream(side): y = gpu * 2",
        "mul reads on stream SIDE what is written on the main stream",
    ),
    "a side stream that waits for too little": (
        "event = torch.cuda.current_stream().record_event(); gpu.add_(1); side.wait_event(event)\n"
        "with torch.cuda.stream(side): y = gpu * 2",
        "mul reads on stream SIDE what is written on the main stream",
    ),
    "a side stream that writes to what is read": (
        "y = gpu * 2\nwith torch.cuda.stream(side): gpu.zero_()",
        "zero_ writes to on stream SIDE what is",
    ),
    "a main stream that does not wait": (
        "side.wait_stream(torch.cuda.current_stream())\nwith torch.cuda.stream(side): y = gpu * 2\nz = y + 1",
        "add reads on the main stream what is written on stream SIDE",
    ),
    "a main stream that writes to what a side stream reads": (
        "side.wait_stream(torch.cuda.current_stream())\nwith torch.cuda.stream(side): y = gpu * 2\ngpu.zero_()",
        "zero_ writes to on the main stream what is read on stream SIDE",
    ),
    "memory of a side stream that the main one still reads": (
        HANDED + "z = y + 1; del y\nwith torch.cuda.stream(side): w = torch.zeros(3, device='cuda')",
        "memory of stream SIDE that was freed and that the main stream may still use",
    ),
    "a host that reads what a copy still brings": (
        "page = torch.zeros(3, pin_memory=True); page.copy_(gpu, non_blocking=True); page.sum()",
        "sum reads on the host what is written on the main stream",
    ),
    "a wait while a graph is captured": (
        "with torch.cuda.graph(torch.cuda.CUDAGraph()): (gpu * 2).sum().item()",
        "_local_scalar_dense while a graph is captured",
    ),
    "a graph on a side stream that does not wait for what it reads": (
        CAPTURED + "gpu.add_(1)\nwith torch.cuda.stream(side): graph.replay()",
        "mul reads on stream SIDE what is written on the main stream",
    ),
    "a main stream that does not wait for a graph": (
        CAPTURED + "with torch.cuda.stream(side): graph.replay()\nz = y + 1",
        "add reads on the main stream what is written on stream SIDE",
    ),
}
FINE = {
    "a context's device": "with torch.device('meta'): x = torch.empty(2)\nassert x.is_meta, x.device",
    "a gradient comes back": (
        "x = torch.ones(3, requires_grad=True); (x.cuda() * gpu).sum().backward(); assert not x.grad.is_cuda"
    ),
    "a checkpoint knows its device": (
        "import io; f = io.BytesIO(); torch.save(gpu, f); f.seek(0); assert torch.load(f).is_cuda; f.seek(0);"
        "assert not torch.load(f, map_location='cpu').is_cuda"
    ),
    "a side stream that is waited for": (
        "side.wait_stream(torch.cuda.current_stream())\nwith torch.cuda.stream(side): y = gpu * 2\n"
        "assert bytes_now(y) != [2, 2, 2]\n"
        "torch.cuda.current_stream().wait_stream(side)\nassert y.tolist() == [2, 2, 2]"
    ),
    "an event that is waited for": (
        "side.wait_stream(torch.cuda.current_stream())\n"
        "with torch.cuda.stream(side): y = gpu * 2; event = side.record_event(); z = y + 1\n"
        "event.wait()\nassert y.tolist() == [2, 2, 2]\nassert bytes_now(z) != [3, 3, 3]"
    ),
    "memory that is freed too early": (
        "x = torch.ones(3, device='cuda')\nside.wait_stream(torch.cuda.current_stream())\n"
        "with torch.cuda.stream(side): y = x * 2\n"
        "del x\nside.synchronize()\nassert y.tolist() != [2, 2, 2]"
    ),
    "memory that its stream keeps": (
        "x = torch.ones(3, device='cuda')\nx.record_stream(side); side.wait_stream(torch.cuda.current_stream())\n"
        "with torch.cuda.stream(side): y = x * 2\n"
        "del x\nside.synchronize()\nassert y.tolist() == [2, 2, 2]"
    ),
    "memory of a side stream that is kept for the main one": (
        HANDED + "y.record_stream(torch.cuda.current_stream())\nz = y + 1; del y\n"
        "with torch.cuda.stream(side): w = torch.zeros(3, device='cuda')"
    ),
    "memory of a side stream that waits for the main one": (
        HANDED + "z = y + 1; del y; side.wait_stream(torch.cuda.current_stream())\n"
        "with torch.cuda.stream(side): w = torch.zeros(3, device='cuda')"
    ),
    "a copy to the host that nobody waited for": (
        "page = torch.zeros(3, pin_memory=True); side.wait_stream(torch.cuda.current_stream())\n"
        "with torch.cuda.stream(side): page.copy_(gpu, non_blocking=True)\n"
        "assert bytes_now(page) == [0, 0, 0]\nside.synchronize()\nassert page.tolist() == [1, 1, 1]"
    ),
    "DDP asks for its buckets itself": (
        "ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 3).cuda(), process_group=nccl)\n"
        "before = len(ledger.units); ddp(gpu[None]).sum().backward()\n"
        "assert ledger.units[before]['what'] == 'c10d::allreduce_ torch.float32 12'"
    ),
    "a copy to the host beside the main stream": (
        "page = gpu.to('cpu', non_blocking=True); event = torch.cuda.current_stream().record_event()\n"
        "assert bytes_now(page) != [1, 1, 1]\nassert not event.query()\nevent.synchronize()\n"
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
        "page = gpu.to('cpu', non_blocking=True)\nside.record_event().synchronize()\n"
        "assert bytes_now(page) != [1, 1, 1]"
    ),
    "a copy to the host that the device reads": (
        "page = gpu.to('cpu', non_blocking=True); assert page.to('cuda', non_blocking=True).tolist() == [1, 1, 1]"
    ),
    "a thread has the device, too": (
        "import threading; seen = []\n"
        "thread = threading.Thread(target=lambda: seen.append((gpu + 1).device.type)); thread.start(); thread.join()\n"
        "assert seen == ['cuda']"
    ),
    "a graph is replayed on what is there then": (
        CAPTURED + "assert bytes_now(y) != [2, 2, 2]\ngraph.replay(); assert y.tolist() == [2, 2, 2]\n"
        "gpu.add_(1); side.wait_stream(torch.cuda.current_stream())\nwith torch.cuda.stream(side): graph.replay()\n"
        "assert bytes_now(y) == [2, 2, 2]\n"
        "torch.cuda.current_stream().wait_stream(side)\nassert y.tolist() == [4, 4, 4]"
    ),
    "a boolean index waits": "gpu[gpu > 0]; assert ledger.counts['waits']",
    "a list waits on its way to the device": (
        "torch.tensor([1], device='cuda'); gpu.new_tensor([2]); assert sum(ledger.counts['to_device'].values()) == 2"
    ),
}
HEAD = """
import threading
import torch, torch.distributed as dist
torch.cuda.set_device(1)
from rehearsal import ledger, streams
from torch.nn.attention.varlen import varlen_attn
dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
nccl, gloo = dist.new_group([0], backend="nccl"), dist.new_group([0], backend="gloo")

def bytes_now(x):
    with streams.carried_out():
        return x.tolist()

def in_thread(act, name="another"):
    errors = []
    def run():
        try:
            act()
        except BaseException as error:
            errors.append(error)
    thread = threading.Thread(target=run, name=name)
    thread.start()
    thread.join()
    for error in errors:
        raise error

def flash(dtype, width, strided=False):
    x = torch.ones(4, 2, width * 2, dtype=dtype, device="cuda")
    x = x[..., ::2] if strided else x[..., :width].contiguous()
    borders = torch.tensor([0, 4], dtype=torch.int32, device="cuda")
    return varlen_attn(x, x, x, borders, borders, 4, 4)

results = {}
for name, act in json.loads(sys.argv[1]).items():
    gpu, side = torch.ones(3, device="cuda"), torch.cuda.Stream()
    for count in ledger.counts.values():
        count.clear()
    try:
        exec(act)
        results[name] = ""
    except Exception as error:
        results[name] = f"{type(error).__name__}: {error}"
print("RESULTS" + json.dumps(results), flush=True)
os._exit(0)
"""


@pytest.fixture(scope="module")
def results():
    """What each act raised, all in one process."""
    acts = {name: act for name, (act, _) in ACTS.items()} | FINE
    rank = {"MASTER_ADDR": "127.0.0.1", "LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": "1", "GLOO_SOCKET_IFNAME": "lo"}
    return json.loads(said_by(HEAD, json.dumps(acts), **rank).partition("RESULTS")[2])


@pytest.mark.parametrize("name", ACTS)
def test_what_cuda_refuses_is_refused(results, name):
    assert re.fullmatch(f".*{re.escape(ACTS[name][1]).replace('SIDE', '[0-9]+')}.*", results[name], re.DOTALL)


@pytest.mark.parametrize("name", FINE)
def test_what_cuda_does_is_done(results, name):
    assert results[name] == ""
