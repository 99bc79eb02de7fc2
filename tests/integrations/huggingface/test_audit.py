"""`evenload audit`: wrongs of a script's own batches are named with sample and token, and right ones have none."""

from __future__ import annotations

from importlib import import_module
from itertools import pairwise
from typing import Any

import pytest
import torch
from evenload.plugins.audit.rows import BORDER
from harness.lazy import LazyModule
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

transformers = LazyModule("transformers")

pytestmark = pytest.mark.slow  # imports Transformers' Trainer

LENGTHS = (7, 12, 5, 9, 14, 6, 3, 11)
IGNORE = -100


@pytest.fixture
def audited(tmp_path, monkeypatch):
    """Runs a training function as `evenload audit` does; what it judged."""
    verdict_of = import_module("rank_audit").verdict_of

    def run(train: Any, border: str = "-1") -> dict[str, Any]:
        monkeypatch.setenv(BORDER, border)
        verdict = verdict_of(tmp_path, train)
        assert verdict is not None
        return verdict

    return run


def model(kind: str = "llama", **more: Any) -> Any:
    sizes = {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "pad_token_id": 0}
    if kind == "gpt2":
        sizes = {"vocab_size": 96, "n_embd": 32, "n_layer": 2, "n_head": 4}
    config = transformers.AutoConfig.for_model(kind, **sizes, initializer_range=0.25, **more)
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config)


def rows() -> list[dict[str, list[int]]]:
    torch.manual_seed(3)
    tokens = [torch.randint(1, 96, (length,)).tolist() for length in LENGTHS]
    return [{"input_ids": one, "labels": list(one)} for one in tokens]


def padded(samples: Any) -> dict[str, Any]:
    return import_module("trainer_runs").collate(samples)


def left(samples: Any) -> dict[str, Any]:
    unasked = [{**one, "labels": [IGNORE, *one["labels"][1:]]} for one in samples]
    return import_module("trainer_runs").collate(unasked, left=True)


def flat(samples: Any) -> dict[str, Any]:
    """One row, its positions and labels as they should be."""
    labels = [label for one in samples for label in (IGNORE, *one["labels"][1:])]
    positions = [place for one in samples for place in range(len(one["input_ids"]))]
    tokens = [token for one in samples for token in one["input_ids"]]
    return {k: torch.tensor([v]) for k, v in (("input_ids", tokens), ("labels", labels), ("position_ids", positions))}


def one_label_shifted(samples: Any) -> dict[str, Any]:
    batch = flat(samples)
    batch["labels"][0, 8] = batch["input_ids"][0, 9]
    return batch


def all_labels_shifted(samples: Any) -> dict[str, Any]:
    return padded([{**one, "labels": [*one["labels"][1:], IGNORE]} for one in samples])


def crossing_labels(samples: Any) -> dict[str, Any]:
    batch = flat(samples)
    return batch | {"labels": batch["input_ids"].clone()}


def crossing_attention(samples: Any) -> dict[str, Any]:
    batch = flat(samples)
    return batch | {"attention_mask": torch.ones_like(batch["input_ids"])}


def positions_that_go_on(samples: Any) -> dict[str, Any]:
    """Samples are kept apart by a mask of their own, and count on."""
    batch = flat(samples)
    number = (batch["position_ids"][0] == 0).cumsum(0)
    seen = (number[:, None] == number[None]) & torch.ones(len(number), len(number)).tril().bool()
    mask = torch.zeros(1, 1, *seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
    return batch | {"attention_mask": mask, "position_ids": torch.arange(len(number))[None]}


def without_borders(samples: Any) -> dict[str, Any]:
    batch = flat(samples)
    return {key: batch[key] for key in ("input_ids", "labels")}


def train_by_trainer(collate: Any) -> None:
    from transformers import Trainer, TrainingArguments

    own = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "remove_unused_columns": False}
    arguments = TrainingArguments(**import_module("trainer_runs").arguments(**own))
    Trainer(model(), arguments, train_dataset=rows(), data_collator=collate).train()


