"""Every two documented keys of the sections that meet in a run start together, or are refused in words.

Keys are those of the schema, each with values that its documentation gives. What a key needs besides (a source of the
validation, a policy of the plugin) is added where neither of the two says it.
"""

import json
import random
import traceback
from collections import Counter
from contextlib import chdir, nullcontext
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from evenload.api import load_plugins, load_recipe
from evenload.core.errors import EvenloadError, RankError
from evenload.core.recipe.recipe import schema_type
from evenload.plugins.data.reference import LossFiles
from evenload.training.preflight import open_data

load_plugins()
RECIPE = """
model: {num_layers: 1, hidden_size: 16, num_attention_heads: 2, vocab_size: 256}
data:
  max_length: 32
  long_samples: truncate
  domains: {code: {source: code.jsonl}, talk: {source: talk.jsonl}}
train: {steps: 2, global_batch_size: 4, lr: 1.0e-2}
generate: {max_new_tokens: 4, end_tokens: [10]}
plugins: {packing: {enabled: true, max_tokens: 128}}
"""
REWARDS = "def share(prompt, text, row): return len(text) % 3 / 2\ndef first(text): return text[:1] or None\n"
SECTIONS = ("data.validation", "generate", "plugins.data", "checkpoint", "sparse")
VALUES = {
    "data.validation.source": ["held.jsonl"],
    "data.validation.domains": [{"held": "held.jsonl", "code": "code.jsonl"}],
    "data.validation.every": [1, 2],
    "data.validation.batches": [1, None],
    "data.validation.generate.prompts": ["p.jsonl"],
    "data.validation.generate.samples": [2],
    "data.validation.generate.score": [
        "documented_rewards:share",
        [{"by": "documented_rewards:share", "unsure": [0.5, 1]}, {"by": "documented_rewards:share"}],
    ],
    "data.validation.generate.rescore": [0, 0.5],
    "data.validation.generate.passes": [0.5],
    "data.validation.generate.k": [[1], None],
    "data.validation.generate.answer": ["documented_rewards:first", None],
    "data.validation.generate.every": [2],
    "checkpoint.dir": ["kept", None],
    "checkpoint.every": [1, 2],
    "checkpoint.keep": [1],
    "checkpoint.background": [True],
    "checkpoint.resume": [False],
    "checkpoint.best": [True, False, "held", "generate.score", "generate.pass_at_1"],
    "checkpoint.verify": [False],
    "checkpoint.trust": [True],
    "generate.max_new_tokens": [3],
    "generate.temperature": [0, 0.7],
    "generate.top_k": [3],
    "generate.top_p": [0.5],
    "generate.end_tokens": [[], [10, 11], None],
    "generate.stop": [["a", "b c"]],
    "generate.slots": [1],
    "generate.cache_tokens": [64, None],
    "generate.move_every": [0, 2, None],
    "generate.keys": ["int8", "int4", None],
    "generate.drafts.by": ["texts", "quantized"],
    "generate.drafts.most": [2],
    "generate.drafts.weights": ["int4"],
    "generate.drafts.earlier": [None],
    "generate.collect.keep": [1],
    "generate.collect.of": [3],
    "generate.collect.every": [2],
    "generate.collect.prune.score": [
        "documented_rewards:share",
        [{"by": "documented_rewards:share", "unsure": [0.5, 1]}, {"by": "documented_rewards:share"}],
    ],
    "generate.collect.prune.rescore": [0, 0.5],
    "generate.collect.prune.below": [0.5],
    "generate.collect.prune.most": [1],
    "sparse.choose": ["dense", "sample", "estimate", "kept"],
    "sparse.mass": [0.5, 1],
    "sparse.min_length": [16],
    "sparse.dense_share": [0.5, 1],
    "sparse.limit": [0, 0.01],
    "sparse.state_bytes": [1 << 20, None],
    "plugins.data.enabled": [True, False],
    "plugins.data.mix.policy": ["temperature", "odm", "doremi", "ado"],
    "plugins.data.mix.settings": [{"smoothing": 0.5}],
    "plugins.data.mix.every": [2],
    "plugins.data.select.policy": ["random", "loss", "delta_loss", "less", "cluster_less", "online", "near", "tsds"],
    "plugins.data.select.settings": [{"factor": 2.0}],
    "plugins.data.select.every": [2],
    "plugins.data.select.pool": [2, None],
    "plugins.data.select.embeddings": ["embeddings.npy"],
    "plugins.data.select.queries": ["queries.npy"],
    "plugins.data.weight.policy": ["loss", "adapt"],
    "plugins.data.weight.settings": [{"strategy": "uniform"}],
    "plugins.data.reference": ["losses"],
}
EMBEDDED = {"plugins.data.select.embeddings": "embeddings.npy", "plugins.data.select.queries": "queries.npy"}
NEEDS = [
    ("checkpoint.best", (True, "generate.score", "generate.pass_at_1"), {"data.validation.every": 1}),
    ("checkpoint.best", ("held",), {"data.validation.domains": VALUES["data.validation.domains"][0]}),
    ("checkpoint.best", ("generate.score", "generate.pass_at_1"), {"data.validation.generate.samples": 2}),
    ("checkpoint.", (), {"checkpoint.dir": "kept"}),
    ("generate.collect.prune.", (), {"generate.collect.prune.score": "documented_rewards:share"}),
    ("generate.collect.prune.", (), {"generate.collect.prune.below": 0.5, "generate.collect.prune.most": 1}),
    ("generate.collect.", (), {"generate.collect.keep": 2, "generate.collect.of": 3}),
    ("plugins.data.mix.policy", ("doremi",), {"plugins.data.reference": "losses"}),
    ("plugins.data.mix.", (), {"plugins.data.mix.policy": "odm"}),
    ("plugins.data.select.settings", (), {"plugins.data.select.policy": "loss"}),
    ("plugins.data.select.embeddings", (), {"plugins.data.select.policy": "near"} | EMBEDDED),
    ("plugins.data.select.queries", (), {"plugins.data.select.policy": "near"} | EMBEDDED),
    ("plugins.data.select.", (), {"plugins.data.select.policy": "random"}),
    ("plugins.data.select.policy", ("near", "tsds", "cluster_less"), EMBEDDED),
    ("plugins.data.select.policy", ("less", "cluster_less"), {"data.validation.batches": 1}),
    ("plugins.data.weight.", (), {"plugins.data.weight.policy": "loss"}),
    ("plugins.data.weight.policy", ("adapt",), {"data.validation.batches": 1}),
    ("plugins.data.", (), {"plugins.data.enabled": True}),
    ("sparse.", (), {"sparse.choose": "sample"}),
    ("data.validation.generate.", (), {"data.validation.generate.prompts": "p.jsonl"}),
    ("data.validation.generate.", (), {"data.validation.generate.score": "documented_rewards:share"}),
]
"""What a key, or those below it, needs besides, for some values or for all."""


