"""Samples of a step, read before it begins: data that cannot be read any more concern their tenant and nobody else."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ....core.errors import EvenloadError, shorten
from ....core.planning.planner import Draw, Planned
from ....data.samples.cut import IGNORE
from ....data.sources import Source
from ....runtime.attention.labels import Labels
from ....runtime.attention.pack import TokensOf
from ..state.drawing import labels_in


class TenantSamples:
    """Tokens and labels of the batches that this rank computes."""

    def __init__(self) -> None:
        self.sources: dict[int, Source] = {}
        """Of the tenants that take part, by their numbers."""
        self._draw: Draw | None = None
        self._tokens: dict[int, NDArray[np.int64]] = {}
        self._labels: dict[int, NDArray[np.int64]] = {}

    def read(self, planned: Planned, rank: int) -> dict[int, str]:
        """Read what a plane rank computes of a step; by tenant, what is wrong with its data."""
        draw = planned.draw
        assert draw.tenants is not None
        wanted = {s.sequence for m in planned.plan.micro_batches if rank in m.ranks for s in m.slices}
        self._draw = draw
        self._tokens = {}
        self._labels = {}
        faults: dict[int, str] = {}
        for index in sorted(wanted):
            try:
                self._read(draw, index)
            except EvenloadError as error:
                faults.setdefault(int(draw.tenants[index]), str(error))
            except Exception as error:  # of whatever reads the data
                faults.setdefault(int(draw.tenants[index]), shorten(f"{type(error).__name__}: {error}"))
        return faults

    def tokens_of(self, draw: Draw) -> TokensOf:
        """Reads one sequence of a batch, if it was not read before its step."""
        kept = self._tokens if draw is self._draw else {}
        return lambda index: (
            kept[index] if index in kept else self._source(draw, index).tokens(int(draw.samples[index]))
        )

    def labels_of(self, draw: Draw) -> Labels | None:
        """The targets of a batch, likewise; None where every token is one."""
        if draw.targets is None:
            return None
        kept = self._labels if draw is self._draw else {}

        def of(index: int) -> NDArray[np.int64]:
            return kept[index] if index in kept else labels_in(self._source(draw, index), int(draw.samples[index]))

        return Labels(of, draw.targets)

    def _read(self, draw: Draw, index: int) -> None:
        """Raises EvenloadError for a sequence that is not what it was when the data were opened."""
        source, sample = self._source(draw, index), int(draw.samples[index])
        self._tokens[index] = source.tokens(sample)
        if draw.targets is None:
            return
        self._labels[index] = labels_in(source, sample)
        counted, wanted = int((self._labels[index][1:] != IGNORE).sum()), int(draw.targets[index])
        if counted != wanted:
            detail = f"sample {sample} has {counted} targets, {wanted} before"
            do = "leave the data files alone while they are trained on"
            raise EvenloadError(f"{source.name} has changed since it was opened", detail, do)

    def _source(self, draw: Draw, index: int) -> Source:
        assert draw.tenants is not None
        return self.sources[int(draw.tenants[index])]
