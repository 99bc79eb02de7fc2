"""What pictures and sounds cost on top of the tokens that stand for them: the work of the towers that encode them.

A tower of W weights and D layers of width H does, of each picture of n patches, as the language model does of tokens,

    seconds = linear_s * n * W / W_text + 2 * pair_s * n^2 / 2 * D * H / (D_text * Q_text)      twice: it is not causal

in either direction, with the coefficients of the text (`core.costs`); none backward where the tower is frozen. n is
what a picture's values are over those of a patch: input channels times strides of the tower's convolutions. Frames of a
video attend by themselves, and so do windows, in all layers but those that the tower's config names.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import nn

from ....core.costs.costs import Costs, PassCost
from ....core.machine.shape import Shape
from .parts import PartForm, Parts

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


class Values(NamedTuple):
    """How large the pictures, or the sounds, of one sample are, in numbers that a tower reads."""

    is_sound: bool
    total: float
    squares: float
    """Of each picture or frame, summed."""


class Tower(NamedTuple):
    """What encodes pictures, or sounds."""

    patch_values: int
    weights: int
    layer_widths: int
    """Widths of all layers that attend to a whole picture, summed."""
    trained: bool


def values_of(parts: Parts, form: PartForm) -> list[Values]:
    """What a sample has of each modality."""
    result = []
    for leader in {key.group for key in form if key.group} & parts.keys():
        own = [parts[key.name] for key in form if key.group == leader]
        largest = max((one for one in own if one.is_floating_point()), key=lambda one: one.numel())
        if parts[leader].is_floating_point():
            frames = [one.numel() for one in largest]
        else:  # a grid of (frames, height, width), each place of which has a piece
            each = largest[0].numel()
            frames = [each * h * w for t, h, w in parts[leader].tolist() for _ in range(t)]
        # Sounds are [frequencies, time].
        is_sound = parts[leader].is_floating_point() and largest.dim() == 3
        result.append(Values(is_sound, float(sum(frames)), float(sum(one * one for one in frames))))
    return result


def towers_of(model: Any) -> dict[bool, Tower]:
    """The towers next to the language model of a model, by whether they encode sounds."""
    decoder = model.get_decoder()
    around = next((m for m in model.modules() if any(child is decoder for child in m.children())), None)
    beside = [child for child in around.children() if child is not decoder] if around is not None else []
    encoders = [(one, _convolutions(one)) for one in beside if _convolutions(one)]
    others = sum(_size(one) for one in beside if not _convolutions(one) and one is not model.get_output_embeddings())
    towers = {}
    for encoder, convolutions in encoders:
        first = convolutions[0]
        layers = max((len(m) for m in encoder.modules() if isinstance(m, nn.ModuleList)), default=1)
        whole = getattr(getattr(encoder, "config", None), "fullatt_block_indexes", None)
        towers[isinstance(first, nn.Conv1d)] = Tower(
            first.in_channels * math.prod(math.prod(one.stride) for one in convolutions),
            _size(encoder) + others,
            first.out_channels * (layers if whole is None else len(whole)),
            any(parameter.requires_grad for parameter in encoder.parameters()),
        )
    return towers


def seconds_beside(
    samples: Iterable[Sequence[Values]], towers: Mapping[bool, Tower], shape: Shape, costs: Costs
) -> list[tuple[float, float]]:
    """(forward, backward) seconds of each sample's pictures and sounds.

    Args:
        shape: of the language model, whose costs these are.
    """

    def of(price: PassCost, values: Values) -> float:
        tower = towers.get(values.is_sound)
        if tower is None:
            return 0.0
        patches, squares = values.total / tower.patch_values, values.squares / tower.patch_values**2
        linear_s = price.linear_s * patches * tower.weights / shape.weights
        return linear_s + price.pair_s * squares * tower.layer_widths / (shape.num_layers * shape.query_size)

    def backward(values: Values) -> float:
        trained = values.is_sound in towers and towers[values.is_sound].trained
        return of(costs.backward, values) if trained else 0.0

    return [(sum(of(costs.forward, one) for one in own), sum(map(backward, own))) for own in samples]


def _convolutions(module: nn.Module) -> list[Any]:
    return [one for one in module.modules() if isinstance(one, _CONVOLUTIONS)]


def _size(module: nn.Module) -> int:
    return sum(getattr(parameter, "ds_numel", parameter.numel()) for parameter in module.parameters())
