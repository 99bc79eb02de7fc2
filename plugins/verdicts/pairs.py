"""Files of samples, paired by their prompts, and the sheets on which people write their verdicts.

Samples are JSON Lines of ``prompt`` and ``text``, as `evenload generate` writes them: ``prompt`` is its number there,
and any JSON value elsewhere. The i-th sample of a prompt in one file is paired with the i-th in the other.
"""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ...core.aliases import Floats, Ints
from ...core.corrected_mean import drawn
from ...core.errors import EvenloadError, refuse_first, shorten, shown
from ...data.jsonl import read_objects
from ...training.files import refusing_unwritable, whole
from .judges import preference


class Pairs(NamedTuple):
    """Texts of A and B for the same prompts."""

    prompts: list[Any]
    """What a judge is shown of each prompt."""
    keys: list[str]
    """A prompt's own text, by which it is drawn."""
    of: Ints
    """Each pair's place in ``prompts``, int64 [P]; ascending."""
    texts: list[tuple[str, str]]
    left_out: int = 0
    """Samples that had none to be paired with."""


def read_pairs(first: Path, second: Path, prompts: Path | None = None) -> Pairs:
    """The pairs of two files; ``prompts``: the file whose lines the numbers of prompts mean.

    Raises EvenloadError for what is no such file, for files of other prompts, and for fewer than two prompts.
    """
    a, b = _samples(first), _samples(second)
    names = shorten(str(first)), shorten(str(second))
    for name, other, lacking in ((*names, a.keys() - b.keys()), (*names[::-1], b.keys() - a.keys())):
        detail = f"{len(lacking)} of them are not in {other}, such as {min(lacking, default='')}"
        refuse_first((bool(lacking), f"{name} has other prompts", detail, "generate both from one file of prompts"))
    refuse_first((len(a) < 2, "a comparison needs two prompts", f"{len(a)} in {names[0]}", "generate more samples"))
    keys = list(a)
    rows = [(place, pair) for place, key in enumerate(keys) for pair in zip(a[key], b[key], strict=False)]
    left_out = sum(map(len, [*a.values(), *b.values()])) - 2 * len(rows)
    asked = _of_numbers(keys, prompts) if prompts else [json.loads(key) for key in keys]
    places = np.array([place for place, _ in rows], np.int64)
    return Pairs(asked, keys, places, [pair for _, pair in rows], left_out)


def _samples(path: Path) -> dict[str, list[str]]:
    texts: dict[str, list[str]] = defaultdict(list)
    for place, _, row in read_objects(path):
        lacking = "prompt" not in row or not isinstance(row.get("text"), str)
        do = 'write {"prompt": ..., "text": "..."} on every line, as `evenload generate` does'
        refuse_first((lacking, f"{place} is no sample", shown(row), do))
        texts[json.dumps(row["prompt"], sort_keys=True)].append(row["text"])
    return dict(sorted(texts.items()))


def _of_numbers(keys: list[str], path: Path) -> list[Any]:
    lines = [row.get("prompt") for _, _, row in read_objects(path)]
    for key in keys:
        odd = not key.isdecimal() or int(key) >= len(lines) or lines[int(key)] is None
        detail, do = (
            f"prompt {shorten(key)}, of {len(lines)} lines",
            "give the file that the samples were generated from",
        )
        refuse_first((odd, f"{shorten(str(path))} does not have a prompt", detail, do))
    return [lines[int(key)] for key in keys]


def write_sheet(path: Path, pairs: Pairs, share: float) -> int:
    """Write pairs of a drawn share of the prompts for people to judge; which text comes first is drawn too.

    Gives the number of prompts. Raises EvenloadError where fewer than two were drawn.
    """
    chosen, swapped = drawn(pairs.keys, share), drawn(pairs.keys, 0.5, seed=1)
    number = int(chosen.sum())
    refuse_first((number < 2, "people would judge fewer than two prompts", f"{number} drawn", "raise --share"))
    with refusing_unwritable("--for-people", path), whole(path) as part, part.open("w", encoding="utf-8") as file:
        for place, texts in zip(pairs.of, pairs.texts, strict=True):
            if chosen[place]:
                first, second = reversed(texts) if swapped[place] else texts
                row = {"prompt": pairs.prompts[place], "first": first, "second": second, "verdict": None}
                file.write(json.dumps(row) + "\n")
    return number


def read_people(path: Path, pairs: Pairs) -> tuple[Ints, Floats]:
    """Pairs that people judged [n], by their places, and how far they preferred A [n]: several people count as one.

    Raises EvenloadError for a line that is of none of the pairs, or whose verdict is none.
    """
    places = {}
    for place, (of, (a, b)) in enumerate(zip(pairs.of, pairs.texts, strict=True)):
        prompt = json.dumps(pairs.prompts[of], sort_keys=True)
        places[prompt, b, a] = place, True
        places[prompt, a, b] = place, False
    verdicts: dict[int, list[float]] = defaultdict(list)
    for line, _, row in read_objects(path):
        key = json.dumps(row.get("prompt"), sort_keys=True), row.get("first"), row.get("second")
        if not all(isinstance(word, str) for word in key) or key not in places:
            do = "judge what --for-people wrote of these two files, with the same --prompts"
            raise EvenloadError(f"{line} is of none of the pairs", shown(row), do)
        place, swapped = places[key]
        value = preference(row.get("verdict"), line)
        verdicts[place].append(1 - value if swapped else value)
    judged = sorted(verdicts)
    return np.array(judged, np.int64), np.array([np.mean(verdicts[place]) for place in judged])
