"""How large a number may be: every integer and size that a user gives is held to one of these bounds.

They lie an order of magnitude above what any machine or batch of today needs, and below where planning would run out of
time or memory, or arithmetic out of int64 and float64.

| bound | why |
|---|---|
| RANKS 2^20 | ten of the largest clusters; lists of ranks and layouts stay within memory |
| STAGES 2^10 | of a pipeline; all of them are simulated, pass by pass |
| SHARERS 2^14 | ranks of one tensor- or context-parallel group; micro-batches list those of the latter |
| LOCAL_RANKS 2^10 | processes that one machine starts; each takes hundreds of megabytes |
| SEQUENCES 2^24 | samples of a global batch, of which a planner holds a few arrays and lists |
| SAMPLES 2^27 | that documents are split into; each takes a few integers in memory |
| TOKENS 2^40 | of a sequence; products with bytes of a token stay inside float64 without loss that matters |
| MOST_TOKENS 2^60 | of all sequences together; sums stay inside int64 |
| SLICES 2^15 | of a sequence in one plan: at 8,192 tokens each they are 268 million; time grows with their number |
| LAYERS 2^14, SIZE 2^24 | of a model; products of three sizes stay inside int64 |
| STEPS 10^4 | that ``plan`` looks ahead: each is planned and simulated with every baseline |
| REPEATS 10^3 | of a step of ``bench``; steps of ``verify`` |
| EFFORT 10^6, TRIES 100 | nodes and milliseconds, or whole attempts, that a planner may search for a better plan |
| SEEDS 2^63 | generators take 64 bits, and trainers add the number of a rank |
| SECONDS 10^9 | a timer of the system takes no more |
| AMOUNT 10^24 | of any quantity in floating point; products of four of them stay inside float64 |
| LEAST 10^-50 | of any quantity but nothing; so do quotients |
"""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable, Mapping, Set
from itertools import islice
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
from pydantic import Field

from ..errors import EvenloadError, shown

RANKS = 1 << 20
LOCAL_RANKS = 1 << 10
STAGES = 1 << 10
SHARERS = 1 << 14
SEQUENCES = 1 << 24
SAMPLES = 1 << 27
TOKENS = 1 << 40
MOST_TOKENS = 1 << 60
SLICES = 1 << 15
LAYERS = 1 << 14
SIZE = 1 << 24
STEPS = 10**4
REPEATS = 10**3
EFFORT = 10**6
TRIES = 100
SEEDS = 1 << 63
SECONDS = 1e9
AMOUNT = 1e24
LEAST = 1e-50

RankCount = Annotated[int, Field(ge=1, le=RANKS)]
StageCount = Annotated[int, Field(ge=1, le=STAGES)]
SharerCount = Annotated[int, Field(ge=1, le=SHARERS)]
RankCountOrAll = Annotated[int, Field(ge=0, le=RANKS)]
"""0 means all."""
SequenceCount = Annotated[int, Field(ge=1, le=SEQUENCES)]
TokenCount = Annotated[int, Field(ge=1, le=TOKENS)]
SampleLength = Annotated[int, Field(ge=2, le=TOKENS)]
"""A token and its target, or more."""
LayerCount = Annotated[int, Field(ge=1, le=LAYERS)]
Size = Annotated[int, Field(ge=1, le=SIZE)]
SizeOrNone = Annotated[int, Field(ge=0, le=SIZE)]
"""0 means none."""
Count = Annotated[int, Field(ge=1, le=TOKENS)]
"""Of what costs nothing to count: steps of training, steps between two log lines."""
CountOrNone = Annotated[int, Field(ge=0, le=TOKENS)]
"""The same; 0 means none."""
Effort = Annotated[int, Field(ge=0, le=EFFORT)]
Tries = Annotated[int, Field(ge=0, le=TRIES)]
Seed = Annotated[int, Field(ge=0, lt=SEEDS)]
Seconds = Annotated[float, Field(gt=0, le=SECONDS)]
Milliseconds = Annotated[float, Field(gt=0, le=1e3 * SECONDS)]
Amount = Annotated[float, Field(gt=0, le=AMOUNT)]
Beta = Annotated[float, Field(ge=0, lt=1)]
"""By how much a running mean keeps to what it was."""
AmountOrNone = Annotated[float, Field(ge=0, le=AMOUNT)]
"""0 means none."""

