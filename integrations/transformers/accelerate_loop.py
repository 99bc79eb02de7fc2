"""evenload inside a loop of Accelerate without a Trainer, in scripts that nobody edits.

    loss = model(**batch).loss              # of a model that accelerator.prepare has prepared
    accelerator.backward(loss)

Each batch is planned by itself, whatever the loop accumulates, and where it comes to the model: after whatever the loop
does to it, and in whatever words it hands it on. There the samples of all ranks' batches become one pack a rank. Stock
loops take the mean over the targets of each batch (or divide by the ``num_items_in_batch`` that they give), so a token
counts by the batch that it came from: the model's loss is the sum of its token losses, each over the divisor of its
stock batch, and gradients are those of the stock loop. The loop keeps its own batch; a forward that cannot be planned
runs as it is, on all ranks, and a warning says why. Of a planned forward the loop gets the loss alone, and may hand any
constant multiple of it to its backward, which is measured.

Up to its first backward a loop runs as it is and is watched: where it makes something else of the model's loss, or its
hooks change gradients out of proportion, it stays as it is.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary, WeakSet, ref

import torch
from accelerate.utils import DynamoBackend
from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss

from ...core.errors import EvenloadError, refuse_first
from ...core.recipe.recipe import Recipe
from ...runtime.attention.pack import build_pack
from ...runtime.world.agreement import rank_and_size
from ..huggingface import attention
from ..huggingface.inputs import without_unread
from ..huggingface.mixers import apart
from ..unmodified.exact_number import into_exactly
from ..unmodified.planned_loop import Loops, LoopSession
from ..unmodified.planned_runs import is_checking, on_release, report_idle
from .hooks import GradientHooks
from .inside import is_inside
from .multimodal.step import FillerSample
from .pack_loss import PackLoss
from .planning import StepForm, StepSamples, chain_for, gather, reading, with_work, zero_stage_of
from .probe_samples import SamplePair, weights_of
from .proof import Call, ProbeModel, prove
from .supported import entered_module, outer_model, packs_fault, unwrapped, virtual_tokens

log = logging.getLogger("evenload")

NAME = "a loop of Accelerate"
_BY_TRAINER = (
    "train by transformers.Trainer, where padded rows are regrouped too; as it is, the loop runs without plans"
)


@dataclass(eq=False, kw_only=True)
class PlannedModel(LoopSession):
    """What evenload keeps for the one model of an Accelerator."""

    name: str = NAME
    model: Any
    """The Hugging Face model inside what the Accelerator has prepared."""
    loss: PackLoss
    stock_attention: str
    hooks: GradientHooks = field(default_factory=GradientHooks)
    hooked: bool = False
    watched: bool = False
    """The loop's own step has come to its backward: the next batch is planned."""
    form: StepForm | None = None
    """Of the batch that was measured."""
    filler_samples: list[FillerSample] = field(default_factory=list)
    """Short samples with pictures, for packs that have none."""
    sees_windows: bool | None = None
    """Attention is told of every window of the model; None: not measured yet."""

    def __post_init__(self) -> None:
        self.undo.callback(attention.set_attention, self.model, self.stock_attention)
        self.undo.callback(setattr, self.model, "loss_function", self.loss.stock)
        self.undo.callback(self.hooks.release)
        self.model.loss_function = self.loss

    def give_back(self, error: EvenloadError) -> None:
        """Leave the loop as it is, of which nothing has been planned."""
        self.close()
        self.leave(error)


_prepared: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
"""Hooks, by the models that Accelerators have prepared."""
_loops: Loops[LoopSession] = Loops()
"""By Accelerator."""

_untrained: WeakSet[Any] = WeakSet()
"""Accelerators whose model was called as it is, since it was not in training mode."""


def prepare(wrapped: Any, accelerator: Any, args: Any, kwargs: Any, recipe: Recipe) -> Any:
    """`Accelerator.prepare`, whose model plans its training batches from then on."""
    result = wrapped(*args, **kwargs)
    for model in accelerator._models if recipe.enabled() else ():
        if model not in _prepared:
            call = partial(_before_call, ref(accelerator), recipe)
            # Before anything that data parallelism does in its forward.
            _prepared[model] = model.register_forward_pre_hook(call, with_kwargs=True, prepend=True)
    return result


def backward(wrapped: Any, accelerator: Any, args: Any, kwargs: Any, recipe: Recipe) -> Any:
    """`Accelerator.backward`, where a loop in which nothing is planned says so. Raises EvenloadError where another loss
    than a multiple of the model's own follows a planned forward."""
    loop = _planned_model(accelerator)
    if loop is None:
        if not is_inside(accelerator) and recipe.enabled() and accelerator not in _loops:
            idle = accelerator in _untrained
            why = (
                "its model is not in training mode" if idle else "the model that accelerator.prepare gave is not called"
            )
            do = "write model.train() before the loop, and call what accelerator.prepare(model) gives"
            report_idle(NAME, why, f"{do}, or train by transformers.Trainer")
        return wrapped(*args, **kwargs)
    loss = args[0] if args else kwargs["loss"]
    if loop.loss.strayed is not None:
        return _watched_backward(loop, loss, lambda: wrapped(*args, **kwargs))
    result, planned = loop.loss.run_backward(loss, lambda: wrapped(*args, **kwargs))
    if loop.hooked:
        loop.hooks.refuse_unlike()
    for one in planned:
        if one.plan is not None:
            loop.report(one.plan, packed=one.packed)
    return result


