import sys
from pathlib import Path

import pytest
from evenload.core.errors import EvenloadError
from evenload.core.recipe.pretrained import folder_of
from evenload.data.tokenizers import open_tokenizer

from . import files

TEXTS = ["two words", "", "w\u00f6rter \U0001f600", "two \ud800 words"]


@pytest.fixture
def tokenizer_file(tmp_path):
    words = {"two": 3, "words": 7, "<s>": 1, "?": 0}
    clipped = {"enable_truncation": {"max_length": 2}, "enable_padding": {"length": 9}}
    return files.tokenizer(tmp_path, words, begin="<s>", **clipped)


def test_a_file_keeps_its_special_tokens_but_neither_truncates_nor_pads(tokenizer_file):
    tokenizer = open_tokenizer(str(tokenizer_file))
    assert tokenizer.encode("two words two").tolist() == [1, 3, 7, 3]
    assert tokenizer.vocab_size == 8  # ids have gaps


def test_tokens_become_text_again(tokenizer_file):
    tokenizer = open_tokenizer("bytes")
    assert tokenizer.decode(tokenizer.encode("w\u00f6rter").tolist()) == "w\u00f6rter"
    assert tokenizer.decode([104, 195, 300, 105]) == "h\ufffdi"  # half a letter, and an id that no byte has
    assert tokenizer.end_token is None
    tokenizer = open_tokenizer(str(tokenizer_file))
    assert tokenizer.decode(tokenizer.encode("two words").tolist()[1:]) == "two words"
    assert tokenizer.end_token is None


@pytest.mark.slow
def test_a_folder_names_the_token_that_ends_a_text():
    tokenizer = open_tokenizer(str(folder_of(Path("tiny-llama"))))
    assert tokenizer.decode([*tokenizer.encode("two words").tolist(), tokenizer.end_token]) == "two words"


def test_lengths_are_those_of_the_encoded_texts(tokenizer_file):
    for spec in ("bytes", str(tokenizer_file)):
        tokenizer = open_tokenizer(spec)
        assert tokenizer.lengths(TEXTS) == [len(tokenizer.encode(text)) for text in TEXTS]


def test_a_folder_with_a_tokenizer_file_will_do(tokenizer_file):
    assert open_tokenizer(str(tokenizer_file.parent)).identity == open_tokenizer(str(tokenizer_file)).identity


def test_missing_and_malformed_files_are_refused(tmp_path):
    with pytest.raises(EvenloadError, match="is not a file"):
        open_tokenizer(str(tmp_path / "tokenizer.json"))
    for content in (b"{}", b"\xff\xfe"):
        (tmp_path / "tokenizer.json").write_bytes(content)
        with pytest.raises(EvenloadError, match="not a tokenizer file"):
            open_tokenizer(str(tmp_path / "tokenizer.json"))


def test_a_missing_library_is_named_with_its_command(tokenizer_file, monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(EvenloadError, match="pip install tokenizers"):
        open_tokenizer(str(tokenizer_file))


def test_a_pattern_of_a_tokenizer_that_has_no_end_is_refused_and_not_a_panic(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0, "!": 1}, [], unk_token="a"))
    pattern = tokenizers.Regex("(a+)+$")
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Split(pattern, "isolated")
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    opened = open_tokenizer(str(tmp_path))
    assert opened.lengths(["a!"]) == [2]
    with pytest.raises(EvenloadError, match="the tokenizer fails on a text"):
        opened.encode_all(["a" * 99 + "!"])
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    folder = open_tokenizer(str(tmp_path))
    with pytest.raises(EvenloadError, match="fails on a text"):
        folder.encode_all(["a" * 99 + "!"])
    with pytest.raises(EvenloadError, match="fails on a text"):
        folder.marked("a" * 99 + "!")