_DIGITS = re.compile(r"[+-]?[0-9]{1,30}")


def whole_number(value: Any, name: str, most: int, *, least: int = 1, do: str = "give one") -> int:
    """``value`` if it is an integer from ``least`` to ``most``, of Python, numpy or torch.

    Raises EvenloadError, naming ``name``, for anything else, floats, booleans and texts among it.
    """
    try:
        number = least - 1 if isinstance(value, (bool, np.bool_)) else operator.index(value)
    except TypeError:
        number = least - 1
    if not least <= number <= most:
        raise EvenloadError(f"{name} is not an integer from {least} to {most}", shown(value), do)
    return number


def number_of_word(word: str, name: str, most: int, *, least: int = 1) -> int:
    """The integer from ``least`` to ``most`` that a word of the command line is. Raises EvenloadError."""
    # Python itself also reads 1_000, and the digits of every script.
    return whole_number(int(word) if _DIGITS.fullmatch(word.strip()) else word, name, most, least=least)


def lengths_of_batch(values: Any) -> npt.NDArray[np.int64]:
    """Lengths of the sequences of one batch, int64 [S] in tokens, from any list, array or iterator of integers.

    Raises:
        EvenloadError: there is none, there are too many, or one is not an integer from 1 to `TOKENS`; names its place.
    """
    if isinstance(values, (str, bytes, bytearray, Mapping, Set)) or not isinstance(values, Iterable):
        raise EvenloadError("lengths are not a list of integers", shown(values), "give tokens per sequence: [900, 40]")
    array = values if isinstance(values, np.ndarray) and values.ndim == 1 and values.dtype.kind in "iu" else None
    if array is not None and 0 < len(array) <= SEQUENCES and array.min() >= 1 and array.max() <= TOKENS:
        lengths = array.astype(np.int64)
    else:
        lengths = _lengths_of_rows(values)
    refuse_uncountable(lengths, "a batch")
    return lengths


def refuse_uncountable(lengths: npt.NDArray[np.int64], name: str) -> None:
    """Raise EvenloadError where the sum of lengths [S] would leave int64."""
    total = float(lengths.sum(dtype=np.float64))
    if total > MOST_TOKENS:
        raise EvenloadError(f"{name} holds more tokens than can be counted", f"{total:.3g}", "check the lengths")


def _lengths_of_rows(values: Iterable[Any]) -> npt.NDArray[np.int64]:
    try:
        rows = list(islice(values, SEQUENCES + 1))
    except Exception as error:  # of an iterator that is not ours
        raise EvenloadError("lengths cannot be read", shown(error), "give a list of integers") from error
    if not rows:
        raise EvenloadError("a batch needs a sequence", "no lengths", "give one length or more")
    if len(rows) > SEQUENCES:
        raise EvenloadError("a batch has too many sequences", f"more than {SEQUENCES}", "plan smaller global batches")
    return np.array([whole_number(n, f"the length of sequence {i}", TOKENS) for i, n in enumerate(rows)], np.int64)


def refuse_odd_numbers(values: Any, name: str) -> None:
    """Raise EvenloadError unless all numbers of a description are 0 or of a size from `LEAST` to `AMOUNT`.

    ``values``: mappings and lists of values, as a file holds them; what is no number is not looked at.
    """
    rows = [(name, values)]
    for place, value in rows:
        if isinstance(value, dict):
            rows += [(f"{place}: {key}", inner) for key, inner in value.items()]
        elif isinstance(value, list):
            rows += [(place, inner) for inner in value]
        elif type(value) in (int, float) and value and not LEAST <= abs(value) <= AMOUNT:
            do = f"give seconds, bytes and operations: 0, or {LEAST:g} to {AMOUNT:g}"
            raise EvenloadError(f"{place} is no quantity", shown(value), do)


def refuse_endless(lengths: npt.NDArray[np.int64], cap: int) -> None:
    """Raise EvenloadError if the longest sequence would be cut into more than `SLICES` slices of ``cap`` tokens."""
    longest = int(lengths.max(initial=0))
    if longest > SLICES * cap:
        raise EvenloadError(
            f"a sequence would be cut into more than {SLICES} slices",
            f"{longest} tokens, at most {cap} in a micro-batch",
            "raise max_tokens, or shorten the samples (data.max_length)",
        )
