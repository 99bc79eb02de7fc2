"""Models that packed causal attention would compute wrongly are refused from their config, before anything starts."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from evenload.core.errors import EvenloadError
from evenload.integrations.huggingface.models import refuse_unequal_replay, refuse_unsupported
from harness.lazy import LazyModule

transformers = LazyModule("transformers")


class Config:
    """What a case makes a config of."""

    def __init__(self, model_type, **values):
        self.model_type, self._values = model_type, values

    def made(self):
        return transformers.AutoConfig.for_model(self.model_type, **self._values)


SMALL = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}

DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
LONG = {**DYNAMIC, "rope_type": "longrope", "original_max_position_embeddings": 128}
LONG |= {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}


@pytest.mark.parametrize(
    ("config", "told"),
    [
        (Config("mistral", **SMALL, sliding_window=128), "sliding_window = 128 tokens, data.max_length = 200"),
        (
            Config("qwen2", **SMALL, use_sliding_window=True, sliding_window=64, max_window_layers=1),
            "sliding_window = 64",
        ),
        (
            Config("llama4_text", **SMALL, attention_chunk_size=64, layer_types=["chunked_attention"] * 2),
            "attention_chunk_size = 64",
        ),
        (Config("llama", **SMALL, attention_dropout=0.1), "attention_dropout = 0.1"),
        (Config("gpt2"), "attn_pdrop = 0.1"),
        (Config("bert", attention_probs_dropout_prob=0.0, is_decoder=True, add_cross_attention=True), "cross"),
        (Config("t5"), "is_encoder_decoder = True"),
        (Config("mamba"), "no attention layers"),
        (Config("qwen3_next", **SMALL), "layers of type linear_attention"),
        (Config("gemma", **SMALL, use_bidirectional_attention=True), "use_bidirectional_attention = True"),
        (Config("qwen3_moe", **SMALL, output_router_logits=True), "router_aux_loss_coef = 0.001"),
        (Config("mixtral", **SMALL, output_router_logits=True), "output_router_logits = True"),
        (
            Config("dbrx", d_model=32, n_heads=4, output_router_logits=True),
            "= of its own",
        ),
        *(
            (Config("llama", **SMALL, max_position_embeddings=128, rope_parameters=rope), "beyond 128 tokens")
            for rope in (DYNAMIC, LONG)
        ),
    ],
    ids=lambda value: getattr(value, "model_type", ""),
)
def test_what_the_config_tells_is_refused(config, told):
    with pytest.raises(EvenloadError) as caught:
        refuse_unsupported(config.made(), 200)
    assert told in str(caught.value)
    assert caught.value.do


WINDOWED = Config("mistral", **SMALL, sliding_window=128)
CHUNKS = Config("llama4_text", **SMALL, attention_chunk_size=64, layer_types=["chunked_attention"] * 2)


@pytest.mark.parametrize(
    ("config", "known"),
    [
        (Config("llama", **SMALL), {}),
        (Config("qwen3", **SMALL, sliding_window=64), {}),
        (Config("qwen3_moe", **SMALL), {}),
        (Config("qwen3_moe", **SMALL, output_router_logits=True, router_aux_loss_coef=0.0), {}),
        (Config("gpt_neox", num_hidden_layers=2, hidden_size=32, num_attention_heads=4), {}),
        (Config("mistral", **SMALL, sliding_window=200), {}),
        (Config("qwen2", **SMALL, use_sliding_window=True, sliding_window=64, max_window_layers=2), {}),
        (Config("llama", **SMALL, max_position_embeddings=200, rope_parameters=DYNAMIC), {}),
        (WINDOWED, {"longest": None}),
        (WINDOWED, {"windows": True}),
        (Config("gemma2", **SMALL), {"windows": True}),
        (Config("mamba"), {"measured": True}),
        (Config("qwen3_next", **SMALL), {"measured": True}),
    ],
    ids=lambda value: getattr(value, "model_type", None) or " ".join(value),
)
def test_what_packs_compute_rightly_passes(config, known):
    """Plain causal models; windows where lengths are not known or no ranks share a sample; what is measured."""
    refuse_unsupported(config.made(), **{"longest": 200, **known})


@pytest.mark.parametrize(
    ("config", "known", "told"),
    [
        (CHUNKS, {"windows": True}, "attention_chunk_size"),
        (Config("deepseek_v32", num_hidden_layers=2), {"measured": True}, "indexed_attention"),
    ],
    ids=["chunks", "chosen keys"],
)
def test_chunks_and_layers_that_choose_keys_never_pass(config, known, told):
    with pytest.raises(EvenloadError, match=told):
        refuse_unsupported(config.made(), 200, **known)


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
