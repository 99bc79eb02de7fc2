"""A small Hugging Face model with random weights, and a tokenizer of its own: what examples fine-tune, nothing
downloaded."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from .reading import SINGLE

END, PADDING = "<|end|>", "<|padding|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}:\n{{ message['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:\n{% endif %}"
)


def write_tiny(folder: Path, config: dict[str, Any], pairs: Sequence[Path]) -> None:
    """Write a llama of a config into an existing folder: config.json, safetensors, tokenizer, chat template.

    Args:
        pairs: JSON Lines of prompts and completions, which the tokenizer (byte-level BPE) is trained on.
    """
    rows = (json.loads(line) for path in pairs for line in path.read_text(encoding="utf-8").splitlines())
    texts = (row[field] for row in rows for field in ("prompt", "completion"))
    words = Tokenizer(models.BPE())
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    words.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=config["vocab_size"],
            special_tokens=[END, PADDING],
            initial_alphabet=alphabet,
            show_progress=False,
        ),
    )
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, eos_token=END, pad_token=PADDING)
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None}
    whole = transformers.LlamaConfig(**config, **ends)
    whole.save_pretrained(folder)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1234)
        model = transformers.LlamaForCausalLM(whole)
    tensors = {name: weight.detach() for name, weight in model.named_parameters()}  # tied ones once
    save_file(tensors, folder / SINGLE, metadata={"format": "pt"})
