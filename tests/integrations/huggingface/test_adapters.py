"""Adapters in PEFT's folders: peft opens what we write, we read what peft writes, and all else is refused by name."""

import json
import os
import resource
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from evenload.core.errors import EvenloadError
from evenload.core.recipe.adapter import Adapter
from evenload.integrations.huggingface.folders import adapter_config
from evenload.integrations.huggingface.folders.adapters import read_adapter, refuse_other_base, write_adapter
from harness.lazy import LazyModule
from safetensors.torch import load_file, save_file

peft, transformers = LazyModule("peft"), LazyModule("transformers")

ADAPTERS = {
    "all": Adapter(r=4),
    "attention": Adapter(r=4, lora_alpha=16, target_modules=("q_proj", "self_attn.v_proj")),
    "ranks": Adapter(r=4, rank_pattern={"q_proj": 8, r"layers\.1\.mlp\.up_proj": 2}),
    "alphas": Adapter(r=4, alpha_pattern={"model.layers.0.self_attn.k_proj": 24.5}, lora_alpha=6),
    "stable": Adapter(r=9, use_rslora=True, lora_dropout=0.25, rank_pattern={"down_proj": 4}),
}
MODEL, CONFIG = "adapter_model.safetensors", "adapter_config.json"


def llama() -> torch.nn.Module:
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads)).double().eval()


def linears(model: torch.nn.Module) -> dict[str, torch.nn.Linear]:
    named = model.named_modules()
    return {name: layer for name, layer in named if isinstance(layer, torch.nn.Linear) and name != "lm_head"}


def drawn(adapter: Adapter) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    layers, weights = linears(llama()), {}
    for name in adapter.targets(layers):
        rank = adapter.rank_of(name)
        weights[f"{name}.lora_A"] = torch.randn(rank, layers[name].in_features, dtype=torch.float64)
        weights[f"{name}.lora_B"] = torch.randn(layers[name].out_features, rank, dtype=torch.float64)
    return weights


def textbook_logits(adapter: Adapter, weights: dict[str, torch.Tensor], tokens: torch.Tensor) -> torch.Tensor:
    """Of a llama whose weights are W + scaling B A."""
    model = llama()
    for name in adapter.targets(linears(model)):
        product = weights[f"{name}.lora_B"] @ weights[f"{name}.lora_A"]
        linears(model)[name].weight.data += adapter.scaling_of(name) * product
    return model(tokens).logits


@pytest.fixture
def written(tmp_path) -> Path:
    model = peft.get_peft_model(llama(), peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    model.save_pretrained(tmp_path / "theirs")
    return tmp_path / "theirs"


def changed(folder: Path, **fields) -> Path:
    config = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps({**config, **fields}))
    return folder


@pytest.mark.parametrize("name", ADAPTERS)
def test_what_we_write_computes_the_same_under_peft_and_comes_back_as_it_was(name, tmp_path):
    adapter, weights, out = ADAPTERS[name], drawn(ADAPTERS[name]), tmp_path / "out"
    write_adapter(out, adapter, weights, base="some/base")
    tokens = torch.arange(24).view(2, 12)
    with torch.no_grad():
        theirs = peft.PeftModel.from_pretrained(llama(), str(out), autocast_adapter_dtype=False)(tokens)
        ours, bare = textbook_logits(adapter, weights, tokens), llama()(tokens).logits
    torch.testing.assert_close(theirs.logits, ours, rtol=0, atol=1e-6)
    assert (ours - bare).abs().max() > 1e-2
    assert sorted(path.name for path in out.iterdir()) == [CONFIG, MODEL]
    assert json.loads((out / CONFIG).read_text())["base_model_name_or_path"] == "some/base"
    weights = {key: tensor.bfloat16() for key, tensor in weights.items()}
    write_adapter(out, adapter, weights, base=None)
    came, tensors = read_adapter(out)
    assert came == adapter
    assert tensors.keys() == weights.keys()
    assert all(tensor.dtype == torch.bfloat16 and torch.equal(tensor, weights[key]) for key, tensor in tensors.items())


