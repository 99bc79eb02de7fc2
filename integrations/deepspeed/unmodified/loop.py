"""evenload inside a DeepSpeed script that nobody edits.

    engine, _, loader, _ = deepspeed.initialize(model=hf_model, config=ds_config, training_data=..., collate_fn=...)
    for batch in loader:
        loss = engine(**batch).loss
        engine.backward(loss)
        engine.step()

Four methods of DeepSpeedEngine are wrapped (the rows are in `patches.deepspeed`):

    deepspeed_io  gives the planned loader for training data, and sets the model's attention to ``evenload``
    forward       recognises a batch that the loader handed out and adds its pack and positions; a dummy's loss gets the
                  value of its rank's mean
    backward      turns the script's loss, the mean over its micro-batch, into its share of the mean over the global
                  batch: loss * weight * gradient_accumulation_steps * ranks, since DeepSpeed divides by both
    step          refuses a step whose backwards went past `engine.backward`

Samples stay whole: a script that runs forward, backward and step of one batch after the other cannot run slices.
A forward without gradients (evaluation) runs under the attention that the model came with. Whatever does not fit, a
loss of summed tokens above all, has to be told apart by the user: a mean over the labels that are not -100 is assumed.
"""

from __future__ import annotations

import inspect
from collections import deque
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import proxy

import torch
from deepspeed.moe.layer import MoE

from ....core.errors import EvenloadError
from ....core.machine.layout import Layout
from ....core.planning.chain import PlanChain
from ....core.recipe.recipe import Recipe
from ....runtime.attention.copy_rows import ToHost, copy_rows
from ....runtime.attributes import with_attributes
from ...huggingface import attention
from ...huggingface.models import refuse_unsupported, shape_of
from ...unmodified.planned_loop import Loops, LoopSession
from ...unmodified.planned_runs import end_of_check, on_release
from ...unmodified.section import KEY, parse_section, recipe_of
from ..engine.expert_gate import GatedExperts, gated_experts
from ..engine.experts import expert_ranks
from ..engine.traits import traits_of
from .loader import PlannedLoader
from .micro_batches import PlannedMicroBatch


@dataclass(eq=False, kw_only=True)
class PlannedEngine(LoopSession):
    """What evenload keeps for one engine."""

    name: str = "DeepSpeed"
    engine: Any
    """A weak proxy: modules know their engine, which is to end where its script forgets it."""
    stock_attention: str
    handed_out: deque[PlannedMicroBatch] = field(default_factory=deque)
    """Micro-batches that the script holds but has not run."""
    unseen: list[tuple[PlannedMicroBatch, ToHost]] = field(default_factory=list)
    """Of the step that runs, with the tokens that came for them on a device: compared before the update."""
    running: PlannedMicroBatch | None = None
    """The micro-batch between its forward and its backward."""
    loss_sum: torch.Tensor | float = 0.0
    """Losses of the micro-batches that this rank ran in its step, times their weights."""
    weight: float = 0.0
    """The sum of these weights."""
    gated: GatedExperts | None = None
    """The experts of the model, if they are divided."""

    def __post_init__(self) -> None:
        if self.gated:
            self.undo.callback(self.gated.unbind)
        self.undo.callback(lambda: self.engine.module.set_attn_implementation(self.stock_attention))

    def tell(self) -> None:
        """Write the numbers of a step that is about to run to the engine's monitor, where the ds_config has one, next
        to the engine's own of it and under the same count of samples; rank 0 has them."""
        engine = self.engine
        if engine.monitor.enabled and not engine.global_rank:
            samples = engine.global_samples + engine.train_batch_size()
            events = [(f"Train/Samples/{name}", value, samples) for name, value in self.numbers.items()]
            engine.monitor.write_events(events)


_engines: Loops[PlannedEngine] = Loops()
on_release(_engines.release)


def _planned_engine(engine: Any) -> PlannedEngine | None:
    """What evenload keeps for an engine; None where nothing is planned in its loop."""
    state = _engines.get(engine)
    return None if state is None or state.stays else state