def _watched_backward(loop: PlannedModel, loss: Any, run: Callable[[], Any]) -> Any:
    """A backward of the loop's own batches, before any of its batches is planned: the loop stays as it is where what it
    makes of the model's loss, or a hook of gradients, would not be exact on packs. Collective."""
    done: list[Any] = []
    try:
        _, seen = loop.loss.run_backward(loss, lambda: done.append(run()))
        if loop.hooked:
            loop.hooks.refuse_unlike()
    except EvenloadError as error:
        if not done:
            raise
        loop.give_back(error)
    else:
        loop.watched |= bool(seen)
    return done[0]


@on_release
def release() -> None:
    """Give every model its own loss and attention back; for after the rows are off."""
    for handle in _prepared.values():
        handle.remove()
    _loops.release()
    _prepared.clear()


def _before_call(accelerator_of: Any, recipe: Recipe, model: Any, args: Any, kwargs: Any) -> Any:
    """A call of a model that an Accelerator has prepared: what it is called with, planned where it trains."""
    accelerator = accelerator_of()
    if accelerator is None or is_inside(accelerator) or not torch.is_grad_enabled():
        return None
    outer = outer_model(accelerator, model)
    # A DeepSpeedEngine sets the mode of the model inside and keeps its own.
    if not outer.training:
        _untrained.add(accelerator)
        return None
    names = list(inspect.signature(type(outer).forward).parameters)[1:]
    call = dict(zip(names, args, strict=False)) | kwargs
    words = {key: value for key, value in call.items() if value is not None and value is not False}
    kept = {key: words.pop(key) for key in ("num_items_in_batch", "return_dict", "use_cache") if key in words}
    batch = without_unread(words, outer)
    if accelerator not in _loops:
        # Its caches may decide what the samples of a row see.
        _begin(accelerator, recipe, batch, {} if call.get("use_cache") is None else {"use_cache": call["use_cache"]})
    loop = _planned_model(accelerator)
    planned = None if loop is None else _planned(loop, batch, kept.get("num_items_in_batch"))
    if loop is None or planned is None:
        return None
    # Its own hook does not yet run in the call that has registered it.
    _before_forward(loop, None, (), planned)
    return (), planned | {key: value for key, value in kept.items() if key == "return_dict"}


def _planned_model(accelerator: Any) -> PlannedModel | None:
    """The loop of an Accelerator; None where nothing is planned in it."""
    loop = _loops.get(accelerator)
    return loop if isinstance(loop, PlannedModel) and not loop.stays else None


def _begin(accelerator: Any, recipe: Recipe, batch: Mapping[str, Any], cache: dict[str, Any]) -> None:
    """Find out whether the model of an Accelerator can be planned, and say why not. Collective."""
    # Also while it is measured, which calls the model.
    _loops[accelerator] = loop = LoopSession(name=NAME, stays=True)
    try:
        _loops[accelerator] = _open(accelerator, recipe, batch, cache)
    except EvenloadError as error:
        loop.leave(error)


def _open(accelerator: Any, recipe: Recipe, batch: Mapping[str, Any], cache: dict[str, Any]) -> PlannedModel:
    """The loop of an Accelerator, whose packs are measured on its first batch. Collective."""
    refuse_first(
        (
            len(accelerator._models) != 1,
            "an Accelerator with one model is planned",
            f"{len(accelerator._models)} models",
            "prepare one model, or train by transformers.Trainer",
        ),
        (
            accelerator.state.dynamo_plugin.backend != DynamoBackend.NO or hasattr(accelerator._models[0], "_orig_mod"),
            "a compiled model would be compiled anew for every pack",
            f"dynamo_backend = {accelerator.state.dynamo_plugin.backend.value}",
            "leave torch.compile out",
        ),
        (
            accelerator.num_processes > 1 and not accelerator.even_batches,
            "ranks may run out of batches before others, which wait for them to plan",
            "even_batches = False",
            "leave even_batches at True, the default",
        ),
    )
    model = unwrapped(accelerator, accelerator._models[0])
    refuse_first(
        (
            not isinstance(batch.get("input_ids"), torch.Tensor),
            "a loop is planned whose model is called with input_ids",
            f"a call with {', '.join(map(str, batch)) or 'nothing'}",
            "give the model input_ids and labels",
        ),
        (
            LOSS_MAPPING.get(getattr(model, "loss_type", None)) is not ForCausalLMLoss,
            "a loop is planned whose model computes the loss of a causal language model",
            f"a model of type {type(model).__name__}",
            "give a Hugging Face causal language model and batches with labels",
        ),
    )
    outer = outer_model(accelerator, accelerator._models[0])
    if fault := virtual_tokens(outer):
        raise fault
    if fault := packs_fault(model):
        raise EvenloadError(fault.what, fault.found, _BY_TRAINER)
    half = accelerator.mixed_precision in ("bf16", "fp16")
    rows, stage = batch["input_ids"].shape[0], zero_stage_of(accelerator)
    chain = chain_for(recipe, model, zero_stage=stage, half=half, whole=True, micro_batch_size=rows)
    loss, stock = PackLoss(model.loss_function), attention.attention_of(model)
    loop = PlannedModel(planners=chain, model=model, loss=loss, stock_attention=stock)
    entered = entered_module(accelerator, accelerator._models[0])
    loop.undo.callback(entered.register_forward_pre_hook(partial(_before_forward, loop), with_kwargs=True).remove)
    try:
        _prove(loop, outer, entered, batch, cache, half=half)
    except EvenloadError:
        loop.close()
        raise
    loop.undo.callback(entered.register_forward_hook(loss.after_forward, with_kwargs=True).remove)
    loss.strayed = None if is_checking() else loop.give_back
    return loop


