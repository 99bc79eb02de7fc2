"""SampleAttention (arXiv 2406.15486) 2.42x to first token, SALE (2505.24179) 3.36x attention beyond 64K, AdaSpa
(2502.21079) 1.78x a video: what their own settings come to by counted work.

    python benchmarks/published/sparse.py [--quick] [--json] [--out FILE]

A part of a pass is attention, its share a; sparse attention does k of the pairs, and choosing costs c of dense
attention's time, whatever the hardware:

    gain = 1 / (1 - a + a (k + c))

a     FLOPs of causal attention over those of the pass: n H / (n H + W) a layer, with 2 n H of causal pairs and 2 W of
      weights a token
k, c  SampleAttention  columns and a window of 8 %; 5 % of the rows are sampled. k is not published by length: the table
                       has it that the published gain needs, and that of its window alone
      SALE             choosing costs 11 % of dense attention and 1 / 3.36 is left in all, so k is 19 %
      AdaSpa           500 of 600 PFLOPs are attention; 10 of 50 steps are dense, the others keep 20 % of blocks

ideal = without a loss in kernels. No claim beyond: nothing is measured here, and no loss is looked at.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from evenload.benchmarks.frame import columns
from evenload.benchmarks.published.common import arguments, finish
from evenload.core.machine.shape import Shape

CHATGLM2_6B = Shape(28, 4096, 13696, 4096, 256, 65024, gated=True, heads=32)
LENGTHS = (32768, 65536, 98304)
WINDOW, ROWS = 0.08, 0.05


class Setting(NamedTuple):
    name: str
    published: float
    attention: float
    """Share of the dense pass."""
    kept: float
    choosing: float

    @property
    def ideal(self) -> float:
        return 1 / (1 - self.attention * (1 - self.kept - self.choosing))

    @property
    def needed(self) -> float:
        """The share of the pairs with which it would be the published gain."""
        return 1 - self.choosing - (1 - 1 / self.published) / self.attention


def attention_share(shape: Shape, length: int) -> float:
    """Share of causal attention in the FLOPs of a forward without its head, which a first token needs once."""
    pairs = 2.0 * shape.num_layers * shape.query_size * length
    weights = shape.hidden_size * (2 * shape.query_size + 2 * shape.kv_size) + shape.mlp_weights(shape.ffn_hidden_size)
    return pairs / (pairs + 2.0 * shape.num_layers * weights)


def settings() -> list[Setting]:
    sampled = [
        Setting(f"SampleAttention, {n // 1024}K, its window", 2.42, attention_share(CHATGLM2_6B, n), WINDOW, ROWS)
        for n in LENGTHS
    ]
    video = 500 / 600
    return [
        *sampled,
        Setting("SALE, attention beyond 64K", 3.36, 1.0, 0.19, 0.11),
        Setting("AdaSpa, 10 of 50 steps dense", 1.78, video, 0.2 + 0.8 * 0.2, 0.0),
    ]


def table(result: dict[str, Any]) -> Any:
    cells = {
        "": "{name}",
        "published": "{published:.2f}x",
        "attention": "{attention:.0%}",
        "kept": "{kept:.0%}",
        "choosing": "{choosing:.0%}",
        "ideal": "{ideal:.2f}x",
        "needed": "{needed:.0%}",
    }
    about = "needed: the share of the pairs that makes the gain the published one; below 0, none does at this length"
    return columns(f"{result['title']} (predicted)", result["rows"], cells, about)


def benchmark() -> dict[str, Any]:
    rows = [{**one._asdict(), "ideal": one.ideal, "needed": one.needed} for one in settings()]
    return {"title": "sparse attention without gradients, by counted work", "rows": rows}


if __name__ == "__main__":
    finish(benchmark(), arguments(__doc__), table)
