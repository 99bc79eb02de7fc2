"""Samples in a file, a line each, that a generation which was ended can go on from, on other ranks too.

While it runs, each rank appends what it has made to a file of its own beside ``out``; at the end rank 0 writes all
samples into ``out``, by prompt and number, and takes these files away. Every line carries the mark of its run: what
decides the tokens, so that no file holds samples of two models.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ...core.errors import EvenloadError, shorten, shown
from ...runtime.generate.request import Completion
from ..files import refusing_unwritable, whole

_RUN = "run"
_DO = "choose another --out, or remove the file"


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
        for path in [self._out, *self._parts()]:
            for sample in self._read(path) if path.exists() else ():
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
        return [path for path in named if path.name.removeprefix(head).isdecimal()]

    def _line(self, sample: Completion) -> str:
        row: dict[str, Any] = {"prompt": sample.prompt, "sample": sample.sample, "ended": sample.ended}
        row |= {"text": self._text_of(sample), "tokens": sample.tokens, "log_probs": sample.log_probs}
        row |= {_RUN: self._run} if sample.score is None else {"score": sample.score, _RUN: self._run}
        return json.dumps(row) + "\n"

    def _read(self, path: Path) -> Iterator[Completion]:
        with refusing_unwritable("--out", path):
            lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
        for number, line in enumerate(lines, 1):
            row = _parsed(line)
            if row is None and path != self._out:
                continue  # the end of a rank that was killed
            run = row.get(_RUN) if isinstance(row, dict) else None
            if not isinstance(row, dict) or run != self._run:
                what = f"{shorten(str(path))} holds something else than samples of this run"
                detail = shown(line) if run is None else f"line {number} is of run {shown(run)}, this is {self._run}"
                raise EvenloadError(what, detail, _DO)
            lists = tuple(row["tokens"]), tuple(row["log_probs"])
            yield Completion(row["prompt"], row["sample"], *lists, row["ended"], row.get("score"))


def _parsed(line: str) -> Any:
    try:
        return json.loads(line)
    except ValueError:
        return None