def _prove(
    loop: PlannedModel, outer: Any, entered: Any, batch: Mapping[str, Any], cache: dict[str, Any], *, half: bool
) -> None:
    """Raise EvenloadError, the same on all ranks, unless packs give each sample's own loss. Collective."""
    first = _gathered(batch, loop, None)
    if first is None:
        raise EvenloadError("no token of the first batch has a target", "labels that are all -100", "give it others")
    loop.form = StepForm(True, parts=first.part_form)
    pair, loop.filler_samples = SamplePair.of(first, loop.form, batch, loop.model.config)

    def compute(inputs: dict[str, Any], times: float) -> Call:
        if attention.PACK in inputs:
            loop.loss.weights_1T = weights_of(pair.samples, times).to(inputs["input_ids"].device)
        outputs = outer(**inputs, **({} if attention.PACK in inputs else cache))
        return Call(outputs.loss, outputs)

    proof = prove(pair.experiment, ProbeModel(loop.model, batch, compute, half=half, entered=entered))
    loop.loss.weights_1T = None
    if (fault := proof.fault) is not None:
        raise EvenloadError(fault.what, fault.found, _BY_TRAINER)
    loop.sees_windows = proof.sees_windows
    loop.undo.enter_context(apart(proof.mixers))


def _before_forward(loop: PlannedModel, module: Any, args: Any, kwargs: Any) -> None:
    """The model attends inside packs where it is given one, else as it came; backwards follow their forward."""
    attention.set_attention(loop.model, attention.NAME if attention.PACK in kwargs else loop.stock_attention)


def _planned(loop: PlannedModel, batch: Mapping[str, Any], num_items: Any) -> dict[str, Any] | None:
    """The pack that this rank computes in place of a batch; None where the batch stays. Collective.

    Args:
        num_items: what the loop has the model divide by; None: nothing.
    """
    loop.hooked = loop.hooks.watch(loop.model)
    try:
        step = _gathered(batch, loop, num_items)
        if step is None:
            return None
        loop.hooked = step.hooked
        loop.loss.strayed = None if loop.watched else loop.loss.strayed
        if loop.loss.strayed is not None:
            return None
        loop.chain = with_work(loop.chain, loop.model, step)
        plan = loop.plan_unless_even(step.samples)
    except EvenloadError as error:
        loop.leave(error)
        return None
    assert loop.form is not None
    if plan is None:
        return None
    rows = into_exactly(plan, 1, loop.chain.context.costs)
    tokens = step.exchange(plan)
    (micro_batch,) = rows[rank_and_size()[0]]
    pack = build_pack(micro_batch, lambda i: tokens[i][0], batch["input_ids"].device, labels_of=lambda i: tokens[i][1])
    parts = step.parts_of_rank(loop.model, loop.form, tokens, plan, loop.filler_samples)
    loop.loss.plan = plan
    loop.loss.packed = step.samples.packed(plan.limits) if step.flattened else None
    # A token's loss counts 1 over the divisor of the stock batch that its sample came in.
    return step.inputs_of(loop.form, loop.loss, parts)(pack)


def _gathered(batch: Mapping[str, Any], loop: PlannedModel, num_items: Any) -> StepSamples | None:
    """The samples of all ranks' batches. Collective. Raises EvenloadError for those of which no pack can be made."""
    config = loop.model.config
    step = gather([reading(batch, config, num_items)()], config, hooked=loop.hooked)
    if step is None:
        return None
    if step.unseen is not None and loop.sees_windows is False:
        raise EvenloadError(step.unseen.what, step.unseen.found, _BY_TRAINER)
    if step.parts and step.parts.fault:
        raise step.parts.fault
    if loop.form is not None and step.part_form != loop.form.parts:
        keys = ", ".join(key.name for key in step.part_form) or "nothing"
        what, do = "other entries than the first batch had", "nothing needs to be done"
        raise EvenloadError(what, f"{keys} in addition to tokens", do)
    return step
