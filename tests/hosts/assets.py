"""Tiny Hugging Face folders and ragged data, made offline in a few seconds: what the scripts of this folder train on.

    python assets.py FOLDER

makes FOLDER/models/{llama,mistral,qwen3_moe,gpt2} with one tokenizer, and FOLDER/data: `text.jsonl` and
`text.txt` (plain text), `chat` (messages), `completions` (prompt and completion) and `preferences` (prompt, chosen,
rejected), each a folder with `train.jsonl` and `test.jsonl` that `datasets.load_dataset` reads. Lengths are lognormal
with a median of 64 tokens, the longest is near `LONGEST`.
"""

from __future__ import annotations

import json
import math
import random
import sys
import sysconfig
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    PreTrainedTokenizerFast,
    Qwen3MoeConfig,
)

LONGEST, NUM_TRAIN, NUM_TEST = 512, 192, 24
VOCABULARY = 512
SPECIAL = ["<pad>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": LONGEST,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GPT2 = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": LONGEST}
CONFIGS: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**COMMON),
    "mistral": MistralConfig(**COMMON, head_dim=8, sliding_window=64),
    "qwen3_moe": Qwen3MoeConfig(
        **COMMON,
        head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        output_router_logits=True,
    ),
    "gpt2": GPT2Config(**GPT2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=1, eos_token_id=2),
}


def make(folder: Path, names: Iterable[str] = ("llama", "mistral", "qwen3_moe", "gpt2")) -> None:
    """Make the models of these names and all data below `folder`."""
    source = library()
    tokenizer = make_tokenizer(source[:400_000])
    for name in names:
        save_model(folder / "models" / name, CONFIGS[name], tokenizer)
    texts = list(draw_texts(source, tokenizer))
    data = folder / "data"
    data.mkdir(parents=True)
    (data / "text.txt").write_text("".join(" ".join(text.split()) + "\n" for text in texts))
    for name, row in ROWS.items():
        write_rows(data / name, texts, row)


def library() -> str:
    """The 80 first modules of the standard library by name: text that every machine with this Python has."""
    paths = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:80]
    return "\n".join(path.read_text(errors="ignore") for path in paths)


def make_tokenizer(text: str, vocabulary: int = VOCABULARY, longest: int = LONGEST) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of this vocabulary that knows `CHAT_TEMPLATE`."""
    byte_pairs = Tokenizer(models.BPE())
    byte_pairs.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    byte_pairs.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary - 8, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    byte_pairs.train_from_iterator(text.splitlines(), trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=byte_pairs, bos_token="<s>", eos_token="</s>", pad_token="<pad>", model_max_length=longest
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def save_model(folder: Path, config: PretrainedConfig, tokenizer: PreTrainedTokenizerFast) -> None:
    """A model with random float32 weights, the same each time, beside its tokenizer."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).float().save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def draw_texts(source: str, tokenizer: PreTrainedTokenizerFast) -> Iterable[str]:
    """Pieces of `source` of lognormal length, a median of an eighth of the tokenizer's longest, the same each time;
    with a template around it none is longer than that."""
    drawn = random.Random(0)
    longest = tokenizer.model_max_length
    tokens = tokenizer(source[:600_000], add_special_tokens=False)["input_ids"]
    for _ in range(NUM_TRAIN + NUM_TEST):
        length = min(max(12, int(drawn.lognormvariate(math.log(longest / 8), 1.0))), longest - 32)
        start = drawn.randrange(len(tokens) - length)
        yield tokenizer.decode(tokens[start : start + length])


Row = Callable[[str, str], dict[str, Any]]
"""A row of a data set from a text and another one."""


def _messages(text: str, _: str) -> dict[str, Any]:
    asked, answered = _halves(text)
    return {"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]}


def _completion(text: str, _: str) -> dict[str, Any]:
    asked, answered = _halves(text)
    return {"prompt": asked, "completion": answered}


def _preference(text: str, other: str) -> dict[str, Any]:
    asked, answered = _halves(text)
    return {"prompt": asked, "chosen": answered, "rejected": other[: len(answered)]}


def _instruction(text: str, _: str) -> dict[str, Any]:
    asked, answered = _halves(text)
    return {"instruction": asked, "input": "", "output": answered}


def _halves(text: str) -> tuple[str, str]:
    return text[: len(text) // 3], text[len(text) // 3 :]


ROWS: dict[str, Row] = {
    "text": lambda text, _: {"text": text},
    "chat": _messages,
    "completions": _completion,
    "preferences": _preference,
    "alpaca": _instruction,
}


def write_rows(folder: Path, texts: list[str], row: Row) -> None:
    """`train.jsonl` and, of the last texts, `test.jsonl`."""
    folder.mkdir(parents=True)
    rows = [json.dumps(row(text, other)) + "\n" for text, other in zip(texts, texts[1:] + texts[:1], strict=True)]
    (folder / "train.jsonl").write_text("".join(rows[:-NUM_TEST]))
    (folder / "test.jsonl").write_text("".join(rows[-NUM_TEST:]))


if __name__ == "__main__":
    make(Path(sys.argv[1]), CONFIGS)
