"""What a program asks of a tensor: where it is, to be moved, to be read by the host."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors
from torch.utils._pytree import tree_iter

from . import streams
from .ledger import asker, bytes_to_device, note, refuse
from .storages import CPU, device, is_pinned, on_device, pin, put

_local = threading.local()


def asked() -> bool | None:
    """Whether the call that runs asked for the device; None: it did not say."""
    stack = getattr(_local, "asked", None)
    return stack[-1] if stack else None


def inside() -> bool:
    """Whether a function of tensors on the device runs, whose own masks and zeros lie beside them."""
    return getattr(_local, "inside", 0) > 0


@contextmanager
def asking(on_gpu: bool) -> Any:
    """Tensors made in here lie on the device, or on the host."""
    stack = _local.__dict__.setdefault("asked", [])
    stack.append(on_gpu)
    try:
        yield
    finally:
        stack.pop()


def device_named(name: Any) -> torch.device | None:
    """The device that an argument names, if it names one."""
    if isinstance(name, bool) or name is None:
        return None
    if isinstance(name, int):
        return torch.device("cuda", name)
    if isinstance(name, str):
        try:
            return torch.device(name)
        except RuntimeError:
            return None
    return name if isinstance(name, torch.device) else None


class Functions(TorchFunctionMode):
    """Answers for tensors on the device, and what names a device."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.backward:
            with self:  # what Python runs in the backward asks, too
                return _backward(*args, **kwargs)
        named = device_named(kwargs.get("device"))
        if named is None and kwargs.get("pin_memory"):
            named = CPU
        if named is None and func in FACTORIES:
            with asking(False):
                return func(*args, **kwargs)
        if named is None or named.type == "meta" or func is torch.Generator:
            if not any(isinstance(x, Tensor) and on_device(x) for x in args):
                return func(*args, **kwargs)
            _local.inside = getattr(_local, "inside", 0) + 1
            try:
                return func(*args, **kwargs)
            finally:
                _local.inside -= 1
        return made_on(func, named, args, kwargs)


def _backward(
    x: Tensor, gradient: Any = None, retain_graph: Any = None, create_graph: bool = False, inputs: Any = None
) -> None:
    torch.autograd.backward(x, gradient, retain_graph, create_graph, inputs=inputs)


def made_on(func: Any, named: torch.device, args: Any, kwargs: Any) -> Any:
    """A factory's result on the device that it was asked for."""
    kwargs = {**kwargs, "device": CPU}
    pinned = kwargs.pop("pin_memory", False)
    gpu = named.type == "cuda"
    if gpu:
        refuse_others(named)
    with asking(gpu):
        out = func(*args, **kwargs)
    for tensor in tree_iter(out):
        if isinstance(tensor, Tensor):
            if gpu:
                put(tensor)
                if func in FROM_HOST and not (isinstance(args[0], Tensor) and on_device(args[0])):
                    copied(tensor, waits=True)
            elif pinned:
                pin(tensor)
    return out


def refuse_others(named: torch.device) -> None:
    """Refuse the device of another rank; without a number it is the one that this thread has set. Who is no rank may
    use all, which are one here."""
    if "LOCAL_RANK" not in os.environ:
        return
    index = torch.cuda.current_device() if named.index is None else named.index
    if index != device().index:
        raise refuse(f"a tensor on cuda:{index}, which is another rank's")


def copied(tensor: Tensor, waits: bool) -> None:
    """Note a copy to the device; from memory that is not page-locked, or blocking, the host waits for it."""
    note("to_device", "waits" if waits else "runs beside")
    bytes_to_device[asker()] += tensor.numel() * tensor.element_size()


