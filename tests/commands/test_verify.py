"""`evenload verify` by the command line: exact where it should be, and not fooled by planted faults."""

import json
import random
from functools import partial

import pytest
from harness.cases import only_full

pytestmark = pytest.mark.slow


RECIPE = """
model: {num_layers: 2, hidden_size: 32, num_attention_heads: 4, num_query_groups: 2}
data: {max_length: 200, long_samples: truncate}
train: {global_batch_size: 6, dtype: fp64}
plugins: {packing: {enabled: true, max_tokens: 256}}
"""

DEEPSPEED = ("trainer=deepspeed", "parallel.dp=2", "train.dtype=fp32")
PROMPTS = "data.source=python-docstrings"
LAYOUTS = [
    only_full(("parallel.dp=2",), 1e-9, id="megatron dp 2"),
    only_full(("parallel.tp=2",), 1e-9, id="megatron tp 2"),
    pytest.param(("parallel.pp=2", PROMPTS), 1e-9, id="megatron pp 2, prompts"),
    pytest.param(("parallel.dp=2", "train.dtype=bf16"), 2e-2, id="megatron bf16"),
    only_full((*DEEPSPEED, "deepspeed.zero_stage=0"), 2e-6, id="deepspeed zero 0"),
    only_full((*DEEPSPEED, "deepspeed.zero_stage=1", PROMPTS), 2e-6, id="deepspeed zero 1, prompts"),
    only_full((*DEEPSPEED, "deepspeed.zero_stage=2"), 2e-6, id="deepspeed zero 2"),
    pytest.param((*DEEPSPEED, "deepspeed.zero_stage=3"), 2e-6, id="deepspeed zero 3"),
]

FAULTS = {
    "wrong loss scale": """
import evenload.runtime.attention.pack as pack
real = pack.build_pack
def build_pack(*a, **k):
    from dataclasses import replace
    made = real(*a, **k)
    return replace(made, num_targets=made.num_targets + 3)
pack.build_pack = build_pack
""",
    "dropped token": """
import evenload.runtime.attention.pack as pack
real = pack.build_pack
def build_pack(micro_batch, *a, **k):
    first = micro_batch.slices[0]
    cut = first._replace(stop=first.stop - 2)  # the last token has no target, the one before has
    return real(micro_batch._replace(slices=(cut, *micro_batch.slices[1:])), *a, **k)
pack.build_pack = build_pack
""",
}


@pytest.fixture
def place(tmp_path):
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    return tmp_path


@pytest.fixture
def verify(place, verbs):
    """What ``evenload verify`` gives with these words."""
    return partial(verbs, place, "verify", "recipe.yaml")


@pytest.fixture
def verify_with(place, forged):
    """What the command gives, in one step, where a fault is planted that it must notice."""

    def run(fault, *words):
        done = forged(place, "verify", "recipe.yaml", *words, "--steps", "1", "--json", planted=fault)
        assert done.returncode == 1, done.stderr[-3000:]
        result = json.loads(done.stdout)
        assert result["exact"] is False
        return result

    return run


@pytest.mark.parametrize(("words", "tolerance"), LAYOUTS)
def test_every_layout_is_exact(words, tolerance, verify):
    result = verify(*words)
    assert result["exact"]
    assert result["grad_rel_err"] <= tolerance
    assert result["loss_rel_err"] <= tolerance
    assert (result["tokens_missing"], result["tokens_repeated"]) == (0, 0)
    assert result["uncompared_parameters"] == []
    assert result["planner"] == "packing"


EXPERTS = ("parallel.ep=2", "model.family=mixtral", "model.moe.num_experts=4", "plugins.moe.enabled=true")
TREES = [
    pytest.param(("parallel.pp=2", "train.recompute=true"), 1e-9, id="megatron pp 2, recomputed"),
    pytest.param((*DEEPSPEED, "deepspeed.zero_stage=3", "data.loss_on=all"), 2e-6, id="deepspeed zero 3, all targets"),
    only_full(("parallel.dp=2",), 1e-9, id="megatron dp 2"),
    only_full(("parallel.tp=2",), 1e-9, id="megatron tp 2"),
    only_full(("parallel.dp=2", "train.dtype=fp32", "data.loss_on=all"), 2e-5, id="megatron dp 2, all targets"),
    only_full((*DEEPSPEED, "deepspeed.zero_stage=0"), 2e-6, id="deepspeed zero 0"),
    only_full((*DEEPSPEED, "deepspeed.zero_stage=2"), 2e-6, id="deepspeed zero 2"),
    only_full(("parallel.dp=2", "train.dtype=fp32", *EXPERTS), 2e-5, id="megatron dp 2, experts"),
]
ONE_TRUNK = """
import evenload.runtime.attention.pack as pack
real = pack._add_trunk
def once(piece, slots, rows, weights_T, *readers):
    return real(piece, slots, rows, weights_T.copy(), *readers)
pack._add_trunk = once
"""
"""A trunk's loss counts once for all rows that have it."""


