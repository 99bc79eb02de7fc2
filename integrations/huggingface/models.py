"""Which Hugging Face models packed causal attention computes exactly, read from their config before anything starts.

The attention function refuses the same things once more, from inside the first forward; that is for models whose config
does not tell.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ...core.errors import EvenloadError
from ...core.machine.shape import Shape
from ...core.plan.step_plan import StepPlan
from ...core.recipe.sizes import shape_in

_WINDOW_OF = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}
"""Layer types that see less than the whole sequence, and the config's name for how much."""

_PLAIN = ("full_attention", "sparse", "dense")
"""Layer types without a say in this: causal attention over the whole sequence, and kinds of MLP."""

_MIXING = ("linear_attention", "conv", "hybrid", "hybrid_sliding", "mlp", "moe")
"""Layer types that mix tokens by other means too, or by none: exact where they are measured (`mixers`)."""

ATTENTION_DROPOUT = ("attention_dropout", "attn_pdrop", "attn_dropout", "attention_probs_dropout_prob")

_NOT_GATED = ("gpt_neox", "gpt2")

_NOT_CAUSAL = ("is_encoder_decoder", "use_bidirectional_attention", "bidirectional", "add_cross_attention")


class LengthWords(NamedTuple):
    """How a message names the longest sequence that a model gets, and the setting that makes it shorter."""

    longest: str
    setting: str


def shape_of(config: Any) -> Shape:
    """The sizes of a live model, by its Hugging Face config. Raises EvenloadError where it lacks one."""
    config = _text(config)
    # Of some models `attribute_map` alone knows these names.
    named = ("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size")
    fields = vars(config) | {name: getattr(config, name) for name in named}
    fields["intermediate_size"] = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    return shape_in(fields)._replace(gated=config.model_type not in _NOT_GATED)


