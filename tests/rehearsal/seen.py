"""What the ranks of a run did to their devices, read from their ledgers."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from .groups import unlike

HOSTS = (
    "tests/scripts/",
    "tests/hosts/",
    "safetensors/",
    "megatron/",
    "deepspeed/",
    "transformers/",
    "accelerate/",
    "torch/",
    "trl/",
    "peft/",
    "?",
    "/",
)


class Seen(NamedTuple):
    """By rank; faults of all ranks together."""

    faults: Counter[str]
    waits: list[Counter[str]]
    to_device: list[Counter[str]]
    collectives: list[dict[str, list[str]]]

    def check(self) -> None:
        """Nothing that CUDA would have refused, and collectives in one order on all ranks of a group."""
        assert self.waits, "no rank has left a ledger"
        assert not self.faults
        assert not unlike(self.collectives)


def seen_in(outputs: Path) -> Seen:
    """The ledgers of a run's ranks, those of rank 0 first."""
    ranks = [json.loads(path.read_text()) for path in sorted(outputs.glob("rank.*.json"))]
    faults: Counter[str] = Counter()
    for rank in ranks:
        faults.update(rank["faults"])
    waits, to_device = ([Counter(rank[kind]) for rank in ranks] for kind in ("waits", "to_device"))
    return Seen(faults, waits, to_device, [rank["collectives"] for rank in ranks])


def each_step(counts: Counter[str], steps: int) -> dict[str, float]:
    """How often evenload itself does it in a step, of what every step does."""
    return {
        what: number / steps
        for what, number in counts.items()
        if number >= steps and not what.partition(" at ")[2].startswith(HOSTS)
    }
