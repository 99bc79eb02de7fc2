"""Models that come from a Hugging Face folder and leave as one: against Transformers' own loading, bit by bit."""

from __future__ import annotations

import pytest
from harness.cases import only_full
from harness.proof import LENGTHS, ROUNDING

pytestmark = pytest.mark.slow

SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
GROUPS = {**SIZES, "num_key_value_heads": 2, "head_dim": 8}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
FAMILIES = {
    "llama": ("LlamaConfig", GROUPS),
    "tied llama": ("LlamaConfig", {**GROUPS, "tie_word_embeddings": True}),
    "qwen2": ("Qwen2Config", GROUPS),
    "qwen3": ("Qwen3Config", {**GROUPS, "head_dim": 16}),
    "gpt_neox": ("GPTNeoXConfig", SIZES),
    "mixtral": ("MixtralConfig", {**GROUPS, **EXPERTS}),
    "qwen3_moe": ("Qwen3MoeConfig", {**GROUPS, **EXPERTS, "moe_intermediate_size": 24, "norm_topk_prob": True}),
}


def _check(on_ranks, tmp_path, cases):
    for number, case in enumerate(cases):
        case |= {"family": FAMILIES[case["family"]], "folder": str(tmp_path / f"in{number}")}
    of_ranks = on_ranks(2, "pretrained_jobs.came_and_went", cases=cases)
    for result in of_ranks[0]:
        assert len(result["logits"]) == len(LENGTHS)
        assert max(result["logits"].values()) <= ROUNDING
    for of_rank in of_ranks:
        for case, result in zip(cases, of_rank, strict=True):
            assert result["unlike"] == result["exported"] == [], case
            assert result["loss"] <= ROUNDING, case
            assert result["grad"] <= ROUNDING, case


@pytest.mark.parametrize(
    ("stage", "families"), [(0, ["tied llama"]), (3, list(FAMILIES)), only_full(0, list(FAMILIES))]
)
def test_every_family_comes_and_leaves(on_ranks, tmp_path, stage, families):
    _check(on_ranks, tmp_path, [{"family": name, "stage": stage} for name in families])


def test_parts_of_a_model(on_ranks, tmp_path):
    cases = [
        {"family": "llama", "stage": 1, "pp": 2},
        {"family": "mixtral", "stage": 1, "ep": 2},
        {"family": "qwen3_moe", "stage": 3, "ep": 2},
    ]
    _check(on_ranks, tmp_path, cases)
