"""`evenload verify --generate` by the command line: exact on every layout, not fooled by planted faults, refused where
it cannot be."""

import importlib
import json
from types import SimpleNamespace

import pytest
import typer.testing as testing
from evenload.api import load_recipe
from evenload.cli import app
from evenload.core.errors import EvenloadError
from evenload.core.recipe.adapter import Adapter
from evenload.plugins.rollout.generate import resolve_request
from evenload.training.proof.prompting import prompting, without_divided_tokens
from harness.cases import only_full

RECIPE = """
model: {num_layers: 2, hidden_size: 32, num_attention_heads: 4, num_query_groups: 2, vocab_size: 256}
data: {max_length: 200, long_samples: truncate}
train: {global_batch_size: 6, dtype: fp64}
plugins: {packing: {enabled: true, max_tokens: 256}}
generate: {max_new_tokens: 7, temperature: 0.9, top_k: 60, top_p: 0.95, slots: 8, stop: ["e"]}
"""
DEEPSPEED = ("trainer=deepspeed", "train.dtype=fp32")
EXPERTS = ("model.family=mixtral", "model.moe.num_experts=4")
LORA = "plugins.lora.enabled=true"
DRAFTS = "generate.drafts.by=texts"
QUANTIZED = "generate.drafts.by=quantized"
LAYOUTS = {
    "megatron tp 2": ("parallel.tp=2", "megatron.sequence_parallel=true"),
    "deepspeed zero 3": (*DEEPSPEED, "parallel.dp=2", "deepspeed.zero_stage=3"),
    "experts, megatron pp 2": (*EXPERTS, "parallel.pp=2", "model.moe.score=sigmoid", "model.moe.bias_rate=0.01"),
    "tenants and drafts, megatron dp 2": (LORA, DRAFTS, "parallel.dp=2"),
    "tenants, zero 1": (LORA, *DEEPSPEED, "parallel.dp=2", "deepspeed.zero_stage=1"),
    "drafts, megatron tp 2": (DRAFTS, "parallel.tp=2"),
    "drafts, megatron pp 2": (DRAFTS, "parallel.pp=2"),
    "drafts, megatron tp 2, pp 2": (DRAFTS, "parallel.tp=2", "parallel.pp=2"),
    "drafts, zero 0": (DRAFTS, *DEEPSPEED, "parallel.dp=2", "deepspeed.zero_stage=0"),
    "drafts, zero 3": (DRAFTS, *DEEPSPEED, "parallel.dp=2", "deepspeed.zero_stage=3"),
    "quantized, megatron dp 2": (QUANTIZED, "parallel.dp=2"),
    "quantized, megatron pp 2": (QUANTIZED, "parallel.pp=2"),
    "quantized to 4 bits, experts": (QUANTIZED, "generate.drafts.weights=int4", *EXPERTS, "model.hidden_size=128"),
    "quantized, deepspeed pp 2": (QUANTIZED, *DEEPSPEED, "parallel.pp=2"),
    "quantized, zero 0": (QUANTIZED, *DEEPSPEED, "parallel.dp=2", "deepspeed.zero_stage=0"),
    "quantized, zero 1": (QUANTIZED, *DEEPSPEED, "parallel.dp=2", "deepspeed.zero_stage=1"),
    "quantized, zero 2": (QUANTIZED, *DEEPSPEED, "parallel.dp=2", "deepspeed.zero_stage=2"),
    "experts, deepspeed": (*EXPERTS, *DEEPSPEED, "parallel.dp=2"),
    "deepspeed pp 2": (*DEEPSPEED, "parallel.pp=2"),
    "megatron dp 2, greedy": ("parallel.dp=2", "generate.temperature=0"),
    "megatron": (),
    "megatron dp 2": ("parallel.dp=2",),
    "megatron dp 4, greedy": ("parallel.dp=4", "generate.temperature=0"),
    "megatron pp 2": ("parallel.pp=2",),
    "megatron tp 2, pp 2": ("parallel.tp=2", "parallel.pp=2"),
    "megatron fp32": ("parallel.dp=2", "train.dtype=fp32"),
    "deepspeed zero 0": (*DEEPSPEED, "parallel.dp=2", "deepspeed.zero_stage=0"),
    "deepspeed zero 1": (*DEEPSPEED, "parallel.dp=2", "deepspeed.zero_stage=1"),
    "deepspeed zero 2": (*DEEPSPEED, "parallel.dp=2", "deepspeed.zero_stage=2"),
    "experts, megatron dp 2": (*EXPERTS, "parallel.dp=2", "model.moe.sequence_aux_loss=0.01", "model.moe.z_loss=0.01"),
    "tenants, megatron tp 2, pp 2": (LORA, "parallel.tp=2", "parallel.pp=2"),
    "tenants, zero 3": (LORA, *DEEPSPEED, "parallel.dp=2", "deepspeed.zero_stage=3"),
    "tenants, deepspeed pp 2": (LORA, *DEEPSPEED, "parallel.pp=2"),
}
AT_EVERY_CHANGE = list(LAYOUTS)[:4]
"""Every trainer, layout and kind of model is in one of them."""
FAULTS = {
    "the noise of a row of the batch": """
import evenload.runtime.generate.schedule as schedule
schedule.stream_of = lambda seed, prompt, sample: 5
""",
    "a sample that is never told": """
import evenload.integrations.host.generating as generating
real = generating.generate
def generate(*arguments):
    for sample in real(*arguments):
        if sample[:2] != (1, 1):
            yield sample
generating.generate = generate
""",
    "a log-probability in half precision": """
import evenload.runtime.generate.engine as engine
real = engine.pick
def pick(logits_RV, *arguments):
    picks = real(logits_RV, *arguments)
    picks[1] = picks[1].half()
    return picks
engine.pick = pick
""",
}


