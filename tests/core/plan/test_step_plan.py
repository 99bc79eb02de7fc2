"""What a plan says of its micro-batches, and what stays of it when they are others."""

from evenload.core.plan.limits import Limits
from evenload.core.plan.step_plan import MicroBatch, Slice, StepPlan

from ..by_hand import alone, ops

WHOLE = MicroBatch((Slice(0, 0, 8), Slice(1, 0, 4)), (0, 1), cp_comm="ring")


def test_every_slice_has_its_ranks():
    assert WHOLE.ranks_of_slices == ((0, 1), (0, 1))
    assert WHOLE._replace(cp_groups=((0, 1), (1,))).ranks_of_slices == ((0, 1), (1,))
    assert MicroBatch((), (3,)).ranks_of_slices == ()


def test_other_micro_batches_leave_the_sequences_alone_as_they_were():
    own = {"order": (ops("F0 B0"),), "recompute": ((1,),), "replayed": (0,), "offload": (0.5,), "notes": ("said",)}
    plan = StepPlan([8, 4], (WHOLE,), Limits(2, 12), **own, made_by="one", bound_s=0.5, tenants=[1, 2])
    apart = alone([8, 4], (0, 1))
    other = plan.with_micro_batches(apart, Limits(2, 8), "another")
    assert (other.micro_batches, other.limits, other.made_by) == (apart, Limits(2, 8), "another")
    assert other.lengths.tolist() == [8, 4]
    assert (other.tenants.tolist(), other.bound_s) == ([1, 2], 0.5)
    empty = (other.order, other.recompute, other.backward, other.replayed, other.offload, other.notes)
    assert empty == ((),) * 6
    assert plan.with_micro_batches(apart, plan.limits, "another", own["order"]).order == own["order"]
