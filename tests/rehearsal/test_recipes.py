"""Every recipe on a rehearsed GPU: nothing that CUDA refuses, and no more waiting than the tables below allow."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from evenload.api import load_recipe

from .groups import unlike

pytestmark = pytest.mark.slow

RECIPES = Path(__file__).parents[2] / "recipes"
STEPS = 3
SMALL = (
    "model.num_layers=2", "model.hidden_size=64", "model.num_attention_heads=4", "model.num_query_groups=2",
    "data.max_length=512", "train.global_batch_size=8", f"train.steps={STEPS}", "train.dtype=bf16",
)  # fmt: skip
WEIGHTS = (f"train.steps={STEPS}", "train.dtype=bf16", "train.global_batch_size=16")
CASES: dict[str, tuple[str, ...]] = {
    "slices": SMALL,
    "mesh": (*SMALL, "parallel.dp=2", "costs=cpu"),
    "pipeline": SMALL,
    "moe": SMALL,
    "megatron-4-ranks": SMALL,
    "finetune": (*WEIGHTS, "train.export_prompts=0", "data.validation=null"),
    "lora": (f"train.steps={STEPS}", "train.dtype=bf16"),
    "deepspeed": (*SMALL, "deepspeed.zero_stage=0"),
    "deepspeed, ZeRO 1": SMALL,
    "deepspeed, ZeRO 2": (*SMALL, "deepspeed.zero_stage=2"),
    "deepspeed, ZeRO 3": (*SMALL, "deepspeed.zero_stage=3"),
}


class Seen(NamedTuple):
    """What the ranks of a run did to their devices, added up or by rank."""

    faults: Counter[str]
    waits: list[Counter[str]]
    to_device: list[Counter[str]]
    collectives: list[dict[str, list[str]]]


def seen_in(outputs: Path) -> Seen:
    """The ledgers of a run's ranks."""
    ranks = [json.loads(path.read_text()) for path in sorted(outputs.glob("rank.*.json"))]
    faults: Counter[str] = Counter()
    for rank in ranks:
        faults.update(rank["faults"])
    by_rank = ([Counter(rank[kind]) for rank in ranks] for kind in ("waits", "to_device"))
    return Seen(faults, *by_rank, [rank["collectives"] for rank in ranks])


def each_step(counts: Counter[str], steps: int = STEPS) -> dict[str, int]:
    """How often a step does it, of what every step does."""
    return {what: number // steps for what, number in counts.items() if number >= steps}


def ours(counts: dict[str, int]) -> dict[str, int]:
    return {what: number for what, number in counts.items() if not what.partition(" at ")[2].startswith(HOSTS)}


HOSTS = ("megatron/", "deepspeed/", "transformers/", "accelerate/", "torch/", "trl/", "/")


@pytest.mark.parametrize("case", CASES)
def test_a_recipe_runs_on_a_gpu(case: str, forge: Any, tmp_path: Path) -> None:
    recipe = RECIPES / f"{case.partition(',')[0]}.yaml"
    words = CASES[case]
    loaded = load_recipe(recipe, words)
    done = forge(f"cuda+{loaded.trainer}").run(tmp_path, ("train", str(recipe), *words), loaded.min_world_size)
    assert done.returncode == 0, done.outputs
    seen = seen_in(done.outputs)
    assert not seen.faults
    assert not unlike(seen.collectives)
    for waits, to_device in zip(seen.waits, seen.to_device, strict=True):
        print(case, each_step(waits), each_step(to_device))
