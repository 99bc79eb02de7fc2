"""Attributes that have other values for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def with_attributes(target: Any, **values: Any) -> Iterator[None]:
    """Inside, the attributes of ``target`` have these values, then those again that they had; what the class alone has,
    a method that is overridden here, is the class's again, and what a class inherits its parent's."""
    of_class = target if isinstance(target, type) else type(target)
    own = {name: vars(target)[name] for name in values if name in vars(target)}
    before = own | {name: getattr(target, name) for name in values if name not in own and not hasattr(of_class, name)}
    try:
        for name, value in values.items():
            setattr(target, name, value)
        yield
    finally:
        for name in values:
            if name in before:
                setattr(target, name, before[name])
            else:
                delattr(target, name)