def deepspeed_io(wrapped: Any, engine: Any, args: Any, kwargs: Any, recipe: Recipe | None) -> Any:
    """`DeepSpeedEngine.deepspeed_io`, planned for training data if the ds_config or `recipe` enables a plugin."""
    stock = wrapped(*args, **kwargs)
    data = engine._config._param_dict.get(KEY)
    chosen = recipe_of(None if data is None else parse_section(data), recipe)
    route = inspect.signature(wrapped).bind(*args, **kwargs).arguments.get("route", "train")
    if chosen is None or not chosen.enabled() or route != "train":
        return stock
    state, module = _planned_engine(engine), engine.module
    try:
        _refuse_unsupported(engine, stock)
        chain = _chain_of(chosen, engine, warn=state is None)
    except EvenloadError as error:
        LoopSession(name=PlannedEngine.name).leave(error)
        return stock
    if state is None:
        gated, stock_attention = gated_experts(module, chosen), module.config._attn_implementation
        state = PlannedEngine(engine=proxy(engine), stock_attention=stock_attention, gated=gated)
        _engines[engine] = state
        module.set_attn_implementation(attention.NAME)
    state.chain = chain
    return PlannedLoader(stock, state, module.config, engine.gradient_accumulation_steps(), state.handed_out)


def _chain_of(recipe: Recipe, engine: Any, *, warn: bool) -> PlanChain:
    """The planners of a recipe for the model, the precision and the ranks of an engine. Raises EvenloadError."""
    dtype = "bf16" if engine.bfloat16_enabled() else "fp32"
    traits = traits_of(int(engine.zero_optimization_stage()), dtype)
    layout = Layout(ep=expert_ranks(engine.module), dp=torch.distributed.get_world_size())
    return PlanChain.of_model(recipe, shape_of(engine.module.config), layout, traits, warn=warn)


def forward(wrapped: Any, engine: Any, args: Any, kwargs: Any) -> Any:
    """`DeepSpeedEngine.forward` under the pack of its batch."""
    state = _planned_engine(engine)
    if state is None:
        return wrapped(*args, **kwargs)
    if not (engine.module.training and torch.is_grad_enabled()):
        engine.module.set_attn_implementation(state.stock_attention)
        try:
            return wrapped(*args, **kwargs)
        finally:
            engine.module.set_attn_implementation(attention.NAME)
    call = dict(inspect.signature(engine.module.forward).bind_partial(*args, **kwargs).arguments)
    call = {**call, **call.pop("kwargs", {})}
    planned = _recognise(state, call.get("input_ids"))
    _refuse_out_of_step(engine, state, planned)
    state.running = planned
    tokens_1T = call["input_ids"]
    rows = {name: getattr(planned.pack, name).numpy() for name in ("cu_seqlens", "positions_T")}
    there = copy_rows(rows, tokens_1T.device)
    pack = replace(
        planned.pack, tokens_T=tokens_1T[0], cu_seqlens=there["cu_seqlens"], positions_T=there["positions_T"]
    )
    call |= {"position_ids": pack.positions_T[None], "use_cache": False, attention.PACK: pack}
    call.pop("attention_mask", None)
    gated = state.gated
    if gated:
        if planned.place == 0:
            gated.begin(planned.plan)
        gated.gate.enter(f"micro-batch {planned.place}")
    with with_attributes(gated, pack=pack) if gated else nullcontext():
        output = wrapped(**call)
    return _show_loss(state, planned, output)


def backward(wrapped: Any, engine: Any, args: Any, kwargs: Any) -> Any:
    """`DeepSpeedEngine.backward` of the micro-batch's share of the global mean; returns what the stock one would."""
    state = _planned_engine(engine)
    if state is None or state.running is None:
        return wrapped(*args, **kwargs)
    # DeepSpeed's decorator hides the signature of the method.
    call = inspect.signature(_backward_arguments).bind(*args, **kwargs)
    call.apply_defaults()
    loss, divided = call.arguments["loss"], call.arguments["scale_wrt_gas"]
    gas = engine.gradient_accumulation_steps()
    ranks = torch.distributed.get_world_size() if engine.gradient_average else 1
    call.arguments["loss"] = loss * (state.running.weight * ranks * (gas if divided else 1))
    wrapped(*call.args, **call.kwargs)
    state.running = None
    return loss.detach() / (gas if divided else 1)


def step(wrapped: Any, engine: Any, args: Any, kwargs: Any) -> Any:
    """`DeepSpeedEngine.step`, refused while a planned micro-batch has not gone through `engine.backward`."""
    state = _planned_engine(engine)
    if state is not None and state.running is not None:
        raise EvenloadError(
            "engine.step() follows a forward whose backward evenload did not see",
            f"micro-batch {state.running.place} of the step",
            "call engine.backward(loss), not loss.backward(), between engine(...) and engine.step()",
        )
    if state is not None and engine.is_gradient_accumulation_boundary():
        unseen, state.unseen = state.unseen, []
        for planned, tokens_T in reversed(unseen):  # the others have come before the last
            if not torch.equal(tokens_T.read(), planned.pack.tokens_T):
                raise _unknown(f"other input_ids in micro-batch {planned.place} of the step")
        end_of_check()
    return wrapped(*args, **kwargs)


