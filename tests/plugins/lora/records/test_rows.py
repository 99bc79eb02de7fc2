"""What logs and people get of a step of several tenants."""

from dataclasses import replace

import pytest
from evenload.plugins.lora.records.rows import JobRow, totals

ROW = JobRow(
    step=7,
    num_tenants=2,
    sequences=5,
    tokens=300,
    targets=200,
    step_s=0.5,
    plan_s=0.1,
    plan_wait_s=0.0,
    imbalance=1.2,
    padding_frac=0.0,
    bound_s=0.4,
    bubble_frac=0.3,
)


def test_rates_leave_out_the_first_step_and_of_no_step_nothing_is_known():
    first = replace(ROW, step=6, tokens=1000, targets=900, step_s=10.0, imbalance=3.0, bubble_frac=0.9)
    summed = totals([first, ROW])
    assert (summed["tokens"], summed["targets"], summed["train_s"]) == (1300, 1100, 10.5)
    assert (summed["tokens_per_s"], summed["imbalance"], summed["bubble_frac"]) == pytest.approx((600, 1.2, 0.3))
    assert totals([])["tokens_per_s"] == 0.0
