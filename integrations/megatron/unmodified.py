"""evenload inside a Megatron-Core training loop that nobody edits.

    forward_backward = get_forward_backward_func()
    losses = forward_backward(forward_step_func=..., data_iterator=..., model=..., num_microbatches=..., ...)

The returned function is wrapped (the rows are in `patches.megatron`). In a training call it

    takes    this rank's batches from the user's iterator and cuts them into samples (`samples`);
    plans    the samples of all data-parallel ranks as one global batch, and compares the plan on all ranks;
    sends    each sample to the rank that computes it;
    calls    the stock schedule. `forward_step_func` is called as ever, takes a batch with its own keys, [1, T], and
             calls the model, which learns the borders between samples by a forward pre-hook that lives as long as
             the call.

Every rank runs the same number of micro-batches, filled up with dummies of one token, so that a collective in the
user's loss function still finds its partners. Planning is in line: to plan ahead, the next step's batches would have to
be taken from an iterator that the user may share, save or stop.

Exact where the loop sums: `calculate_per_token_loss=True` and a loss function that returns the *sum* of the token
losses and their number. Averages of averages change when micro-batches are regrouped, and are refused (`supported`).
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from functools import wraps
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.utils import get_model_config
from torch import Tensor

from ...core.chain import PlanChain
from ...core.errors import EvenloadError
from ...core.layout import Layout
from ...core.recipe import Recipe
from ...core.workload import MicroBatch, StepPlan, sequences
from ...runtime.agreement import agree
from ...runtime.attention import packed_causal_attention
from ...runtime.pack import Pack
from .attention import PlannedSeqParams
from .samples import MASK, OneBatch, UserPack, exchange, lay_out, split
from .supported import (
    bare_model,
    for_config,
    refuse_attention,
    refuse_loop,
    refuse_loss,
    warn_of_dropout,
)

log = logging.getLogger("evenload")


class PlannedSteps:
    """The planned training calls of one session."""

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self._chains: WeakKeyDictionary[Any, PlanChain] = WeakKeyDictionary()
        self._step = 0
        self.lives = True
        _all.add(self)

    def around(self, stock: Callable[..., Any]) -> Callable[..., Any]:
        """What `get_forward_backward_func` gives to its caller in place of ``stock``."""

        @wraps(stock)
        def forward_backward(*args: Any, **call: Any) -> Any:
            if not self.lives or call.get("forward_only"):
                return stock(*args, **call)
            return self._run(stock, **call)

        return forward_backward

    def _run(
        self,
        stock: Callable[..., Any],
        *,
        forward_step_func: Callable[..., Any],
        data_iterator: Any,
        model: Any,
        num_microbatches: int,
        **rest: Any,
    ) -> Any:
        data_iterator, chunk = _only(data_iterator), _only(model)
        refuse_loop(chunk, data_iterator, rest)
        gpt, config = bare_model(chunk), get_model_config(chunk)
        if first := gpt not in self._chains:
            warn_of_dropout(config)
            warn = not self._chains and dist.get_rank() == 0
            self._chains[gpt] = _chain(self._recipe, config, gpt.vocab_size, warn)
        packs = self._plan_step(data_iterator, num_microbatches, self._chains[gpt], config)
        running = _Running(packs, forward_step_func, gpt, checks=first)
        hook = gpt.register_forward_pre_hook(running.tell_model, with_kwargs=True)
        stock_shapes, config.variable_seq_lengths = config.variable_seq_lengths, True
        try:
            return stock(
                forward_step_func=running.forward_step,
                data_iterator=None,
                model=model,
                num_microbatches=len(packs),
                **rest,
            )
        finally:
            hook.remove()
            config.variable_seq_lengths = stock_shapes

    def _plan_step(self, data_iterator: Any, num_microbatches: int, chain: PlanChain, config: Any) -> list[UserPack]:
        """This rank's packs of one step, as many as on every other rank. Collective."""
        group = parallel_state.get_data_parallel_group()
        batches = [next(data_iterator) for _ in range(num_microbatches)]
        mine = [split(batch) for batch in batches]
        told: list[list[list[int]]] = [[] for _ in range(dist.get_world_size(group))]
        dist.all_gather_object(told, [[len(s["tokens"]) for s in samples] for samples in mine], group=group)
        # The global batch in the order of Megatron's sampler: micro-batch by micro-batch, rank by rank.
        order = [
            (rank, place, row)
            for place in range(max(map(len, told)))
            for rank, one in enumerate(told)
            for row in range(len(one[place]) if place < len(one) else 0)
        ]
        me = dist.get_rank(group)
        lengths = [told[rank][place][row] for rank, place, row in order]
        own = {i: mine[place][row] for i, (rank, place, row) in enumerate(order) if rank == me}
        plan = chain.plan(sequences(lengths))
        agree(plan.digest, "plans", self._step)
        if plan.shared:
            raise EvenloadError(
                "a training loop of your own does not share samples between ranks",
                f"a plan of {plan.made_by or 'hand'}",
                "disable plugins.mesh, or use `evenload train`",
            )
        self._step += 1

        target = [0] * len(order)
        for micro_batch in plan.micro_batches:
            for piece in micro_batch.slices:
                (target[piece.sequence],) = micro_batch.ranks
        samples = exchange(own, [rank for rank, _, _ in order], target, lengths, group)
        multiple = config.tensor_model_parallel_size if config.sequence_parallel else 1
        like, with_mask = next(iter(own.values())), MASK in batches[0]
        packs = [lay_out(m, samples, like, multiple=multiple, with_mask=with_mask) for m in _share(plan, me)]
        slots = sum(batch["tokens"].numel() for batch in batches)
        log.info(
            "step %d: %d samples in %d micro-batches of %d tokens at most; %d tokens on this rank instead of %d",
            self._step,
            len(order),
            len(packs),
            max(p.pack.num_slots for p in packs),
            sum(p.pack.num_slots for p in packs),
            slots,
        )
        return packs