@pytest.mark.parametrize(
    "fields",
    [
        {"target_modules": ["q_proj", "v_proj"], "lora_dropout": 0.1},
        {"target_modules": "all-linear", "rank_pattern": {"k_proj": 2}, "alpha_pattern": {"k_proj": 3}},
        {"target_modules": r".*layers\.1\..*_proj", "use_rslora": True},
        {"target_modules": ["up_proj"], "layers_to_transform": [1]},
        {"target_modules": ["q_proj", "k_proj"], "exclude_modules": ["layers.0.self_attn.k_proj"]},
        {"target_modules": ["q_proj"], "init_lora_weights": "orthogonal"},
    ],
)
def test_what_peft_writes_is_read_bit_by_bit(fields, tmp_path):
    torch.manual_seed(2)
    model = peft.get_peft_model(llama(), peft.LoraConfig(r=4, lora_alpha=12, task_type="CAUSAL_LM", **fields))
    model.save_pretrained(tmp_path)
    adapter, weights = read_adapter(tmp_path)
    state = peft.get_peft_model_state_dict(model)
    assert weights.keys() == {name.removeprefix("base_model.model.").removesuffix(".weight") for name in state}
    assert all(torch.equal(weights[name[len("base_model.model.") : -len(".weight")]], state[name]) for name in state)
    layers = {name for name, layer in linears(llama()).items()}
    assert {f"{name}.lora_A" for name in adapter.targets(layers)} == {n for n in weights if n.endswith("A")}
    for name in adapter.targets(layers):
        theirs = model.base_model.model.get_submodule(name)
        assert (theirs.r["default"], theirs.scaling["default"]) == (adapter.rank_of(name), adapter.scaling_of(name))
    refuse_other_base(weights, {n: tuple(layer.weight.shape) for n, layer in linears(llama()).items()})


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"use_dora": True}, "use_dora: True"),
        ({"bias": "all"}, "bias: 'all'"),
        ({"lora_bias": True}, "lora_bias: True"),
        ({"modules_to_save": ["lm_head"]}, r"modules_to_save: \['lm_head'\]"),
        ({"peft_type": "IA3"}, "peft_type: 'IA3'"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights: 'pissa'"),
        ({"target_parameters": ["mlp.experts.down_proj"]}, "target_parameters"),
        ({"task_type": "SEQ_CLS"}, "task_type: 'SEQ_CLS'"),
        ({"a_setting_of_later": 3}, "a_setting_of_later: 3"),
        ({"r": 0}, "r: 0"),
        ({"r": 8}, r"q_proj.lora_A is \[4, 32\], its rank by adapter_config.json is 8"),
        ({"rank_pattern": {"layers.1.self_attn.v_proj": 5}}, r"layers.1.self_attn.v_proj.lora_A is \[4, 32\].*is 5"),
        ({"rank_pattern": {"(": 5}}, "adapter.rank_pattern has no patterns of names"),
        ({"rank_pattern": [5]}, r"rank_pattern: \[5\]"),
        ({"target_modules": ["q_proj"]}, "v_proj, of target_modules q_proj"),
        ({"lora_dropout": "much"}, "lora_dropout: 'much'"),
    ],
)
def test_what_a_config_must_not_say_is_named(fields, says, written):
    with pytest.raises(EvenloadError, match=says):
        read_adapter(changed(written, **fields))


def test_a_missing_or_torn_file_is_named(written, tmp_path):
    with pytest.raises(EvenloadError, match=r"no adapter_model\.safetensors"):
        read_adapter(tmp_path / "none")
    content, config = (written / MODEL).read_bytes(), (written / CONFIG).read_text()
    (written / MODEL).write_bytes(content[:-9])
    with pytest.raises(EvenloadError, match=f"{MODEL} of .* cannot be read"):
        read_adapter(written)
    (written / MODEL).write_bytes(content)
    (written / CONFIG).write_text(config[:-9])
    with pytest.raises(EvenloadError, match=f"{CONFIG} of .* is not JSON"):
        read_adapter(written)
    (written / CONFIG).unlink()
    with pytest.raises(EvenloadError, match=f"{CONFIG} of .* cannot be read"):
        read_adapter(written)
    (written / MODEL).rename(written / "adapter_model.bin")
    with pytest.raises(EvenloadError, match=r"adapter_model.bin, a pickle"):
        read_adapter(written)


KEY = "base_model.model.model.layers.1.self_attn.v_proj.lora_B.weight"