class Moved(torch.autograd.Function):
    """A copy on the other side, whose gradient comes back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gpu: bool, dtype: torch.dtype | None) -> Tensor:
        ctx.gpu, ctx.dtype = on_device(x), x.dtype
        return move(x.detach(), gpu, dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return move(grads[0], ctx.gpu, ctx.dtype), None, None


def move(x: Tensor, gpu: bool, dtype: torch.dtype | None = None, non_blocking: bool = False) -> Tensor:
    """A copy of the tensor on the device, or on the host."""
    with asking(gpu):
        out = torch.empty_like(x, dtype=dtype, device=CPU)
    if gpu:
        put(out)
    elif non_blocking:
        pin(out)  # as torch does it
    out.copy_(x, non_blocking=non_blocking)
    return out


def moved(x: Tensor, gpu: bool, dtype: torch.dtype | None = None, non_blocking: bool = False) -> Tensor:
    if x.requires_grad and torch.is_grad_enabled():
        out: Tensor = Moved.apply(x, gpu, dtype)
        return out
    return move(x, gpu, dtype, non_blocking)


def _to(func: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    rest = list(args)
    target = device_named(kwargs.pop("device", None))
    if rest and isinstance(rest[0], Tensor):
        target = device() if on_device(rest[0]) else CPU
        rest[0] = rest[0].dtype
    elif rest and target is None:
        target = device_named(rest[0])
        rest = rest[1:] if target is not None or rest[0] is None else rest
    if target is None or target.type == "meta":
        return func(x, *rest, **kwargs, **({} if target is None else {"device": target}))
    if target.type == "cuda":
        refuse_others(target)
    gpu = target.type == "cuda"
    if on_device(x) == gpu:
        flags = [value for value in rest if not isinstance(value, bool)]
        kwargs.pop("non_blocking", None)
        copy = kwargs.get("copy", False) or (len(rest) > len(flags) and rest[-1] is True and len(rest) >= 3)
        if not flags and not kwargs.get("dtype") and not copy and "memory_format" not in kwargs:
            return x
        return func(x, *flags, **{**kwargs, "copy": copy})
    dtype = next((value for value in rest if isinstance(value, torch.dtype)), kwargs.get("dtype"))
    flags = [value for value in rest if isinstance(value, bool)]
    return moved(x, gpu, dtype, bool(kwargs.get("non_blocking", flags[0] if flags else False)))


def _cuda(func: Any, x: Tensor, where: Any = None, non_blocking: bool = False, **_: Any) -> Tensor:
    refuse_others(device_named(where) or torch.device("cuda"))
    return x if on_device(x) else moved(x, True, non_blocking=non_blocking)


def _cpu(func: Any, x: Tensor, *_: Any, **__: Any) -> Tensor:
    return moved(x, False) if on_device(x) else x


def _numpy(func: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    if on_device(x):
        if not kwargs.get("force"):
            note("faults", "NumPy of a tensor on the device")
            raise TypeError("can't convert cuda device type tensor to numpy. Use Tensor.cpu() first.")
        x = _cpu(func, x.detach())
    if not is_pinned(x):  # of which it is a view, read when a copy has come
        streams.host_touches([x], [], "the host")
    return func(x, *args, **kwargs)


def _tolist(func: Any, x: Tensor) -> Any:
    if on_device(x):
        streams.asks(streams.current(), [x], [], "tolist")
        streams.host_waits("tolist")
        streams.current().run_to(streams.current().asked)
    else:
        streams.host_touches([x], [], "the host")
    return func(x)


def _new_tensor(func: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    kwargs = {"device": device() if on_device(x) else CPU, **kwargs}
    out: Tensor = made_on(func, device_named(kwargs["device"]), (x, *args), kwargs)
    if on_device(out):
        copied(out, waits=True)
    return out


def _new(func: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    named = device_named(kwargs.get("device"))
    return func(x, *args, **kwargs) if named is None else made_on(func, named, (x, *args), kwargs)


def _pin(func: Any, x: Tensor, *_: Any, **__: Any) -> Tensor:
    if on_device(x):
        raise refuse("page-locked memory of a tensor on the device")
    return x if is_pinned(x) else pin(x.clone())


def _type(func: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    if args or kwargs:
        named = args[0] if args else kwargs["dtype"]
        if isinstance(named, str) and named.startswith("torch.cuda."):
            return moved(func(x, named.replace("torch.cuda.", "torch.")), True)
        return func(x, *args, **kwargs)
    answer = func(x)
    return answer.replace("torch.", "torch.cuda.") if on_device(x) else answer


FACTORIES = {
    torch.zeros, torch.ones, torch.empty, torch.full, torch.arange, torch.linspace, torch.tensor, torch.rand, torch.eye,
    torch.randn, torch.randint, torch.randperm, torch.empty_strided, torch.as_tensor, torch.from_numpy, torch.asarray,
    torch.frombuffer, torch.scalar_tensor,
}  # fmt: skip
"""What a program makes on the host if it names no device; the zeros of a backward pass are made by torch itself."""

FROM_HOST = {torch.tensor, torch.as_tensor, torch.asarray}
"""Those that copy what the host has; as they are before others stand in their place."""

METHODS: dict[str, Callable[..., Any]] = {
    "to": _to,
    "cuda": _cuda,
    "cpu": _cpu,
    "numpy": _numpy,
    "__array__": _numpy,
    "tolist": _tolist,
    "pin_memory": _pin,
    "new_tensor": _new_tensor,
    **dict.fromkeys(("new_empty", "new_zeros", "new_ones", "new_full"), _new),
    "is_pinned": lambda f, x, *_, **__: is_pinned(x),
    "type": _type,
    "get_device": lambda f, x: device().index if on_device(x) else f(x),
    "record_stream": lambda f, x, stream: streams.recorded(x, stream),
}
PROPERTIES: dict[str, Callable[..., Any]] = {
    "device": lambda f, x: device() if on_device(x) else f(x),
    "is_cuda": lambda f, x: on_device(x),
    "is_cpu": lambda f, x: not on_device(x) and f(x),
}


def install() -> None:
    """Let tensors answer, also where torch calls Python from within a function and modes are off: hooks, backwards."""
    for name, own in METHODS.items():
        setattr(Tensor, name, _method(getattr(Tensor, name), own))
    _device_constructors()  # what `with torch.device(...)` looks for is remembered as it is before
    for factory in FACTORIES:
        setattr(torch, factory.__name__, _made(factory))
    for name, own in PROPERTIES.items():
        setattr(Tensor, name, property(partial(own, _plain(getattr(Tensor, name).__get__))))


def _plain(original: Any) -> Callable[..., Any]:
    """Torch's own, to which no mode is asked: a mode would be handed what stands in its place now."""

    def call(*args: Any, **kwargs: Any) -> Any:
        with torch._C.DisableTorchFunction():
            return original(*args, **kwargs)

    return call


def _method(original: Any, own: Callable[..., Any]) -> Callable[..., Any]:
    original = _plain(original)

    def method(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        return own(original, self, *args, **kwargs)

    return method


def _made(factory: Any) -> Callable[..., Any]:
    """A factory of torch for code that runs where modes are off, such as an operator of torch's own."""

    @wraps(factory)
    def make(*args: Any, **kwargs: Any) -> Any:
        named, pinned = device_named(kwargs.get("device")), kwargs.get("pin_memory")
        if torch._C._len_torch_function_stack() or not (pinned or (named and named.type == "cuda")):
            return factory(*args, **kwargs)
        return made_on(factory, named or CPU, args, kwargs)

    return make
