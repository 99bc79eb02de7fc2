"""Which Trainers of Transformers can be planned: those whose loss is a sum over target tokens, over their number in the
step or in each batch.

Everything else is refused by name, before the first forward.
"""

from __future__ import annotations

import logging
from typing import Any
from weakref import ReferenceType, WeakKeyDictionary, ref

from ...core.errors import EvenloadError, Rule, refuse_first
from ..huggingface.models import ATTENTION_DROPOUT, refuse_unsupported

log = logging.getLogger("evenload")

_UPDATES_IN_BACKWARD = ("lomo", "adalomo", "layerwise")
"""Parts of the names of optimizers that update weights inside a backward."""

_RATES = ("p", "dropout", *ATTENTION_DROPOUT)
"""Attributes of modules that are rates of dropout."""

_KNOWN = ("evenload", "transformers", "accelerate", "trl", "llamafactory", "swift", "axolotl")
"""Packages whose own ``training_step`` and ``on_substep_end`` neither read nor change what one batch gives."""


def divides_by_batch(trainer: Any, num_items: Any) -> bool:
    """Whether a token's loss depends on the batch or the rank that it came in.

    Args:
        num_items: what the Trainer divides its token losses by, None where it takes means of micro-batches.
    """
    alone = trainer.accelerator.num_processes > 1 and not trainer.args.average_tokens_across_devices
    return num_items is None or alone


def refuse_trainer(trainer: Any, *, of_units: bool = False) -> None:
    """Raise EvenloadError for a Trainer whose step cannot be planned exactly.

    Args:
        of_units: its loss is a mean of units, so that packs do not matter.
    """
    refuse_first(_of_noise(trainer), *_of_run(trainer))
    if of_units:
        return
    model = inner_model(trainer)
    if not hasattr(model, "set_attn_implementation") or not hasattr(model, "config"):
        raise EvenloadError(
            "packs need a model whose attention Transformers can exchange",
            f"a model of type {type(model).__name__}",
            "give a Hugging Face causal language model",
        )


def own_step(trainer: Any) -> EvenloadError | None:
    """What of a script's own may look at or change a step between its batches, which a plan runs all at once."""
    if trainer.args.gradient_accumulation_steps == 1:
        return None
    steps = [one for kind in type(trainer).__mro__ if (one := vars(kind).get("training_step"))]
    steps += [trainer.training_step, *(one.on_substep_end for one in trainer.callback_handler.callbacks)]
    named = [(getattr(one, "__qualname__", str(one)), str(getattr(one, "__module__", ""))) for one in steps]
    own = next((names for names in named if not _is_known(names[1])), None)
    return own and EvenloadError(
        "the script's own code runs between the batches of a step, which a plan computes all at once",
        f"{' of '.join(own)}, gradient_accumulation_steps = {trainer.args.gradient_accumulation_steps}",
        "change batches in the collate function or in compute_loss, gradients in on_pre_optimizer_step of a callback",
    )


def _is_known(module: str) -> bool:
    package = module.split(".")[0]
    return package in _KNOWN or package.lower().startswith("unsloth")  # which writes modules of its own names


def _of_noise(trainer: Any) -> Rule:
    return (
        bool(trainer.args.neftune_noise_alpha),
        "NEFTune's noise depends on the length of a batch's rows, which packs change",
        f"neftune_noise_alpha = {trainer.args.neftune_noise_alpha}",
        "leave neftune_noise_alpha out",
    )


def _of_run(trainer: Any) -> list[Rule]:
    """Runs whose passes or ranks a plan cannot set."""
    args = trainer.args
    sizes = {name: getattr(trainer, f"get_{name}_size")() for name in ("tp", "cp", "sp")}
    return [
        (
            max(sizes.values()) > 1,
            "samples are planned over data-parallel ranks alone",
            ", ".join(f"{name} size {size}" for name, size in sizes.items() if size > 1),
            "leave the parallelism config at data parallelism",
        ),
        (
            args.n_gpu > 1,
            "one process drives several GPUs by nn.DataParallel",
            f"{args.n_gpu} GPUs in one process",
            "start the script by torchrun or accelerate launch, one process for each GPU",
        ),
        (
            trainer.is_fsdp_enabled and not trainer.accelerator.is_fsdp2,
            "plans are proven under FSDP 2, and FSDP 1 runs on no CPU where they could be",
            "fsdp_config: version 1",
            'set "version": 2 in fsdp_config (accelerate: fsdp_version: 2)',
        ),
        (
            bool(args.torch_compile),
            "a compiled model would be compiled anew for every pack",
            "torch_compile = True",
            "set torch_compile=False",
        ),
        (
            any(word in str(args.optim).lower() for word in _UPDATES_IN_BACKWARD),
            "the optimizer updates weights inside a backward, and a planned step has several",
            f"optim = {args.optim}",
            "use another optimizer, such as adamw_torch",
        ),
    ]