def documented(schema, node, above=()):
    """Dotted keys of the schema that hold no other keys."""
    parts = [node, *node.get("anyOf", []), *node.get("allOf", [])]
    below = [schema["$defs"][one["$ref"].rpartition("/")[2]] for one in parts if "$ref" in one]
    below += [one for one in parts if "properties" in one]
    if not below:
        yield ".".join(above)
    for one in below:
        for name, field in one.get("properties", {}).items():
            yield from documented(schema, field, (*above, name))


def test_every_documented_key_is_drawn():
    schema = schema_type().model_json_schema()
    keys = {key for key in documented(schema, schema) if key.startswith(tuple(f"{one}." for one in SECTIONS))}
    assert keys == set(VALUES)


Case = dict[str, Any]


def completed(case):
    """With what its keys need, where it says nothing of that."""
    whole = dict(case)
    for key, values, more in NEEDS:
        if any(one.startswith(key) and (not values or whole[one] in values) for one in list(whole)):
            whole = more | whole
    named = {"data.validation.source", "data.validation.domains"} & whole.keys()
    if any(key.startswith("data.validation.") for key in whole) and not named:
        whole["data.validation.source"] = "held.jsonl"
    chosen = {f"plugins.data.{kind}.policy" for kind in ("mix", "select", "weight")} & whole.keys()
    if whole.get("plugins.data.enabled") and not chosen:
        whole["plugins.data.mix.policy"] = "odm"
    return whole


def pairs():
    """Every two keys, with a value of each that is drawn."""
    drawn = random.Random(7)
    return [completed({key: drawn.choice(VALUES[key]) for key in two}) for two in combinations(VALUES, 2)]


