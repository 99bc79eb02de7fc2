"""Which samples tenants are scored on, and which share a plan."""

from types import SimpleNamespace

import numpy as np
from evenload.integrations.host.scoring import Scores
from evenload.plugins.lora.arrivals.job import TenantSamples
from evenload.plugins.lora.sweeps.evaluation import _sum_of, held_out_of, union_of
from evenload.plugins.lora.tenant_file import Evaluate


def source(lengths, targets=None, base=0):
    """A stand-in whose sample i holds the id base + i everywhere."""

    def tokens(index):
        return np.full(lengths[index], base + index, dtype=np.int64)

    counted = None if targets is None else np.array(targets)
    return SimpleNamespace(lengths=np.array(lengths), targets=counted, tokens=tokens, labels=tokens)


def held_out(number, one, batches=None, size=2):
    return held_out_of(number, one, Evaluate(source="x", batches=batches), size, seed=5)


def test_the_same_samples_each_time_and_none_without_a_target():
    one = source([5, 1, 7, 8, 9], [4, 0, 6, 0, 8])
    first, again = held_out(3, one), held_out(3, one)
    assert [batch.tolist() for batch in first.batches] == [batch.tolist() for batch in again.batches]
    assert sorted(np.concatenate(first.batches).tolist()) == [0, 2, 4]
    assert [len(batch) for batch in first.batches] == [2, 1]
    assert [len(batch) for batch in held_out(3, one, batches=1).batches] == [2]


def test_tenants_that_are_due_together_share_plans():
    many, few = source([3, 4, 5, 6, 7]), source([8, 9], [2, 3], base=100)
    first, second, third = union_of([held_out(4, many), held_out(9, few)])
    assert first.tenants.tolist() == [4, 4, 9, 9]
    assert [draw.tenants.tolist() for draw in (second, third) if draw.tenants is not None] == [[4, 4], [4]]
    for draw in (first, second, third):
        samples = TenantSamples()
        samples.sources = {4: many, 9: few}
        tokens_of, labels = samples.tokens_of(draw), samples.labels_of(draw)
        assert draw.tenants is not None
        for index, (number, sample) in enumerate(zip(draw.tenants, draw.samples, strict=True)):
            assert set(tokens_of(index).tolist()) == {sample + (100 if number == 9 else 0)}
            assert len(labels.of(index)) == draw.lengths[index]
            assert labels.targets[index] == (few.targets[sample] if number == 9 else draw.lengths[index] - 1)


def test_an_evaluation_is_a_mean_over_targets_of_the_tenant_in_all_of_its_batches():
    """Sequences of unlike length: a mean over sequences, or of the means of batches, is another number."""
    many, few = source([3, 40, 5]), source([8, 9], base=100)
    draws = union_of([held_out(4, many), held_out(9, few)])
    parts, wanted = [], {4: [0.0, 0], 9: [0.0, 0]}
    for draw in draws:
        assert draw.targets is not None
        losses = np.arange(1.0, 1 + len(draw.lengths)) * 7
        parts.append((draw, Scores(losses, draw.targets)))
        for number, loss, targets in zip(draw.tenants.tolist(), losses, draw.targets, strict=True):
            wanted[number][0] += loss
            wanted[number][1] += targets
    for number, (loss, targets) in wanted.items():
        result = _sum_of(number, parts, 1.0)
        assert result.targets == targets
        assert abs(result.loss - loss / targets) < 1e-12
