"""Plans of two ranks by the names under which tests of Hugging Face's Trainer ask for them; see harness.proof."""

from harness.proof.by_hand import by_hand
from harness.proof.drawn import LENGTHS, random_plan

NAMES = {"chains none": "slices", "chains some": "slices, half replayed", "regrouped": "regrouped"}
SIZES = {"num_ranks": 2, "num_stages": 1, "layers_per_stage": 2}


def named(name):
    kind, _, seed = name.partition(" ")
    if kind == "random":
        return random_plan(int(seed), LENGTHS, recompute=False, **SIZES)
    return by_hand(NAMES[name], **SIZES)
