"""What is wrong with a tenant is found before it joins, in one message."""

import json
import os
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from evenload.core.errors import EvenloadError
from evenload.core.planning.chain import PlanChain
from evenload.core.recipe.adapter import Adapter
from evenload.core.recipe.recipe import parse
from evenload.integrations.huggingface.folders.adapters import write_adapter
from evenload.plugins.lora.arrivals.opening import Entrant, open_tenant
from evenload.plugins.lora.tenant_file import parse_tenant, read_tenant


def base_of(**lora):
    plugins = {"packing": {"enabled": True, "max_tokens": 64}, "lora": lora}
    recipe = parse({"model": {"vocab_size": 256}, "parallel": {"dp": 2}, "plugins": plugins})
    return recipe, [PlanChain.of_recipe(recipe, recipe.layout())]


@pytest.fixture(scope="module")
def base():
    return base_of()


def rows(path, lengths, token=5):
    path.write_text("".join(json.dumps({"tokens": [token] * length}) + "\n" for length in lengths))
    return str(path)


def opened(base, **config):
    tenant = parse_tenant(json.dumps(config), "acme")
    return open_tenant(Entrant("acme", "acme", tenant, "digest"), 3, *base)[0]


def refusal(base, **config):
    with pytest.raises(EvenloadError) as caught:
        opened(base, **config)
    assert caught.value.do
    return str(caught.value)


def test_a_tenant_is_opened_with_its_data_and_its_steps(base, tmp_path):
    source = rows(tmp_path / "a.jsonl", [9] * 10)
    tenant = opened(base, data={"source": source}, train={"batch_size": 4, "epochs": 2})
    assert (tenant.name, tenant.number, tenant.steps, tenant.until, tenant.state) == ("acme", 3, 6, 6, "waiting")
    assert tenant.drawing().lengths.tolist() == [9] * 4
    assert tenant.held_out is None
    scored = opened(base, data={"source": source}, evaluate={"source": source})
    assert scored.held_out is not None


def test_a_tenant_of_domains_draws_by_their_shares(base, tmp_path):
    domains = {
        "long": {"source": rows(tmp_path / "a.jsonl", [20] * 10), "share": 3},
        "short": {"source": rows(tmp_path / "b.jsonl", [9] * 40), "weight": 0.5},
    }
    tenant = opened(base, data={"domains": domains}, train={"batch_size": 4, "epochs": 3})
    assert tenant.steps == 120 // 1 // 4 * 4, "until the slower domain has been drawn three times"
    draw = tenant.drawing()
    assert sorted(zip(draw.domain.tolist(), draw.lengths.tolist(), strict=True)) == [(0, 20)] * 3 + [(1, 9)]
    assert dict(zip(draw.domain.tolist(), np.broadcast_to(draw.weight, 4).tolist(), strict=True)) == {0: 1.0, 1: 0.5}
    again = open_tenant(Entrant("acme", "acme", tenant.config, "digest"), 3, *base, draw.state)[0]
    assert again.drawing().samples.tolist() == tenant.drawing().samples.tolist()
    targets = {"domains": domains, "mix": {"unit": "targets"}}
    counts = Counter()
    other = opened(base, data=targets, train={"batch_size": 4})
    for _ in range(40):
        draw = other.drawing()
        for place, count in zip(draw.domain.tolist(), draw.num_targets.tolist(), strict=True):
            counts[place] += count
    assert counts[0] / counts[1] == pytest.approx(3, rel=0.05)


def test_domains_that_cannot_be_mixed_are_refused(base, tmp_path):
    source = rows(tmp_path / "a.jsonl", [9] * 10)
    one = {"one": {"source": source}}
    assert "say the same thing twice" in refusal(base, data={"source": source, "domains": one})
    assert "data.source is missing" in refusal(base, data={"max_length": 64})
    assert "nothing would be drawn" in refusal(base, data={"domains": {"one": {"source": source, "share": 0}}})
    assert "no domains to mix" not in refusal(base, data={"source": source, "mix": {"unit": "targets"}})
    assert "the domain lost: " in refusal(base, data={"domains": {**one, "lost": {"source": str(tmp_path / "none")}}})
    points = [{"step": 0, "shares": {}}, {"step": 5, "shares": {"one": 2}}]
    moving = {"domains": one, "mix": {"policy": "schedule", "points": points}}
    assert "shares which change do not tell" in refusal(base, data=moving, train={"epochs": 2})
    assert "data.group is not valid" in refusal(base, data={"domains": one, "group": "of"})
    large = {**one, "large": {"source": rows(tmp_path / "l.jsonl", [9], token=300)}}
    assert "vocabulary" in refusal(base, data={"domains": large})
    (tmp_path / "root").mkdir()
    text = refusal(base_of(root=str(tmp_path / "root")), data={"domains": one})
    assert "data.domains.one.source leads out of plugins.lora.root" in text


def test_wrong_files_name_the_key_that_is_wrong(base):
    assert "the tenant acme has no key 'daat'" in refusal(base, daat={"source": "x"}, data={"source": "x"})
    assert "data is not valid" in refusal(base, train={"steps": 3})
    assert "adapter.r is not valid" in refusal(base, data={"source": "x"}, adapter={"r": 0})
    assert "train has no key 'learning_rate'" in refusal(base, data={"source": "x"}, train={"learning_rate": 1})
    for text in ("[1, 2]", "data: {source: [", "just text", ""):
        with pytest.raises(EvenloadError, match="the tenant acme"):
            parse_tenant(text, "acme")


