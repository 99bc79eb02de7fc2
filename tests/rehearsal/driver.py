"""The answers of `torch.cuda`, and the start of a rehearsal."""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections import defaultdict
from importlib.util import find_spec
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from . import backwards, clocks, functions, graphs, groups, kernels, ledger, streams
from .functions import Functions, asking
from .ops import Ops
from .storages import device, memory, on_device, put_storage, storage_on_device

BYTES = 141 << 30
NAME = "NVIDIA H200, rehearsed on a CPU: no second here means anything"


WATCHERS = ("evenload-watchdog", "evenload-plan")
"""Threads that must go on where a device is stuck, by how their names begin."""
HARMLESS = {"is_available", "is_initialized", "device_count"}
"""Answers that a driver gives without a device."""
_set = threading.local()


def set_device(where: Any) -> None:
    """Of this thread."""
    _set.number = torch.device(where).index if isinstance(where, str) else getattr(where, "index", where)


def current_device(*_: Any, **__: Any) -> int:
    return int(getattr(_set, "number", 0))


def _unwatched(name: str, answer: Any) -> Any:
    """The answer, but for threads that may not ask."""
    if isinstance(answer, type) or name in HARMLESS:
        return answer

    def ask(*args: Any, **kwargs: Any) -> Any:
        refuse_watchers(f"torch.cuda.{name}")
        return answer(*args, **kwargs)

    return ask


def refuse_watchers(what: str) -> None:
    thread = threading.current_thread().name
    if thread.startswith(WATCHERS):
        raise ledger.refuse(f"{what} in a thread that watches or plans ({thread})")


def _synchronize(*_: Any, **__: Any) -> None:
    for stream in list(streams.EVERY):
        stream.run_to(stream.asked)
    clocks.host_waits_for_all()
    streams.host_waits("torch.cuda.synchronize", clock=clocks.clock_of(clocks.HOST))


_PROPERTIES = SimpleNamespace(
    name=NAME, major=9, minor=0, total_memory=BYTES, multi_processor_count=132, gcnArchName="", warp_size=32, uuid="",
    is_integrated=False, max_threads_per_multi_processor=2048, regs_per_multiprocessor=65536, L2_cache_size=50 << 20,
)  # fmt: skip

ANSWERS: dict[str, Any] = {
    "is_available": lambda: True,
    "is_initialized": lambda: True,
    "init": lambda: None,
    "_lazy_init": lambda: None,
    "device_count": lambda: int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("REHEARSAL_GPUS", "1")),
    "current_device": current_device,
    "set_device": set_device,
    "synchronize": _synchronize,
    "Stream": streams.Stream,
    "Event": streams.Event,
    "current_stream": streams.current,
    "default_stream": lambda *_, **__: streams.Stream.main,
    "stream": streams.inside,
    "set_stream": streams.set_current,
    "memory_allocated": lambda *_, **__: memory().taken,
    "max_memory_allocated": lambda *_, **__: memory().peak_taken,
    "memory_reserved": lambda *_, **__: memory().reserved,
    "max_memory_reserved": lambda *_, **__: memory().peak_reserved,
    "memory_stats": lambda *_, **__: defaultdict(int, num_alloc_retries=memory().flushes),
    "reset_peak_memory_stats": lambda *_, **__: memory().restart(),
    "mem_get_info": lambda *_, **__: (BYTES - memory().reserved, BYTES),
    "get_device_properties": lambda *_, **__: _PROPERTIES,
    "get_device_capability": lambda *_, **__: (9, 0),
    "get_device_name": lambda *_, **__: NAME,
    "get_arch_list": lambda: ["sm_90"],
    "empty_cache": lambda: None,
    "ipc_collect": lambda: None,
    "utilization": lambda *_, **__: 0,
    "is_current_stream_capturing": lambda: streams.graph_captured() is not None,
    "CUDAGraph": graphs.Graph,
    "graph": graphs.capture,
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
    clocks.before_asked.append(lambda: refuse_watchers("work of the device"))
    for name, answer in {**ANSWERS, **RANDOM}.items():
        setattr(cuda, name, _unwatched(name, answer))
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
    _triton()
    groups.install()
    backwards.install()
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


def _triton() -> None:
    """It comes with torch's builds for CUDA: the module of Megatron-Core that cannot be imported without it."""
    if not find_spec("triton"):
        for module in ("paged_stash", "ops.paged_stash"):
            name = f"megatron.core.transformer.moe.{module}"
            sys.modules[name] = _NoKernels(name)


class _NoKernels(ModuleType):
    """Has every name, as something that nothing here calls."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return None


def _autocast() -> None:
    """Autocast of "cuda" is that of the CPU, which runs the ops."""
    start = torch.autocast.__init__

    def init(self: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
        start(self, "cpu" if device_type == "cuda" else device_type, *args, **kwargs)

    torch.autocast.__init__ = init  # type: ignore[method-assign]


def _reducer() -> None:
    """DDP makes its buckets in C++, on the device of its parameters."""

    class Reducer(dist.Reducer):  # type: ignore[misc]
        def __init__(self, parameters: Any, *args: Any, **kwargs: Any) -> None:
            parameters = list(parameters)
            self._there = any(map(on_device, parameters))
            with asking(self._there):
                super().__init__(parameters, *args, **kwargs)

        def _rebuild_buckets(self) -> Any:
            with asking(self._there):
                return super()._rebuild_buckets()

    dist.Reducer = Reducer  # type: ignore[misc, assignment]


def _threads() -> None:
    """Modes are a thread's own: each thread that starts enters them."""
    run = threading.Thread._bootstrap_inner  # type: ignore[attr-defined]

    def bootstrap(self: Any) -> None:
        with Functions(), Ops():
            run(self)

    threading.Thread._bootstrap_inner = bootstrap  # type: ignore[attr-defined]
