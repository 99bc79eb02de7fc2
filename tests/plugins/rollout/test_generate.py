"""`evenload generate`: a file of samples that does not depend on ranks, kills or resumes."""

import fcntl
import json
import shutil
from dataclasses import replace
from io import StringIO
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from evenload.api import load_plugins, load_recipe
from evenload.core.costs.decode import DecodeCost
from evenload.core.errors import EvenloadError
from evenload.core.recipe.pretrained import folder_of
from evenload.data.tokenizers import ByteTokenizer, open_tokenizer
from evenload.plugins.rollout.dealer import ByLength
from evenload.plugins.rollout.generate import mark_of, resolve_request
from evenload.plugins.rollout.tables import table
from evenload.runtime import files
from evenload.runtime.generate.dealing import Dealing
from evenload.runtime.generate.request import Completion, Generation, Request
from evenload.training.checkpoint.manifest import Manifest
from evenload.training.sampling.prompted import StopStrings
from rich.console import Console

RECIPE = """
trainer: megatron
model: {num_layers: 2, hidden_size: 32, num_attention_heads: 4, num_query_groups: 2, vocab_size: 256}
data: {max_length: 64}
parallel: {dp: null}
train: {dtype: fp64, seed: 5}
generate: {max_new_tokens: 24, end_tokens: [10, 200, 201, 202], slots: 3, temperature: 0.9}
"""
PROMPTS = ["def f(x):", "import os", [7, 8, 9, 200], "class A:\\n    pass"]
KILLED = """
import os, signal
import evenload.plugins.rollout.sample_file as files
line = files.SampleFile._line
made = []
def dying(file, sample):
    made.append(sample)
    if os.environ["RANK"] == "0" and len(made) == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return line(file, sample)
files.SampleFile._line = dying
"""


@pytest.fixture
def place(tmp_path):
    (tmp_path / "r.yaml").write_text(RECIPE)
    lines = [json.dumps({"prompt": prompt}) for prompt in PROMPTS]
    lines[1] = json.dumps({"prompt": PROMPTS[1], "max_new_tokens": 5})
    (tmp_path / "p.jsonl").write_text("\n".join(lines) + "\n")
    return tmp_path


def rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def generate(place, forge):
    """``generate(out, ranks, samples, *words)`` of each prompt."""

    def run(out, ranks, samples, *words, planted=""):
        command = ("generate", "r.yaml", *words, "--prompts", "p.jsonl", "--out", out, "--samples", str(samples))
        return forge("megatron").run(place, (*command, "--json"), ranks, planted, limit_s=120)

    return run


@pytest.mark.slow
def test_a_killed_generation_goes_on_on_other_ranks_with_the_same_tokens(place, generate):
    alone = json.loads(generate("alone.jsonl", 1, 3, "generate.slots=1").stdout)
    assert (alone["samples"], alone["samples_before"]) == (12, 0)
    assert alone["ended"].keys() == {"end", "limit"}
    killed = generate("out.jsonl", 2, 3, planted=KILLED)
    assert killed.returncode != 0
    assert not (place / "out.jsonl").exists()
    with next(place.glob("out.jsonl.part-*")).open("a") as part:
        part.write('{"prompt": 3, "sample"')  # cut by the kill
    on = json.loads(generate("out.jsonl", 1, 3, "generate.cache_tokens=112").stdout)
    assert 0 < on["samples_before"] < 12
    assert not [*place.glob("out.jsonl.part-*")]
    want, got = rows(place / "alone.jsonl"), rows(place / "out.jsonl")
    for one, other in zip(want, got, strict=True):
        assert max(abs(a - b) for a, b in zip(one.pop("log_probs"), other.pop("log_probs"), strict=True)) < 1e-9
        assert one == other
    assert [(row["prompt"], row["sample"]) for row in got] == [(p, s) for p in range(4) for s in range(3)]
    again = json.loads(generate("again.jsonl", 2, 3, "generate.drafts.earlier=alone.jsonl").stdout)
    assert [row["tokens"] for row in rows(place / "again.jsonl")] == [row["tokens"] for row in got]
    assert again["drafts"]["tokens_a_forward"] > 3
    without_use = again["drafts"]["drafted"] - again["drafts"]["accepted"]
    assert without_use <= alone["ended"]["end"], "it repeats itself, and after an end nothing comes"
    assert (alone["drafts"], again["run"]) == (None, alone["run"])
    more = json.loads(generate("out.jsonl", 2, 3, "generate.slots=9").stdout)
    assert (more["samples_before"], more["tokens"]) == (12, 0)
    foreign = generate("out.jsonl", 1, 3, "train.seed=6")
    assert (foreign.returncode, "holds something else than samples of this run" in foreign.stderr) == (2, True)


