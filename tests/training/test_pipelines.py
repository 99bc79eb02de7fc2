"""What pipelines on real trainers measure of themselves: bubbles of ranks and variants, peaks of stages."""

import json

import pytest
from harness.cases import only_full

pytestmark = pytest.mark.slow

RECIPE = """
trainer: {trainer}
model: {{num_layers: 4, hidden_size: 32, num_attention_heads: 4, num_query_groups: 2}}
data: {{max_length: 512, long_samples: truncate}}
parallel: {{pp: 2}}
train: {{steps: 2, global_batch_size: 6}}
plugins: {{pipeline: {{enabled: true, max_tokens: 512}}}}
"""
RANKS = [(0, 0), (1, 0)]
"""(stage, plane rank)."""


@pytest.mark.parametrize("trainer", ["megatron", only_full("deepspeed")])
def test_bench_has_a_bubble_and_peaks_of_every_stage(trainer, tmp_path, forged):
    (tmp_path / "recipe.yaml").write_text(RECIPE.format(trainer=trainer))
    against = ("--against", "fixed_chunks", "log.trace=t.json")
    done = forged(tmp_path, "bench", "recipe.yaml", *against, "--json")
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stderr.count("log.trace has no effect in bench") == 1
    result = json.loads(done.stdout)
    for name in ("fixed_chunks", "evenload"):
        assert 0 < result["bubble_frac"][name] < 1
        assert 0 < result["predicted_bubble_frac"][name] < 1
        peaks = result["peak_activation_bytes_of_stages"][name]
        assert result["peak_activation_bytes"][name] == max(peaks)
        # Counted costs know nothing of what a CPU's attention kernel takes: scores of all pairs.
        predicted = result["predicted_peak_activation_bytes_of_stages"][name]
        assert len(peaks) == len(predicted) == 2
        assert all(0.5 * p < peak < 4 * p for peak, p in zip(peaks, predicted, strict=True)), (peaks, predicted)


@pytest.mark.parametrize("trainer", [only_full("megatron"), "deepspeed"])
def test_a_traced_run_tells_the_bubble_of_every_rank(trainer, tmp_path, forged):
    (tmp_path / "recipe.yaml").write_text(RECIPE.format(trainer=trainer))
    done = forged(tmp_path, "train", "recipe.yaml", "--trace", "t.json", "--json")
    assert done.returncode == 0, done.stderr[-3000:]
    bubbles = json.loads(done.stdout)["bubbles"]
    trace = json.loads((tmp_path / "t.json").read_text())
    assert trace["otherData"]["bubbles"] == bubbles
    rows = bubbles["evenload"]
    assert [(row["stage"], row["rank"]) for row in rows] == RANKS
    for row in rows:
        assert 0 < row["bubble_frac"] < 1
        assert 0 < row["predicted_bubble_frac"] < 1
        assert row["bubble_frac"] == pytest.approx(sum(row[f"{part}_frac"] for part in ("before", "between", "after")))
    # Measured and predicted: the same passes on both, and an arrow for each that hands over.
    measured, predicted = ([e for e in trace["traceEvents"] if e["pid"] == pid] for pid in (1, 2))
    kinds = ("forward", "backward", "weight gradients")
    passes = [sorted(e["name"] for e in one if e.get("cat") in kinds) for one in (measured, predicted)]
    arrows = [sorted(e["name"] for e in one if e["ph"] == "s") for one in (measured, predicted)]
    assert passes[0] == passes[1] != []
    assert arrows[0] == arrows[1]
    assert set(arrows[0]) == {"hidden states", "gradients"}
