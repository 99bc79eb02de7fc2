"""Every family of causal language models of the installed Transformers, tiny and in float64, under the real Trainer.

    python families.py [NAME ...] [--list]      what becomes of each under evenload, a line a family; as families.txt,
                                                and families_new.txt for those of `make test-today` alone
    python families.py --page                   the section of docs/support.md, of families.txt

Weights are drawn with a deviation of 0.25: near 0, as configs have them, attention across samples hardly shows.
"""

from __future__ import annotations

import logging
import sys
import warnings
from pathlib import Path
from textwrap import fill
from typing import Any

import torch
from evenload.core.errors import EvenloadError
from evenload.integrations.huggingface.models import refuse_unsupported
from torch.overrides import TorchFunctionMode
from trainer_runs import Gradients, Keep, arguments, collate, error_of, planned_by, recipe
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, Trainer, TrainingArguments
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

FAMILIES = tuple(sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))

_SIZES = {
    96: "vocab_size",
    32: "hidden_size d_model n_embd embed_dim word_embed_proj_dim embedding_size kv_lora_rank q_lora_rank",
    48: "intermediate_size ffn_dim decoder_ffn_dim encoder_ffn_dim n_inner d_ff moe_intermediate_size ffn_hidden_size "
    "expert_ffn_hidden_size shared_expert_intermediate_size",
    2: "num_hidden_layers n_layer n_layers num_layers decoder_layers encoder_layers num_decoder_layers "
    "num_encoder_layers num_experts_per_tok moe_topk moe_k num_key_value_heads eos_token_id linear_num_key_heads "
    "linear_num_value_heads full_attention_interval",
    4: "num_attention_heads n_head n_heads num_heads decoder_attention_heads encoder_attention_heads num_experts "
    "num_local_experts n_routed_experts moe_num_experts rotary_dim linear_conv_kernel_dim mamba_n_heads",
    256: "max_position_embeddings n_positions n_ctx max_seq_len",
    8: "head_dim qk_rope_head_dim qk_nope_head_dim v_head_dim linear_key_head_dim linear_value_head_dim ssm_state_size "
    "state_size sliding_window window_size",
    16: "chunk_size mamba_chunk_size",
    1: "n_group topk_group n_shared_experts bos_token_id first_k_dense_replace",
    0: "pad_token_id",
}
_OFF = (
    "attention_dropout attn_pdrop resid_pdrop embd_pdrop dropout hidden_dropout activation_dropout residual_dropout "
    "attention_probs_dropout_prob hidden_dropout_prob embed_dropout resid_dropout attn_dropout embedding_dropout "
    "layerdrop classifier_dropout decoder_layerdrop encoder_layerdrop dropout_rate router_jitter_noise "
    "input_jitter_noise emb_dropout_prob summary_first_dropout dropout_p rope_dropout"
)
_SETTINGS = {name: size for size, names in _SIZES.items() for name in names.split()}
_SETTINGS |= dict.fromkeys(_OFF.split(), 0.0) | {"is_decoder": True, "initializer_range": 0.25, "init_std": 0.25}
_OF_FAMILIES = {
    "zamba": {"num_hidden_layers": 8},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
}
"""Fields of some alone, whose layers come in turns: with 2 layers there would be one kind of them, or none."""


def tiny(family: str, **own: Any) -> Any:
    """A float64 model of the family, with these fields in its config. Raises what its config or its class does of sizes
    that do not go together."""
    kind = CONFIG_MAPPING[family]
    base = kind()
    if base.get_text_config() is not base:
        raise ValueError("a config of several models")
    wanted = {name: value for name, value in _SETTINGS.items() if getattr(base, name, None) is not None}
    wanted |= {name: _SETTINGS[name] for name in ("pad_token_id", "eos_token_id", "is_decoder") if hasattr(base, name)}
    wanted |= _OF_FAMILIES.get(family, {}) | own
    errors: list[Exception] = []
    layers = ("num_layers", "num_hidden_layers", "n_layer", "n_layers")
    changes: list[dict[str, Any]] = [{}, {"num_key_value_heads": 4}]
    changes += [{"layer_types": None}] if "layer_types" in vars(base) else []
    # A model of 54 layers with such weights turns a change of 1e-9 of them into 0.7 % of its gradients.
    hybrid = "hybrid" in (getattr(base, "layers_block_type", None) or ())
    changes += [{"layers_block_type": ["mamba", "hybrid"]}] if hybrid else []
    for without in ((), ("head_dim",), ("num_key_value_heads",), ("num_key_value_heads", "head_dim"), layers):
        for more in changes:
            try:
                return _built(kind(**{k: v for k, v in wanted.items() if k not in (*without, *more)}, **more))
            except TooLargeError:
                raise
            except Exception as caught:
                errors.append(caught)
    raise errors[0]