@pytest.fixture
def place(tmp_path):
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize("name", [name if name in AT_EVERY_CHANGE else only_full(name) for name in LAYOUTS])
def test_every_layout_generates_what_plain_generation_does(name, place, verbs):
    words = LAYOUTS[name]
    result = verbs(place, "verify", "recipe.yaml", *words, generation=True)
    assert (result["exact"], result["over"]) == (True, [])
    in_float32 = "train.dtype=fp32" in words
    assert max(result["log_prob_err"], result["training_log_prob_err"]) <= (1e-5 if in_float32 else 1e-9)
    assert (result["samples_wrong"], result["samples_missing"], result["samples_repeated"]) == (0, 0, 0)
    assert result["flips"] <= 2 * in_float32
    assert (result["prompts"], result["samples"]) == (6, 18)
    own, single, chunks, small, _, cut, *more = result["arrangements"]
    if {DRAFTS, QUANTIZED} & {*words}:
        drawn, wrong = more
        assert own["drafted"] > own["accepted"] > 0
        assert drawn["drafted"] > drawn["accepted"]
        assert wrong["drafted"] > wrong["accepted"] > 0
    else:
        assert single["forwards"] > chunks["forwards"] > own["forwards"]
        assert {row["drafted"] for row in result["arrangements"]} == {0}
    if "parallel.dp" not in " ".join(words):  # else ranks compute a prompt each
        assert own["tokens_again"] == 0
    # Four ranks have slots for all samples, of which the greedy ones end together.
    assert cut["samples_before"] < 18
    assert cut["samples_before"] > 0 or "parallel.dp=4" in words
    assert cut["tokens_again"] > 0
    assert small["tokens_again"] > 0
    assert result.get("tenants", ["rank-4", "rank-8", "rank-16"]) == ["rank-4", "rank-8", "rank-16"]
    assert ("tenants" in result) == (LORA in words)


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_caught(fault, place, forged):
    done = forged(place, "verify", "recipe.yaml", "--generate", "--json", planted=FAULTS[fault])
    assert done.returncode == 1, done.stderr[-3000:]
    result = json.loads(done.stdout)
    assert not result["exact"]
    assert result["over"]
    assert bool(result["samples_missing"]) == ("never told" in fault)
    assert bool(result["samples_wrong"]) == ("noise" in fault)


