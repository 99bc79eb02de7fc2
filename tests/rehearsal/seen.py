"""What the ranks of a run did to their devices, read from their ledgers."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from .nccl import Unit, broken

HOSTS = (
    "tests/scripts/", "tests/hosts/", "safetensors/", "megatron/", "deepspeed/", "transformers/", "accelerate/",
    "torch/", "trl/", "peft/", "?", "/",
)  # fmt: skip


class Seen(NamedTuple):
    """By rank; faults of all ranks together."""

    faults: Counter[str]
    waits: list[Counter[str]]
    to_device: list[Counter[str]]
    units: dict[int, list[Unit]]
    one_queue: bool

    def check(self) -> None:
        """Nothing that CUDA would have refused, and nothing that NCCL would not have ended."""
        assert self.waits, "no rank has left a ledger"
        assert not self.faults
        assert not broken(self.units, self.one_queue)

    def waits_of_ours(self, steps: int, *passed_over: str) -> list[dict[str, float]]:
        """By rank, how often evenload waits for the device in a step, but for places whose names hold one of these."""
        return [_without(each_step(waits, steps), passed_over) for waits in self.waits]

    def check_copies(self, steps: int, *passed_over: str) -> None:
        """No step waits for what it sends to the device."""
        copies = [what for one in self.to_device for what in _without(each_step(one, steps), passed_over)]
        assert not [what for what in copies if what.startswith("waits")]


def seen_in(outputs: Path) -> Seen:
    """The ledgers of a run's ranks, those of rank 0 first."""
    paths = sorted(outputs.glob("rank.*.json"))
    ranks = [json.loads(path.read_text()) for path in paths]
    faults: Counter[str] = Counter()
    for rank in ranks:
        faults.update(rank["faults"])
    waits, to_device = ([Counter(rank[kind]) for rank in ranks] for kind in ("waits", "to_device"))
    units: dict[int, list[Unit]] = {}
    for path, rank in zip(paths, ranks, strict=True):  # a process that a rank has forked knows the beginning alone
        number = int(path.name.split(".")[1])
        units[number] = max(units.get(number, []), rank["units"], key=len)
    return Seen(faults, waits, to_device, units, any(rank["one_queue"] for rank in ranks))


def each_step(counts: Counter[str], steps: int) -> dict[str, float]:
    """How often evenload itself does it in a step, of what every step does."""
    return {
        what: number / steps
        for what, number in counts.items()
        if number >= steps and not what.partition(" at ")[2].startswith(HOSTS)
    }


def _without(counts: dict[str, float], passed_over: tuple[str, ...]) -> dict[str, float]:
    return {what: number for what, number in counts.items() if not any(place in what for place in passed_over)}
