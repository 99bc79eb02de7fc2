"""Hugging Face folders: read by slice as transformers reads them, written whole or not at all."""

import json
import resource
from pathlib import Path

import pytest
import torch
from evenload.core.errors import EvenloadError
from evenload.integrations.huggingface.folders.reading import INDEX, WeightFolder, refuse_unlike
from evenload.integrations.huggingface.folders.writing import FolderWriter
from evenload.runtime.files import refuse_taken
from harness.lazy import LazyModule
from safetensors.torch import save_file

transformers = LazyModule("transformers")
conversion = LazyModule("evenload.integrations.huggingface.folders.conversion")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("model") / "llama"
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, num_attention_heads=4))
    model.save_pretrained(path, max_shard_size="20KB")
    (path / "tokenizer.json").write_text("{}")
    return path


def copy_of(folder: Path, out: Path, shard_bytes: int) -> WeightFolder:
    came = WeightFolder.open(folder)
    with FolderWriter(out, came.config, folder, shard_bytes) as writer:
        for name in came.names:
            writer.add(name, came.read(name))
    return WeightFolder.open(out)


@pytest.mark.parametrize(("shard_bytes", "single"), [(1 << 14, False), (1 << 28, True)])
def test_a_folder_comes_out_as_it_went_in(folder, tmp_path, shard_bytes, single):
    copy = copy_of(folder, tmp_path / "out", shard_bytes)
    assert not list(tmp_path.glob("*.tmp"))
    assert (tmp_path / "out" / INDEX).exists() is not single
    assert copy.config == WeightFolder.open(folder).config
    assert (tmp_path / "out" / "tokenizer.json").exists()
    theirs, ours = (
        transformers.AutoModelForCausalLM.from_pretrained(path).state_dict() for path in (folder, copy.path)
    )
    assert all(torch.equal(ours[name], tensor) for name, tensor in theirs.items())


def test_slices_are_those_of_the_tensor(folder, monkeypatch):
    monkeypatch.setattr("evenload.integrations.huggingface.folders.reading._MAPPED_BYTES", 7 * 32 * 4)  # of seven rows
    opened, name = WeightFolder.open(folder), "model.layers.1.mlp.up_proj.weight"
    whole = opened.read(name)
    assert (tuple(whole.shape), whole.dtype) == (opened.shape(name), opened.dtype(name)) == ((48, 32), torch.float32)
    part = opened.read(name, slice(5, 20), slice(8, 16))
    assert torch.equal(part, whole[5:20, 8:16])
    assert part.untyped_storage().nbytes() == part.nbytes
    assert torch.equal(opened.read("model.norm.weight", slice(3, 9)), opened.read("model.norm.weight")[3:9])


def test_what_is_wrong_with_a_folder_is_named(folder, tmp_path):
    with pytest.raises(EvenloadError, match="no folder"):
        WeightFolder.open(tmp_path / "none")
    with pytest.raises(EvenloadError, match=r"config\.json"):
        WeightFolder.open(tmp_path)
    opened = WeightFolder.open(folder)
    with pytest.raises(EvenloadError, match=r"did you mean 'model.norm.weight'"):
        opened.read("model.norms.weight")
    with pytest.raises(EvenloadError, match=r"model.norm.weight(.|\n)*\[32\] in (.|\n)*\[33\]"):
        opened.require("model.norm.weight", (33,))
    copy = copy_of(folder, tmp_path / "copy", 1 << 14).path
    shard = sorted(copy.glob("*.safetensors"))[1]
    content = shard.read_bytes()
    shard.write_bytes(content[:-9])
    with pytest.raises(EvenloadError, match=shard.name):
        WeightFolder.open(copy)
    shard.unlink()
    with pytest.raises(EvenloadError, match=f"there is no {shard.name}"):
        WeightFolder.open(copy)


def indexed(folder: Path, tensor: str, file: str) -> Path:
    """The folder, whose index has a tensor in another file."""
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"][tensor] = file
    (folder / INDEX).write_text(json.dumps(index))
    return folder


@pytest.mark.parametrize(
    "outside", ["../elsewhere.safetensors", "inside/elsewhere.safetensors", "{}/elsewhere.safetensors"]
)
def test_a_shard_of_another_folder_is_not_read(folder, tmp_path, outside):
    """The file is there and holds the tensor: a folder that somebody gives may name no file but its own."""
    copy = copy_of(folder, tmp_path / "copy", 1 << 14).path
    outside = outside.format(tmp_path)
    (copy / "inside").mkdir()
    for place in (tmp_path, copy / "inside"):
        save_file({"model.norm.weight": torch.ones(32)}, place / "elsewhere.safetensors")
    with pytest.raises(EvenloadError, match=r"there is no .*elsewhere"):
        WeightFolder.open(indexed(copy, "model.norm.weight", outside))