def train_by_hand(
    collate: Any = padded, loss_of: Any = None, kind: str = "llama", batches: int = 1, use_cache: bool = False
) -> None:
    """A loop of its author's own: no Trainer, no Accelerate."""
    own = model(kind)
    optimizer = torch.optim.SGD(own.parameters(), lr=0.1)
    for batch in DataLoader(rows(), batch_size=8 // batches, collate_fn=collate, num_workers=1):
        loss = own(**batch, use_cache=use_cache).loss if loss_of is None else loss_of(own, batch)
        (loss / batches).backward()
    optimizer.step()


def own_loss(ahead: int, **more: Any) -> Any:
    """A loss of the script's own, of the token so far ahead."""

    def loss(own: Any, batch: Any) -> Any:
        labels = batch.pop("labels")
        logits = own(**batch, use_cache=False).logits[:, : labels.shape[1] - ahead]
        return cross_entropy(logits.flatten(0, 1), labels[:, ahead:].flatten(), ignore_index=IGNORE, **more)

    return loss


def said(verdict: dict[str, Any]) -> set[str]:
    return {one["what"].partition(":")[0] for one in verdict["wrong"]}


@pytest.mark.parametrize("collate", [padded, flat])
def test_right_batches_are_right(collate, audited):
    """Micro-batches of unlike targets, whose losses Trainer divides by those of all."""
    verdict = audited(lambda: train_by_trainer(collate))
    assert (verdict["wrong"], verdict["remarks"]) == ([], [])
    assert verdict["judged"] == {"states": True, "targets": True, "divisor": True}
    assert (verdict["samples"], verdict["targets"]) == (8, sum(LENGTHS) - 8)
    assert verdict["loss"] == pytest.approx(verdict["loss_alone"], rel=1e-5)
    assert (verdict["padding_frac"] > 0.2) == (collate is padded)


@pytest.mark.parametrize("loss", [None, own_loss(1)])
def test_a_loop_of_its_authors_own_is_judged(loss, audited):
    assert audited(lambda: train_by_hand(padded, loss))["wrong"] == []
    assert audited(lambda: train_by_hand(left, loss))["wrong"] == []


def test_one_shifted_label_is_found(audited):
    verdict = audited(lambda: train_by_hand(one_label_shifted))
    (wrong,) = verdict["wrong"]
    assert (wrong["what"], wrong["found"]) == ("labels are shifted", "it predicts the token after the next")
    # The state in front of slot 8 predicts slot 9.
    assert (wrong["sample"], wrong["start"] + wrong["token"], verdict["num_wrong"]) == (1, 7, 1)


def test_labels_that_the_script_and_the_model_shift_are_found(audited):
    verdict = audited(lambda: train_by_hand(all_labels_shifted))
    assert said(verdict) == {"labels are shifted"}
    assert (verdict["wrong"][0]["sample"], verdict["wrong"][0]["token"]) == (0, 0)
    # Where a token stands twice in a row, the next one and the one after it are one.
    assert verdict["num_wrong"] == sum(a != b for row in rows() for a, b in pairwise(row["input_ids"][1:]))
    assert not verdict["judged"]["divisor"]
    verdict = audited(lambda: train_by_hand(padded, own_loss(0)))
    assert verdict["wrong"][0]["found"] == "it predicts the token itself"


def test_a_label_over_a_border_is_found(audited):
    verdict = audited(lambda: train_by_hand(crossing_labels))
    assert said(verdict) == {"the last token of a sample has a target"}
    assert {one["found"] for one in verdict["wrong"]} == {"it predicts the first token of the next sample"}
    places = [(one["sample"], one["token"]) for one in verdict["wrong"]]
    assert places == [(sample, length - 1) for sample, length in enumerate(LENGTHS[:-1])]


@pytest.mark.parametrize("collate", [crossing_attention, without_borders, flat])
def test_attention_across_samples_is_found(collate, audited):
    """Transformers keeps samples apart by positions that start again, but not where the call keeps a cache, as it does
    unless it is told otherwise."""
    verdict = audited(lambda: train_by_hand(collate, use_cache=collate is flat))
    assert said(verdict) == {"attention looks across samples or padding"}
    places = [(one["sample"], one["token"]) for one in verdict["wrong"]]
    assert places == [(sample, 0) for sample in range(1, len(LENGTHS))]


def test_positions_that_go_on_are_found_where_they_count(audited):
    """GPT-2 learns its positions; rotary ones are relative, so that nothing is wrong there."""
    verdict = audited(lambda: train_by_hand(positions_that_go_on, kind="gpt2"))
    assert said(verdict) == {"positions do not start again at 0"}
    assert (verdict["wrong"][0]["sample"], verdict["wrong"][0]["token"]) == (1, 0)
    assert audited(lambda: train_by_hand(positions_that_go_on))["wrong"] == []


def test_a_mean_of_means_is_found(audited):
    verdict = audited(lambda: train_by_hand(batches=2))
    (wrong,) = verdict["wrong"]
    assert wrong["what"].startswith("a mean of means")
    assert (wrong["sample"], wrong["token"]) == (0, 0)
    assert wrong["found"].endswith("targets 29 and 30")


def test_a_loss_of_another_kind_is_not_judged(audited):
    verdict = audited(lambda: train_by_hand(padded, own_loss(1, label_smoothing=0.3)))
    assert verdict["wrong"] == []
    assert verdict["judged"] == {"states": True, "targets": False, "divisor": False}


def test_a_token_that_ends_samples_cuts_rows(audited):
    """Rows of which nothing says that they hold several samples, as data sets that are cut into blocks have them."""

    def blocks(_: Any) -> Any:
        tokens = torch.tensor([[9, 4, 5, 95, 7, 8, 3, 95]])
        return {"input_ids": tokens, "labels": tokens.clone()}

    assert audited(lambda: train_by_hand(blocks))["samples"] == 1
    verdict = audited(lambda: train_by_hand(blocks), border="95")
    assert verdict["samples"] == 2
    assert {(one["sample"], one["token"]) for one in verdict["wrong"]} == {(1, 0), (0, 3)}


def train_on_packed_rows() -> None:
    """As TRL's packing leaves rows: their samples' lengths beside them, which its collator does not hand on."""
    kept = [row["input_ids"] for row in rows()]
    packed = []
    for own in (kept[:3], kept[3:7]):
        tokens = [token for one in own for token in one]
        packed.append({"input_ids": tokens, "labels": tokens, "seq_lengths": [len(one) for one in own]})
    own = model()
    optimizer = torch.optim.SGD(own.parameters(), lr=0.1)
    for batch in DataLoader(packed, batch_size=1, collate_fn=without_borders):
        (own(**batch, use_cache=False).loss / 2).backward()
    optimizer.step()


def test_rows_that_trl_has_packed_are_the_samples_that_it_packed(audited):
    verdict = audited(train_on_packed_rows)
    assert verdict["samples"] == 7
    looks = [one for one in verdict["wrong"] if one["what"].startswith("attention looks across")]
    assert [(one["micro_batch"], one["sample"], one["token"]) for one in looks] == [
        *((0, sample, 0) for sample in (1, 2)),
        *((1, sample, 0) for sample in (1, 2, 3)),
    ]
    assert [one["start"] for one in looks] == [7, 19, 9, 23, 29]


def test_what_all_ranks_have_is_in_the_figures(on_ranks, tmp_path):
    """The mean of all targets, padding and predicted seconds of all ranks: rank 0 has twice the batch of rank 1."""
    import_module("evenload.api").load_plugins()
    wanted = on_ranks(2, "rank_audit.losses")[0]
    (verdict, _) = on_ranks(2, "rank_audit.verdict", folder=str(tmp_path))
    assert verdict["wrong"] == []
    assert (verdict["ranks"], verdict["micro_batches"], verdict["samples"]) == (2, [2, 1], 6)
    assert verdict["targets"] == sum(map(len, wanted)) == 47
    mean = float(sum(one.sum() for one in wanted) / 47)
    assert verdict["loss"] == pytest.approx(mean, rel=1e-6)
    assert verdict["loss_alone"] == pytest.approx(mean, rel=1e-6)
    twice = (((7, 12), (7, 12)), ((7, 12),))
    (verdict, _) = on_ranks(2, "rank_audit.verdict", folder=str(tmp_path), batches=twice)
    assert verdict["busiest_over_mean"] == pytest.approx(2 / 1.5, rel=1e-12)


def test_a_wrong_of_another_rank_is_named_with_it(on_ranks, tmp_path):
    (verdict, _) = on_ranks(2, "rank_audit.verdict", folder=str(tmp_path), leaks_on=1)
    assert said(verdict) == {"attention looks across samples or padding"}
    assert {(one["rank"], one["micro_batch"], one["sample"]) for one in verdict["wrong"]} == {(1, 0, 1)}


def test_a_mean_of_means_over_ranks_is_found(on_ranks, tmp_path):
    """The usual count is that of the micro-batch with the most targets: 18 on rank 1; others have 17 and 12."""
    (verdict, _) = on_ranks(2, "rank_audit.verdict", folder=str(tmp_path), own_means=True)
    assert {one["what"].partition(":")[0] for one in verdict["wrong"]} == {"a mean of means"}
    assert [(one["rank"], one["micro_batch"]) for one in verdict["wrong"]] == [(0, 0), (0, 1)]
    assert [one["found"].partition("targets ")[2] for one in verdict["wrong"]] == ["17 and 18", "12 and 18"]
    assert "1.059 times" in verdict["wrong"][0]["found"]
    assert "1.5 times" in verdict["wrong"][1]["found"]
    # What each token counts makes no difference to the mean that the samples have alone.
    assert verdict["loss"] != pytest.approx(verdict["loss_alone"], rel=1e-4)
