"""Runs of a mixture: killed and gone on with on other ranks they draw the same, and tell what each domain came to."""

import json

import pytest
from evenload.commands.tables.train import table
from evenload.training.checkpoint.manifest import read as load_manifest
from harness.cases import full

pytestmark = pytest.mark.slow
RECIPE = """
trainer: {trainer}
model: {{num_layers: 2, hidden_size: 32, num_attention_heads: 4, num_query_groups: 2}}
data:
  max_length: 256
  domains: {{long: {{source: long.jsonl, share: 2}}, short: {{source: short.jsonl}}}}
  mix:
    policy: schedule
    unit: targets
    points: [{{step: 1, shares: {{long: 0.5}}}}, {{step: 5, shares: {{long: 4}}}}]
  validation: {{domains: {{long: long.jsonl, other: short.jsonl}}, every: 2}}
train: {{steps: 6, global_batch_size: 8, lr: 1.0e-2}}
checkpoint: {{dir: kept, every: 2, keep: 9, best: other}}
plugins: {{packing: {{enabled: true, max_tokens: 512, max_delay_steps: 2}}}}
"""


@pytest.fixture
def place(tmp_path, two_domains):
    """A folder with two domains and a recipe for each trainer."""
    two_domains(tmp_path, long=(30, 90, 256), short=(25, 5, 40))
    for trainer in ("megatron", "deepspeed"):
        (tmp_path / f"{trainer}.yaml").write_text(RECIPE.format(trainer=trainer))
    return tmp_path


def orders(kept, step):
    """What a checkpoint says of the domains' orders, credits and waiting samples."""
    return load_manifest(kept / f"step{step:08d}").state["order"]


def refuse_other_losses(result):
    """The losses of domains add up to the loss of the step, and of the validation."""
    for row in (*result["steps"], *result["validation"]):
        own = list(row["domains"].values())
        assert sum(one["targets"] for one in own) == row["targets"]
        assert sum(one["tokens"] for one in own) == row["tokens"]
        loss = sum(one["loss"] * one["targets"] for one in own) / row["targets"]
        assert loss == pytest.approx(row["loss"], rel=1e-6)


def test_a_killed_run_goes_on_with_the_same_draws_on_fewer_ranks(place, ran, logged, shown):
    words = "parallel.dp=2", "checkpoint.dir=whole", "log.jsonl=whole.jsonl"
    whole = ran(place, "train", "megatron.yaml", *words)
    refuse_other_losses(whole)
    steps = []
    for ranks, until in ((2, 2), (1, 6)):
        words = f"parallel.dp={ranks}", f"train.steps={until}", "log.jsonl=steps.jsonl", "log.tensorboard=board"
        result = ran(place, "train", "megatron.yaml", *words)
        refuse_other_losses(result)
        steps += result["steps"]
    drawn = [[line["samples"] for line in logged(place / f"{name}.jsonl")] for name in ("steps", "whole")]
    assert drawn[0] == drawn[1]
    for step in (2, 4, 6):
        assert orders(place / "kept", step) == orders(place / "whole", step), "bit for bit, credits too"
    assert [row["loss"] for row in steps] == pytest.approx([row["loss"] for row in whole["steps"]], rel=1e-5)
    lines = [json.loads(line) for line in (place / "steps.jsonl").read_text().splitlines()]
    assert [line["domains"] for line in logged(place / "steps.jsonl")] == [row["domains"] for row in steps]
    refuse_other_best(place, lines)
    assert "losses of the first and the last step that drew of the domain" in shown(table(whole))


def refuse_other_best(place, lines):
    """The best checkpoint is that of the domain's lowest loss, and boards show the losses of domains."""
    validations = [line["validation"] for line in lines if "validation" in line]
    lowest = min(validations[1:], key=lambda row: row["domains"]["other"]["loss"])
    assert (place / "kept" / "best" / "latest").read_text() == f"step{lowest['step']:08d}"
    assert orders(place / "kept" / "best", lowest["step"]) == orders(place / "kept", lowest["step"])
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(place / "board")).Reload()
    losses = [event.value for event in board.Scalars("evenload/validation/domains/other/loss")]
    assert losses[-1] == pytest.approx(validations[-1]["domains"]["other"]["loss"], rel=1e-6)
    assert "evenload/domains/long/loss" in board.Tags()["scalars"]


@full
def test_a_domain_joins_and_another_leaves_on_another_trainer_too(place, ran):
    first = ran(place, "train", "deepspeed.yaml", "parallel.dp=2", "train.steps=2")
    refuse_other_losses(first)
    (place / "new.jsonl").write_text((place / "short.jsonl").read_text())
    mix = "data.mix={unit: samples}", "data.domains={long: {source: long.jsonl}, new: {source: new.jsonl, share: 3}}"
    more = ran(place, "train", "deepspeed.yaml", "parallel.dp=1", "train.steps=4", *mix)
    refuse_other_losses(more)
    before, after = (orders(place / "kept", step)["domains"] for step in (2, 4))
    assert {key: after["short"][key] for key in after["short"]} == before["short"], "it waits as it was left"
    taken = {name: own["epoch"] * own["num_samples"] + own["consumed"] for name, own in after.items()}
    already = before["long"]["epoch"] * before["long"]["num_samples"] + before["long"]["consumed"]
    assert (taken["new"], taken["long"] - already) == (12, 4), "two steps of eight samples, 3 to 1"