@pytest.mark.slow
def test_a_file_of_prompts_is_continued_to_its_own_limits(place, ran):
    rows = [{"prompt": "def f(", "max_new_tokens": 3}, {"prompt": [7, 8, 9]}]
    (place / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = ran(place, "verify", "recipe.yaml", "generate.stop=[]", "--generate", "--prompts", "p.jsonl")
    assert (result["prompts"], result["samples"]) == (2, 6)
    assert result["tokens"] <= 3 * (3 + 7)


def test_options_of_the_other_proof_are_refused(place):
    for words, text in ((["--generate", "--weights"], "samples have no weights"), (["--prompts", "p"], "--generate")):
        done = testing.CliRunner().invoke(app, ["verify", str(place / "recipe.yaml"), *words])
        assert isinstance(done.exception, EvenloadError)
        assert text in str(done.exception)


def test_prompts_that_cannot_be_are_refused_before_a_rank_starts(place):
    (place / "p.jsonl").write_text('{"prompt": "a", "tenant": 3}\n')
    recipe = load_recipe(place / "recipe.yaml")
    with pytest.raises(EvenloadError, match=r"tenant in line 1 of .* is no name"):
        prompting(recipe, place / "p.jsonl")
    (place / "p.jsonl").write_text('{"prompt": "a", "tenant": "acme"}\n')
    assert [prompt.tenant for prompt in prompting(recipe, place / "p.jsonl").prompts or ()] == ["acme"]
    assert prompting(recipe, None).limit == 7
    with pytest.raises(EvenloadError, match="rounded keys give samples of another model"):
        prompting(recipe.changed({"generate.keys": "int8"}), None)
    recipe = recipe.changed({"generate.end_tokens": []})
    with pytest.raises(EvenloadError, match="the recipe has no tenants"):
        resolve_request(recipe, place / "p.jsonl", place / "o.jsonl", 1)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("parallel.tp=2", "megatron.sequence_parallel=true"), "experts of tensor-parallel ranks"),
        (("model.moe.capacity_factor=1.5",), "does not drop tokens of experts"),
        (("parallel.ep=2", "parallel.dp=2"), "experts that ranks share"),
    ],
)
def test_experts_that_do_not_generate_are_refused_by_name(place, words, text):
    generating = pytest.importorskip("evenload.integrations.host.generating")
    without = ("plugins.packing.enabled=false",)
    recipe = without_divided_tokens(load_recipe(place / "recipe.yaml", (*EXPERTS, *without, *words)))
    with pytest.raises(EvenloadError, match=text):
        generating.refuse_unfit(SimpleNamespace(recipe=recipe), [], None)


def test_adapters_of_tenants_are_those_below_their_folder(place):
    words = ["plugins.lora.enabled=true", f"plugins.lora.out={place}", "generate.end_tokens=[0]"]
    recipe = load_recipe(place / "recipe.yaml", words)
    (place / "p.jsonl").write_text('{"prompt": "a"}\n{"prompt": "b", "tenant": "acme"}\n')
    for name in ("acme/last", "acme/best"):
        (place / name).mkdir(parents=True)
        (place / name / "adapter_model.safetensors").write_bytes(name.encode())

    def ask(tenant=""):
        return resolve_request(recipe, place / "p.jsonl", place / "o.jsonl", 1, tenant=tenant)

    assert ask().adapters == [place / "acme/last"]
    assert ask("acme/best").adapters == [place / "acme/best", place / "acme/last"]
    for name, text in {"nobody": "no adapter of tenant nobody", "../acme": "leads out", "/acme": "leads out"}.items():
        with pytest.raises(EvenloadError, match=text):
            ask(name)
    with pytest.raises(EvenloadError, match="checkpoints of tenants hold no model"):
        resolve_request(recipe, place / "p.jsonl", place / "o.jsonl", 1, place / "nowhere")


def test_adapters_join_by_their_places(tmp_path):
    pytest.importorskip("peft")
    torch = pytest.importorskip("torch")
    folders = importlib.import_module("evenload.integrations.huggingface.folders.adapters")
    serving = importlib.import_module("evenload.plugins.rollout.generate")
    adapter, first = Adapter(r=2, target_modules=("q_proj",)), "model.layers.0.q_proj.lora_A"
    for number, name in enumerate(("a", "b")):
        weights = {first: torch.ones(2, 4) * number, "model.layers.0.q_proj.lora_B": torch.ones(4, 2)}
        folders.write_adapter(tmp_path / name, adapter, weights, None)
    sums = {}

    def join(number, own, _, state):
        assert own.r == 2
        sums[number] = float(state.weights[first].sum())

    serving.join(SimpleNamespace(adapters=SimpleNamespace(join=join)), [tmp_path / "b", tmp_path / "a"])
    assert sums == {0: 8.0, 1: 0.0}
