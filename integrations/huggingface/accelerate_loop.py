"""evenload inside a loop of Accelerate without a Trainer, in scripts that nobody edits.

    for batch in loader:                    # prepared by accelerator.prepare
        loss = model(**batch).loss
        accelerator.backward(loss)

Each batch is planned by itself, whatever the loop accumulates: the samples of all ranks' batches become one pack a
rank. A stock loop takes the mean over the targets of each batch, so a token counts by the batch that it came from: the
model's loss is the sum of its token losses, each over the number of targets of its stock batch, and gradients are
those of the stock loop. What cannot be planned so runs as it is, and a warning says why; a loss that is not the model's
own is refused at its backward.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary, WeakSet, ref

import torch
from accelerate.utils import DistributedType
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss

from ...core.errors import EvenloadError, RankError, refuse_first
from ...core.planning.chain import PlanChain, warn_once
from ...core.recipe.recipe import Recipe
from ...runtime.attention.pack import IGNORE, Pack, build_pack
from ...runtime.world.agreement import agree, place
from ..deepspeed.unmodified.counts import into_exactly
from ..planned_runs import on_release, report_idle, report_step
from . import attention
from .inputs import inputs_of
from .inside import is_inside
from .models import refuse_unsupported
from .planning import GlobalBatch, chain_for, gather
from .proof import Call, num_targets, prove, windows
from .supported import unwrapped

NAME = "a loop of Accelerate"
WEIGHTS = "evenload_weights"
"""The keyword argument of the model's call that carries what each token's loss counts."""


@dataclass(eq=False)
class PlannedLoop:
    """What evenload keeps for the one model of an Accelerator."""

    model: Any
    """The Hugging Face model inside what the Accelerator has prepared."""
    chain: PlanChain
    stock_loss: Any
    stock_attention: str
    hook: Any
    warned: set[str]
    step: int = 0
    loss: Tensor | None = None
    """Of the planned forward whose backward is to come."""


_accelerators: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
"""Prepared loaders, and a weak reference to what has prepared them."""
_loops: WeakKeyDictionary[Any, PlannedLoop | None] = WeakKeyDictionary()
"""By Accelerator; None where its loop stays as it is."""

_untrained: WeakSet[Any] = WeakSet()
"""Accelerators whose loaders gave batches as they are, for a model that was not in training mode."""


def prepare_data_loader(wrapped: Any, accelerator: Any, args: Any, kwargs: Any) -> Any:
    """`Accelerator.prepare_data_loader`, which remembers who has prepared the loader."""
    loader = wrapped(*args, **kwargs)
    _accelerators[loader] = ref(accelerator)
    return loader


def iterate(wrapped: Any, loader: Any, args: Any, kwargs: Any, recipe: Recipe) -> Iterator[Any]:
    """`DataLoaderShard.__iter__`: batches of a training loop, planned one by one; all others as they are."""
    accelerator = _accelerators.get(loader, lambda: None)()
    loop: PlannedLoop | None = None
    for number, batch in enumerate(wrapped(*args, **kwargs)):
        if number == 0 and accelerator is not None and recipe.enabled() and not is_inside():
            loop = _loop(accelerator, recipe, batch) if _trains(accelerator) else None
        yield batch if loop is None else _planned(loop, batch)


def backward(wrapped: Any, accelerator: Any, args: Any, kwargs: Any, recipe: Recipe) -> Any:
    """`Accelerator.backward`, where a loop in which nothing is planned says so. Raises EvenloadError where another loss
    than the model's own follows a planned forward."""
    loop = _loops.get(accelerator)
    if loop is not None and loop.loss is not None:
        _refuse_other_loss(loop, args[0] if args else kwargs["loss"])
    elif not is_inside() and recipe.enabled() and loop is None and accelerator not in _loops:
        why = "its model is not in training mode" if accelerator in _untrained else "no loader of accelerator.prepare"
        do = "call model.train() before the loop, and give loader and model to accelerator.prepare"
        report_idle(NAME, why, f"{do}, or train by transformers.Trainer")
    return wrapped(*args, **kwargs)


def _refuse_other_loss(loop: PlannedLoop, loss: Tensor) -> None:
    assert loop.loss is not None
    own, loop.loss = loop.loss, None
    if not torch.equal(own.float(), loss.detach().float()):
        raise EvenloadError(
            "the loss that reaches accelerator.backward is not the model's own",
            f"{loss.detach().item():.6g}, the model gave {own.item():.6g}",
            "hand model(**batch).loss on as it is and let the Accelerator divide it (gradient_accumulation_steps), or "
            "leave evenload off",
        )


@on_release
def release() -> None:
    """Give every model its own loss and attention back; for after the rows are off."""
    for loop in filter(None, _loops.values()):
        _close(loop)
    _loops.clear()
    _accelerators.clear()


def _close(loop: PlannedLoop) -> None:
    loop.hook.remove()
    loop.model.loss_function = loop.stock_loss
    loop.model.set_attn_implementation(loop.stock_attention)


def _trains(accelerator: Any) -> bool:
    """Whether an iteration that begins now is of training: loops evaluate with their model in another mode."""
    # A DeepSpeedEngine sets the mode of the model inside and keeps its own.
    trains = bool(accelerator._models) and all(accelerator.unwrap_model(m).training for m in accelerator._models)
    if not trains:
        _untrained.add(accelerator)
    return trains


