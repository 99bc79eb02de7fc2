"""What users bring along and what earlier runs have left: tenants, adapters, folders of models, templates, records.

Strategies of cases, as those of `cases`, which need torch and Transformers in the process that runs them (`doors`).
"""

from __future__ import annotations

import json
import struct
from typing import Any

from hypothesis import strategies as st

from . import cases
from .cases import pick

Case = dict[str, Any]
LAYER = "model.layers.0.self_attn.q_proj"
ROWS = {"text": '{"tokens": [5, 6, 7, 8, 9]}\n', "times": 30}
CHATS = '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n'
TENANT = """data: {source: good.jsonl, max_length: 60, text_key: text}
adapter: {r: 4, lora_alpha: 8, lora_dropout: 0.1, target_modules: [q_proj], use_rslora: false}
train: {steps: 6, batch_size: 3, lr: 0.002, lr_schedule: cosine, warmup_steps: 2, seed: 7, clip_grad: 1.0}
evaluate: {source: good.jsonl, every: 2, batches: 1, patience: 2}
"""
KEYS = ("data.source", "data.tokenizer", "data.max_length", "data.long_samples", "data.text_key", "data.loss_on")
KEYS += ("data.append_eos", "data.min_length", "adapter.r", "adapter.lora_alpha", "adapter.target_modules")
KEYS += ("adapter.rank_pattern", "adapter.alpha_pattern", "adapter.lora_dropout", "train.steps", "train.epochs")
KEYS += ("train.batch_size", "train.lr", "train.seed", "train.betas", "train.warmup_steps", "evaluate.source")
KEYS += ("evaluate.every", "evaluate.patience", "evaluate.batches", "from", "sweep", "sweep.train.lr")
KEYS += ("sweep.adapter.r", "sweep.halve_every", "data", "adapter", "train", "evaluate", "data.validation", "nope")
KEYS += ("train.nope",)
PATTERNS = ["(", "[", "*", "q_proj", "(a+)+$", "([a-z0-9_.]+)+!", "(?P<a>x)(?P<a>y)", "\\\\1", "(?<=a*)b", "a{99999}"]
PATTERNS += ["((((((((((a*)*)*)*)*)*)*)*)*)*$", ".*" * 40 + "!", "(?:" * 500 + ")" * 500, "", "\\udcff", "x" * 9000]
VALUES = [json.dumps({pattern: 4}) for pattern in PATTERNS] + [json.dumps([pattern]) for pattern in PATTERNS]
VALUES += ["{q_proj: 0}", "{q_proj: -1}", "{q_proj: 1000000000000}", "{q_proj: .nan}", "[q_proj, q_proj]", "all-linear"]
VALUES += [
    "adapter",
    "hf",
    "tok",
    "d.jsonl",
    "good.jsonl",
    "../good.jsonl",
    "/etc/passwd",
    "/dev/zero",
    "tenants",
    "out",
]
VALUES += [
    "[1, 2]",
    "[0.1, .nan]",
    "[[1], [2]]",
    "[1, 1]",
    "{train.lr: [0.1, 0.2], halve_every: 2}",
    "[" + "1, " * 300 + "1]",
]
VALUES += [
    "python-docstrings/json",
    "python-docstrings/nope",
    "python-stdlib",
    "**",
    "/**/*.arrow",
    "tok/tokenizer.json",
]
values = st.one_of(st.sampled_from(VALUES), cases.values)
TEMPLATES = ["{% for m in messages %}{{ m['role'] }}:{{ m['content'] }}\n{% endfor %}"]
TEMPLATES += ["{% for m in messages %}{% generation %}{{ m['content'] }}{% endgeneration %}{% endfor %}"]
TEMPLATES += ["{% for i in range(99999999) %}{% for j in range(99999999) %}{% endfor %}{% endfor %}"]
TEMPLATES += ["{{ 'a' * 10 ** 9 }}", "{{ 'a' * 10 ** 6 }}", "{{ ''.__class__.__mro__[1].__subclasses__() }}"]
TEMPLATES += ["{{ cycler.__init__.__globals__.os.system('touch PWNED') }}", "{{ raise_exception('no') }}"]
TEMPLATES += ["{{ messages[99].content }}", "{% for m in messages %}", "{{ 1 / 0 }}"]
TEMPLATES += ["{% macro f(n) %}{{ f(n) }}{% endmacro %}{{ f(1) }}", "{% include '/etc/passwd' %}"]
TEMPLATES += ["{{ messages | tojson(indent=100000000) }}", "{{ '%1000000000d' | format(1) }}"]
TEMPLATES += ["{{ range(10 ** 12) | list }}", "", "\ud800", "{{ strftime_now('%Y' * 10000000) }}"]
TEMPLATES += ["{# " + "x" * 5000 + " #}"]
KWARGS = ['{"chat_template": "{{ 1 }}"}', '{"tokenize": true}', '{"a": 1}', "5", "[]", '{"tools": [1]}']
KWARGS += ['{"messages": []}', '{"bos_token": "x"}', '{"conversation": 1}', '{"return_dict": true}']
KWARGS += ['{"add_generation_prompt": 7}', "null", '{"tokenizer_kwargs": {"a": 1}}', '{"": 1}', '{"self": 1}', '"{}"']
KWARGS += ['"["', '{"loop": {"a": [1, 2]}}']


