"""By which loss a trial is ranked, and which trials are still in the race."""

from types import SimpleNamespace

import pytest
from evenload.plugins.lora.sweeps.race import Race
from evenload.plugins.lora.sweeps.trials import sweep_of
from evenload.plugins.lora.tenant_file import Tenant

TENANT = {"data": {"source": "a.jsonl"}, "train": {"steps": 6}, "sweep": {"train.lr": [1, 2], "halve_every": 2}}
SWEEP = sweep_of("acme", Tenant.model_validate(TENANT))


def trial(place, losses, state="training"):
    fields = {"step": len(losses), "steps": 6, "losses": losses, "state": state, "best": None}
    return SimpleNamespace(name=SWEEP.trials[place].name, config=SWEEP.trials[place].tenant, **fields)


def test_without_evaluations_the_losses_since_the_last_rung_count():
    race = Race(SWEEP, "digest", 6)
    assert race.loss_of(trial(0, [])) is None
    assert race.loss_of(trial(0, [8.0, 6.0])) == 7.0
    assert race.loss_of(trial(0, [8.0, 6.0, 3.0])) == 3.0
    assert race.loss_of(trial(0, [8.0, 6.0, 3.0, 1.0])) == 2.0


@pytest.mark.parametrize("state", ["failed", "left"])
def test_who_failed_or_left_is_out_of_the_race_and_holds_up_nobody(state):
    race, trials = Race(SWEEP, "digest", 6), [trial(0, [9.0, 9.0]), trial(1, [1.0], state)]
    assert race.take_down(trials)
    assert race.halving.out_at(SWEEP.trials[1].name) == 1
    assert race.halving.close()
    assert race.next_rung(trials[0]) == 4
    assert race.halving.out_at(SWEEP.trials[0].name) is None


def test_who_waits_for_the_others_stays_where_it_is():
    race, trials = Race(SWEEP, "digest", 6), [trial(0, [9.0, 9.0]), trial(1, [1.0])]
    race.take_down(trials)
    assert not race.halving.close()
    assert [race.next_rung(one) for one in trials] == [2, 2]
