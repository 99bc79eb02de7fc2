"""A tenant's file with lists of values: the trials that it means, and what is refused."""

import pytest
from evenload.core.errors import EvenloadError
from evenload.plugins.lora.sweeps.trials import MOST_TRIALS, sweep_of
from evenload.plugins.lora.tenant_file import Tenant

EVALUATE = {"source": "held_out.jsonl", "every": 10}


def tenant(sweep, **more):
    return Tenant.model_validate({"data": {"source": "a.jsonl"}, "sweep": sweep, **more})


def test_every_combination_is_a_tenant_with_its_values():
    sweep = sweep_of("acme", tenant({"train.lr": ["1e-4", 0.002], "adapter.r": [8, 16], "halve_every": 20}))
    names = ["acme.lr=1e-4.r=8", "acme.lr=1e-4.r=16", "acme.lr=0.002.r=8", "acme.lr=0.002.r=16"]
    assert [trial.name for trial in sweep.trials] == names
    assert sweep.halve_every == 20
    for trial in sweep.trials:
        assert trial.tenant.sweep is None
        assert trial.tenant.data.source == "a.jsonl"
        assert trial.values == {"train.lr": trial.values["train.lr"], "adapter.r": trial.tenant.adapter.r}
        assert float(trial.values["train.lr"]) == trial.tenant.train.lr


def test_what_a_sweep_does_not_name_stays_as_the_file_has_it():
    more = {"train": {"steps": 7, "lr": 1.0}, "adapter": {"lora_alpha": 4}, "evaluate": EVALUATE}
    (trial,) = sweep_of("a", tenant({"train.batch_size": [2]}, **more)).trials
    assert (trial.tenant.train.steps, trial.tenant.train.lr, trial.tenant.train.batch_size) == (7, 1.0, 2)
    assert trial.tenant.adapter.lora_alpha == 4
    assert trial.tenant.evaluate == Tenant.model_validate({"data": {"source": "b"}, "evaluate": EVALUATE}).evaluate


def test_names_are_fit_for_files_and_tell_trials_apart():
    targets = [["q_proj", "v_proj"], "all-linear", ["a/b"]]
    swept = {"data.source": ["x/y.jsonl", "x_y.jsonl"], "adapter.target_modules": targets}
    names = [trial.name for trial in sweep_of("a", tenant(swept, evaluate=EVALUATE)).trials]
    assert len(set(names)) == 6
    assert names[0] == "a.source=1-x_y_jsonl.target_modules=q_proj+v_proj"
    assert not [name for name in names if "/" in name or " " in name]


WRONG = {
    "unknown key": ({"train.lrr": [1e-3]}, {}, "did you mean 'train.lr'?"),
    "key of the whole recipe": ({"plugins.lora": [1]}, {}, "sweep has no key"),
    "halve_evry": ({"train.lr": [1e-3], "halve_evry": 3}, {}, "did you mean 'halve_every'?"),
    "no list": ({"train.lr": 1e-3}, {}, "not a list of values"),
    "empty list": ({"train.lr": []}, {}, "not a list of values"),
    "nothing": ({"halve_every": 3}, {}, "tries nothing"),
    "too many": ({"train.seed": list(range(17)), "train.lr": [0.1 * k for k in range(1, 17)]}, {}, f"{MOST_TRIALS}"),
    "rung too late": ({"train.lr": [1e-3, 1e-4], "halve_every": 100}, {}, "comes after"),
    "rung of nothing": ({"train.lr": [1e-3, 1e-4], "halve_every": 0}, {}, "not an integer"),
    "rung unseen": ({"train.lr": [1e-3], "halve_every": 15}, {"evaluate": EVALUATE}, "multiple of evaluate.every"),
    "a value twice": ({"train.lr": [1e-3, "1.0e-3"]}, {}, "two trials"),
    "no value": ({"adapter.r": [8, 0]}, {}, "adapter.r is not valid"),
    "unlike lengths": ({"train.steps": [8, 9]}, {}, "cannot be compared"),
    "unlike scores": ({"evaluate.source": ["a", "b"]}, {"evaluate": EVALUATE}, "cannot be compared"),
    "unlike data": ({"data.source": ["a", "b"]}, {}, "no loss in common"),
    "rank of what goes on": ({"adapter.r": [8, 16]}, {"from": "folder"}, "keeps its rank"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_sweep_is_one_message_about_its_tenant(name):
    sweep, more, says = WRONG[name]
    with pytest.raises(EvenloadError) as caught:
        sweep_of("acme", tenant(sweep, **more))
    assert says in str(caught.value)
    assert "tenant acme" in caught.value.what
    assert caught.value.found
    assert caught.value.do
