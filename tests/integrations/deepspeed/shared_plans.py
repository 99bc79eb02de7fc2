"""Plans of four ranks by the names under which tests of Hugging Face's Trainer ask for them; see harness.proof."""

from harness.proof.by_hand import by_hand
from harness.proof.drawn import LENGTHS, random_shared_plan

NAMES = {
    "mixed ring": "ring",
    "mixed all_gather": "all_gather",
    "mixed all_to_all": "all_to_all",
    "cp_groups all_gather remap": "zones, all_gather, remap",
    "chains none": "chain",
    "chains some": "chain, half replayed",
    "regrouped": "regrouped beside shared",
    "even": "zones",
}
SIZES = {"num_ranks": 4, "num_stages": 1, "layers_per_stage": 2, "heads": 4}


def named(name):
    kind, _, seed = name.partition(" ")
    if kind == "random":
        return random_shared_plan(int(seed), LENGTHS, recompute=False, **SIZES)
    return by_hand(NAMES[name], node_ranks=2, **SIZES)
