"""What pydantic says of a user's values, in parts that our messages are made of."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple, TypeVar, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, GetCoreSchemaHandler, ValidationError
from pydantic_core import PydanticKnownError, core_schema

from ..errors import EvenloadError, nearest, shorten, shown

Described = TypeVar("Described", bound=BaseModel)


OFF_IS_A_WORD = BeforeValidator(lambda value: "off" if value is False else value)
"""For settings of which one is off: YAML reads a bare ``off`` as false."""


class Frozen(BaseModel):
    """Values that do not change: no others than the fields, and numbers that are finite."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class OneOf:
    """Annotates a string that is one of the names that are known when it is read, where `Literal` fixes them."""

    def __init__(self, known: Collection[str]) -> None:
        self._known = known

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        return core_schema.no_info_plain_validator_function(self._check)

    def __get_pydantic_json_schema__(self, schema: Any, handler: Any) -> dict[str, Any]:
        return {"enum": list(self._known), "type": "string"}

    def _check(self, value: Any) -> Any:
        if not self._known or (isinstance(value, str) and value in self._known):
            return value
        *most, last = map(repr, self._known)
        raise PydanticKnownError("literal_error", {"expected": f"{', '.join(most)} or {last}" if most else last})


class Fault(NamedTuple):
    """The first fault of a report."""

    path: tuple[str, ...]
    """Keys from the top level to the value."""
    value: str
    """What was found there, as `errors.shown` has it."""
    says: str
    """What is wrong with it."""
    known: tuple[str, ...] | None
    """The keys that exist where there is one too many; None where the key is right and the value is not."""
    more: int
    """Number of further faults."""

    @property
    def key(self) -> str:
        """The path as one types it: ``plugins.packing.max_tokens``."""
        return shorten(".".join(self.path)) or "the whole"


UNSHOWN = "\0"
"""Begins tags of alternatives, which are no part of a key."""


def first_fault(error: ValidationError, schema: type[BaseModel]) -> Fault:
    """The first fault of a value that is no ``schema``."""
    fault = error.errors(include_url=False, include_context=False)[0]
    path = tuple(str(part) for part in fault["loc"] if not str(part).startswith(UNSHOWN))
    if fault["type"] == "model_type":  # a whole section
        keys = ", ".join(_fields(schema, path))
        fault["msg"] = f"leave {'.'.join(path)} out for what is so by default, or set keys below it: {keys}"
    known = _fields(schema, path[:-1]) if fault["type"] == "extra_forbidden" else None
    return Fault(path, shown(fault["input"]), shorten(fault["msg"]), known, error.error_count() - 1)


def refused(
    error: ValidationError,
    schema: type[BaseModel],
    whole: str,
    elsewhere: Mapping[str, str] | None = None,
    more: Mapping[str, str] | None = None,
) -> EvenloadError:
    """What is wrong with a file that a user wrote, by its first fault; ``whole``: what the file is called,
    ``elsewhere``: what says here what keys of other tools say; ``more``: by section, why a key may not be known."""
    fault = first_fault(error, schema)
    rest = f" (and {fault.more} more)" if fault.more else ""
    if fault.known is None:
        return EvenloadError(f"{fault.key} is not valid{rest}", fault.value, fault.says)
    *above, last = fault.path or ("",)
    where = shorten(".".join(above)) or whole
    detail = shorten(f"{fault.key} = {fault.value}")
    ours = (elsewhere or {}).get(last)
    if ours and not ours.startswith(fault.key):
        do = f"that is {ours} here"
    else:
        do = nearest(last, fault.known) + (more or {}).get(where, "")
    return EvenloadError(f"{where} has no key {shown(last)}{rest}", detail, do)


def described(
    data: Any, schema: type[Described], fault: str, do: str, error_type: type[EvenloadError] = EvenloadError
) -> Described:
    """What a file holds as a ``schema``. Raises the error with ``fault``, the first wrong value, and ``do``."""
    try:
        return schema.model_validate(data)
    except ValidationError as error:
        first = first_fault(error, schema)
        raise error_type(fault, shorten(f"{first.key}: {first.value}: {first.says}"), do) from error


def _fields(schema: Any, path: tuple[str, ...]) -> tuple[str, ...]:
    """Names of the fields at a path through models; none where it leads through anything else."""
    for part in path:
        field = getattr(schema, "model_fields", {}).get(part)
        if field is not None:  # else a name or a place in a collection of sections
            schema = next(iter(sections_in(field.annotation)), field.annotation)
    return tuple(getattr(schema, "model_fields", ()))


def sections_in(kind: Any) -> list[type[BaseModel]]:
    """The sections that a field of this type holds: one that may be null, or those of a collection."""
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return [kind]
    return [section for inner in get_args(kind) for section in sections_in(inner)]
