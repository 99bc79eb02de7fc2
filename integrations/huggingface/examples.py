"""Models that recipes name instead of a folder: evenload writes them into its cache, so that an example needs no
download."""

from __future__ import annotations

from pathlib import Path

from ...core.recipe.pretrained import Example
from ...data.cache import cached_folder, key_of
from ...data.documents import require
from ...data.stdlib import HELD_OUT, PAIRS, pairs_as_jsonl


def _tiny_llama() -> Path:
    """The folder; made once, by the first process that asks. Raises EvenloadError without Transformers."""
    require("transformers", "making the model tiny-llama")
    from .folders.tiny import write_tiny

    pairs = [pairs_as_jsonl(name) for name in (PAIRS, HELD_OUT)]
    return cached_folder(
        key_of(pairs, "tiny-llama-3"), lambda folder: write_tiny(folder, dict(TINY_LLAMA.config), pairs)
    )


TINY_LLAMA = Example(
    {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 1024,
        "hidden_size": 128,
        "intermediate_size": 320,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
    },
    _tiny_llama,
)
"""A llama of 0.65 M parameters with random weights, whose tokenizer has read the docstrings of Python's library."""
