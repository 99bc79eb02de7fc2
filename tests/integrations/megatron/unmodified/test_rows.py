"""TensorDicts taken apart into rows and put together again, and their losses divided as the loop's own."""

from __future__ import annotations

import pytest
import torch
from evenload.core.errors import EvenloadError
from evenload.integrations.megatron.unmodified.reading.rows import (
    holds_rows,
    joined,
    of_batch,
    refuse_uncommon,
    rows_of,
)
from harness.lazy import LazyModule

tensordict = LazyModule("tensordict")
objective = LazyModule("evenload.integrations.megatron.unmodified.running.objective")


@pytest.fixture(autouse=True)
def _installed():
    pytest.importorskip("tensordict")


def nested(*rows):
    return torch.nested.as_nested_tensor([torch.tensor(row) for row in rows], layout=torch.jagged)


def value(anything):
    return tensordict.NonTensorData(anything)


def batch(first=10, **more):
    ids = nested([first, first + 1, first + 2], [first + 3], [first + 4, first + 5])
    made = tensordict.TensorDict({"gain": torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]) + first}, batch_size=[3])
    made["input_ids"] = ids
    made["uid"] = tensordict.NonTensorStack.from_list([value({"place": first + i}) for i in range(3)])
    for key, entry in {"num_micro_batch": value(4), **more}.items():
        made[key] = entry
    return made


def test_rows_change_batches_with_all_that_is_theirs():
    one, other = batch(), batch(20)
    first, second = rows_of(one), [row.cpu() for row in rows_of(other)]
    assert [row.length for row in first + second] == [3, 1, 2, 3, 1, 2]
    joint = joined([second[2], first[0], second[1]], one)
    assert type(joint) is type(one)
    assert joint.device == one.device
    assert joint.batch_size == torch.Size([3])
    assert [row.tolist() for row in joint["input_ids"].unbind()] == [[24, 25], [10, 11, 12], [23]]
    assert joint["gain"].tolist() == [[25.0, 26.0], [11.0, 12.0], [23.0, 24.0]]
    assert list(joint["uid"]) == [{"place": 22}, {"place": 10}, {"place": 21}]
    assert joint["num_micro_batch"] == 4
    assert joint.keys() == one.keys()
    assert joined([first[1]], one)["num_micro_batch"] == 4


def test_rows_without_anything_but_ragged_values_are_joined_too():
    bare = tensordict.TensorDict({}, batch_size=[2])
    bare["input_ids"] = nested([1, 2], [3])
    joint = joined(rows_of(bare)[::-1], bare)
    assert [row.tolist() for row in joint["input_ids"].unbind()] == [[3], [1, 2]]


def test_padded_rows_are_as_long_as_their_mask():
    padded = tensordict.TensorDict({"input_ids": torch.ones(2, 4), "attention_mask": torch.ones(2, 4)}, batch_size=[2])
    padded["attention_mask"][0, 2:] = 0
    assert [row.length for row in rows_of(padded)] == [2, 4]
    assert [row.length for row in rows_of(padded.exclude("attention_mask"))] == [4, 4]


def test_a_moved_row_does_not_bring_the_others_memory():
    row = rows_of(batch())[0].cpu()
    assert row.ragged["input_ids"].untyped_storage().nbytes() == 3 * 8
    assert row.rest["gain"].untyped_storage().nbytes() == 2 * 4


def test_other_batches_hold_no_rows():
    assert holds_rows(batch())
    assert not holds_rows({"input_ids": torch.ones(1, 2)})
    assert not holds_rows(torch.ones(1, 2))
    assert not holds_rows(tensordict.TensorDict({"tokens": torch.ones(1, 2)}, batch_size=[1]))


@pytest.mark.parametrize(
    ("spoiled", "says"),
    [
        (lambda: batch(inner=tensordict.TensorDict({"a": torch.ones(3)}, batch_size=[3])), "holds another one"),
        (lambda: tensordict.TensorDict({"input_ids": torch.ones(2, 2)}, batch_size=[]), "one dimension of rows"),
        (lambda: tensordict.TensorDict({"input_ids": torch.ones(0, 2)}, batch_size=[0]), "one dimension of rows"),
        (lambda: tensordict.TensorDict({"input_ids": torch.nested.nested_tensor([torch.ones(2)])}), "one dimension"),
    ],
)
def test_what_is_no_row_is_refused(spoiled, says):
    with pytest.raises(EvenloadError, match=says) as refused:
        rows_of(spoiled())
    assert refused.value.do


def test_a_nested_tensor_of_another_layout_or_dimension_is_refused():
    turned = batch()
    turned["places"] = nested([1], [2], [3])
    turned["places"]._ragged_idx = 2
    with pytest.raises(EvenloadError, match="cannot be told apart"):
        rows_of(turned)


def test_rows_that_differ_cannot_be_joined():
    wider = batch()
    wider["gain"] = torch.ones(3, 4)
    with pytest.raises(EvenloadError, match="rows of different micro-batches") as refused:
        joined([rows_of(batch())[0], rows_of(wider)[0]], batch())
    assert refused.value.found == "gain: [1, 2] and [1, 4]"
    with pytest.raises(EvenloadError, match="rows of different micro-batches"):
        joined([rows_of(batch())[0], rows_of(batch(extra=torch.ones(3)))[0]], batch())


def test_what_is_the_batchs_must_be_the_same_everywhere():
    alike = [of_batch(batch(mode=value("train"), hook=value(print))) for _ in range(2)]
    assert alike[0] == {"num_micro_batch": 4, "mode": "train"}
    refuse_uncommon(alike)
    for odd in ({"num_micro_batch": 3, "mode": "train"}, {"num_micro_batch": 4}):
        with pytest.raises(EvenloadError, match="say different things"):
            refuse_uncommon([*alike, odd])


def step(per_token, own, answer, real=True):
    """What the schedule gets from a loss function's answer."""
    batches = [batch(), batch()]
    function = lambda data, _: (next(data), lambda output: answer)  # noqa: E731
    output, loss_func = objective.RowStep(function, batches, [real, True], own=own, per_token=per_token)(None, None)
    assert output is batches[0]
    return loss_func(output)


def test_a_loss_keeps_its_weight_when_another_number_of_micro_batches_runs():
    # The schedule divides by the 2 that run, the loop means its own 3.
    loss, report = step(False, 3, (torch.tensor(6.0), "report"))
    assert (float(loss) / 2, report) == (6.0 / 3, "report")
    loss, count, _ = step(True, 3, (torch.tensor(6.0), torch.tensor(4), "report"))
    assert (float(loss), int(count)) == (6.0, 4)


def test_a_repeated_row_has_no_loss_and_no_tokens():
    assert float(step(False, 3, (torch.tensor(6.0), "report"), real=False)[0]) == 0
    loss, count, _ = step(True, 3, (torch.tensor(6.0), torch.tensor(4), "report"), real=False)
    assert (float(loss), int(count)) == (0, 0)


@pytest.mark.parametrize("per_token", [True, False])
def test_a_loss_that_megatron_divides_in_another_manner_is_refused(per_token):
    odd = (torch.tensor(6.0), "report") if per_token else (torch.tensor(6.0), torch.tensor(4), "report")
    for answer in (odd, torch.tensor(6.0)):
        with pytest.raises(EvenloadError, match="or not at all"):
            step(per_token, 3, answer)