@st.composite
def tenant(draw: st.DrawFn) -> Case:
    """The file of a tenant: one with some values replaced, keys of any value, or what is none."""
    how = pick(draw, ["line", "keys", "keys", "keys", "raw", "special"])
    if how == "line":
        return draw(cases.put(TENANT))
    if how == "keys":
        tree: dict[str, Any] = {"data": {"source": "good.jsonl"}}
        for key in draw(st.lists(st.sampled_from(KEYS), min_size=1, max_size=3)):
            section, _, last = key.partition(".")
            node = tree if not last else tree.setdefault(section, {})
            if isinstance(node, dict):
                node[last or section] = draw(values)
        return {"text": cases._block(tree, "")}
    return draw(cases.raw if how == "raw" else cases.special)


def _tensors(tensors: dict[str, tuple[str, list[int], int]]) -> bytes:
    """A safetensors file of zeros; by name: type, shape and bytes."""
    header, place = {}, 0
    for name, (dtype, shape, size) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [place, place + size]}
        place += size
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + b"\0" * place


@st.composite
def safetensors(draw: st.DrawFn, names: dict[str, list[int]]) -> Case:
    """A file of tensors with one of another name, shape, type or size, with other bytes, or cut short."""
    tensors = {
        name: ("F32", shape, 4 * shape[0] * (shape[1] if len(shape) > 1 else 1)) for name, shape in names.items()
    }
    for name in draw(st.lists(st.sampled_from(sorted(names)), max_size=2, unique=True)):
        dtype, shape, size = tensors.pop(name)
        dtype = pick(draw, [dtype, dtype, "F16", "I64", "F8_E4M3", "X", "BF16", "BOOL"])
        shape = pick(draw, [shape, shape, shape[::-1], [], [-1], [2**62, 4], [0], [2**31]])
        size = pick(draw, [size, size, 0, 1, 2**40, -4])
        new = pick(draw, [name, name, "", f"{name}.more", "__metadata__", "../x", "x" * 3000])
        tensors[new] = (dtype, shape, size) if -1 < size < 2**30 else (dtype, shape, 8)
    data = bytearray(_tensors(tensors))
    for _ in range(pick(draw, [0, 0, 1, 3])):
        data[draw(st.integers(0, min(len(data) - 1, 300)))] = pick(draw, [0, 34, 91, 125, 127, 255])
    return {"hex": bytes(data)[: pick(draw, [None, None, None, 4, 9, 100])].hex()}


