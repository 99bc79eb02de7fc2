"""Attributes that have other values for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def with_attributes(target: Any, **values: Any) -> Iterator[None]:
    """Inside, the attributes of ``target`` have these values; then those again that they had before."""
    before = {name: getattr(target, name) for name in values}
    try:
        for name, value in values.items():
            setattr(target, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(target, name, value)
