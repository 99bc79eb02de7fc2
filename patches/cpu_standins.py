"""What Megatron-Core meets in place of CUDA on a machine without it: everything on the CPU, in order, at once."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch

from ..core.errors import EvenloadError

CPU = torch.device("cpu")

_FACTORIES = ("arange", "empty", "full", "ones", "rand", "randint", "randn", "tensor", "zeros")
_LIKE = ("empty_like", "full_like", "ones_like", "rand_like", "randn_like", "zeros_like")


class _Done:
    """Takes any arguments; on the CPU every operation has finished when it returns, so there is nothing to wait for."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def synchronize(self, *args: Any) -> None:
        pass

    def query(self) -> bool:
        return True


class Stream(_Done):
    """A stream that is always empty."""

    wait_stream = wait_event = _Done.synchronize

    def record_event(self, event: Any = None) -> Any:
        return event or Event()


class Event(_Done):
    """An event that has always happened. It measures no time: `elapsed_time` is 0 ms."""

    record = wait = _Done.synchronize

    def elapsed_time(self, end: Any) -> float:
        return 0.0


_STREAM = Stream()


def current_device() -> torch.device:
    return CPU


def synchronize(device: Any = None) -> None:
    pass


def only_stream(device: Any = None) -> Stream:
    return _STREAM


@contextmanager
def stream_context(stream: Any) -> Iterator[None]:
    yield


def manual_seed(seed: Any) -> torch.Generator:
    return torch.default_generator.manual_seed(int(seed))


def get_rng_state(device: Any = "cuda", clone: bool = False, graph_safe: bool = False) -> torch.Tensor:
    return torch.get_rng_state()


def set_rng_state(new_state: torch.Tensor, device: Any = -1, graph_safe: bool = False) -> None:
    torch.set_rng_state(new_state)


def _called_by_megatron() -> bool:
    """Whether the caller of our caller is Megatron's code."""
    return str(sys._getframe(2).f_globals.get("__name__", "")).startswith("megatron.")


def type_method(original: Any) -> Callable[..., Any]:
    """``Tensor.type`` that calls a CPU tensor ``torch.cuda.X`` to Megatron, whose optimizer asserts on that string."""

    def type(self: Any, *args: Any, **kwargs: Any) -> Any:
        answer = original(self, *args, **kwargs)
        if isinstance(answer, str) and self.device.type == "cpu" and _called_by_megatron():
            return answer.replace("torch.", "torch.cuda.", 1)
        return answer

    return type


def cuda_method(original: Any) -> Callable[..., Any]:
    """``Tensor.cuda`` that leaves the tensor where it is for Megatron and fails as usual for everybody else."""

    def cuda(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self if _called_by_megatron() else original(self, *args, **kwargs)

    return cuda


class TorchOnCpu(ModuleType):
    """What a Megatron module sees as ``torch``: tensor factories asked for CUDA or pinned memory give plain CPU memory.

    Everything else is torch's own, looked up at each use.
    """

    def __init__(self) -> None:
        super().__init__("torch")
        for name in (*_FACTORIES, *_LIKE):
            setattr(self, name, _on_cpu(getattr(torch, name)))

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def _on_cpu(factory: Callable[..., Any]) -> Callable[..., Any]:
    def on_cpu(*args: Any, **kwargs: Any) -> Any:
        if str(kwargs.get("device")).startswith("cuda"):
            kwargs["device"] = CPU
        kwargs.pop("pin_memory", None)
        return factory(*args, **kwargs)

    return on_cpu


TORCH_ON_CPU = TorchOnCpu()


def to_numpy_without_cuda(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``maybe_move_tensor_to_cpu`` that keeps its promise of numpy for tensors that are on the CPU already."""

    def call(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        if torch.is_tensor(tensor) and not tensor.is_cuda:
            return tensor.detach().numpy() if as_numpy else tensor
        return wrapped(tensor, as_numpy, record_stream)

    return call(*args, **kwargs)


def init_data_on_cpu(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``ShardedTensor.init_data(device, ...)`` on the CPU where CUDA was asked for."""

    def call(device: Any, *rest: Any, **options: Any) -> Any:
        return wrapped(CPU if str(device).startswith("cuda") else device, *rest, **options)

    return call(*args, **kwargs)


class _WithoutTriton(ModuleType):
    """A module of kernels that cannot be imported here: it has every name, as a function that raises."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def needs_triton(*args: Any, **kwargs: Any) -> Any:
            raise EvenloadError(
                "a kernel of Megatron-Core cannot run without Triton", name, "set moe_paged_stash=False, or use a GPU"
            )

        return needs_triton


MODULE_WITHOUT_TRITON = _WithoutTriton("megatron.core.transformer.moe.without_triton")


class _LoggingWithoutRngWarning(ModuleType):
    """What ``tensor_parallel.random`` sees as ``logging``: no warning that the CPU generator moved. Under the bridge
    the CPU generator *is* the tracked one, so it moves at every dropout."""

    def getLogger(self, name: str) -> logging.Logger:  # noqa: N802
        quiet = logging.Logger(name)
        quiet.parent = logging.getLogger(name)
        quiet.addFilter(lambda record: "CPU RNG state changed" not in record.getMessage())
        return quiet

    def __getattr__(self, name: str) -> Any:
        return getattr(logging, name)


LOGGING_WITHOUT_RNG_WARNING = _LoggingWithoutRngWarning("logging")


def gather_unlike_parts(wrapped: Any, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """All ranks' rows, one rank after the other: each rank's filled up to those of the longest."""

    def gathered(input_: torch.Tensor, group: Any, output_split_sizes: Any = None, *buffer: Any) -> torch.Tensor:
        if output_split_sizes is None or group.size() == 1:
            return wrapped(*args, **kwargs)  # type: ignore[no-any-return]
        padded = input_.new_zeros(max(output_split_sizes), *input_.shape[1:])
        padded[: len(input_)] = input_
        parts = [torch.empty_like(padded) for _ in output_split_sizes]
        torch.distributed.all_gather(parts, padded, group=group)
        return torch.cat([part[:rows] for part, rows in zip(parts, output_split_sizes, strict=True)])

    return gathered(*args, **{name: value for name, value in kwargs.items() if name != "use_global_buffer"})


def reduce_unlike_parts(wrapped: Any, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """This rank's rows of the sum over ranks, which is formed whole."""

    def reduced(input_: torch.Tensor, group: Any, input_split_sizes: Any = None, *buffer: Any) -> torch.Tensor:
        if input_split_sizes is None or group.size() == 1:
            return wrapped(*args, **kwargs)  # type: ignore[no-any-return]
        total = input_.clone()
        torch.distributed.all_reduce(total, group=group)
        own: torch.Tensor = torch.split(total, input_split_sizes)[group.rank()].clone()
        return own

    return reduced(*args, **{name: value for name, value in kwargs.items() if name != "use_global_buffer"})
