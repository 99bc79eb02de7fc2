"""Samples in a file, a line each, that a generation which was ended can go on from, on other ranks too.

While it runs, each rank appends what it has made to a file of its own next to ``out``; at the end rank 0 writes all
samples into ``out``, by prompt and number, and takes these files away. Every line carries the mark of its run: what
decides the tokens, so that no file holds samples of two models.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from ...core.errors import EvenloadError, refuse_first, shorten, shown
from ...core.input import reading
from ...runtime.generate.request import Completion, Ended
from ...training.files import refusing_unwritable, whole

log = logging.getLogger("evenload")

_RUN = "run"
_BEGIN = b'{"prompt": '
_MOST_LINE = 1 << 28
"""Bytes of a line, which holds a sample's tokens."""
_DO = "choose another --out, or remove the file"
_LEAVE = "name a file that `evenload generate` has written as generate.drafts.earlier, or leave it out"


class SampleFile:
    """The file of a run's samples.

    Args:
        run: the mark of the run.
        text_of: gives the text of a sample.
    """

    def __init__(self, out: Path, run: str, text_of: Callable[[Completion], str]) -> None:
        self._out = out
        self._run = run
        self._text_of = text_of

    def read(self) -> list[Completion]:
        """What is there of the run. Raises EvenloadError for a file of another run, or of something else."""
        samples: dict[tuple[int, int], Completion] = {}
        for path in [*([self._out] if self._out.exists() else []), *self._parts()]:
            link = path.is_symlink() and path != self._out
            refuse_first((link, f"{shorten(str(path))} is not a file of samples", "a link", _DO))
            for sample in self._read(path):
                samples[sample.prompt, sample.sample] = sample
        return list(samples.values())

    @contextmanager
    def adding(self, rank: int) -> Iterator[Callable[[Completion], None]]:
        """Inside, samples can be added by this rank, each of which is there when the call returns."""
        path = self._out.with_name(f"{self._out.name}.part-{rank}")
        with refusing_unwritable("--out", path):
            cut = path.exists() and not path.read_bytes().endswith(b"\n")
            with path.open("a", encoding="utf-8") as file:
                file.write("\n" * cut)

                def add(sample: Completion) -> None:
                    file.write(self._line(sample))
                    file.flush()

                yield add

    def finish(self, samples: Iterable[Completion]) -> None:
        """Write all samples, and take away what ranks have written of them."""
        with whole(self._out) as part, part.open("w", encoding="utf-8") as file:
            file.writelines(map(self._line, sorted(samples)))
        for path in self._parts():
            path.unlink()

    def _parts(self) -> list[Path]:
        """Files that ranks append to; no other whose name begins alike."""
        head = f"{self._out.name}.part-"
        named = [path for path in self._out.parent.iterdir() if path.name.startswith(head)]
        return [path for path in named if re.fullmatch(r"0|[1-9][0-9]*", path.name.removeprefix(head))]

    def _line(self, sample: Completion) -> str:
        row: dict[str, Any] = {"prompt": sample.prompt, "sample": sample.sample, "ended": sample.ended}
        row |= {"text": self._text_of(sample), "tokens": sample.tokens, "log_probs": sample.log_probs}
        row |= {_RUN: self._run} if sample.score is None else {"score": sample.score, _RUN: self._run}
        return json.dumps(row) + "\n"

    def _read(self, path: Path) -> Iterator[Completion]:
        name = shorten(str(path))
        with reading.open_file(path, name, _DO) as file, reading.failures_of(name, _DO):
            for number, line in enumerate(iter(lambda: file.readline(_MOST_LINE), b""), 1):
                row = _parsed(line)
                cut = line.startswith(_BEGIN) or _BEGIN.startswith(line.rstrip(b"\n"))
                if row is None and cut and path != self._out:
                    continue  # the end of a rank that was killed
                if row is None or row.run != self._run:
                    what = f"{name} holds something else than samples of this run"
                    other = f"line {number} is of run {shown(row.run)}, this is {self._run}" if row else shown(line)
                    raise EvenloadError(what, other, _DO)
                yield Completion(row.prompt, row.sample, row.tokens, row.log_probs, row.ended, row.score)


def refuse_unreadable(path: Path) -> None:
    """Raise EvenloadError for a file of earlier samples that cannot be read."""
    reading.open_file(path, f"the file of earlier samples {shorten(str(path))}", _LEAVE).close()


def earlier_samples(path: Path, vocabulary: int | None) -> list[Completion]:
    """The samples of a file, whatever run it is of, by which others are drafted; lines that are none of this vocabulary
    are left out, with a warning. Raises EvenloadError."""
    name = f"the file of earlier samples {shorten(str(path))}"
    with reading.open_file(path, name, _LEAVE) as file, reading.failures_of(name, _LEAVE):
        rows = [*map(_parsed, iter(lambda: file.readline(_MOST_LINE), b""))]
    known = [row for row in rows if row and (vocabulary is None or max(row.tokens, default=0) < vocabulary)]
    if len(known) < len(rows):
        of = f"{len(rows) - len(known)} of {len(rows)} lines of {name}"
        log.warning("%s are no samples of this vocabulary, and nothing is drafted by them", of)
    return [Completion(row.prompt, row.sample, row.tokens, row.log_probs, row.ended, row.score) for row in known]


class _Line(BaseModel, extra="allow", strict=True):
    prompt: int
    sample: int
    tokens: tuple[int, ...]
    log_probs: tuple[float, ...]
    ended: Ended
    score: float | None = None
    run: str


def _parsed(line: bytes) -> _Line | None:
    try:
        return _Line.model_validate_json(line)
    except ValueError:
        return None
