"""Models that packed causal attention would compute wrongly are refused from their config, before anything starts."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import transformers
from evenload.core.errors import EvenloadError
from evenload.integrations.huggingface.models import refuse_unequal_replay, refuse_unsupported

SMALL = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}

DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
LONG = {**DYNAMIC, "rope_type": "longrope", "original_max_position_embeddings": 128}
LONG |= {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}


@pytest.mark.parametrize(
    ("config", "told"),
    [
        (transformers.MistralConfig(**SMALL, sliding_window=128), "sliding_window = 128 tokens, data.max_length = 200"),
        (
            transformers.Qwen2Config(**SMALL, use_sliding_window=True, sliding_window=64, max_window_layers=1),
            "sliding_window = 64",
        ),
        (
            transformers.Llama4TextConfig(**SMALL, attention_chunk_size=64, layer_types=["chunked_attention"] * 2),
            "attention_chunk_size = 64",
        ),
        (transformers.LlamaConfig(**SMALL, attention_dropout=0.1), "attention_dropout = 0.1"),
        (transformers.GPT2Config(), "attn_pdrop = 0.1"),
        (transformers.BertConfig(attention_probs_dropout_prob=0.0, is_decoder=True, add_cross_attention=True), "cross"),
        (transformers.T5Config(), "is_encoder_decoder = True"),
        (transformers.MambaConfig(), "no attention layers"),
        (transformers.Qwen3NextConfig(**SMALL), "layers of type linear_attention"),
        (transformers.GemmaConfig(**SMALL, use_bidirectional_attention=True), "use_bidirectional_attention = True"),
        (transformers.Qwen3MoeConfig(**SMALL, output_router_logits=True), "router_aux_loss_coef = 0.001"),
        (transformers.MixtralConfig(**SMALL, output_router_logits=True), "output_router_logits = True"),
        (
            transformers.DbrxConfig(d_model=32, n_heads=4, output_router_logits=True),
            "= of its own",
        ),
        *(
            (transformers.LlamaConfig(**SMALL, max_position_embeddings=128, rope_parameters=rope), "beyond 128 tokens")
            for rope in (DYNAMIC, LONG)
        ),
    ],
    ids=lambda value: getattr(value, "model_type", ""),
)
def test_what_the_config_tells_is_refused(config, told):
    with pytest.raises(EvenloadError) as caught:
        refuse_unsupported(config, 200)
    assert told in str(caught.value)
    assert caught.value.do


WINDOWED = transformers.MistralConfig(**SMALL, sliding_window=128)
CHUNKS = transformers.Llama4TextConfig(**SMALL, attention_chunk_size=64, layer_types=["chunked_attention"] * 2)


@pytest.mark.parametrize(
    ("config", "known"),
    [
        (transformers.LlamaConfig(**SMALL), {}),
        (transformers.Qwen3Config(**SMALL, sliding_window=64), {}),
        (transformers.Qwen3MoeConfig(**SMALL), {}),
        (transformers.Qwen3MoeConfig(**SMALL, output_router_logits=True, router_aux_loss_coef=0.0), {}),
        (transformers.GPTNeoXConfig(num_hidden_layers=2, hidden_size=32, num_attention_heads=4), {}),
        (transformers.MistralConfig(**SMALL, sliding_window=200), {}),
        (transformers.Qwen2Config(**SMALL, use_sliding_window=True, sliding_window=64, max_window_layers=2), {}),
        (transformers.LlamaConfig(**SMALL, max_position_embeddings=200, rope_parameters=DYNAMIC), {}),
        (WINDOWED, {"longest": None}),
        (WINDOWED, {"windows": True}),
        (transformers.Gemma2Config(**SMALL), {"windows": True}),
        (transformers.MambaConfig(), {"measured": True}),
        (transformers.Qwen3NextConfig(**SMALL), {"measured": True}),
    ],
    ids=lambda value: getattr(value, "model_type", None) or " ".join(value),
)
def test_what_packs_compute_rightly_passes(config, known):
    """Plain causal models; windows where lengths are not known or no ranks share a sample; what is measured."""
    refuse_unsupported(config, **{"longest": 200, **known})


@pytest.mark.parametrize(
    ("config", "known", "told"),
    [
        (CHUNKS, {"windows": True}, "attention_chunk_size"),
        (transformers.DeepseekV32Config(num_hidden_layers=2), {"measured": True}, "indexed_attention"),
    ],
    ids=["chunks", "chosen keys"],
)
def test_chunks_and_layers_that_choose_keys_never_pass(config, known, told):
    with pytest.raises(EvenloadError, match=told):
        refuse_unsupported(config, 200, **known)


def test_dropout_cannot_be_replayed():
    config = transformers.GPTNeoXConfig(
        num_hidden_layers=1, hidden_size=32, num_attention_heads=4, intermediate_size=64, vocab_size=97
    )
    replays, keeps = (SimpleNamespace(replayed=replayed, recompute=()) for replayed in ((0,), ()))
    refuse_unequal_replay(replays, transformers.GPTNeoXForCausalLM(config))
    config.hidden_dropout = 0.2
    refuse_unequal_replay(keeps, transformers.GPTNeoXForCausalLM(config))
    with pytest.raises(EvenloadError, match=r"drops 0\.2"):
        refuse_unequal_replay(replays, transformers.GPTNeoXForCausalLM(config))
