"""Plans of two ranks by name (see harness.proof): of slices, replays and regrouped backward passes."""

from harness.proof.by_hand import by_hand
from harness.proof.drawn import LENGTHS, random_plan

HAND = ("slices", "slices, half replayed", "slices, all replayed", "regrouped")
EQUAL = ("slices, in step", "slices, in step, half replayed", "slices, in step, all replayed")
SIZES = {"num_ranks": 2, "num_stages": 1, "layers_per_stage": 2}


def plan_of(name, lengths=LENGTHS):
    return random_plan(int(name), lengths, recompute=False, **SIZES) if name.isdigit() else by_hand(name, **SIZES)
