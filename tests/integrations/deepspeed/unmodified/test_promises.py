"""A user's loop on 2 ranks keeps its objective, or ends before its first forward with one message on all ranks."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.slow


def test_what_cannot_be_regrouped_is_refused_on_all_ranks_with_one_message(on_ranks):
    first, second = on_ranks(2, "script_jobs.refusals")
    parts = {
        "labels on padding": ("3 labels of 1 samples", "labels[attention_mask == 0] = -100"),
        "chunks": (
            "attention_chunk_size = 16",
            "longest sample of the step = 20",
            "lower max_length",
            "tokenizer call",
        ),
        "rotary": ("beyond 16 tokens", "longest sample of the step = 17", "tokenizer call to 16"),
        "rotary of padding": ("longest sample of the step = 9, padded to 17",),
        "router loss": ("output_router_logits = True", "output_router_logits: false"),
        "no target": ("no target token",),
    }
    for name, texts in parts.items():
        assert first[name] == second[name]
        for text in texts:
            assert text in first[name], name
        assert "data.max_length" not in first[name]
    assert "deterministic" in first.get("another sample", "") + second.get("another sample", "")


ROWS = [list(range(1 + 13 * place, n + 1 + 13 * place)) for place, n in enumerate((30, 3, 1, 17, 9, 4, 22, 6))]


@pytest.mark.parametrize("kind", ["right", "left", "flattened"])
def test_every_sample_with_a_target_is_handed_out_once(on_ranks, kind):
    of_ranks = on_ranks(2, "script_jobs.batches", kind=kind)
    assert [len(batches) for batches in of_ranks] == [2, 2]
    samples = sorted(sample for batches in of_ranks for batch in batches for sample in batch)
    assert samples == sorted((row, [-100, *row[1:]]) for row in ROWS if len(row) > 1)


@pytest.mark.parametrize("kind", ["", "experts", "window"])
def test_a_dummy_shows_the_loss_of_its_rank_and_changes_nothing(on_ranks, kind):
    of_ranks = on_ranks(2, "script_jobs.losses_of_dummies", kind=kind)
    assert sorted(result["real"] for result in of_ranks) == [[True, False], [True, True]]
    for result in of_ranks:
        assert result["error"] < 3e-7
        if result["real"] == [True, False]:
            assert result["losses"][0] == result["losses"][1]
        else:
            assert result["losses"][0] != result["losses"][1]