@pytest.fixture
def trees(place):
    """Rows of a prompt and one to six completions."""
    drawn = random.Random(1)
    rows = [
        {
            "prompt": "".join(drawn.choices("abc ", k=drawn.randint(8, 90))),
            "completions": ["".join(drawn.choices("abc", k=drawn.randint(1, 50))) for _ in range(drawn.randint(1, 6))],
        }
        for _ in range(30)
    ]
    (place / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return "data.source=rows.jsonl", "train.global_batch_size=20"


@pytest.mark.parametrize(("words", "tolerance"), TREES)
def test_completions_that_share_their_prompt_are_exact(words, tolerance, trees, verify):
    result = verify(*words, *trees, steps=2)
    assert result["exact"], result["over"]
    assert result["grad_rel_err"] <= tolerance
    assert result["branches"]["trunks computed once"] > 5
    assert (result["tokens_missing"], result["tokens_repeated"]) == (0, 0)


def test_a_trunk_that_counts_once_for_all_rows_is_caught(trees, verify_with):
    result = verify_with(ONE_TRUNK, "parallel.dp=2", "train.dtype=fp32", "data.loss_on=all", *trees)
    assert result["grad_rel_err"] > 1e-3


ADAM = ("train.weight_decay=0.3", "train.betas=[0.8, 0.9]", "train.eps=1e-4", "train.lr=1e-2", "train.clip_grad=0.3")
FROZEN = {
    "megatron": ("parallel.dp=2", 'train.freeze=["embedding.*", "decoder.layers.0.*"]'),
    "deepspeed": (*DEEPSPEED, 'train.freeze=["*embed*", "*layers.0.*"]'),
}


@pytest.mark.parametrize("trainer", FROZEN)
def test_both_trainers_are_one_adam_that_decays_matrices_alone_and_leaves_frozen_weights(trainer, verify):
    result = verify(*FROZEN[trainer], *ADAM, "train.recompute=true", "plugins.packing.max_tokens=100")
    assert result["exact"], result["over"]
    assert result["grad_rel_err"] <= {"megatron": 1e-9, "deepspeed": 2e-6}[trainer]
    assert result["update_rel_err"] <= {"megatron": 1e-9, "deepspeed": 2e-5}[trainer]
    assert result["resumed"]
    assert result["branches"]["cut sequences"]


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_caught(fault, verify_with):
    # Of a sequence that is cut, a slice that ends early is refused by the next one.
    result = verify_with(FAULTS[fault], "parallel.dp=2", "plugins.packing.slices=off")
    assert result["grad_rel_err"] > 1e-4
    if fault == "dropped token":
        assert result["tokens_missing"]


LORA = ("plugins.lora.enabled=true", "model.vocab_size=256", "parallel.dp=2")
TENANT = """
data: {source: python-stdlib, max_length: 200, long_samples: truncate}
adapter: {r: 3, lora_dropout: 0.5, target_modules: [q_proj, down_proj]}
train: {batch_size: 2, lr: 1e-2, seed: %d}
"""
SHARED_DIVISOR = """
import evenload.runtime.adapters.adapters as adapters
real = adapters.Adapters.sum_gradients
def together(self, divisors):
    real(self, dict.fromkeys(divisors, sum(divisors.values())))
adapters.Adapters.sum_gradients = together
"""


def test_tenants_are_exact_beside_each_alone(place, verify):
    result = verify(*LORA)
    assert result["exact"], result["over"]
    assert result["grad_rel_err"] <= 1e-9
    assert result["update_rel_err"] <= 1e-9
    assert result["resumed"]["pp"] == 2, "the adapters went on in another layout"
    tenants = [(row["name"], row["r"], row["steps"]) for row in result["tenants"]]
    assert tenants == [("rank-4", 4, 2), ("rank-8", 8, 3), ("rank-16", 16, 3)]
    (place / "tenants").mkdir()
    for seed, name in enumerate(("acme", "zeta")):
        (place / "tenants" / f"{name}.yaml").write_text(TENANT % seed)
    words = ("plugins.lora.tenants=tenants", "train.dtype=fp32", "parallel.dp=null", "parallel.pp=2")
    result = verify(*LORA, *words, steps=1)
    assert result["exact"], result["over"]
    assert [row["name"] for row in result["tenants"]] == ["acme", "zeta"]
    assert result["grad_rel_err"] <= result["tolerance"]


def test_tenants_are_exact_under_deepspeed(verify):
    result = verify(*LORA, *DEEPSPEED, "deepspeed.zero_stage=3", "plugins.packing.max_tokens=100", steps=2)
    assert result["exact"], result["over"]
    assert result["grad_rel_err"] <= result["tolerance"] <= 1e-5
    assert result["branches"]["cut sequences"]


def test_a_divisor_that_tenants_share_is_caught(verify_with):
    result = verify_with(SHARED_DIVISOR, *LORA)
    assert any("gradient of" in text for text in result["over"])
    assert not all(row["exact"] for row in result["tenants"])


FAILING_STEPS = """
from dataclasses import replace
from evenload.api import load_plugins
from evenload.core import registry
load_plugins()
real = registry.unregister("packing")
def plan(incoming, *words):
    if len(incoming.lengths) > 2:  # the longest samples, which are planned before the start, still pass
        return replace(incoming, micro_batches=())
    return real.plan(incoming, *words)
registry.register(replace(real, plan=plan))
"""
LOST_TOKENS = """
import numpy as np
from evenload.api import load_plugins
from evenload.core import registry
load_plugins()
registry.get("moe").layers["clone"] = lambda counts, *_: np.zeros(counts.shape[::-1], dtype=np.int64)
"""


def test_planners_that_failed_are_not_exact_however_well_the_simpler_plan_ran(verify_with):
    result = verify_with(FAILING_STEPS, "parallel.dp=2")
    assert result["over"] == []
    assert result["planners_failed"][0].startswith("step 0: planning failed on ranks [0, 1]: PlanError: ")
    assert result["planners_failed"][0].endswith("the simpler plan 'chunks' ran")
    assert result["not_exercised"].keys() == {"packing"}
    result = verify_with(LOST_TOKENS, "plugins.packing.enabled=false", *EXPERTS, "plugins.moe.tolerance=1")
    assert result["over"] == []
    assert "experts of layer 0 stay at home, as 'clone' failed: quotas lose tokens" in result["planners_failed"][0]
    assert result["not_exercised"] == {"moe": "no copies of experts or tokens once to a node"}


def test_a_plugin_that_did_nothing_is_named_and_the_rest_is_exact(verify):
    result = verify("parallel.dp=2", "plugins.mesh.enabled=true", "plugins.mesh.max_degree=1", steps=1)
    assert result["exact"], result["over"]
    assert result["planners_failed"] == []
    assert result["not_exercised"] == {"mesh": "no shared micro-batches"}


SPLIT = "parallel.replicas=[{pp: 2, layers: [1, 1]}, {dp: 1}]"
REPLICAS = [
    pytest.param(("parallel.replicas=[{pp: 2}, {dp: 1}]", "model.tied_embeddings=true", *ADAM), 1e-9, id="tied"),
    pytest.param(("parallel.replicas=[{tp: 2}, {dp: 1}]", *ADAM), 1e-6, id="tp 2"),
    only_full(("parallel.replicas=[{dp: 2}, {dp: 1}]",), 1e-9, id="dp 2"),
    only_full(("parallel.replicas=[{dp: 2}, {tp: 2}]",), 1e-6, id="dp 2, tp 2"),
    only_full(("parallel.replicas=[{pp: 2, layers: [1, 3]}, {dp: 1}]", "model.num_layers=4"), 1e-9, id="pp 1|3"),
    only_full(("parallel.replicas=[{pp: 2, layers: [1, 3]}, {pp: 2}]", "model.num_layers=4"), 1e-9, id="pp 1|3, pp 2"),
    only_full(("parallel.replicas=[{dp: 2}, {pp: 2}]", "train.dtype=fp32"), 2e-5, id="dp 2, pp 2, fp32, sharded"),
    only_full(
        ("parallel.replicas=[{dp: 2}, {pp: 2}]", "train.dtype=fp32", "megatron.distributed_optimizer=false"),
        2e-5,
        id="dp 2, pp 2, fp32, whole",
    ),
    only_full(("parallel.replicas=[{dp: 2}, {tp: 2}]", "train.dtype=bf16"), 2e-2, id="dp 2, tp 2, bf16"),
    only_full(("parallel.replicas=[{dp: 2}, {dp: 1}]", "train.dtype=bf16"), 2e-2, id="dp 2, bf16"),
    only_full(
        ("parallel.replicas=[{dp: 1}, {dp: 1}, {dp: 1}]", "train.global_batch_size=2"), 1e-9, id="one for nothing"
    ),
    only_full(("parallel.replicas=[{dp: 2}, {dp: 1}]", "plugins.mesh.enabled=true"), 1e-9, id="mesh"),
    only_full((SPLIT, "plugins.pipeline.enabled=true", "train.recompute=true"), 1e-9, id="pipeline, recomputed"),
    only_full((SPLIT, "plugins.packing.max_tokens=64", "plugins.packing.slices=auto"), 1e-9, id="slices"),
]


@pytest.mark.parametrize(("words", "tolerance"), REPLICAS)
def test_replicas_of_a_whole_model_are_exact_and_hold_the_same_bits(words, tolerance, place, forged):
    done = forged(place, "verify", "recipe.yaml", *words, "--steps", "2", "--json")
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout)
    assert result["exact"], result["over"]
    assert result["grad_rel_err"] <= tolerance
    assert (result["tokens_missing"], result["tokens_repeated"], result["samples_wrong"]) == (0, 0, 0)
    assert result["uncompared_parameters"] == []
    assert result["resumed"]
