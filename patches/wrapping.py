"""The wrapper that stands in for an upstream function."""

from __future__ import annotations

from typing import Any

import wrapt

from .row import Patch
from .slots import by_path


class PatchedMethod(wrapt.BoundFunctionWrapper):  # type: ignore[type-arg]
    """A `PatchedFunction` bound to an instance or class."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        return getattr, (self._self_instance, self.__wrapped__.__name__)

    def __copy__(self, memo: Any = None) -> Any:
        return self

    __deepcopy__ = __copy__


class PatchedFunction(wrapt.FunctionWrapper):  # type: ignore[type-arg]
    """wrapt's FunctionWrapper with a plain function's manners: copied as itself and pickled by name.

    Stock wrapt refuses both. A spawned process unpickles whatever its own import finds at that name, the stock function
    unless it applies the row too; and configs that hold a patched function stay copyable.
    """

    __bound_function_wrapper__ = PatchedMethod

    def __init__(self, wrapped: Any, row: Patch) -> None:
        wrapper: Any = row.wrapper
        super().__init__(wrapped, wrapper)
        self._self_row = row

    def __reduce_ex__(self, protocol: Any) -> Any:
        return by_path, (self._self_row.target,)

    def __copy__(self, memo: Any = None) -> Any:
        return self

    __deepcopy__ = __copy__
