"""What logs and people get of a step of several tenants."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
from evenload.training.tenants.records.rows import JobRow, Live, entry_of_step, totals

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


def test_a_log_gets_the_step_and_each_tenant_by_its_name():
    own = {"acme": {"step": 3, "loss": 2.5, "lr": 1e-3, "samples": [4, 1]}, "bolt": {"step": 9, "loss": 1.5}}
    entry = entry_of_step(ROW, own)
    assert entry.step == 7
    assert entry.line["num_tenants"] == 2
    assert entry.line["tenants"] == own
    assert entry.scalars["evenload/step_s"] == 0.5
    named = {name: value for name, value in entry.scalars.items() if name.startswith("evenload/tenants/")}
    assert named == {
        "evenload/tenants/acme/loss": 2.5,
        "evenload/tenants/acme/lr": 1e-3,
        "evenload/tenants/bolt/loss": 1.5,
    }


def test_rates_leave_out_the_first_step_and_of_no_step_nothing_is_known():
    first = replace(ROW, step=6, tokens=1000, targets=900, step_s=10.0, imbalance=3.0, bubble_frac=0.9)
    summed = totals([first, ROW])
    assert (summed["tokens"], summed["targets"], summed["train_s"]) == (1300, 1100, 10.5)
    assert (summed["tokens_per_s"], summed["imbalance"], summed["bubble_frac"]) == pytest.approx((600, 1.2, 0.3))
    assert totals([])["tokens_per_s"] == 0.0


def test_a_row_says_how_its_tenant_has_ended_and_is_not_moved_by_that():
    said = []
    tenant = SimpleNamespace(
        number=1, name="acme", steps=10, step=4, losses=[2.5], best=None, tokens=90, seconds=3.0, state="training"
    )
    live = Live(lambda *words: said.append(words))
    live.tick(tenant)
    live.end([tenant])
    tenant.state, tenant.best = "stopped", 2.25
    for _ in range(2):
        live.end([tenant])
    assert said == [
        ("acme", 1, 7, "loss 2.5000  30 tokens/s"),
        ("acme", 1, 7, "stopped  loss 2.5000  best 2.2500  30 tokens/s"),
    ]