@st.composite
def json_file(draw: st.DrawFn, good: dict[str, Any], more: tuple[str, ...] = ()) -> Case:
    """A JSON object with some values of any kind, with keys taken out, or what is none."""
    if draw(st.integers(0, 4)) == 0:
        return draw(st.one_of(cases.raw, cases.special))
    pairs = {key: json.dumps(value) for key, value in good.items()}
    for key in draw(st.lists(st.sampled_from([*good, *more]), max_size=3)):
        pairs[key] = pick(draw, [*ODD, *ODD, *VALUES[:8]])
    for key in draw(st.lists(st.sampled_from(sorted(good)), max_size=1)):
        pairs.pop(key, None)
    return {"text": "{" + ", ".join(f"{json.dumps(key)}: {value}" for key, value in pairs.items()) + "}"}


ODD = ["null", "0", "-1", "1.5", "1e400", "NaN", "true", '""', '"x"', '"yes"', "[]", "{}", "[1]", '["a"]', '{"a": 1}']
ODD += ["1" + "0" * 400, '"\\ud800"', '"\\u001b[31m"', '"../../x"', '"/etc/passwd"', "[" * 400 + "]" * 400, "2"]
ODD += ["[[1, 2]]", '"[bold]"', '"\\u0000"', f'"{"x" * 4000}"', "9007199254740993", '{"": null}', "[null]"]
ODD += ['["q_proj", 5]']
ADAPTER = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
ADAPTER |= {"bias": "none", "lora_dropout": 0.0, "rank_pattern": {}, "alpha_pattern": {}, "use_rslora": False}
PEFT = ("modules_to_save", "layers_to_transform", "exclude_modules", "use_dora", "init_lora_weights")
PEFT += ("layer_replication",)
MATRICES = {f"base_model.model.{LAYER}.lora_A.weight": [4, 4], f"base_model.model.{LAYER}.lora_B.weight": [6, 4]}
WORDS = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None}
WORDS |= {"pre_tokenizer": {"type": "Whitespace"}, "post_processor": None, "decoder": None}
WORDS |= {"model": {"type": "WordLevel", "vocab": {"a": 0, "b": 1, ":": 2}, "unk_token": "a"}}
TOKENIZER = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "a", "unk_token": "a", "model_max_length": 99}
OF_TOKENIZER = ("chat_template", "auto_map", "added_tokens_decoder", "additional_special_tokens", "pad_token")


@st.composite
def chat_rows(draw: st.DrawFn) -> Case:
    """Chats, some of which hand their template what they like."""
    row = CHATS.strip()[:-1]
    rows = [f'{row}, "chat_template_kwargs": {pick(draw, KWARGS)}}}' for _ in range(draw(st.integers(0, 1)))]
    rows += [f'{row}, "tools": {pick(draw, ODD)}}}' for _ in range(draw(st.integers(0, 1)))]
    return {"text": "\n".join([*rows, *[CHATS.strip()] * 12]) + "\n"}


@st.composite
def tokenizer(draw: st.DrawFn) -> Case:
    """The files of a tokenizer's folder."""
    whole = st.just({"text": json.dumps(WORDS)})
    config = {**TOKENIZER, **pick(draw, [{}, {"chat_template": draw(st.sampled_from(TEMPLATES))}])}
    return {
        "tok/tokenizer.json": draw(st.one_of(whole, whole, whole, json_file(WORDS))),
        "tok/tokenizer_config.json": draw(
            st.one_of(st.just({"text": json.dumps(config)}), json_file(config, OF_TOKENIZER))
        ),
        "tok/chat_template.jinja": {"text": pick(draw, TEMPLATES)},
    }


STATUS = {"name": "a", "state": "training", "step": 3, "steps": 9, "loss": 2.5, "best": 2.25, "best_step": 2}
STATUS |= {"tokens": 90, "seconds": 3.5, "left_s": 7.0, "reason": "", "file": "f00d"}
RANKING = {
    "sweep": "a",
    "winner": None,
    "best": None,
    "loss_is": "x",
    "file": "f00d",
    "race": {"rung": 1, "losses": {"a.lr=1": {"3": 2.5}}, "ended": {}, "out": {}},
}
RANKING |= {
    "trials": [{"trial": "a.lr=1", "state": "training", "step": 3, "steps": 9, "loss": 2.5, "values": {"lr": 1}}]
}
FILES = ["a", "a", "a", "x y", "\u00e4", "a" * 240, "[bold]", "a=1", "-", "good2", "GOOD", "\u202e", "a.b", "stop"]


