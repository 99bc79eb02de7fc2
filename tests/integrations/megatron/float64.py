"""Float64 where trainers insist on float32, so that a proof may ask for more digits."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode


def all_in_float64() -> Any:
    """Inside, norms, routers and cross-entropy are computed in float64 where their inputs are."""

    class Float64(TorchFunctionMode):
        def __torch_function__(self, function: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = dict(kwargs or {})
            casts = (torch.Tensor.to, torch.Tensor.float, torch.nn.functional.softmax, torch.softmax)
            if function in casts and isinstance(args[0], torch.Tensor) and args[0].dtype == torch.float64:
                if function is torch.Tensor.float:
                    return args[0]
                args = tuple(torch.float64 if arg is torch.float32 else arg for arg in args)
                kwargs |= {"dtype": torch.float64} if kwargs.get("dtype") is torch.float32 else {}
            return function(*args, **kwargs)

    return Float64()
