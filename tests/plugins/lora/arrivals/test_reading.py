"""Samples are read before their step, and a fault of a tenant's data is that tenant's alone."""

import json
from types import SimpleNamespace

import numpy as np
from evenload.core.plan.limits import Limits
from evenload.core.plan.step_plan import MicroBatch, Slice, StepPlan
from evenload.core.planning.planner import Draw
from evenload.data.samples.cut import IGNORE
from evenload.data.sources import open_source
from evenload.plugins.lora.arrivals.job import TenantSamples
from evenload.plugins.lora.state.drawing import union


def source(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return open_source(str(path), max_length=64)


def draw_of(one, samples):
    chosen = np.array(samples)
    return Draw(chosen, one.lengths[chosen], {}, targets=None if one.targets is None else one.targets[chosen])


def planned(draw):
    """One micro-batch a sequence, on rank 0, but for the last sequence, which is on rank 1."""
    last = len(draw.lengths) - 1
    batches = [MicroBatch((Slice(i, 0, int(n)),), (int(i == last),)) for i, n in enumerate(draw.lengths)]
    return SimpleNamespace(draw=draw, plan=StepPlan(draw.lengths, tuple(batches), Limits(2, 64)))


def test_tokens_and_labels_are_those_of_each_tenant(tmp_path):
    bare = source(tmp_path / "a.jsonl", [{"tokens": [1, 2, 3]}, {"tokens": [4, 5]}])
    prompts = source(tmp_path / "b.jsonl", [{"prompt": "ab", "completion": "cd"}] * 3)
    draw = union({1: draw_of(bare, [1, 0]), 4: draw_of(prompts, [0, 2])})
    samples = TenantSamples()
    samples.sources |= {1: bare, 4: prompts}
    assert samples.read(planned(draw), 0) == {}
    tokens, labels = samples.tokens_of(draw), samples.labels_of(draw)
    assert [tokens(i).tolist() for i in range(2)] == [[4, 5], [1, 2, 3]]
    assert labels.of(0).tolist() == [4, 5]
    assert labels.of(2).tolist() == prompts.labels(0).tolist()
    assert tokens(3).tolist() == prompts.tokens(2).tolist()  # of rank 1: read when it is asked for
    assert labels.targets.tolist() == draw.targets.tolist()
    assert samples.labels_of(union({1: draw_of(bare, [0])})) is None


def test_data_that_are_gone_or_have_changed_are_said_of_their_tenant(tmp_path):
    one, other = (source(tmp_path / f"{name}.jsonl", [{"tokens": [1, 2, 3]}] * 2) for name in "ab")
    draw = union({1: draw_of(one, [0, 1]), 2: draw_of(other, [0, 1])})
    samples = TenantSamples()
    samples.sources |= {1: one, 2: other}
    (tmp_path / "b.jsonl").write_text(json.dumps({"tokens": [1]}) + "\n")
    faults = samples.read(planned(draw), 0)
    assert list(faults) == [2]
    assert "b.jsonl" in faults[2]
    (tmp_path / "b.jsonl").unlink()
    assert list(samples.read(planned(draw), 1)) == [2]  # the last sequence is the other rank's


def test_a_sample_of_other_targets_than_when_the_data_were_opened_is_not_trained_on():
    tokens = {0: [1, 2, 3], 1: [4, 5, 6]}
    labels = {0: [IGNORE, 2, 3], 1: [4, IGNORE, 6]}  # the second one had two targets when it was counted
    one = SimpleNamespace(
        name="a.jsonl",
        lengths=np.array([3, 3]),
        targets=np.array([2, 2]),
        tokens=lambda sample: np.array(tokens[sample]),
        labels=lambda sample: np.array(labels[sample]),
    )
    samples = TenantSamples()
    samples.sources |= {1: one, 2: one}
    faults = samples.read(planned(union({1: draw_of(one, [0]), 2: draw_of(one, [1, 0])})), 0)
    assert list(faults) == [2]
    assert "a.jsonl has changed since it was opened" in faults[2]
    assert "sample 1 has 1 targets, 2 before" in faults[2]