def covering(size=6):
    """Every key with every value once, so many keys at a time, and a pair that fell once."""
    settings = [(key, value) for key, values in VALUES.items() for value in values]
    met = {"data.validation.domains": VALUES["data.validation.domains"][0], "checkpoint.best": "generate.score"}
    cases = [met, *({} for _ in range(len(settings) // size))]
    for key, value in random.Random(7).sample(settings, len(settings)):
        min((case for case in cases if key not in case), key=len)[key] = value
    return [completed(case) for case in cases]


def launched(place, trainer, cases, first):
    """How each case ended on this rank: it ran, was refused in words, or fell."""
    return [_ended(Path(place), trainer, case, f"{first + number}") for number, case in enumerate(cases)]


def _ended(place, trainer, case, number):
    from evenload.plugins.rollout.generate import generate, resolve_request
    from evenload.training.verbs.train import train
    from harness.groups import giving_groups_back

    case = case | ({"checkpoint.dir": f"kept{number}"} if case.get("checkpoint.dir") else {})
    words = [f"{key}={json.dumps(value)}" for key, value in case.items()]

    def start(*more):
        with giving_groups_back() if trainer == "deepspeed" else nullcontext():
            train(load_recipe("r.yaml", [f"trainer={trainer}", *words, *more]))

    def sample():
        with giving_groups_back() if trainer == "deepspeed" else nullcontext():
            recipe, out = load_recipe("r.yaml", [f"trainer={trainer}", *words]), Path(f"o{number}.jsonl")
            resolve_request(recipe, Path("p.jsonl"), out, 1)
            generate(recipe, Path("p.jsonl"), out, 1)

    try:
        with chdir(place):
            if any(not key.startswith("generate.") for key in case):
                start()
            if case.get("checkpoint.dir"):
                start("train.steps=3")
            if any(key.startswith("generate.") for key in case):
                sample()
    except RankError:
        return f"fell: {traceback.format_exc()}"
    except EvenloadError as error:
        return f"refused: {error.what}" if error.found and error.do else f"fell: no remedy: {error}"
    except Exception:
        return f"fell: {traceback.format_exc()}"
    return "ran"


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with two domains, held-out samples, prompts, rewards, embeddings and losses of a reference."""
    folder = tmp_path_factory.mktemp("pairs")
    for name, count in {"code": 24, "talk": 16, "held": 6}.items():
        rows = [{"input_ids": [(7 * i + k * k) % 251 for k in range(3 + 5 * i % 17)]} for i in range(count)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "p.jsonl").write_text('{"prompt": "def f"}\n{"prompt": [7, 8], "max_new_tokens": 2}\n')
    (folder / "documented_rewards.py").write_text(REWARDS)
    (folder / "r.yaml").write_text(RECIPE)
    rng = np.random.default_rng(0)
    np.save(folder / "embeddings.npy", rng.random((40, 3), np.float32))
    np.save(folder / "queries.npy", rng.random((2, 3), np.float32))
    with chdir(folder):
        source = open_data(load_recipe("r.yaml"))
        losses = LossFiles(Path("losses"), source)
        for sample, length in enumerate(source.lengths.tolist()):
            losses.write(sample, np.full(length, 5.0))
        losses.finish()
    return folder


def _hold(worlds, place, trainer, cases):
    ends = []
    for first in range(0, len(cases), 8):
        world = worlds(trainer, 1)
        [some] = world.run(launched, str(place), trainer, cases[first : first + 8], len(ends), timeout_s=600)
        ends += some
        world.close()  # threads of gloo stay, and the watchdog looks at each
    counts = Counter(end.partition("\n")[0] if end.startswith("refused") else end.partition(":")[0] for end in ends)
    print(json.dumps(counts, indent=1))
    fell = [(case, end) for case, end in zip(cases, ends, strict=True) if end.startswith("fell")]
    assert not fell, f"{len(fell)} of {len(cases)} fell; the first: {fell[0][0]}\n{fell[0][1]}"
    assert counts["ran"] > 0.7 * len(cases)


@pytest.mark.slow
def test_every_value_starts_beside_another(worlds, place):
    _hold(worlds, place, "megatron", covering())


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("trainer", ["megatron", "deepspeed"])
def test_every_two_keys_start_together(worlds, place, trainer):
    _hold(worlds, place, trainer, pairs())
