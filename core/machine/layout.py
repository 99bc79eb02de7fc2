"""How a world of processes is laid out: tensor, pipeline, context, expert and data parallelism."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ..errors import EvenloadError


@dataclass(frozen=True)
class Layout:
    """Degrees of parallelism. The *plane* is data x context parallel: the ranks a plan may place work on."""

    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    dp: int = 1
    v_shape: bool = False
    """Each of ``pp`` devices has two stages, the model's layers lie on them down and up again (Limits.v_shape)."""
    layers: tuple[int, ...] = ()
    """Of each stage, where not all have equally many; empty: all have."""

    @property
    def num_stages(self) -> int:
        """Parts in which a pipeline has the layers."""
        return 2 * self.pp if self.v_shape else self.pp

    @property
    def world_size(self) -> int:
        return self.tp * self.pp * self.cp * self.dp

    @property
    def dp_cp_size(self) -> int:
        return self.dp * self.cp

    def stages_of_device(self, device: int) -> tuple[int, ...]:
        """The stages that a device of a pipeline has, ascending."""
        return (device, self.num_stages - 1 - device) if self.v_shape else (device,)

    def world_ranks(self, stage: int, plane_ranks: Iterable[int]) -> list[int]:
        """Ranks of the world at a stage for ranks of the plane, the first tensor-parallel one of each.

        Trainers number tensor-parallel ranks fastest, then the plane, devices of a pipeline slowest.
        """
        device = min(stage, self.num_stages - 1 - stage) if self.v_shape else stage
        first = device * self.dp_cp_size
        return [(first + rank) * self.tp for rank in plane_ranks]

    @classmethod
    def of_world(
        cls,
        world_size: int,
        *,
        tp: int,
        pp: int,
        cp: int,
        ep: int,
        dp: int | None = None,
        v_shape: bool = False,
        layers: tuple[int, ...] = (),
    ) -> Layout:
        """The layout of ``world_size`` processes; ``dp`` takes what the others leave. Raises EvenloadError."""
        inner = tp * pp * cp
        if world_size % inner or (dp is not None and dp * inner != world_size):
            wanted = f"tp {tp} x pp {pp} x cp {cp}" + ("" if dp is None else f" x dp {dp}")
            raise EvenloadError(
                "the number of processes does not fit parallel.*",
                f"{world_size} processes for {wanted}",
                f"start {inner * (dp or 1)} processes (--nproc {inner * (dp or 1)}) or "
                + ("change parallel.*" if world_size % inner else f"set parallel.dp={world_size // inner}"),
            )
        layout = cls(tp, pp, cp, ep, world_size // inner, v_shape, layers)
        if layout.dp_cp_size % ep:
            raise EvenloadError(
                "parallel.ep does not divide the data-parallel ranks",
                f"ep {ep}, dp x cp {layout.dp_cp_size}",
                "choose an ep that divides dp x cp",
            )
        return layout


def share_of(layers: tuple[int, ...], stage: int) -> float:
    """The layers of a stage over those of a mean one; ``layers``: of each stage, empty where all have as many."""
    return layers[stage] * len(layers) / sum(layers) if layers else 1.0


def most_share(layers: tuple[int, ...]) -> float:
    """`share_of` the stage with most layers."""
    return max(layers) * len(layers) / sum(layers) if layers else 1.0


def unless_equal(layers: tuple[int, ...]) -> tuple[int, ...]:
    """Layers of stages as a `Layout` has them: none where all stages have equally many."""
    return layers if len(set(layers)) > 1 else ()