def _loop(accelerator: Any, recipe: Recipe, batch: Any) -> PlannedLoop | None:
    """The loop of an Accelerator; None, once said why, where its model cannot be planned."""
    if accelerator not in _loops:
        try:
            _loops[accelerator] = _open(accelerator, recipe, batch)
        except RankError:
            raise  # nothing about the loop: a rank is missing
        except EvenloadError as error:
            _loops[accelerator] = None
            report_idle(NAME, f"{error.what} ({error.found})", error.do)
    return _loops[accelerator]


def _open(accelerator: Any, recipe: Recipe, batch: Any) -> PlannedLoop:
    """The loop of an Accelerator, whose packs are measured on its first batch. Collective."""
    refuse_first(
        (
            len(accelerator._models) != 1,
            "an Accelerator with one model is planned",
            f"{len(accelerator._models)} models",
            "prepare one model, or train by transformers.Trainer",
        )
    )
    model = unwrapped(accelerator, accelerator._models[0])
    refuse_first(
        (
            LOSS_MAPPING.get(getattr(model, "loss_type", None)) is not ForCausalLMLoss,
            "a loop is planned whose model computes the loss of a causal language model",
            f"a model of type {type(model).__name__}",
            "give a Hugging Face causal language model and batches with labels",
        )
    )
    refuse_unsupported(model.config)
    plugin = accelerator.state.deepspeed_plugin
    stage = plugin.zero_stage if plugin else 3 if accelerator.distributed_type == DistributedType.FSDP else 0
    half = accelerator.mixed_precision in ("bf16", "fp16")
    chain = chain_for(recipe, model, zero_stage=stage, half=half, whole=True)
    loop = PlannedLoop(model, chain, model.loss_function, model.config._attn_implementation, None, set())
    loop.hook = model.register_forward_pre_hook(lambda *call: _before_forward(loop, *call), with_kwargs=True)
    model.loss_function = lambda *args, **kwargs: _loss(loop, *args, **kwargs)
    try:
        _prove(loop, accelerator.unwrap_model(accelerator._models[0]), batch, half=half)
    except EvenloadError:
        _close(loop)
        raise
    return loop


def _prove(loop: PlannedLoop, model: Any, batch: Any, *, half: bool) -> None:
    """Raise EvenloadError, the same on all ranks, unless packs give each sample's own loss. Collective."""
    samples = windows([*gather([batch if isinstance(batch, Mapping) else {}], None, loop.model.config).own.values()])

    def compute(inputs: dict[str, Any], times: float) -> Call:
        if attention.PACK in inputs:
            own = [
                torch.full((len(tokens),), 1 / (times * num_targets([tokens, labels]))) for tokens, labels in samples
            ]
            inputs = inputs | {WEIGHTS: torch.cat(own)[None].to(inputs["input_ids"].device)}
        outputs = model(**inputs)
        return Call(outputs.loss, outputs)

    fault = prove(loop.model, samples, batch, compute, half=half).fault
    loop.loss = None
    if fault is not None:
        raise fault


def _before_forward(loop: PlannedLoop, model: Any, args: Any, kwargs: Any) -> None:
    """The model attends inside packs where it is given one, else as it came; backwards follow their forward."""
    model.set_attn_implementation(attention.NAME if attention.PACK in kwargs else loop.stock_attention)


def _loss(loop: PlannedLoop, *args: Any, **kwargs: Any) -> Tensor:
    """The model's loss function, and on a planned batch the sum of its weighted token losses."""
    weights_1T = kwargs.pop(WEIGHTS, None)
    if weights_1T is None:
        loss: Tensor = loop.stock_loss(*args, **kwargs)
        return loss
    logits_TV, labels_T = kwargs["logits"][0], kwargs["shift_labels"][0]
    wide = logits_TV.to(torch.promote_types(logits_TV.dtype, torch.float32))
    losses_T = cross_entropy(wide, labels_T, ignore_index=IGNORE, reduction="none")
    loss = (losses_T * weights_1T[0].to(losses_T.dtype)).sum()
    loop.loss = loss.detach()
    return loss


def _planned(loop: PlannedLoop, batch: Any) -> Any:
    """The pack that this rank computes in place of a batch. Collective."""
    refuse_first(
        (
            loop.loss is not None,
            "the loss of a planned batch did not come to accelerator.backward",
            f"iteration {loop.step} of the loop",
            "call accelerator.backward(loss) with the loss of model(**batch) for every batch, or leave evenload off",
        )
    )
    loop.step += 1
    samples = gather([batch if isinstance(batch, Mapping) else {}], None, loop.model.config)
    plan = loop.chain.plan(samples.lengths)
    if place()[0] == 0:
        warn_once(plan, loop.warned)
    agree(plan.digest, "plans", loop.step)
    report_step(NAME, loop.chain, plan)
    rows = into_exactly(plan, 1, loop.chain.context.costs)
    tokens = samples.exchange(plan)
    (micro_batch,) = rows[place()[0]]
    pack = build_pack(micro_batch, lambda i: tokens[i][0], batch["input_ids"].device, labels_of=lambda i: tokens[i][1])
    return {**inputs_of(pack, with_mask=samples.has_mask), WEIGHTS: _weights(pack, samples)}


def _weights(pack: Pack, samples: GlobalBatch) -> Tensor:
    """What each token's loss counts [1, T]: 1 over the targets of the stock batch that its sample came in."""
    weights_T = torch.zeros(pack.num_padded_tokens, dtype=torch.float64, device=pack.tokens_T.device)
    for piece, first in zip(pack.slices, pack.segments, strict=False):
        weights_T[first : first + piece.length] = 1.0 / samples.targets_beside[piece.sequence]
    return weights_T[None]
