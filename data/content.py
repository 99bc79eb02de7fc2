"""Whether data are what they were: when a run goes on, and while it runs.

A fingerprint is ``LENGTHS-CONTENT``: a hash of all lengths, numbers of targets, groups and sums of weights, and one
of the tokens, labels and weights of some samples, the same ones for the same number of samples. Data of up to `SAMPLES`
short samples are compared whole; of larger ones an exchange of every k-th sample is noticed with a probability of
1 - (1 - 1/k)^256.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..core.errors import EvenloadError
from .documents import Documents
from .samples.cut import Cut
from .samples.order import SampleOrder

log = logging.getLogger(__name__)

SAMPLES = 256
_MOST_TOKENS = 1 << 19
"""Of the documents that are read for a fingerprint: a format may tokenise a whole document for each of its samples."""
LOOK_S = 1.0
"""Between two looks at files."""
_FILES = 16
"""Looked at each time: a file server may take a millisecond for one."""
_Stamp = tuple[int, int, int] | None


def fingerprint(documents: Documents, cut: Cut) -> str:
    """The fingerprint of samples, see the module."""
    lengths = hashlib.blake2b(cut.length.astype("<i8").tobytes(), digest_size=8)
    if cut.targets is not None:
        lengths.update(cut.targets.astype("<i8").tobytes())
    if documents.groups is not None:
        lengths.update(documents.groups[cut.document].astype("<i8").tobytes())
    if cut.weight_sums is not None:
        lengths.update(cut.weight_sums.astype("<f8").tobytes())
    content = hashlib.blake2b(digest_size=8)
    for document, samples in _chosen(documents, cut).items():
        start, stop = cut.start[samples], cut.start[samples] + cut.length[samples]
        first, last = int(start.min()), int(stop.max())
        columns = [documents.read(document, first, last)]
        if cut.targets is not None:
            columns.append(documents.read_labels(document, first, last))
        if documents.weights is not None:
            place = int(documents.lengths[:document].sum())
            columns.append(documents.weights.of(place + first, place + last).view(np.int64))
        for one in columns:
            for begin, end in zip(start - first, stop - first, strict=True):
                content.update(np.asarray(one[begin:end]).astype("<i8").tobytes())
    return f"{lengths.hexdigest()}-{content.hexdigest()}"


def _chosen(documents: Documents, cut: Cut) -> Mapping[int, NDArray[np.int64]]:
    order, _ = SampleOrder(len(cut.length), seed=0).take(SAMPLES)
    of_documents: dict[int, list[int]] = {}
    tokens = 0
    for sample in order.tolist():
        document = int(cut.document[sample])
        if document not in of_documents:
            tokens += int(documents.lengths[document])
            if of_documents and tokens > _MOST_TOKENS:
                break
        of_documents.setdefault(document, []).append(sample)
    return {document: np.array(samples) for document, samples in of_documents.items()}


def are_same(kept: Any, now: str, what: str) -> bool:
    """Whether data of a fingerprint that was kept are those of now; ``what`` they are, for a warning where the version
    that kept it knew lengths alone."""
    if isinstance(kept, str) and kept and "-" not in kept and now.startswith(f"{kept}-"):
        log.warning("%s: an earlier version kept their lengths alone, so other content would not be noticed", what)
        return True
    return bool(kept == now)


class Watch:
    """Notices files that change while their data are in use. What is ``same`` in spite of that goes on with a warning:
    a file that was touched, or one that was replaced while the former one is still mapped into memory.

    Raises EvenloadError from `look` where ``content`` is not what it was.
    """

    def __init__(self, name: str, files: Sequence[Path], content: Callable[[], str]) -> None:
        self._name = name
        self._content = content
        self._stamps = {path: _stamp(path) for path in files}
        self._turn, self._next_s = 0, 0.0

    @cached_property
    def first(self) -> str:
        """The fingerprint when it was first asked for, or at the first look."""
        return self._content()

    def look(self) -> None:
        """Look at all files for the first time, later at some of them, at most once a second."""
        if not self._stamps or (now := time.monotonic()) < self._next_s:
            return
        paths, first = list(self._stamps), self._next_s == 0.0
        due = paths if first else [paths[(self._turn + i) % len(paths)] for i in range(_FILES)]
        self._turn, self._next_s = (self._turn + len(due)) % len(paths), now + LOOK_S
        if changed := {path: stamp for path in due if (stamp := _stamp(path)) != self._stamps[path]}:
            self._compare(changed)
        elif first:
            _ = self.first

    def _compare(self, changed: Mapping[Path, _Stamp]) -> None:
        name, detail = next(iter(changed)), "another file, or other content"
        try:
            same = "first" in vars(self) and self._content() == self.first
        except (EvenloadError, OSError, ValueError, IndexError) as error:
            same, detail = False, str(error)
        if not same:
            do = "end the run, restore the data, and start again: it goes on from its last checkpoint"
            raise EvenloadError(f"{self._name} changed while it was in use", f"{name}: {detail}", do)
        log.warning("%s was written or replaced while it is in use; the samples compared are as they were", name)
        self._stamps.update(changed)


def _stamp(path: Path) -> _Stamp:
    """What tells a file from another one in its place; None where there is none."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino
