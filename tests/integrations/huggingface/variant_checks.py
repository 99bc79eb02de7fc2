"""What tests ask of planned runs on all ranks: of models by name, and of what `Variants.of_kind` gives."""

from __future__ import annotations

from typing import Any

OfRanks = list[dict[str, dict[str, Any]]]


def check_exact(of_ranks: OfRanks, grad: float, **wanted: Any) -> None:
    """Gradients and losses of each model, and what else its run came to."""
    for found in of_ranks:
        for name, one in found.items():
            assert one["grad"] < grad, (name, one)
            assert one["loss"] < 1e-6, (name, one)
            assert {key: one[key] for key in wanted} == wanted, (name, one)


def check_planned(of_ranks: OfRanks, most_of_loss: float) -> None:
    for found in of_ranks:
        for name, ended in found.items():
            assert not ended["refused"], (name, ended)
            assert ended["grad"] < 1e-9, (name, ended)
            assert ended["loss"] < most_of_loss, (name, ended)
            assert ended["planned"] == ended["wanted"], (name, ended)
            assert not ended["said"], (name, ended)


def check_stays(of_ranks: OfRanks) -> None:
    for found in of_ranks:
        for name, ended in found.items():
            assert not ended["refused"], (name, ended)
            assert not ended["planned"], (name, ended)
            assert ended["grad"] == ended["loss"] == 0, (name, ended)
            assert ended["wanted"] in ended["said"][0], (name, ended)


def check_refused(of_ranks: OfRanks, most_planned: int) -> None:
    own, other = of_ranks
    for name, ended in own.items():
        assert ended["wanted"] in ended["refused"], (name, ended)
        assert ended["refused"] == other[name]["refused"]
        assert len(ended["planned"]) <= most_planned, (name, ended)
