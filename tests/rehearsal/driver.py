"""The answers of `torch.cuda`, and the start of a rehearsal."""

from __future__ import annotations

import atexit
import os
import threading
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from . import functions, groups, kernels, ledger, streams
from .functions import Functions, asking
from .ops import Ops
from .storages import Books, device, on_device, put_storage, storage_on_device

BYTES = 141 << 30
NAME = "NVIDIA H200, rehearsed on a CPU: no second here means anything"


def _number(*_: Any, **__: Any) -> int:
    return int(device().index or 0)


def _synchronize(*_: Any, **__: Any) -> None:
    streams.host_waits("torch.cuda.synchronize")
    for stream in list(streams.EVERY):
        stream.run_to(stream.asked)


_PROPERTIES = SimpleNamespace(
    name=NAME, major=9, minor=0, total_memory=BYTES, multi_processor_count=132, gcnArchName="", warp_size=32, uuid="",
    is_integrated=False, max_threads_per_multi_processor=2048, regs_per_multiprocessor=65536, L2_cache_size=50 << 20,
)  # fmt: skip
_memory = defaultdict(int)

ANSWERS: dict[str, Any] = {
    "is_available": lambda: True,
    "is_initialized": lambda: True,
    "init": lambda: None,
    "_lazy_init": lambda: None,
    "device_count": lambda: int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("REHEARSAL_GPUS", "1")),
    "current_device": _number,
    "set_device": lambda d: None,
    "synchronize": _synchronize,
    "Stream": streams.Stream,
    "Event": streams.Event,
    "current_stream": streams.current,
    "default_stream": lambda *_, **__: streams.Stream.main,
    "stream": streams.inside,
    "set_stream": streams.set_current,
    "memory_allocated": lambda *_, **__: Books.allocated,
    "max_memory_allocated": lambda *_, **__: Books.peak,
    "memory_reserved": lambda *_, **__: Books.allocated,
    "max_memory_reserved": lambda *_, **__: Books.peak,
    "memory_stats": lambda *_, **__: _memory,
    "reset_peak_memory_stats": lambda *_, **__: Books.restart(),
    "mem_get_info": lambda *_, **__: (BYTES - Books.allocated, BYTES),
    "get_device_properties": lambda *_, **__: _PROPERTIES,
    "get_device_capability": lambda *_, **__: (9, 0),
    "get_device_name": lambda *_, **__: NAME,
    "get_arch_list": lambda: ["sm_90"],
    "empty_cache": lambda: None,
    "ipc_collect": lambda: None,
    "utilization": lambda *_, **__: 0,
    "is_current_stream_capturing": streams.is_capturing,
    "CUDAGraph": streams.Graph,
    "graph": streams.capture,
    "is_bf16_supported": lambda *_, **__: True,
    "can_device_access_peer": lambda *_: True,
}

RANDOM: dict[str, Any] = {
    "manual_seed": lambda seed: torch.default_generator.manual_seed(int(seed)),
    "manual_seed_all": lambda seed: torch.default_generator.manual_seed(int(seed)),
    "seed": lambda: torch.default_generator.seed(),
    "initial_seed": lambda: torch.default_generator.initial_seed(),
    "get_rng_state": lambda device=None: torch.random.get_rng_state(),
    "get_rng_state_all": lambda: [torch.random.get_rng_state()],
    "set_rng_state": lambda state, device=None: torch.random.set_rng_state(state),
    "set_rng_state_all": lambda states: torch.random.set_rng_state(states[0]),
}


def install() -> None:
    """From here on this process, its threads and its forks have a GPU. Before the hosts are imported."""
    cuda = torch.cuda
    for name, answer in {**ANSWERS, **RANDOM}.items():
        setattr(cuda, name, answer)
    for name, answer in RANDOM.items():
        setattr(torch.cuda.random, name, answer)
    torch.Stream = torch.cuda.Stream  # type: ignore[misc, assignment]
    cuda.default_generators = tuple(torch.default_generator for _ in range(8))
    cuda.nccl.version = lambda: (2, 27, 3)
    for name in ("range_push", "range_pop", "mark"):
        setattr(cuda.nvtx, name, lambda *_, **__: None)
    torch.backends.cuda.is_flash_attention_available = lambda: True
    functions.install()
    _storages()
    _autocast()
    kernels.install()
    groups.install()
    _reducer()
    _threads()
    Functions().__enter__()
    Ops().__enter__()
    atexit.register(ledger.write)
    leave = os._exit

    def exit_now(code: int) -> Any:
        ledger.write()
        leave(code)

    os._exit = exit_now


def _storages() -> None:
    """Storages answer for themselves where a checkpoint asks them."""
    kind = torch.UntypedStorage

    def clone(self: Any) -> Any:
        return kind(self.nbytes()).copy_(self)

    def cloned(self: Any) -> Any:
        return put_storage(clone(self)) if storage_on_device(self) else clone(self)

    kind.clone = cloned  # type: ignore[method-assign]
    kind.device = property(lambda s: device() if storage_on_device(s) else torch.device("cpu"))  # type: ignore[assignment]
    kind.is_cuda = property(storage_on_device)  # type: ignore[assignment]
    kind.cpu = lambda s: clone(s)  # type: ignore[method-assign, assignment]
    kind.cuda = lambda s, *_, **__: put_storage(clone(s))  # type: ignore[method-assign, assignment]
    kind.to = lambda s, *, device, non_blocking=False: (  # type: ignore[method-assign, assignment]
        put_storage(clone(s)) if torch.device(device).type == "cuda" else clone(s)
    )
    torch.serialization._validate_device = lambda location, backend: torch.device(location)


def _autocast() -> None:
    """Autocast of "cuda" is that of the CPU, which runs the ops."""
    start = torch.autocast.__init__

    def init(self: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
        start(self, "cpu" if device_type == "cuda" else device_type, *args, **kwargs)

    torch.autocast.__init__ = init  # type: ignore[method-assign]


def _reducer() -> None:
    """DDP makes its buckets in C++, on the device of its parameters."""
    kind = dist.Reducer

    def reducer(parameters: Any, *args: Any, **kwargs: Any) -> Any:
        parameters = list(parameters)
        with asking(any(map(on_device, parameters))):
            return kind(parameters, *args, **kwargs)

    dist.Reducer = reducer  # type: ignore[misc, assignment]


def _threads() -> None:
    """Modes are a thread's own: each thread that starts enters them."""
    run = threading.Thread._bootstrap_inner  # type: ignore[attr-defined]

    def bootstrap(self: Any) -> None:
        with Functions(), Ops():
            run(self)

    threading.Thread._bootstrap_inner = bootstrap  # type: ignore[attr-defined]
