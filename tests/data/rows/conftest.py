"""A tokenizer's folder as `transformers` writes it, with a chat template that marks the assistant's part or not."""

import json
import re

import pytest

HEAD = "{% for message in messages %}<|start|>{{ message.role }}\n"
PLAIN = HEAD + "{{ message.content }}<|end|>{% endfor %}{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
MARKED = (
    HEAD + "{% if message.role == 'assistant' %}{% generation %}{{ message.content }}<|end|>{% endgeneration %}"
    "{% else %}{{ message.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
SPECIAL = ["<s>", "</s>", "<|start|>", "<|end|>"]
TEXT = [
    "def name(one, other):\n    return one + other\n",
    "the name of the other one is returned",
    "user assistant system",
]


@pytest.fixture(scope="session")
def bare_folder(tmp_path_factory):
    tokenizers = pytest.importorskip("tokenizers")
    levels = tokenizers.pre_tokenizers.ByteLevel
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = levels(add_prefix_space=False)
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400, special_tokens=SPECIAL, initial_alphabet=levels.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(TEXT * 20, trainer)
    begin = [("<s>", 0)]
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=begin)
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="session")
def folder_with(bare_folder, tmp_path_factory):
    """Gives the folder with a template."""
    pytest.importorskip("transformers")

    def make(template):
        folder = tmp_path_factory.mktemp("chats")
        for name in ("tokenizer.json", "tokenizer_config.json"):
            (folder / name).write_bytes((bare_folder / name).read_bytes())
        (folder / "chat_template.jinja").write_text(template)
        return folder

    return make


@pytest.fixture(scope="session")
def plain_folder(folder_with):
    return folder_with(PLAIN)


@pytest.fixture(scope="session")
def marked_folder(folder_with):
    return folder_with(MARKED)


@pytest.fixture(scope="session")
def bytes_folder(tmp_path_factory):
    """Gives a folder whose tokens are the marks of its template, such as <|end|>, and else single bytes."""
    tokenizers = pytest.importorskip("tokenizers")
    pytest.importorskip("transformers")
    levels = tokenizers.pre_tokenizers.ByteLevel
    mark = re.compile(r"<[|\uff5c][^<>|\uff5c]+[|\uff5c]?>|</?[a-z_]+[|]?>")

    def make(template, more=""):
        letters = {letter: number for number, letter in enumerate(sorted(levels.alphabet()))}
        tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(letters, []))
        tokenizer.pre_tokenizer = levels(add_prefix_space=False, use_regex=False)
        tokenizer.decoder = tokenizers.decoders.ByteLevel()
        tokenizer.add_special_tokens(sorted({"<s>", "</s>", *mark.findall(template + more)}))
        folder = tmp_path_factory.mktemp("bytes")
        tokenizer.save(str(folder / "tokenizer.json"))
        config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
        (folder / "chat_template.jinja").write_text(template)
        return folder

    return make