@st.composite
def tenants(draw: st.DrawFn) -> Case:
    """A folder with a good tenant and one or two of any kind, and what an earlier job may have left of them."""
    files: Case = {"good.jsonl": ROWS, "tenants/good.yaml": {"text": "data: {source: good.jsonl}\n"}}
    for name in draw(st.lists(st.sampled_from(FILES), min_size=1, max_size=2, unique=True)):
        files[f"tenants/{name}.yaml"] = draw(tenant())
        left = pick(draw, ["", "", "", "metrics.jsonl", "status.json", "ranking.json", "folder", "error"])
        if left == "folder":
            files[f"out/{name}"] = draw(st.one_of(cases.raw, cases.special))
        elif left == "error":
            files[f"tenants/{name}.error"] = {"kind": "folder"}
        elif left:
            whole = json_file(RANKING if left == "ranking.json" else STATUS)
            files[f"out/{name}/{left}"] = draw(st.one_of(whole, cases.raw, cases.special))
    odd = pick(draw, ["", "", "", "tenants/stop", "tenants/loop.yaml", "tenants/x.yml", "tenants/.yaml"])
    if odd:
        files[odd] = {"kind": "link", "to": "loop.yaml"} if "loop" in odd else draw(cases.special)
    files["d.jsonl"] = draw(st.one_of(cases.targets(), cases.jsonl(), cases.raw))
    return {"call": "admit()", "files": files}


@st.composite
def adapters(draw: st.DrawFn) -> Case:
    """A tenant that goes on from a folder of PEFT."""
    yaml = pick(draw, ["", "", "adapter: {r: 4, target_modules: [q_proj]}\n", "adapter: {r: 8}\n"])
    files: Case = {"good.jsonl": ROWS, "tenants/good.yaml": {"text": "data: {source: good.jsonl}\n"}}
    files["tenants/a.yaml"] = {"text": f"data: {{source: good.jsonl}}\nfrom: adapter\n{yaml}"}
    files["adapter/adapter_config.json"] = draw(json_file(ADAPTER, PEFT))
    model = pick(draw, ["adapter_model.safetensors"] * 5 + ["adapter_model.bin"])
    files[f"adapter/{model}"] = draw(st.one_of(safetensors(MATRICES), safetensors(MATRICES), cases.raw, cases.special))
    return {"call": "admit()", "files": files}


@st.composite
def templates(draw: st.DrawFn) -> Case:
    """Chats under a tokenizer's folder, of a tenant or of a recipe."""
    files: Case = {"d.jsonl": draw(chat_rows()), **draw(tokenizer())}
    if draw(st.booleans()):
        yaml = "data: {source: d.jsonl, tokenizer: tok, loss_on: all}\n"
        files |= {"good.jsonl": ROWS, "tenants/good.yaml": {"text": "data: {source: good.jsonl}\n"}}
        return {"call": "admit()", "files": {**files, "tenants/a.yaml": {"text": yaml}}}
    loss = pick(draw, ["all", "completion"])
    settings = ["data.source=d.jsonl", "data.tokenizer=tok", f"data.loss_on={loss}"]
    files["r.yaml"] = {"text": cases.RECIPES["packing"]}
    return {"argv": cases.request("train", *settings), "files": files}


