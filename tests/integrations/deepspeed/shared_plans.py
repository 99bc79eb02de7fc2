"""Plans of four ranks by name (see harness.proof): of micro-batches that ranks share."""

from harness.proof.by_hand import by_hand
from harness.proof.drawn import LENGTHS, random_shared_plan

SIZES = {"num_ranks": 4, "num_stages": 1, "layers_per_stage": 2, "heads": 4}


def plan_of(name):
    if name.isdigit():
        return random_shared_plan(int(name), LENGTHS, recompute=False, **SIZES)
    return by_hand(name, node_ranks=2, **SIZES)
