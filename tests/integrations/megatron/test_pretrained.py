"""Models that come from a Hugging Face folder, against Transformers' own forward, and leave as one, bit by bit."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
from harness.cases import only_full
from harness.proof import LENGTHS

pytestmark = pytest.mark.slow

VOCABULARY = 51
"""Odd, so that tensor parallelism pads it."""
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
GROUPS = {**SIZES, "num_key_value_heads": 2}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
WHOLE_HEADS = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
FAMILIES = {
    "llama": ("LlamaConfig", {**GROUPS, "rope_parameters": LLAMA3}),
    "tied llama": ("LlamaConfig", {**GROUPS, "tie_word_embeddings": True, "rms_norm_eps": 1e-4}),
    "deep tied llama": ("LlamaConfig", {**GROUPS, "num_hidden_layers": 4, "tie_word_embeddings": True}),
    "qwen2": ("Qwen2Config", GROUPS),
    "qwen3": ("Qwen3Config", {**GROUPS, "head_dim": 12, "tie_word_embeddings": True}),
    "gpt_neox": ("GPTNeoXConfig", {**SIZES, "use_parallel_residual": False, "rope_parameters": WHOLE_HEADS}),
    "mixtral": ("MixtralConfig", {**GROUPS, **EXPERTS}),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        {**GROUPS, **EXPERTS, "moe_intermediate_size": 16, "norm_topk_prob": True, "mlp_only_layers": [1]},
    ),
}
DENSE = [name for name in FAMILIES if "moe" not in name and name != "mixtral"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory, all_in_float64):
    """A folder of each family as Transformers saves it, with samples and the logits that Transformers gives for them in
    float64."""
    import torch
    import transformers

    generator = np.random.default_rng(1)
    samples = [torch.from_numpy(generator.integers(0, VOCABULARY, length)) for length in LENGTHS]
    root = tmp_path_factory.mktemp("families")
    for family, (config, fields) in FAMILIES.items():
        torch.manual_seed(1)
        model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, config)(**fields))
        for name, parameter in model.named_parameters():
            torch.nn.init.normal_(parameter, mean=float("norm" in name), std=0.3)
        model.save_pretrained(root / family, max_shard_size="20KB")
        kind = transformers.AutoModelForCausalLM
        model = kind.from_pretrained(root / family, dtype=torch.float64, attn_implementation="sdpa")
        model.config._experts_implementation = "eager"
        with torch.no_grad(), all_in_float64():
            torch.save((samples, [model(ids[None]).logits[0] for ids in samples]), root / family / "logits.pt")
    return root


V_SHAPE = {"pipeline": {"enabled": True, "v_shape": True}}
CUT = {"plugins": {"moe": {"enabled": True, "owners": "sharded"}}}
UNEQUAL = {"folder": "deep tied llama", "pp": 2, "layers": [1, 3], "plans": [6]}
CASES = {
    "tp2": (2, [{"folder": name, "tp": 2, "plans": [5]} for name in ("tied llama", "qwen3", "gpt_neox")]),
    "pp2": (2, [UNEQUAL, *({"folder": name, "pp": 2, "plans": [6]} for name in ("llama", "qwen3_moe"))]),
    "dp2": (
        2,
        [
            {"folder": "qwen2", "plans": [3, "shared 101"]},
            {"folder": "mixtral", "ep": 2, "plans": [4], **CUT},
            {"folder": "qwen2", "dtype": "bf16"},
        ],
    ),
}
"""Each family once."""
FULL = {
    "tp2, all": (2, [{"folder": name, "tp": 2, "plans": [5]} for name in DENSE]),
    "pp2, all": (2, [{"folder": name, "pp": 2, "plans": [6]} for name in FAMILIES]),
    "dp2, all": (2, [{"folder": name, "plans": [3, "shared 101"]} for name in DENSE]),
    "ep2": (2, [{"folder": name, "ep": 2, "plans": [4]} for name in ("mixtral", "qwen3_moe")]),
    "tp2 pp2": (4, [{"folder": name, "tp": 2, "pp": 2, "plans": [5]} for name in ("tied llama", "gpt_neox")]),
    "pp2 ep2": (4, [{"folder": "mixtral", "pp": 2, "ep": 2, "plans": [4], **cut} for cut in ({}, CUT)]),
}


@pytest.mark.parametrize(
    ("size", "cases"),
    [
        *(pytest.param(*case, id=name) for name, case in CASES.items()),
        *(only_full(*case, id=name) for name, case in FULL.items()),
    ],
)
def test_logits_are_those_of_transformers_and_what_came_leaves(on_ranks, folders, size, cases):
    asked = [{**case, "folder": str(folders / case["folder"])} for case in cases]
    for results in on_ranks(size, "came_and_went", cases=asked):
        for case, result in zip(cases, results, strict=True):
            assert result["logits"] < 1e-9, case
            assert result["unlike"] == [], case


@pytest.mark.parametrize("family", ["tied llama", only_full("mixtral")])
def test_what_was_read_reshards(on_ranks, folders, tmp_path, family):
    """A padded vocabulary and a tied embedding, too."""
    folder, there = str(folders / family), str(tmp_path / "c")
    dense = "llama" in family
    saved = on_ranks(4, "stepped", folder=folder, write=there, **({"tp": 2, "pp": 2} if dense else {"pp": 2}))[0]
    same_shards, others = ({"tp": 2}, {}) if dense else ({"ep": 2}, {"ep": 1})
    for layout in (same_shards, others):
        read = on_ranks(2, "stepped", folder=folder, read=there, **layout)[0]
        assert saved["left"].keys() == read["left"].keys()
        assert all(np.array_equal(tensor, read["left"][name]) for name, tensor in saved["left"].items())
        if layout is same_shards:
            assert read["norm"] == pytest.approx(saved["norm"], rel=1e-6)
    alone = on_ranks(2, "stepped", folder=folder, **others)[0]["left"]
    for name, tensor in saved["left"].items():
        assert np.linalg.norm(tensor - alone[name]) < 1e-3 * np.linalg.norm(tensor), name


def test_a_v_of_stages_reads_and_writes_what_others_do(on_ranks, folders, tmp_path):
    """With the moments of a distributed optimizer: there and back again."""
    folder, there, back = str(folders / "deep tied llama"), str(tmp_path / "there"), str(tmp_path / "back")
    came = on_ranks(2, "came_and_went", cases=[{"folder": folder, "pp": 2, "plugins": V_SHAPE}])
    assert [result["unlike"] for of_rank in came for result in of_rank] == [[], []]
    saved = on_ranks(2, "stepped", folder=folder, write=there, pp=2)[0]
    in_v = on_ranks(4, "stepped", folder=folder, read=there, write=back, pp=2, plugins=V_SHAPE)[0]
    again = on_ranks(2, "stepped", folder=folder, read=back, tp=2)[0]
    assert in_v["norm"] == saved["norm"]
    for other in (in_v, again):
        assert other["left"].keys() == saved["left"].keys()
        assert all(np.array_equal(tensor, other["left"][name]) for name, tensor in saved["left"].items())


def test_folders_that_do_not_fit_are_refused_on_every_rank(on_ranks, folders, tmp_path):
    """Also by the rank whose stage has what is wrong nothing of."""
    names = ("shard", "shape", "tied")
    bad = [shutil.copytree(folders / "llama", tmp_path / name) for name in names]
    next(bad[0].glob("model-00001-of*")).unlink()
    for folder, change in zip(bad[1:], ({"num_key_value_heads": 4}, {"tie_word_embeddings": True}), strict=True):
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, **change}))
    for shard, shape, tied in on_ranks(2, "unreadable", folders=list(map(str, bad)), pp=2):
        assert "has one weight where its folder has two" in tied
        assert "model-00001-of" in shard
        words = "self_attn.k_proj.weight has another shape", "[16, 32]", "[32, 32]"
        assert all(word in shape for word in words), shape