@pytest.mark.parametrize(
    ("key", "tensor", "says"),
    [
        (KEY, None, "layers.1.self_attn.v_proj has no lora_B"),
        (KEY, torch.full((16, 4), torch.nan), "layers.1.self_attn.v_proj.lora_B, of type float32"),
        (KEY, torch.ones(16, 4).index_fill(0, torch.tensor([15]), torch.inf), "v_proj.lora_B, of type float32"),
        (KEY, torch.zeros(16, 4, dtype=torch.int8), "of type int8"),
        (KEY, torch.zeros(64), r"lora_B is \[64\]"),
        ("base_model.model.model.embed_tokens.lora_embedding_A", torch.zeros(4, 64), "lora_embedding_A"),
        ("base_model.model.lm_head.weight", torch.zeros(64, 32), "lm_head.weight"),
    ],
)
def test_tensors_that_are_no_pairs_are_named(key, tensor, says, written):
    tensors = {**load_file(written / MODEL), key: tensor}
    save_file({name: value for name, value in tensors.items() if value is not None}, written / MODEL)
    with pytest.raises(EvenloadError, match=says):
        read_adapter(written)


Q0, V1, Q2 = "model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.v_proj", "model.layers.2.self_attn.q_proj"


@pytest.mark.parametrize(
    ("shapes", "says"),
    [
        ({Q0: (32, 40)}, r"layers.0.self_attn.q_proj.lora_A is \[4, 32\].* takes 40, not 32"),
        ({V1: (24, 32)}, r"layers.1.self_attn.v_proj.lora_B is \[16, 4\].* gives 24, not 16"),
        ({V1: None}, "no linear layer of that name"),
        ({Q2: (32, 32)}, r"layers.2.self_attn.q_proj.lora_A is missing"),
        ({}, None),
    ],
)
def test_an_adapter_of_another_base_is_refused_by_its_first_tensor(written, shapes, says):
    adapter, weights = read_adapter(written)
    own = {name: tuple(layer.weight.shape) for name, layer in linears(llama()).items()} | shapes
    own = {name: shape for name, shape in own.items() if shape}
    with pytest.raises(EvenloadError, match=says) if says else nullcontext():
        refuse_other_base(weights, own, adapter.targets(own))


def test_an_adapter_is_replaced_whole_or_not_at_all(tmp_path):
    adapter = ADAPTERS["attention"]
    first = drawn(adapter)
    later = {name: tensor + 1 for name, tensor in first.items()}
    out, limits = tmp_path / "out", resource.getrlimit(resource.RLIMIT_FSIZE)

    def refuse_to_grow(bytes_of_file: int, weights: dict[str, torch.Tensor]) -> None:
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (bytes_of_file, limits[1]))
            with pytest.raises(EvenloadError, match="the disk is full"):
                write_adapter(out, adapter, weights, base=None)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    for most in (64, 4096):  # inside the config, inside the tensors
        refuse_to_grow(most, first)
        assert not out.exists()
    write_adapter(out, adapter, first, base=None)
    (out / "metrics.jsonl").write_text("{}")
    refuse_to_grow(4096, later)
    assert all(torch.equal(tensor, read_adapter(out)[1][name]) for name, tensor in first.items())
    write_adapter(out, adapter, later, base=None)
    assert all(torch.equal(tensor, read_adapter(out)[1][name]) for name, tensor in later.items())
    write_adapter(out, ADAPTERS["ranks"], drawn(ADAPTERS["ranks"]), base=None)
    assert read_adapter(out)[0] == ADAPTERS["ranks"]
    assert sorted(path.name for path in out.iterdir()) == [CONFIG, MODEL, "metrics.jsonl"]


def test_no_moment_of_a_replacement_has_tensors_under_another_config(tmp_path, monkeypatch):
    """Killed at any rename, the folder holds an adapter that is whole, or lacks a file."""
    old, new = ADAPTERS["all"], ADAPTERS["stable"]
    weights = {adapter: drawn(ADAPTERS[adapter]) for adapter in ("all", "stable")}
    replace, left = os.replace, []

    class KilledError(BaseException):
        pass

    def count_down(*words):
        if not left.pop():
            raise KilledError
        replace(*words)

    for survived in range(2):
        write_adapter(tmp_path / "out", old, weights["all"], base=None)
        left[:] = [False, *[True] * survived]
        with monkeypatch.context() as patched:
            patched.setattr(os, "replace", count_down)
            with pytest.raises(KilledError):
                write_adapter(tmp_path / "out", new, weights["stable"], base=None)
        with pytest.raises(EvenloadError, match=f"no {MODEL}"):
            read_adapter(tmp_path / "out")


def test_without_peft_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr(adapter_config, "find_spec", lambda name: None)
    with pytest.raises(EvenloadError, match="pip install peft"):
        write_adapter(tmp_path / "out", ADAPTERS["all"], drawn(ADAPTERS["all"]), base=None)
    assert list(tmp_path.iterdir()) == []