@pytest.mark.slow
def test_two_generations_do_not_write_into_one_file(place, generate):
    hasty = "import evenload.runtime.world.folder_lock as module; module.WAIT_S = 0.1"
    with (place / ".o.jsonl.lock").open("a") as lock:
        fcntl.lockf(lock, fcntl.LOCK_EX)
        second = generate("o.jsonl", 1, 1, planted=hasty)
    assert (second.returncode, "another run writes into o.jsonl" in second.stderr) == (2, True)
    assert generate("o.jsonl", 1, 1).returncode == 0
    assert {path.name for path in place.iterdir()} == {"r.yaml", "p.jsonl", "o.jsonl"}


@pytest.mark.slow
def test_samples_of_rounded_keys_are_named_so_wherever_they_are_told_of(place, generate):
    done = generate("near.jsonl", 2, 1, "generate.keys=int4", "generate.drafts.by=quantized")
    result = json.loads(done.stdout)
    assert (result["approximate"], result["run"][:22]) == ("int4 keys", "approximate-int4-keys-")
    assert {row["run"] for row in rows(place / "near.jsonl")} == {result["run"]}
    assert "samples/s, approximate: int4 keys" in done.stderr
    shown = Console(file=(out := StringIO()), width=120)
    shown.print(table(result))
    assert "approximate, not the model's own samples" in out.getvalue()
    exact = generate("near.jsonl", 1, 1)
    assert (exact.returncode, "holds something else than samples of this run" in exact.stderr) == (2, True)


COSTS = """
source: a test
forward: {token_s: 1.0e-6}
backward: {token_s: 2.0e-6}
decode: {step_s: 1.0e-2, row_s: 1.0e-3, key_s: 1.0e-5, prompt_s: 1.0e-6}
"""


@pytest.mark.slow
def test_samples_that_are_dealt_by_length_and_again_stay_the_same(place, generate):
    (place / "c.yaml").write_text(COSTS)

    def dealt(*arguments):
        return json.loads(generate(*arguments).stdout)["dealing"]

    alone = dealt("alone.jsonl", 1, 6)
    assert (alone["dealt"], alone["borders"], len(alone["forwards"])) == ("spread", 0, 1)
    assert alone["least_forwards"] <= alone["forwards"][0]
    assert "bound_s" not in alone
    first = dealt("out.jsonl", 2, 2, "generate.move_every=2")
    assert (first["dealt"], first["borders"] > 2) == ("spread", True)
    more = dealt("out.jsonl", 2, 6, "generate.move_every=1", "costs=c.yaml")
    assert (more["dealt"], more["borders"] > 2) == ("tie", True)
    assert 0 < more["bound_s"] <= more["predicted_s"]
    want, got = rows(place / "alone.jsonl"), rows(place / "out.jsonl")
    assert [(row["tokens"], row["ended"]) for row in got] == [(row["tokens"], row["ended"]) for row in want]


def test_moves_are_by_measured_costs_where_nobody_says():
    dealing = Dealing.of_requests([Request(0, (1, 2), 6400, (0, 1, 2))], Generation(), 2)
    measured = DecodeCost(step_s=0.01, row_s=0.0, key_s=0.0, prompt_s=0.0)
    asked_for = {(None, None): None, (measured, None): 200, (measured, 0): None, (None, 7): 7}
    for (costs, every), steps in asked_for.items():
        forwards = ByLength(costs, (), every).deal(dealing).forwards
        assert (None if forwards is None else forwards.tolist()) == (steps and [steps, steps])
    quick = measured.model_copy(update={"step_s": 1e-5})
    assert ByLength(quick, (), None).deal(dealing).forwards is None