def _backward_arguments(loss: Any, retain_graph: bool = False, scale_wrt_gas: bool = True) -> None:
    """The arguments of `DeepSpeedEngine.backward` in 0.19."""


def _show_loss(state: PlannedEngine, planned: PlannedMicroBatch, output: Any) -> Any:
    """The output of a forward. The loss of a dummy gets the value that dashboards expect, since scripts print it: the
    mean over the targets that this rank ran in its step, or in the last one in which it had any."""
    is_tuple = isinstance(output, tuple)
    loss = output[0] if is_tuple else getattr(output, "loss", None)
    if loss is None:
        return output
    if planned.weight:
        if planned.place == 0:
            state.loss_sum, state.weight = 0.0, 0.0
        state.loss_sum = state.loss_sum + loss.detach() * planned.weight
        state.weight += planned.weight
    elif state.weight:
        loss = loss * 0 + state.loss_sum / state.weight
        if is_tuple:
            return (loss, *output[1:])
        output.loss = loss
    return output


def _recognise(state: PlannedEngine, input_ids: Any) -> PlannedMicroBatch:
    """The handed-out micro-batch with these tokens; it is taken off the list. On a device the next one of that shape
    is taken for it, until the update."""
    if isinstance(input_ids, torch.Tensor):
        if input_ids.is_cuda and [input_ids.shape] == [(1, len(one.pack.tokens_T)) for one in [*state.handed_out][:1]]:
            state.unseen.append((state.handed_out.popleft(), ToHost(input_ids[0])))
            return state.unseen[-1][0]
        for planned in state.handed_out:
            tokens_T = planned.pack.tokens_T
            if input_ids.shape == (1, len(tokens_T)) and torch.equal(input_ids[0].cpu(), tokens_T):
                state.handed_out.remove(planned)
                return planned
    raise _unknown(f"input_ids {tuple(input_ids.shape)}" if isinstance(input_ids, torch.Tensor) else "no input_ids")


def _unknown(detail: str) -> EvenloadError:
    return EvenloadError(
        "the engine was given a training batch that the planned loader did not hand out",
        detail,
        "pass the batches of deepspeed.initialize's loader on unchanged, or leave the evenload section out",
    )


def _refuse_out_of_step(engine: Any, state: PlannedEngine, planned: PlannedMicroBatch) -> None:
    place = engine.micro_steps % engine.gradient_accumulation_steps()
    if state.running is not None or planned.place != place:
        raise EvenloadError(
            "the script does not run forward, backward and step once for every batch, in order",
            f"micro-batch {planned.place} of its step arrives where DeepSpeed counts {place}"
            + ("" if state.running is None else ", before the backward of the one before it"),
            "call engine(...), engine.backward(loss) and engine.step() once for each batch of the loader",
        )


def _refuse_unsupported(engine: Any, stock: Any) -> None:
    module = engine.module
    detail = do = ""
    if engine.pipeline_parallelism or engine.mpu is not None or engine.autotp_size() > 1:
        detail, do = "model, pipeline or tensor parallelism", "use data parallelism, or trainer: megatron"
    elif engine.curriculum_learning_enabled():
        detail, do = "curriculum learning", "switch data_efficiency off"
    elif not engine.managed_gradient_accumulation():
        detail, do = "managed_gradient_accumulation: false", "leave the key out"
    elif not hasattr(module, "set_attn_implementation") or not hasattr(module, "config"):
        detail, do = f"a model of type {type(module).__name__}", "give a Hugging Face causal language model"
    elif not hasattr(stock.dataset, "__getitem__"):
        detail, do = f"a dataset of type {type(stock.dataset).__name__}", "give a dataset with __getitem__ and __len__"
    elif expert_ranks(module) > 1 and engine.bfloat16_enabled() and not engine.zero_optimization_stage():
        detail, do = "bfloat16 under ZeRO 0, which does not know divided experts", "use ZeRO 1"
    elif any(isinstance(one, MoE) for one in module.modules()):
        detail = "layers of deepspeed.moe, which pad every expert to its capacity: there is nothing to even"
        do = "use a Hugging Face model with experts, divided by expert_parallel of the ds_config, or leave evenload off"
    if detail:
        raise EvenloadError("ds_config: the evenload section cannot be honoured here", detail, do)
    refuse_unsupported(module.config)