class TooLargeError(ValueError):
    """Sizes of a family have names that the settings do not know."""


_MOST = 2_000_000
"""Parameters of a family whose sizes the settings do not reach."""


def _built(config: Any) -> Any:
    # Of some configs it follows from other fields.
    if getattr(config, "layer_types", None) and "layer_types" in vars(config):
        config.layer_types = list(config.layer_types)[: config.num_hidden_layers]
    if getattr(config, "dropout", None):
        config.dropout = 0.0
    # The others have no kernel for float64.
    config._experts_implementation = "eager"
    torch.manual_seed(0)
    with torch.device("meta"):
        size = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
    if size > _MOST:
        raise TooLargeError(f"more than {_MOST:,} parameters")
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float64).double()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.25)
    tokens = torch.arange(3, 12)[None]
    model(input_ids=tokens, labels=tokens)
    return model


_LENGTHS = (5, 40, 9, 23, 60, 7, 31, 14)


def rows() -> list[dict[str, list[int]]]:
    draw = torch.Generator().manual_seed(3)
    drawn = [torch.randint(3, 96, (length,), generator=draw).tolist() for length in _LENGTHS]
    return [{"input_ids": one, "labels": one} for one in drawn]


class Wide(TorchFunctionMode):
    """Inside, nothing of float64 is computed in float32, which families do in norms, losses and linear layers."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if args and isinstance(args[0], torch.Tensor) and args[0].dtype == torch.float64:
            if func is torch.Tensor.float:
                return args[0]
            if func in (torch.Tensor.to, torch.Tensor.type):
                args = tuple(torch.float64 if one is torch.float32 else one for one in args)
            if kwargs.get("dtype") is torch.float32:
                kwargs["dtype"] = torch.float64
        return func(*args, **kwargs)


TWO_MICRO_BATCHES = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}


def gradients_of(model: Any) -> Gradients:
    """Those of one step of the real Trainer: two micro-batches of four padded rows."""
    own, keep = arguments(**TWO_MICRO_BATCHES, logging_strategy="no"), Keep()
    Trainer(model, TrainingArguments(**own), train_dataset=rows(), data_collator=collate, callbacks=[keep]).train()
    return keep.updates[-1]


def planned() -> Any:
    """A session of evenload that packs."""
    return planned_by(recipe(packing={"max_tokens": 8192}))


def outcome(family: str) -> tuple[str, float]:
    """What becomes of a family, and the largest relative error of a gradient against the stock Trainer's where it is
    planned: "planned", "padded groups" where it runs no packs; "stock: WHY", left as it is with a word; "refused: WHY";
    "none: WHY", where Transformers' own step does not run at this size."""
    try:
        model = tiny(family)
        weights = {name: value.clone() for name, value in model.state_dict().items()}
        with Wide():
            stock = gradients_of(model)
    except Exception as error:
        return f"none: {_first_line(error)}", 0.0
    model.load_state_dict(weights)
    model.zero_grad()
    try:
        with Wide(), planned() as seen:
            own = gradients_of(model)
    except EvenloadError as error:
        return f"refused: {error.found}", 0.0
    if seen.idle:
        (why,) = seen.idle
        return f"stock: {why.split(' (')[0]}", difference(own, stock)
    assert seen.plans, "neither planned nor a word"
    return "padded groups" if seen.plans[-1].limits.padded else "planned", difference(own, stock)