def test_what_has_ended_tells_of_the_rest_also_of_samples_that_were_cut():
    requests = [Request(3, (1,), 50, (1, 2)), Request(8, (1, 2), 900, (1, 2))]
    dealing = Dealing.of_requests(requests, Generation(), 2)
    known = [Completion(3, 0, (1,) * 50, (0.0,) * 50, "limit"), Completion(8, 0, (1,) * 40, (0.0,) * 40, "end")]
    dealt = ByLength(None, [*known, Completion(5, 0, (1,), (0.0,), "end")], 4).deal(dealing)
    assert dealt.dealer == "tie"
    assert sorted(i for own in dealt.ranks for i in own) == [0, 1, 2, 3]
    cut = ByLength(None, known[:1], 4).deal(dealing)
    assert cut.dealer == "spread"
    under_way = replace(
        dealing, ranks=np.array([0, 0, 1, 0]), tokens=np.array([9, 30, 200, 9]), ended=np.array([0, 1, 1, 0])
    )
    again = ByLength(None, (), 4).deal(under_way)
    assert again.dealer == "moved"
    assert sorted(map(list, again.ranks)) == [[0], [3]]


QUANTIZED = {"generate.drafts.by": "quantized"}
ZERO_3 = {"trainer": "deepspeed", "deepspeed.zero_stage": 3, "train.dtype": "fp32"}
BAD = {
    "no end token": ({"generate.end_tokens": "null"}, '{"prompt": "a"}', "nothing says which token ends a sample"),
    "no prompts": ({}, "", "has no prompt"),
    "another field": ({}, '{"text": "a"}', "line 1 of .* has no prompt"),
    "an empty prompt": ({}, '{"prompt": "a"}\n{"prompt": ""}', "prompt 1 has no token"),
    "no limit": ({}, '{"prompt": "a", "max_new_tokens": 0}', "max_new_tokens in line 1"),
    "too long": ({}, json.dumps({"prompt": "a" * 41}), "prompt 0 and what may follow are longer"),
    "unknown tokens": ({}, '{"prompt": [256]}', "tokens that the model does not know"),
    "too many samples": ({"samples": 2**24}, '{"prompt": "a"}\n{"prompt": "b"}', "too many samples"),
    "no folder": ({"out": "nowhere/o.jsonl"}, '{"prompt": "a"}', "--out cannot be written"),
    "chats without a template": ({}, '{"prompt": [{"role": "user", "content": "a"}]}', "chats need a chat template"),
    "no checkpoint": ({"checkpoint": Path("nowhere")}, '{"prompt": "a"}', "there is no checkpoint"),
    "divided layers": ({**QUANTIZED, "parallel.tp": 2}, '{"prompt": "a"}', "does not draft where ranks divide layers"),
    "divided weights": ({**QUANTIZED, **ZERO_3}, '{"prompt": "a"}', "does not draft where ranks divide weights"),
    "tenants": ({**QUANTIZED, "plugins.lora.enabled": "true"}, '{"prompt": "a"}', "does not draft for tenants"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_is_said_before_a_rank_starts(name, place):
    changes, prompts, text = BAD[name]
    (place / "p.jsonl").write_text(prompts)
    words = [f"{key}={value}" for key, value in changes.items() if "." in key or key == "trainer"]
    recipe = load_recipe(place / "r.yaml", words)
    out, number = place / changes.get("out", "o.jsonl"), changes.get("samples", 1)
    with pytest.raises(EvenloadError, match=text):
        resolve_request(recipe, place / "p.jsonl", out, number, changes.get("checkpoint"))


def test_the_mark_of_a_run_is_that_of_what_decides_tokens(place):
    def run(*words, samples=1):
        return mark_of(resolve_request(load_recipe(place / "r.yaml", words), place / "p.jsonl", place / "o", samples))

    same = [run("generate.slots=9"), run("generate.cache_tokens=640"), run("parallel.tp=2"), run(samples=4)]
    same += [run("generate.drafts.by=texts"), run("generate.drafts.by=quantized", "generate.drafts.weights=int4")]
    assert {*same} == {run()}
    assert run("generate.keys=int4") == f"approximate-int4-keys-{run()}"
    words = ("train.seed=1", "generate.top_k=3", "model.num_layers=3", "generate.stop=[x]", "train.dtype=fp32")
    assert len({run(), *map(run, words)}) == 6


def kept_checkpoint(folder, content, *, hashed=True):
    """A checkpoint of one file, with the manifest of this version or of the first one, which had no hashes."""
    (folder / "trainer").mkdir(parents=True, exist_ok=True)
    (folder / "trainer" / "weights.pt").write_bytes(content)
    stamps = files.stamp(folder, ["trainer/weights.pt"])
    text = json.dumps(Manifest({"step": 2}, stamps).to_json())
    if not hashed:
        text = json.dumps({"format": 1, "step": 2, "files": {name: file.size for name, file in stamps.items()}})
    (folder / "evenload.json").write_text(text)
    return folder


def marked(place, words=(), checkpoint=None, tenant=""):
    recipe = load_recipe(place / "r.yaml", words)
    return mark_of(resolve_request(recipe, place / "p.jsonl", place / "o", 1, checkpoint, tenant))


@pytest.mark.parametrize("hashed", [True, False])
def test_the_mark_of_a_checkpoint_is_of_its_content_and_not_of_its_path(place, hashed):
    one = marked(place, checkpoint=kept_checkpoint(place / "kept", b"one", hashed=hashed))
    assert one not in (marked(place), marked(place, checkpoint=kept_checkpoint(place / "kept", b"two", hashed=hashed)))
    assert one == marked(place, checkpoint=kept_checkpoint(place / "copy", b"one", hashed=hashed))


@pytest.mark.slow
def test_the_mark_of_weights_is_of_every_byte_and_not_of_their_path(place):
    pytest.importorskip("transformers")
    folder = folder_of(Path("tiny-llama"))
    config, size = json.loads((folder / "config.json").read_text()), (folder / "model.safetensors").stat().st_size
    marks = {}
    for name, where in {"same": 0, "copy": 0, "first": size // 8 + 100_000, "last": size - 1}.items():
        shutil.copytree(folder, place / name)
        with (place / name / "model.safetensors").open("r+b") as file:
            byte = file.seek(where) == where and where and file.read(1)[0]
            file.seek(where)
            file.write(bytes([byte ^ 1]) if where else b"")
        marks[name] = marked(place, [f"model={{weights: {place / name}}}"])
    shutil.copytree(folder, place / "scaled")
    (place / "scaled" / "config.json").write_text(json.dumps({**config, "rope_theta": 77.0}))
    marks["scaled"] = marked(place, [f"model={{weights: {place / 'scaled'}}}"])
    assert marks.pop("copy") == marks["same"]
    assert len({*marks.values()}) == len(marks) == 4


def test_the_mark_of_an_adapter_is_of_what_scales_it_too(place):
    words = ["plugins.lora.enabled=true", f"plugins.lora.out={place}"]
    for name, alpha in {"a": 8, "b": 8, "c": 16}.items():
        (place / name).mkdir()
        (place / name / "adapter_model.safetensors").write_bytes(b"tensors")
        (place / name / "adapter_config.json").write_text(json.dumps({"r": 4, "lora_alpha": alpha}))
    assert marked(place, words, tenant="a") == marked(place, words, tenant="b") != marked(place, words, tenant="c")


def digest_on_rank(place):
    load_plugins()
    wanted = resolve_request(load_recipe(Path(place) / "r.yaml"), Path(place) / "p.jsonl", Path(place) / "o", 1)
    return mark_of(wanted._replace(unhashed=[Path(place) / name for name in ("one", "two", "three", "four", "five")]))


def test_ranks_share_the_reading_of_files_and_have_the_mark_of_one(place, world):
    for number, name in enumerate(("one", "two", "three", "four", "five")):
        (place / name).write_bytes(bytes([number]) * number)
    assert {*world(2).run(digest_on_rank, str(place))} == {digest_on_rank(str(place))}


def test_the_mark_of_a_run_is_that_of_its_prompts_and_their_limits(place):
    def run(*lines):
        (place / "p.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        return marked(place)

    one, other = {"prompt": "import"}, {"prompt": "import os"}
    known = [run(one, other), run(other, one), run(one), run({**one, "max_new_tokens": 7}, other)]
    known += [run({**one, "max_new_tokens": 24}, {**other, "max_new_tokens": 7})]
    assert len({*known}) == 5
    assert run({**one, "max_new_tokens": 24, "note": "read by nobody"}, other) == known[0]


def test_the_mark_of_a_run_is_that_of_its_tokenizer_too(place, monkeypatch):
    """Whose texts a file has, though the prompt was given in tokens."""
    (place / "p.jsonl").write_text('{"prompt": [7, 8, 9]}')
    runs = [marked(place)]
    monkeypatch.setattr(ByteTokenizer, "identity", "bytes of another alphabet")
    runs.append(marked(place))
    assert len({*runs}) == 2


TENANTS = ("plugins.lora.enabled=true", "plugins.lora.tenants=own", "plugins.lora.out=kept")


def test_a_line_goes_through_its_own_tenant_and_others_through_that_of_the_command(place, monkeypatch):
    monkeypatch.chdir(place)
    (place / "own").mkdir()
    for name in ("ann", "bob", "cid"):
        (place / "kept" / name / "last").mkdir(parents=True)
        (place / "kept" / name / "last" / "adapter_model.safetensors").write_bytes(name.encode())

    def wanted(tenant, *of_lines):
        lines = [{"prompt": "a", **({"tenant": own} if own else {})} for own in of_lines]
        (place / "p.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        return resolve_request(load_recipe(place / "r.yaml", TENANTS), place / "p.jsonl", place / "o", 1, tenant=tenant)

    def names(tenant, *of_lines):
        given = wanted(tenant, *of_lines)
        folders = [folder.parent.name for folder in given.adapters]
        return [folders[one.tenant] if one.tenant is not None else "" for one in given.requests]

    assert names("bob", "ann", "", "cid", "") == ["ann", "bob", "cid", "bob"]
    assert names("", "cid", "", "ann") == ["cid", "", "ann"]
    runs = [
        mark_of(wanted(*words))
        for words in (("", "ann", "bob"), ("", "bob", "ann"), ("ann", "", ""), ("bob", "", ""), ("", "", ""))
    ]
    assert len({*runs}) == 5
    same = mark_of(wanted("", "ann", "bob", "ann")), mark_of(wanted("", "ann", "bob", "bob"))
    assert same[0] != same[1], "of the same two adapters"
    (place / "kept" / "bob" / "last" / "adapter_model.safetensors").write_bytes(b"trained on")
    assert mark_of(wanted("bob", "", "")) != runs[3], "adapters are told by what they hold"


def test_the_first_of_several_stop_strings_cuts_a_text_where_it_first_stands():
    """Tokens of several characters may bring more than one at once."""
    words = ("one ", "two;\n; END three END", "END")
    stops = StopStrings(SimpleNamespace(decode=lambda tokens: "".join(words[token] for token in tokens)), ("END", "\n"))
    assert [stops(tokens) for tokens in ((0,), (0, 1), (2,))] == [False, True, True]
    sample = Completion(0, 0, (0, 1), (0.0, 0.0), "stop")
    assert stops.text_of(sample) == "one two;"
    assert stops.text_of(sample._replace(tokens=(0, 2, 0, 2))) == "one "


def test_a_stop_string_ends_a_sample_wherever_tokens_part_it():
    stops = StopStrings(open_tokenizer("bytes"), ("\n\n", "END"))
    tokens = list(b"aEN\nDENDx")
    assert [stops(tokens[:n]) for n in range(1, 10)] == [False] * 7 + [True, True]
    sample = Completion(0, 0, tuple(tokens[:8]), (0.0,) * 8, "stop")
    assert stops.text_of(sample) == "aEN\nD"
    assert stops.text_of(sample._replace(ended="end")) == "aEN\nDEN"
    assert stops.text_of(sample._replace(ended="limit")) == "aEN\nDEND"
    assert not StopStrings(open_tokenizer("bytes"), ())(tokens)


def test_a_recipe_that_divides_tokens_or_has_domains_is_generated_from_as_any_other(place):
    recipe = load_recipe(
        place / "r.yaml", ["parallel.tp=2", "megatron.sequence_parallel=true", "model.vocab_size=null"]
    )
    domains = {name: {"source": f"python-stdlib/{name}", "share": 1.0} for name in ("json", "email")}
    recipe = recipe.changed({"data": {"domains": domains, "max_length": 64}})
    prepared = resolve_request(recipe, place / "p.jsonl", place / "o.jsonl", samples=1)
    assert (prepared.recipe.megatron.sequence_parallel, prepared.recipe.model.vocab_size) == (False, 256)