def attention(wrapped: Any, core: Any, args: Any, kwargs: Any) -> Any:
    """`DotProductAttention.forward`, which refuses packs; those of `PlannedSteps` go to packed attention instead."""
    params = kwargs.get("packed_seq_params", args[6] if len(args) > 6 else None)
    if not isinstance(params, PlannedSeqParams) or params.pack is None:
        return wrapped(*args, **kwargs)
    refuse_attention(core)
    named = dict(zip(("query", "key", "value"), args, strict=False)) | kwargs
    pack = params.pack
    out_THD = packed_causal_attention(
        named["query"],
        named["key"],
        named["value"],
        params.cu_seqlens_q,
        pack.max_seqlen,
        core.softmax_scale,
        segments=pack.segments,
    )
    return out_THD.flatten(1)


def release() -> None:
    """Make every wrapped function that a loop still holds the stock one again; for after the rows are off."""
    for steps in list(_all):
        steps.lives = False
    _all.clear()


_all: WeakSet[PlannedSteps] = WeakSet()


class _Running:
    """One training call: which micro-batch runs, and what its forward must be told."""

    def __init__(self, packs: list[UserPack], user_step: Callable[..., Any], gpt: Any, *, checks: bool) -> None:
        self._packs, self._user_step, self._checks = iter(packs), user_step, checks
        self._signature = inspect.signature(gpt.forward)
        self._device = next(gpt.parameters()).device
        self._params: PlannedSeqParams | None = None

    def forward_step(self, _: Any, chunk: Any, *more: Any) -> tuple[Any, Any]:
        """The user's ``forward_step_func`` on the next pack."""
        current = next(self._packs)
        self._params = seq_params(current.pack, self._device)
        output, loss_func = self._user_step(OneBatch(current.fields), chunk, *more)
        return output, loss_func if loss_func is None else self._checked(loss_func, current.fields["loss_mask"])

    def tell_model(self, gpt: Any, args: Any, kwargs: Any) -> tuple[tuple[()], dict[str, Any]]:
        """A forward pre-hook: the model's arguments with the borders of the pack, and without a mask."""
        assert self._params is not None
        call = self._signature.bind(*args, **kwargs).arguments
        tokens, slots = call.get("input_ids"), self._params.pack.num_slots if self._params.pack else 0
        if call.get("packed_seq_params") is not None or (tokens is not None and tuple(tokens.shape) != (1, slots)):
            raise EvenloadError(
                "forward_step does not give the model the batch that it took from its data iterator",
                f"input_ids {None if tokens is None else tuple(tokens.shape)} for a pack of {slots} tokens, "
                f"packed_seq_params {type(call.get('packed_seq_params')).__name__}",
                "hand the batch on as it is, or disable plugins.packing",
            )
        return (), {**call, "packed_seq_params": self._params, "attention_mask": None}

    def _checked(self, loss_func: Callable[..., Any], loss_mask: Tensor) -> Callable[..., Any]:
        def checked(output: Tensor, *args: Any, **kwargs: Any) -> Any:
            losses = output.detach().clone() if self._checks else None
            told = loss_func(output, *args, **kwargs)
            refuse_loss(told, losses, loss_mask)
            return told

        return checked


def seq_params(pack: Pack, device: torch.device) -> PlannedSeqParams:
    """Megatron's parameters of a pack with a document per sample.

    ``max_seqlen`` is the longest sample and nothing else: where it equals the number of tokens, Megatron's rotary
    embeddings run on across borders (measured: 3e-9 in the gradients of a float64 step, since they are relative). The
    longest of several samples is always shorter than all of them together.
    """
    borders = pack.cu_seqlens.to(device)
    return PlannedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=borders,
        cu_seqlens_kv=borders,
        max_seqlen_q=pack.max_seqlen,
        max_seqlen_kv=pack.max_seqlen,
        pack=pack,
    )


def _chain(recipe: Recipe, config: Any, vocab_size: int, warn: bool) -> PlanChain:
    layout = Layout(
        tp=parallel_state.get_tensor_model_parallel_world_size(),
        pp=parallel_state.get_pipeline_model_parallel_world_size(),
        dp=parallel_state.get_data_parallel_world_size(),
    )
    return PlanChain.of_loop(for_config(recipe, config, vocab_size, layout), layout, warn=warn)


def _share(plan: StepPlan, rank: int) -> list[MicroBatch]:
    """The rank's micro-batches behind as many dummies as make it equal to the others.

    Dummies come first: the last backward, with which Megatron overlaps the gradient reduction, is then a real one.
    """
    own = [plan.micro_batches[index] for index in plan.of_rank(rank)]
    count = max(len(plan.of_rank(r)) for r in range(plan.limits.num_ranks))
    return [MicroBatch((), (rank,))] * (count - len(own)) + own


def _only(thing: Any) -> Any:
    """What a list of one holds; Megatron takes both."""
    if not isinstance(thing, list):
        return thing
    if len(thing) != 1:
        raise EvenloadError(
            "evenload does not run Megatron's interleaved pipeline schedule in a loop of your own",
            f"{len(thing)} model chunks",
            "leave virtual_pipeline_model_parallel_size unset, or disable plugins.packing",
        )
    return thing[0]