def test_a_file_on_disk_is_read_as_its_text_is(tmp_path):
    text = "data: {source: x.jsonl}\nfrom: somewhere\n"
    (tmp_path / "acme.yaml").write_text(text)
    tenant = read_tenant(tmp_path / "acme.yaml")
    assert tenant == parse_tenant(text, "acme")
    assert tenant.start == Path("somewhere")
    with pytest.raises(EvenloadError, match="the tenant none cannot be read"):
        read_tenant(tmp_path / "none.yaml")


def test_data_that_cannot_be_trained_on_are_refused(base, tmp_path):
    empty, large, few = (tmp_path / f"{name}.jsonl" for name in ("empty", "large", "few"))
    empty.write_text("")
    assert "none.jsonl" in refusal(base, data={"source": str(tmp_path / "none.jsonl")})
    assert "empty.jsonl" in refusal(base, data={"source": str(empty)})
    text = refusal(base, data={"source": rows(large, [9] * 10, token=300)})
    assert "the base's vocabulary is smaller than the data's" in text
    assert "token ids up to 300, the base a vocabulary of 256" in text
    text = refusal(base, data={"source": rows(few, [9] * 3)})
    assert "3 samples, train.batch_size 8" in text
    held_out = {"source": rows(large, [9], token=300)}
    assert "vocabulary" in refusal(base, data={"source": rows(few, [9] * 9)}, evaluate=held_out)
    masked = tmp_path / "masked.jsonl"
    masked.write_text(json.dumps({"input_ids": [1, 2, 3], "labels": [-100] * 3}) + "\n")
    text = refusal(base, data={"source": rows(few, [9] * 9)}, evaluate={"source": str(masked)})
    assert "masked.jsonl has no target" in text


def test_files_lead_nowhere_outside_of_the_root(tmp_path):
    """Neither by themselves nor by links, patterns, or lists of files; what is built in is open to all."""
    root, outside = tmp_path / "root", tmp_path / "outside"
    for folder in (root / "words", root / "saved", outside):
        folder.mkdir(parents=True)
    inner, outer = rows(root / "a.jsonl", [9] * 10), rows(outside / "a.jsonl", [9] * 10)
    os.symlink(outer, root / "link.jsonl")
    os.symlink(outside, root / "folder")
    os.symlink(outer, root / "words" / "tokenizer.json")
    for name in ("pair.bin", "pair.idx", "x.arrow"):
        (outside / name).write_bytes(b"")
        os.symlink(outside / name, root / name)
    listed = {"_data_files": [{"filename": "../../outside/x.arrow"}]}
    (root / "saved" / "state.json").write_text(json.dumps(listed))
    fenced = base_of(root=str(root))
    assert opened(fenced, data={"source": inner}, evaluate={"source": "python-docstrings/email"}).name == "acme"
    assert opened(fenced, data={"source": f"{outside}/../root/a.jsonl"}).name == "acme"
    escapes = [outer, f"{root}/../outside/a.jsonl", f"{root}/link.jsonl", f"{root}/folder/a.jsonl", f"{root}/pair"]
    escapes += [f"{root}/pair.idx", f"{root}/*.arrow", f"{root}/saved", f"{root}/folder", str(tmp_path), "/", "/*"]
    for spec in escapes:
        assert "data.source leads out of plugins.lora.root" in refusal(fenced, data={"source": spec}), spec
        assert "evaluate.source leads" in refusal(fenced, data={"source": inner}, evaluate={"source": spec}), spec
    for spec in (str(root / "words"), str(outside)):
        assert "data.tokenizer leads" in refusal(fenced, data={"source": inner, "tokenizer": spec})
    for spec in (outside, root / "words", root / "folder"):
        assert "from leads out" in refusal(fenced, data={"source": inner}, **{"from": str(spec)})


def test_an_adapter_that_goes_on_must_be_the_one_of_the_file(base, tmp_path):
    source = rows(tmp_path / "a.jsonl", [9] * 10)
    weights = {f"model.layers.0.self_attn.{name}_proj.lora_{half}": torch.ones(4, 4) for name in "qv" for half in "AB"}
    adapter = Adapter(r=4, lora_alpha=8, target_modules=("q_proj", "v_proj"))
    write_adapter(tmp_path / "from", adapter, weights, None)
    config = {"data": {"source": source}, "from": str(tmp_path / "from")}
    assert opened(base, **config).adapter.r == 4
    same = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]}
    assert opened(base, **config, adapter=same).adapter.r == 4
    other = {"r": {"r": 8, "lora_alpha": 16}, "lora_alpha": {"lora_alpha": 4}, "target_modules": {}}
    for key, changes in other.items():
        said = {**same, **changes, **({"target_modules": ["q_proj"]} if key == "target_modules" else {})}
        text = refusal(base, **config, adapter=said)
        assert f"adapter.{key} is not that of the adapter to go on with" in text
    assert "holds no adapter" in refusal(base, data={"source": source}, **{"from": str(tmp_path)})