MODEL = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 16, "num_hidden_layers": 1}
MODEL |= {"num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 300, "intermediate_size": 32}
MODEL |= {"rms_norm_eps": 1e-5, "tie_word_embeddings": False, "hidden_act": "silu", "max_position_embeddings": 64}
OF_MODEL = ("auto_map", "rope_scaling", "rope_theta", "quantization_config", "attention_bias", "head_dim", "dtype")
OF_MODEL += ("num_local_experts", "sliding_window", "layer_types", "torch_dtype", "transformers_version", "mlp_bias")
WEIGHTS = {"model.embed_tokens.weight": [300, 16], "lm_head.weight": [300, 16], "model.norm.weight": [16]}
WEIGHTS |= {f"model.layers.0.self_attn.{name}_proj.weight": [16, 16] for name in "qkvo"}
WEIGHTS |= {f"model.layers.0.mlp.{name}_proj.weight": [32, 16] for name in ("gate", "up")}
WEIGHTS |= {"model.layers.0.mlp.down_proj.weight": [16, 32]}
WEIGHTS |= {f"model.layers.0.{name}_layernorm.weight": [16] for name in ("input", "post_attention")}
INDEX = {"metadata": {"total_size": 1}, "weight_map": dict.fromkeys(WEIGHTS, "model.safetensors")}


@st.composite
def folders(draw: st.DrawFn) -> Case:
    """A folder of Hugging Face's that a run begins from, under both trainers."""
    kinds = ["llama", "qwen2", "qwen3", "mixtral", "gpt2", "bert", "t5", "nope", ""]
    config = {**MODEL, "model_type": pick(draw, ["llama"] * 6 + kinds)}
    files: Case = {"hf/config.json": draw(json_file(config, OF_MODEL)), "r.yaml": {"text": cases.RECIPES["packing"]}}
    name = pick(draw, ["model.safetensors"] * 6 + ["pytorch_model.bin", "adapter_model.safetensors"])
    files[f"hf/{name}"] = draw(st.one_of(safetensors(WEIGHTS), safetensors(WEIGHTS), cases.raw, cases.special))
    if draw(st.integers(0, 3)) == 0:
        files["hf/model.safetensors.index.json"] = draw(json_file(INDEX))
    if draw(st.integers(0, 3)) == 0:
        files |= {file.replace("tok/", "hf/"): content for file, content in draw(tokenizer()).items()}
    verb, trainer = pick(draw, ["train", "verify", "plan"]), pick(draw, ["megatron", "deepspeed"])
    files["text.jsonl"] = {"text": '{"text": "a b : a b a b"}\n', "times": 30}
    words = ("model={weights: hf}", f"trainer={trainer}", "data.source=text.jsonl")
    return {"argv": cases.request(verb, *words), "files": cases.beside(**files)}


MANIFEST = {"format": 1, "step": 2, "order": {}, "data": "f00d", "recipe": {"trainer": "megatron"}, "files": {}}


@st.composite
def records(draw: st.DrawFn) -> Case:
    """What earlier runs left: states of tenants, rankings, manifests of checkpoints, logs."""
    what = pick(draw, ["status", "ranking", "manifest", "manifest", "latest", "log"])
    anything = st.one_of(cases.raw, cases.special)
    as_json = draw(cases.json_or_not)
    if what in ("status", "ranking"):
        files: Case = {"out/a/status.json": draw(json_file(STATUS))}
        if what == "ranking":
            files = {"out/a/status.json": {"text": json.dumps(STATUS)}, "out/a/ranking.json": draw(json_file(RANKING))}
        return {"argv": ["lora", pick(draw, ["out", "out", "tenants", ".", "out/a"]), *as_json], "files": files}
    if what == "log":
        rows = st.sampled_from(
            [*cases.ROWS, '{"step": 3}', '{"step": 9}', '{"validation": {"step": 9}}', '{"step": "x"}']
        )
        lines = {"text": "\n".join(draw(st.lists(rows, max_size=6)))}
        return {
            "call": f"logged({draw(st.integers(0, 12))})",
            "files": {"log.jsonl": draw(st.one_of(st.just(lines), anything))},
        }
    recipe = {"trainer": "megatron", "model": {"vocab_size": 300, "hidden_size": 16, "num_attention_heads": 2}}
    files = {"kept/step00000002/evenload.json": draw(json_file({**MANIFEST, "recipe": recipe}))}
    if what == "latest":
        files = {"kept/step00000002/evenload.json": {"text": json.dumps({**MANIFEST, "recipe": recipe})}}
        files["kept/latest"] = draw(st.one_of(anything, st.sampled_from(cases.TEXTS).map(lambda text: {"text": text})))
    out = pick(draw, ["new", "new", "new", "kept", "", "/dev/null", "ok.txt", "a" * 300, "new/below"])
    folder = pick(draw, ["kept", "kept/step00000002", "nope"])
    return {"argv": ["export", folder, "--out", out, *as_json], "files": cases.beside(**files)}


@st.composite
def company(draw: st.DrawFn) -> Case:
    """Plans of tenants together."""
    files: Case = {"good.jsonl": ROWS, "tenants/good.yaml": {"text": "data: {source: good.jsonl}\n"}}
    files |= {"tenants/a.yaml": draw(st.one_of(tenant(), st.just({"text": TENANT}))), "l.txt": {"text": cases.LENGTHS}}
    recipe = cases.RECIPES["packing"].replace("plugins: {", "plugins: {lora: {enabled: true, tenants: tenants}, ")
    more = pick(draw, [[], [], ["--lengths", "a=l.txt"], ["--lengths", "good=nope"], ["--lengths", "=l.txt"]])
    words = ["plan", "r.yaml", "model.vocab_size=300", *more, *draw(cases.json_or_not)]
    return {"argv": words, "files": cases.beside(**files, **{"r.yaml": {"text": recipe}})}


STEPS = [
    '{"step": 1, "step_s": 0.5, "tokens": 90, "loss": 2.5, "of_steps": 9}',
    '{"step": 2, "step_s": 0.5, "tokens": 80, "loss": null, "imbalance": 1.5, "tenants": {"a": {"loss": 2.5}}}',
    '{"step": 9, "step_s": 0.25, "tokens": 7, "ends": "done"}',
    '{"validation": {"step": 2, "loss": 2.5, "generate": {"score": 0.5}}}',
]
SAMPLES = [
    '{"prompt": 0, "sample": 0, "ended": "end", "text": "a", "tokens": [5, 6], "log_probs": [-1.5, -2], "run": "f00d"}',
    '{"prompt": 1, "sample": 1, "ended": "limit", "tokens": [7], "log_probs": [-0.5], "score": 0.5, "run": "f00d"}',
    '{"prompt": 0, "sample": 0, "ended": "end", "text": "a", "tokens": [5], "log_probs": [-1.5], "run": "0123"}',
]
ASKED = ['{"prompt": "def f"}', '{"prompt": [7, 8, 9], "max_new_tokens": 2}', '{"prompt": "a", "row": {"b": []}}']
NOTES = {"text": "notes of somebody\n"}
UNFINISHED = [
    '{"data": {"all": "f00d"}}',
    '{"data": {"b": 1}}',
    '{"data": {"../theirs": ""}}',
    '{"data": ["all"]}',
    "[]",
]


@st.composite
def lines(draw: st.DrawFn, good: list[str]) -> Case:
    """Lines of JSON: good ones, some with another value or cut, deeply nested ones, others'; ended or not."""
    texts = []
    for _ in range(draw(st.integers(0, 5))):
        row, how = pick(draw, good), pick(draw, ["whole", "whole", "whole", "torn", "value", "other", "deep"])
        if how == "torn":
            row = row[: draw(st.integers(1, len(row) - 1))]
        elif how == "value":
            fields = {name: json.dumps(value) for name, value in json.loads(row).items()}
            fields[pick(draw, sorted(fields))] = pick(draw, ODD)
            row = "{" + ", ".join(f'"{name}": {value}' for name, value in fields.items()) + "}"
        elif how == "other":
            row = pick(draw, [*cases.ROWS, *STEPS, *SAMPLES, *ASKED])
        elif how == "deep":
            row = pick(draw, ['{"step": ' + "[" * 100_000, "[" * 300 + "]" * 300, '{"a":' * 9000, "\0" * 5000])
        texts.append(row)
    return {"text": "\n".join([*texts, pick(draw, ["", "", "", good[0][:40]])]), "times": pick(draw, [1, 1, 1, 40])}


def of_others(draw: st.DrawFn, good: list[str]) -> Case:
    """A file in a place where one of ours may be."""
    links = st.sampled_from(["theirs", "empty", "folder", "pipe"]).map(lambda to: {"kind": "link", "to": to})
    return draw(st.one_of(lines(good), lines(good), cases.raw, cases.special, links, st.just(NOTES)))


@st.composite
def written(draw: st.DrawFn) -> Case:
    """What `watch` reads, and where `generate` and `score` write, beside files of others, which stay as they are."""
    what = pick(draw, ["watch", "watch", "sampled", "sampled", "scored", "launch"])
    files: Case = cases.beside(theirs=NOTES, empty={"text": ""}, **{"r.yaml": {"text": cases.RECIPES["packing"]}})
    if what == "watch":
        for name in ("log.jsonl", pick(draw, ["log.jsonl", "steps.jsonl", "notes.txt", ".jsonl"])):
            files[f"run/{name}"] = of_others(draw, STEPS)
        run = pick(draw, [*["run", "run/log.jsonl", "run/steps.jsonl"] * 8, *cases.PATHS])
        return {"argv": ["watch", run, *draw(st.sampled_from([["--json"], ["--once"]]))], "files": files, "ours": []}
    files["d.jsonl"] = {"text": '{"input_ids": [5, 6, 7, 8]}\n', "times": 30}
    whole = {
        "text": json.dumps({**MANIFEST, "files": pick(draw, [{}, {}, {"t": 3}, {"/dev/zero": 0}, {"../pipe": 0}])})
    }
    files["kept/evenload.json"] = draw(st.one_of(st.just(whole), st.just(whole), json_file(MANIFEST)))
    files["kept/t"] = draw(st.one_of(st.just({"text": "abc"}), cases.special))
    good = {"text": "\n".join(ASKED) + "\n"}
    files["p.jsonl"] = of_others(draw, ASKED) if draw(st.integers(0, 3)) == 0 else good
    for name in draw(st.lists(st.sampled_from(["o.jsonl", *OF_OUT]), max_size=3, unique=True)):
        files[name] = of_others(draw, SAMPLES)
    for name in draw(st.lists(st.sampled_from(OF_FOLDER), max_size=3, unique=True)):
        marker = st.sampled_from(UNFINISHED).map(lambda text: {"text": text})
        files[f"out/{name}"] = draw(marker) if name == "unfinished.json" else of_others(draw, SAMPLES)
    if not draw(st.integers(0, 4)):
        files = {name: content for name, content in files.items() if not name.startswith("out/")}
        files["out"] = of_others(draw, SAMPLES)
    if what != "launch":
        return {"call": f"{what}()", "files": files, "ours": OURS}
    out = pick(draw, [*["o.jsonl", "out", "new"] * 8, *cases.PATHS])
    more = pick(draw, [[], ["--checkpoint", pick(draw, [*["kept"] * 20, "out", *cases.PATHS])]])
    verb = pick(draw, [["generate", "--prompts", pick(draw, [*["p.jsonl"] * 20, *cases.PATHS])], ["score"]])
    settings = ["data.source=d.jsonl", "generate={end_tokens: [10], max_new_tokens: 4}", *draw(cases.json_or_not)]
    return {"argv": [verb[0], "r.yaml", *verb[1:], "--out", out, *more, *settings], "files": files, "ours": []}


OURS = ["work/o.jsonl", "work/o.jsonl.part-0", "work/o.jsonl.part-3", "work/.o.jsonl.lock"]
OURS += [f"work/out/{name}" for name in (".lock", "unfinished.json", "all.npy", "b.npy")]
"""What `generate` and `score` may change where they go on; of others' content they are refused."""
OF_OUT = ["o.jsonl.part-0", "o.jsonl.part-3", "o.jsonl.part-03", "o.jsonl.part-notes", ".o.jsonl.lock", "o.jsonl.bak"]
OF_FOLDER = [".lock", "unfinished.json", "unfinished.json", "all.npy", "b.npy", "reference.json", "notes.txt"]
