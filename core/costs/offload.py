"""How much of its activations a rank may leave in host memory until the backward.

ByteScale (arXiv 2502.21231, section 4). Of the l layers of a stage the first and the last keep what they save (the
backward of the last one starts too soon for anything to travel). Of each layer between them a share r travels to the
host while the next layer computes, and comes back while the next layer runs backward.

    T    seconds of one layer's forward, for the sequence on its ranks
    Act  bytes that one layer saves for the backward
    B    bytes/s of the link to the host, the slower of the two directions

    hidden behind compute   r Act / B <= T, so r* = min(1, T B / Act)
    left on the device      (2 + (1 - r)(l - 2)) Act

A backward takes at least as long as its forward, so what is hidden on the way out is hidden on the way back. T grows
with the square of the length and Act with the length itself: the longer a sequence, the more of it hides.

What it does not count: the layer that is on its way out while another computes (`runtime.stage.offload` lets one layer
lag).
"""

from __future__ import annotations

KEPT_LAYERS = 2
"""The first and the last."""


def offload_share(seconds_per_layer: float, bytes_per_layer: float, bytes_per_s: float) -> float:
    """r*, the largest share of the inner layers' activations whose transfers hide; 0 where nothing is saved.

    Seconds are those of a layer's forward, bytes what it saves for the backward; ``bytes_per_s`` is the rate of the
    link to the host, the slower direction, 0 where there is none.
    """
    if bytes_per_layer <= 0:
        return 0.0
    return min(1.0, seconds_per_layer * bytes_per_s / bytes_per_layer)


def layers_on_device(layers: int, share: float) -> float:
    """Layers' worth of activations that stay on the device; all of them where no layer is between first and last."""
    inner = max(0, layers - KEPT_LAYERS)
    return layers - share * inner