LONGEST = 8192
"""Tokens of a sample that docs/support.md asks for."""
PAGE = Path(__file__).parents[3] / "docs" / "support.md"
_HEADING, _NEXT = "## Families of models\n\n", "## Tested versions\n"
_HEAD = f"""What Transformers' Trainer trains under evenload, of all {{count}} families of causal language models that
Transformers {{version}} has (`python tests/integrations/huggingface/families.py --page` writes the list):

- *packs*: samples follow one another in one row without padding, and each attends to itself alone;
- *padded groups*: the samples of a global batch are regrouped as rows of like length, with the divisor of the whole
  ([packing](packing.md#padded-groups));
- *as it is*: neither is exact, so the script runs without plans and evenload says why;
- *not run at this size*: Transformers' own step does not run for so small a model;
- *refused*: the run ends with a message.

That is measured: a tiny model of the family, with windows of 8 tokens, is trained by the real Trainer for a step, and
its gradients are compared with the stock Trainer's in float64. *By default no packs* is what the family's default
config says of packs with samples of {LONGEST:,} tokens; padded groups are then tried. What counts for a model of yours
is measured before its first update, on the model itself ([Hugging Face](huggingface.md)). Megatron-Core's models are on
[its page](megatron.md#the-hybrid-model).

"""
_WORDS = {"planned": "packs", "padded groups": "padded groups", "stock": "as it is", "refused": "refused"}


def section(lines: list[str]) -> str:
    """What docs/support.md says of families, by what became of every one: those of one outcome together."""
    import transformers

    together: dict[str, list[str]] = {}
    for line in lines:
        family, outcome = _row(line)
        together.setdefault(outcome, []).append(f"`{family}`")
    rows = (f"- **{outcome}**: {', '.join(names)}" for outcome, names in sorted(together.items(), key=_largest_first))
    head = _HEAD.format(count=len(lines), version=transformers.__version__)
    return head + "".join(fill(row, 118, subsequent_indent="  ", break_on_hyphens=False) + "\n" for row in rows)


def _largest_first(row: tuple[str, list[str]]) -> tuple[int, str]:
    return -len(row[1]), row[0]


def _row(line: str) -> tuple[str, str]:
    """A family, and what is measured: on one machine or another, where its line has several ends."""
    family, _, said = line.partition(": ")
    ends = [_in_words(*end.partition(": ")[::2]) for end in said.split(" | ")]
    config, measured = by_config(family), ", or ".join(ends)
    return family, measured if config == "yes" else f"{measured}; by default no packs: {config.removeprefix('no: ')}"


def _in_words(kind: str, why: str) -> str:
    says_why = kind in ("stock", "refused") and why != "None"
    return _WORDS.get(kind, "not run at this size") + (f": {why}" if says_why else "")


def by_config(family: str) -> str:
    """Whether a family's default config lets it run packs of `LONGEST` tokens, and if not why."""
    try:
        config = CONFIG_MAPPING[family]()
    except Exception as error:  # Transformers' own
        return f"there is no default config ({type(error).__name__})"
    try:
        refuse_unsupported(config, LONGEST, measured=True, windows=True)
    except EvenloadError as error:
        return f"no: {error.found}"
    return "yes"


def difference(own: Gradients, stock: Gradients) -> float:
    """`error_of`, and 0 where all is equal, also where a model's own numbers are none."""
    is_equal = all(torch.equal(own[name].nan_to_num(), w.nan_to_num()) for name, w in stock.items())
    return 0.0 if is_equal and own.keys() == stock.keys() else error_of(own, stock)


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:60]}"


if __name__ == "__main__":
    from evenload.api import load_plugins

    warnings.simplefilter("ignore")
    logging.disable(logging.ERROR)
    load_plugins()
    if "--page" in sys.argv:
        text = section(Path(__file__).with_name("families.txt").read_text().splitlines())
        before, _, rest = PAGE.read_text().partition(_HEADING)
        PAGE.write_text(before + _HEADING + text + "\n" + _NEXT + rest.partition(_NEXT)[2])
        sys.exit()
    for name in [word for word in sys.argv[1:] if word != "--list"] or FAMILIES:
        said, error = outcome(name)
        print(f"{name}: {said}" if "--list" in sys.argv else f"{name:26} {error:.1e} {said}", flush=True)