def inner_model(trainer: Any) -> Any:
    """The Hugging Face model inside what the Trainer trains."""
    return unwrapped(trainer.accelerator, trainer.model)


def unwrapped(accelerator: Any, model: Any) -> Any:
    """The Hugging Face model inside what an Accelerator has prepared: no data parallelism, no adapters around it."""
    model = outer_model(accelerator, model)
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def entered_module(accelerator: Any, model: Any) -> Any:
    """The module whose call is the forward of the Hugging Face model: it, or PEFT's tuner around it, which before 0.21
    calls its ``forward`` past its hooks."""
    outer = outer_model(accelerator, model)
    return outer.base_model if hasattr(outer, "get_base_model") else outer


_outer: WeakKeyDictionary[Any, ReferenceType[Any]] = WeakKeyDictionary()


def outer_model(accelerator: Any, model: Any) -> Any:
    """What is inside data parallelism. Accelerate is asked once: it reads the metadata of a package each time, which
    takes 0.4 ms and more."""
    known = _outer.get(model)
    outer = known and known()
    if outer is None:
        outer = accelerator.unwrap_model(model)
        _outer[model] = ref(outer)
    return outer


def build_of(model: Any) -> list[tuple[Any, ...]]:
    """What a script may change of a model while it trains: its modules, their hooks and their rates of dropout."""
    return [
        (id(one), len(one._forward_hooks), len(one._forward_pre_hooks), *map(vars(one).get, _RATES))
        for one in model.modules()
    ]


def packs_fault(model: Any) -> EvenloadError | None:
    """What keeps the model from computing packs, by its config."""
    try:
        refuse_unsupported(model.config, measured=True)
    except EvenloadError as error:
        return error
    return None


def rows_fault(by_batch: bool) -> EvenloadError | None:
    """What keeps a Trainer from padded groups, where a token's loss depends on its batch (`divides_by_batch`): the loss
    of several rows is the model's own, which counts their tokens alike."""
    if not by_batch:
        return None
    return EvenloadError(
        "tokens have weights of their own, which rows do not take",
        "the Trainer divides by each batch or rank: no num_items_in_batch, or average_tokens_across_devices = False",
        "nothing needs to be done: the script runs as it is, without plans",
    )


def virtual_tokens(model: Any) -> EvenloadError | None:
    """What is wrong where a method of PEFT puts learned tokens in front of every row."""
    adapter = getattr(model, "active_peft_config", None)
    if not getattr(adapter, "is_prompt_learning", False):
        return None
    return EvenloadError(
        "PEFT puts learned tokens in front of every row, and a pack is one row of many samples",
        f"a model with {type(adapter).__name__}",
        "nothing needs to be done: the script runs as it is, without plans; LoRA and its kin are planned",
    )


def dropouts(model: Any) -> list[str]:
    """What of a model drops values, by name."""
    layers = [(name, layer) for name, layer in model.named_modules() if type(layer).__name__.startswith("Dropout")]
    dropped = [name for name, layer in layers if getattr(layer, "p", 0.0)]
    sources = [vars(layer) for layer in model.modules()] + [vars(model.config)]
    dropped += [key for key in ATTENTION_DROPOUT if any(one.get(key) for one in sources)]
    return dropped


def dropouts_fault(model: Any) -> EvenloadError | None:
    """Why rows do not share what they begin with where a model drops values."""
    dropped = dropouts(model)
    return EvenloadError("rows that begin alike would share what dropout draws", dropped[0], "") if dropped else None


def warn_of_dropout(model: Any) -> None:
    """Say that dropout draws other masks than in a run without evenload."""
    if dropped := dropouts(model):
        log.warning("dropout (%s and %d more) draws other masks than without evenload", dropped[0], len(dropped) - 1)
