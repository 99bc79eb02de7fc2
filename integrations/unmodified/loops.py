"""What each plugin can do in which training loop: the one table, for `evenload doctor` and docs/switching_on.md.

A loop has a trainer and a way in; what a plugin does there is a phrase, and a plugin that is not named does nothing.
``refused`` ends a run before its first step; ``parts of samples`` are slices and shared sequences. Imports neither a
trainer nor torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

PLUGINS = ("packing", "mesh", "pipeline", "moe", "lora")
NOTHING, REFUSED = "-", "refused"


class Loop(NamedTuple):
    """A training loop that runs plans."""

    name: str
    trainer: str
    """Of the recipe."""
    start: str
    """What its user types."""
    plugins: Mapping[str, str]
    """What each does there."""
    cuts: bool = True
    """Parts of samples may run on a rank, where the attention allows it."""

    def does(self, plugin: str) -> str:
        return self.plugins.get(plugin, NOTHING)


_STAGES = "orders, PP > 1"

LOOPS = (
    Loop(
        "evenload train, Megatron-Core",
        "megatron",
        "evenload train",
        {"packing": "packs, slices", "mesh": "shares", "pipeline": _STAGES, "moe": "copies, EP > 1", "lora": "tenants"},
    ),
    Loop(
        "evenload train, DeepSpeed",
        "deepspeed",
        "evenload train",
        {
            "packing": "packs, slices",
            "mesh": "shares",
            "pipeline": f"{_STAGES}, ZeRO 0, 1",
            "moe": "copies, EP > 1",
            "lora": "tenants",
        },
    ),
    Loop(
        "Megatron-LM, Megatron-Core loops",
        "megatron",
        "evenload run",
        {"packing": "packs, slices", "mesh": "shares", "pipeline": _STAGES, "moe": "copies, EP > 1", "lora": REFUSED},
    ),
    Loop(
        "deepspeed.initialize",
        "deepspeed",
        "evenload run",
        {"packing": "packs of whole samples", "moe": "copies, EP > 1", "lora": REFUSED},
        cuts=False,
    ),
    Loop(
        "Transformers' Trainer",
        "transformers",
        "evenload run",
        {"packing": "packs, slices", "mesh": "shares", "moe": REFUSED, "lora": REFUSED},
    ),
    Loop(
        "a loop of Accelerate",
        "transformers",
        "evenload run",
        {"packing": "packs of whole samples", "moe": REFUSED, "lora": REFUSED},
        cuts=False,
    ),
)


def document() -> str:
    """The table of plugins and loops, as Markdown."""
    head = f"| loop | {' | '.join(PLUGINS)} |\n|---{'|---' * len(PLUGINS)}|\n"
    return head + "".join(f"| {one.name} | {' | '.join(map(one.does, PLUGINS))} |\n" for one in LOOPS)