def test_a_tensor_that_is_not_in_its_shard_is_named(folder, tmp_path):
    copy = copy_of(folder, tmp_path / "copy", 1 << 14).path
    places = json.loads((copy / INDEX).read_text())["weight_map"]
    other = next(file for file in places.values() if file != places["model.norm.weight"])
    with pytest.raises(EvenloadError, match=f"model.norm.weight is not in {other}"):
        WeightFolder.open(indexed(copy, "model.norm.weight", other))


def test_two_tensors_of_one_weight_must_be_equal_to_the_last_row(folder, monkeypatch):
    monkeypatch.setattr("evenload.integrations.huggingface.folders.reading._COMPARED_ROWS", 24)
    opened, (embedding, output) = WeightFolder.open(folder), ("model.embed_tokens.weight", "lm_head.weight")
    refuse_unlike(opened, opened.read, embedding, embedding, 64)
    with pytest.raises(EvenloadError, match="one weight where its folder has two"):
        refuse_unlike(opened, opened.read, embedding, output, 64)

    def but_for_the_last(name: str, rows: slice) -> torch.Tensor:
        part = opened.read(embedding, rows)
        return part + (name == output) * (torch.arange(64)[rows] == 63)[:, None]

    with pytest.raises(EvenloadError, match="one weight where its folder has two"):
        refuse_unlike(opened, but_for_the_last, embedding, output, 64)


def test_a_folder_says_in_its_config_which_type_its_tensors_have(tmp_path):
    for key in ("torch_dtype", "dtype"):
        with FolderWriter(tmp_path / key, {key: "float32"}, None) as writer:
            writer.add("a", torch.ones(3, dtype=torch.bfloat16))
        assert WeightFolder.open(tmp_path / key).config == {key: "bfloat16"}


@pytest.fixture(scope="module")
def experts(tmp_path_factory) -> tuple[Path, torch.nn.Module]:
    """A model whose experts are a tensor each in its folder, and rows of one parameter in memory."""
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4, "tie_word_embeddings": True}
    torch.manual_seed(0)
    model = transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes, **heads))
    path = tmp_path_factory.mktemp("experts") / "mixtral"
    model.save_pretrained(path, max_shard_size="20KB")
    return path, model


def test_parameters_are_put_together_whole_and_by_rows(experts):
    path, model = experts
    weights, state = conversion.ModelWeights(WeightFolder.open(path), model), model.state_dict()
    for name, tensor in state.items():
        if name in weights:
            assert torch.equal(weights.read(name), tensor), name
            assert torch.equal(weights.read(name, slice(1, 3)), tensor[1:3]), name
    assert state.keys() - {name for name in state if name in weights} <= {"lm_head.weight"}


@pytest.mark.parametrize(
    ("left_out", "says"),
    [
        (("experts.3", "norm"), r"lacks tensors of the model|another shape"),
        (("model.norm.weight",), r"lacks tensors of the model(.|\n)*model\.norm\.weight"),
    ],
)
def test_a_folder_that_lacks_a_tensor_of_its_model_is_named(experts, tmp_path, left_out, says):
    path, model = experts
    opened = WeightFolder.open(path)
    with FolderWriter(tmp_path / "short", opened.config, None) as writer:
        for name in opened.names:
            if not any(part in name for part in left_out):
                writer.add(name, opened.read(name))
    with pytest.raises(EvenloadError, match=says):
        conversion.ModelWeights(WeightFolder.open(tmp_path / "short"), model)


def test_nothing_half_written_stays(folder, tmp_path):
    out, limits = tmp_path / "out", resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
        with pytest.raises(EvenloadError, match="the disk is full"):
            copy_of(folder, out, 1 << 28)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    with pytest.raises(AttributeError), FolderWriter(out, {}, None) as writer:
        writer.add("a", None)
    assert list(tmp_path.iterdir()) == []


def test_a_taken_place_is_refused(tmp_path):
    refuse_taken(tmp_path)
    refuse_taken(tmp_path / "a" / "b")
    (tmp_path / "file").write_text("")
    for taken in (tmp_path, tmp_path / "file"):
        with pytest.raises(EvenloadError, match=r"not empty|no folder"):
            refuse_taken(taken)
    with pytest.raises(EvenloadError, match="cannot be written"):
        refuse_taken(tmp_path / ("a" * 300))