def shape_near(model: Any) -> Shape:
    """About the sizes of a live model whose config does not name them: its weights, all in one layer, without pairs."""
    vocab_size, hidden_size = model.get_input_embeddings().weight.shape
    weights = sum(parameter.numel() for parameter in model.parameters()) - vocab_size * hidden_size
    return Shape(1, hidden_size, max(1, weights // (2 * hidden_size)), 1, 1, vocab_size, gated=False)


def refuse_unsupported(
    config: Any, longest: int | None = None, *, measured: bool = False, windows: bool = False
) -> None:
    """Raise EvenloadError if the model does something else than causal attention over each whole sequence.

    Args:
        config: a Hugging Face config; of a model with several parts, that of its text is read.
        longest: what the recipe says of the longest sequence that will come; None: `refuse_lengths` is asked later.
        measured: layers without attention are measured before the first update.
        windows: see `refuse_lengths`.
    """
    try:
        fault = _fault(_text(config), measured)
    except Exception as error:  # of code that nobody here has seen
        fault = f"its config raises {type(error).__name__}", "use a causal language model whose layers are alike"
    _raise(config, fault)
    if longest is not None:
        refuse_lengths(config, longest, longest, LengthWords("data.max_length", "data.max_length"), windows=windows)


def refuse_lengths(config: Any, longest: int, reach: int, words: LengthWords, *, windows: bool) -> None:
    """Raise EvenloadError if the model sees less than a whole sequence, or has other rotary tables in a stock run.

    Args:
        longest: tokens of the longest sequence.
        reach: positions that stock runs have, padding included.
        windows: sliding windows are taken: attention is told of them, and no ranks share a sample.
    """
    refuse_reach(config, longest, reach, words)
    _raise(config, _fault_of_windows(_text(config), longest, words, windows))


def num_windows(config: Any) -> int:
    """Calls of attention in a window that a forward of the model has at least, by its config."""
    config = _text(config)
    types = getattr(config, "layer_types", None) or ()
    if types:
        return sum(kind in (*_WINDOW_OF, "hybrid_sliding") for kind in types)
    return int(any(getattr(config, key, None) for key in _WINDOW_OF.values()))


def refuse_reach(config: Any, longest: int, reach: int, words: LengthWords) -> None:
    """Raise EvenloadError if the model has other rotary tables in a stock run; arguments as of `refuse_lengths`."""
    _raise(config, _fault_of_reach(_text(config), longest, reach, words))


def _text(config: Any) -> Any:
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def _raise(config: Any, fault: tuple[str, str]) -> None:
    if fault[0]:
        name = getattr(config, "model_type", type(config).__name__)
        raise EvenloadError(f"packed causal attention cannot run the model '{name}'", *fault)


def is_rotary(config: Any) -> bool:
    """Whether positions act by their differences alone, so that a sample may begin at any of them."""
    return bool(getattr(_text(config), "rope_parameters", None))


def rotary_reach(config: Any) -> int | None:
    """Up to how many tokens a sequence's rotary tables do not depend on what it is packed with; None if they never do.

    Beyond it the kinds "dynamic" and "longrope" take one table for all, by the largest position in the call.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    for kind in [rope, *(inner for inner in rope.values() if isinstance(inner, dict))]:
        if kind.get("rope_type") == "dynamic":
            return int(config.max_position_embeddings)
        if kind.get("rope_type") == "longrope":
            return int(kind["original_max_position_embeddings"])
    return None


def refuse_unequal_replay(plan: StepPlan, model: Any) -> None:
    """Raise EvenloadError if a second forward that the plan has would drop other values than the first."""
    for name, module in model.named_modules() if plan.replayed or plan.recompute else ():
        share: Any = getattr(module, "p", 0.0)
        if type(module).__name__.startswith("Dropout") and share:
            raise EvenloadError(
                "a plan with replayed micro-batches cannot run a model with dropout",
                f"{name} drops {share:g}",
                "set the config's dropout to 0, or plan without replays (packing.asymmetric false, no activation cap)",
            )


def _fault(config: Any, measured: bool) -> tuple[str, str]:
    """What was found and what to do about it; empty if nothing is wrong."""
    if getattr(config, "num_attention_heads", None) is None and not measured:
        return "no num_attention_heads: it has no attention layers", "use a transformer with causal attention"
    for key in ATTENTION_DROPOUT:
        if getattr(config, key, None):
            return f"{key} = {getattr(config, key):g}", f"set {key} to 0 in the model's config"
    if getattr(config, "is_causal", True) is False:
        return "is_causal = False", "use a causal language model"
    for key in _NOT_CAUSAL:
        if getattr(config, key, None):
            return f"{key} = {getattr(config, key)!r}", "use a causal language model"
    types = set(getattr(config, "layer_types", None) or ())
    unknown = sorted(types - set(_PLAIN) - set(_WINDOW_OF) - set(_MIXING if measured else ()))
    if unknown:
        return f"layers of type {', '.join(unknown)}", "use a model whose layers all attend to the whole sequence"
    weight = getattr(config, "router_aux_loss_coef", "of its own")
    if getattr(config, "output_router_logits", False) and weight:
        detail = f"output_router_logits = True, router_aux_loss_coef = {weight}: a mean over each micro-batch"
        return detail, "set output_router_logits: false in the model's config, or leave evenload off for this model"
    return "", ""


def _fault_of_reach(config: Any, longest: int, reach: int, words: LengthWords) -> tuple[str, str]:
    own_reach = rotary_reach(config)
    if own_reach is not None and own_reach < reach:
        padded = "" if reach == longest else f", padded to {reach}"
        detail = f"rotary tables that beyond {own_reach} tokens depend on the pack, {words.longest} = {longest}{padded}"
        return detail, f"lower {words.setting} to {own_reach}, or take a model without dynamic or longrope tables"
    return "", ""


def _fault_of_windows(config: Any, longest: int, words: LengthWords, windows: bool) -> tuple[str, str]:
    types = set(getattr(config, "layer_types", None) or ())
    for kind, key in _WINDOW_OF.items():
        if windows and kind == "sliding_attention":
            continue
        window = getattr(config, key, None)
        if window is not None and window < longest and (not types or kind in types):
            do = f"lower {words.setting} to {window}, or take a model without a window"
            return f"{key} = {window} tokens, {words.longest} = {longest}", do
    return "", ""
