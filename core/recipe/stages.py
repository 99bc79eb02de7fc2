"""How many layers each pipeline stage has (``parallel.layers``).

The last stage has the output layer as well, which counts as so many layers as its products are as much work,

    head = hidden x vocabulary / weights of a mean layer that a token multiplies

so ``auto`` gives layers, one after the other, to the stage that has least; of equal ones to the first, which waits for
none. The largest stage is then as small as whole layers allow. Attention over long sequences makes layers longer and
the output layer count for less: where lengths are known, `core.planning.stage_layers` counts with their seconds.
"""

from __future__ import annotations

from ..machine.layout import unless_equal
from .sections import Model, Parallel
from .sizes import shape_of


def stage_layers(model: Model, parallel: Parallel) -> tuple[int, ...]:
    """Layers of each stage where they are not equally many; empty where they are. Of a recipe without fault."""
    layers = parallel.layers or ()
    if layers == "auto":
        shape = shape_of(model)
        head = shape.hidden_size * shape.vocab_size
        layers = least_maximal(shape.num_layers, parallel.pp, head * shape.num_layers / (shape.weights - head))
    return unless_equal(layers)


def layers_of_each(model: Model, parallel: Parallel) -> tuple[int, ...]:
    """Layers of each stage, equally many or not."""
    return stage_layers(model, parallel) or (shape_of(model).num_layers // parallel.pp,) * parallel.pp


def least_maximal(num_layers: int, stages: int, head: float) -> tuple[int, ...]:
    """Layers of each of the stages, one or more, whose largest is smallest; ``head``: the output layer in layers."""
    layers, loads = [1] * stages, [1.0] * (stages - 1) + [1.0 + head]
    for _ in range(num_layers - stages):
        stage = loads.index(min(loads))
        layers[stage] += 1
        loads[stage] += 1.0
    return tuple(layers)
