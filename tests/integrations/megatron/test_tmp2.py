import pytest, sys
pytestmark = pytest.mark.slow
BIASED = {"score": "sigmoid", "bias_rate": 0.01, "z_loss": 0.02, "sequence_aux_loss": 0.05}
CASES = [(2, {"parallel__ep": 2}, "fp64"), (4, {"parallel__ep": 2}, "fp64"), (4, {"parallel__ep": 2}, "fp32"), (4, {"parallel__ep": 2, "parallel__pp": 2, }, "fp32"),(4, {"parallel__ep": 2}, "bf16"), (4, {"parallel__ep": 2, "megatron__distributed_optimizer": False}, "bf16"),
 (4, {"parallel__ep": 4, "model__hidden_size": 10, "model__num_attention_heads": 1, "model__num_query_groups": 1,}, "fp64"),
 (4, {"parallel__ep": 2, "parallel__pp": 2, "model__family": "qwen3_moe", "plugins": {}}, "fp64"),
]
@pytest.mark.parametrize("i", range(8))
def test_it(on_ranks, i, tmp_path):
    size, layout, dtype = CASES[i]
    moe = {**BIASED, **({"ffn_hidden_size": 25} if i == 6 else {}), **({"every": 2} if i == 7 else {})}
    rows = on_ranks(size, "sharded_beside_home", folder=str(tmp_path / "c"), moe=moe, train__dtype=dtype, **layout)
    for r in rows:
        print(i, r, file=sys.stderr)
        assert r["started"] == r["carried 0"] == r["carried 1"] == []
