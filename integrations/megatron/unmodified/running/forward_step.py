"""A user's ``forward_step_func`` on planned packs: what it is given, and what the model is told meanwhile.

The function takes a batch with its own keys, [1, T], from its data iterator and calls the model. A forward pre-hook
adds the plan of the pack to the model's arguments; where the model can have it, its rotary embeddings go by the
position of each token, so that a pack may hold parts of samples. Both live as long as the training call.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import wraps
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from .....core.errors import EvenloadError
from .....core.plan.step_plan import MicroBatch
from .....runtime.attention.pack import Pack
from .....runtime.attention.prefix import PrefixStore
from .....runtime.attributes import with_attributes
from .....runtime.experts.gate import ExpertGate
from .....runtime.experts.routing import StepRouting
from ...base.families import MODELS
from ...model.attention import PlannedSeqParams, seq_params
from ...model.expert_gate import bind_gate
from ...model.rope import TokenRope
from ..reading.form import FIELDS, MASK
from ..reading.samples import UserPack, one_batch
from ..refusals.layers import rope_owners
from .attention import attending
from .experts import routing_packs
from .mtp import refuse_missing_mask
from .objective import Losses
from .order import LoopStep

UserFunction = Callable[..., tuple[Any, Any]]

LayOut = Callable[[MicroBatch, PrefixStore | None], UserPack]
"""How a rank lays a micro-batch of the plan out in the user's form."""


@dataclass(eq=False)
class UserStep(LoopStep):
    """The user's ``forward_step_func`` in one training call."""

    function: UserFunction
    gpts: Sequence[Any]
    """The model chunks of this rank; one, without virtual pipeline stages."""
    lay: LayOut
    losses: Losses
    by_token: bool
    """Angles go by the position of each token; else by the borders between samples."""
    has_borders: bool
    """The user's batches hold samples side by side, and the model is given parameters of theirs."""
    routing: StepRouting | None
    gate: ExpertGate | None
    left_borders_out: bool = field(default=False, init=False)
    """Whether it calls the model on batches with borders without telling it where samples lie."""
    _params: PlannedSeqParams | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self._signature = inspect.signature(self.gpts[0].forward)
        kinds = {p.kind: name for name, p in self._signature.parameters.items()}
        self._more = kinds.get(inspect.Parameter.VAR_KEYWORD, "")

    def load(self, micro_batch: MicroBatch, prefix: PrefixStore | None = None) -> UserPack:
        return self.lay(micro_batch, prefix)

    @contextmanager
    def listening(self) -> Iterator[None]:
        with ExitStack() as undo:
            for gpt in self.gpts:
                self._listen(gpt, undo)
            if self.losses.further is not None:
                undo.enter_context(self.losses.further.listening(self.gpts))
            for kind in MODELS:
                undo.enter_context(with_attributes(kind, forward=_refusing_others(kind.forward, self.gpts)))
            yield

    def _listen(self, gpt: Any, undo: ExitStack) -> None:
        undo.callback(gpt.register_forward_pre_hook(self._tell_model, with_kwargs=True).remove)
        undo.enter_context(attending(gpt))
        for owner in rope_owners(gpt) if self.by_token else ():
            if not isinstance(owner.rotary_pos_emb, TokenRope):
                undo.enter_context(with_attributes(owner, rotary_pos_emb=TokenRope(owner.rotary_pos_emb)))
        if self.routing is not None:
            undo.enter_context(routing_packs(gpt))
        if self.gate is not None:
            undo.enter_context(bind_gate(gpt, self.gate))

    def run(self, packed: UserPack, chunk: Any, *more: Any) -> tuple[Any, Callable[..., Any] | None]:
        if self.by_token:
            fused = bool(self.gpts[0].config.apply_rope_fusion)
            self._params = seq_params(packed.pack, routing=self.routing, fused=fused)
        else:
            self._params = by_borders(packed.pack, self.routing)
        if self.losses.further is not None:
            self.losses.further.begin(packed)
        with present(packed.fields):
            output, loss_func = self.function(one_batch(packed.fields), chunk, *more)
        return output, loss_func if loss_func is None else self.losses.around(loss_func, packed)

    def _tell_model(self, gpt: Any, args: Any, kwargs: Any) -> tuple[tuple[()], dict[str, Any]]:
        """A forward pre-hook: the model's arguments with the plan of the pack, and without a mask."""
        assert self._params is not None
        call = dict(self._signature.bind(*args, **kwargs).arguments)
        call |= call.pop(self._more, {})
        tokens, slots = call.get("input_ids"), self._params.pack.num_padded_tokens if self._params.pack else 0
        foreign = call.get("packed_seq_params") is not None and not self.has_borders
        self.left_borders_out |= self.has_borders and call.get("packed_seq_params") is None
        if foreign or (tokens is not None and tuple(tokens.shape) != (1, slots)):
            raise EvenloadError(
                "forward_step does not give the model the batch that it took from its data iterator",
                f"input_ids {None if tokens is None else tuple(tokens.shape)} for a pack of {slots} tokens, "
                f"packed_seq_params {type(call.get('packed_seq_params')).__name__}",
                "hand the batch on as it is, or disable evenload's plugins",
            )
        refuse_missing_mask(gpt, call.get("loss_mask"))
        return (), {**call, "packed_seq_params": self._params, "attention_mask": None}


def _refusing_others(stock: Callable[..., Any], gpts: Sequence[Any]) -> Callable[..., Any]:
    """A model's forward, which refuses a pack where nobody has told the model what is in it, as in a teacher."""

    @wraps(stock)
    def forward(gpt: Any, *args: Any, **kwargs: Any) -> Any:
        tokens = kwargs.get("input_ids", args[0] if args else None)
        is_pack = _present is not None and tokens is not None and tokens.shape == _present["tokens"].shape
        if is_pack and kwargs.get("packed_seq_params") is None and not any(gpt is own for own in gpts):
            raise EvenloadError(
                "forward_step gives its batch to a second model, which would take the samples of a pack for one",
                f"a {type(gpt).__name__} that is not the model of the schedule's call",
                "run that model by itself before the step (forward_only=True), or disable evenload's plugins",
            )
        return stock(gpt, *args, **kwargs)

    return forward


_present: dict[str, Any] | None = None


@contextmanager
def present(fields: dict[str, Any]) -> Iterator[None]:
    """Inside, the user's function is called for the pack with these fields."""
    global _present
    _present = fields
    try:
        yield
    finally:
        _present = None


def batch_on_tensor_ranks(wrapped: Any, _: Any, args: Any, kwargs: Any) -> Any:
    """`get_batch_on_this_tp_rank` of Megatron-LM, which broadcasts a batch of one fixed shape: in a planned step every
    tensor-parallel rank has the pack already."""
    return wrapped(*args, **kwargs) if _present is None else _on_device(_present, _OF_PACKED)


def batch_of_core(wrapped: Any, _: Any, args: Any, kwargs: Any) -> Any:
    """`batch_on_tensor_ranks` for Megatron-Core 0.18 and later, whose batches have more keys."""
    return wrapped(*args, **kwargs) if _present is None else _on_device(_present, _OF_CORE)


def _on_device(fields: dict[str, Any], further: tuple[str, ...]) -> dict[str, Any]:
    """The pack as scripts read it: scripts of 0.16 and 0.17 unpack the values in this order."""
    device = torch.cuda.current_device()
    batch = dict.fromkeys((*FIELDS[:3], MASK, FIELDS[3], *further))
    for name, value in fields.items():
        batch[name] = value.to(device, non_blocking=True) if isinstance(value, Tensor) else value
    return batch


_OF_PACKED = ("cu_seqlens", "max_seqlen", "local_cp_size")
"""What a batch of Megatron-LM has besides; None where it holds whole rows."""

_OF_CORE = (*_OF_PACKED, "cu_seqlens_padded", "hybrid_cp_group")


def by_borders(pack: Pack, routing: StepRouting | None = None) -> PlannedSeqParams:
    """Megatron's parameters of a pack of whole samples with a document per sample.

    ``max_seqlen`` is the longest sample and nothing else: where it equals the number of tokens, Megatron's rotary
    embeddings run on across borders (measured: 3e-9 in the gradients of a float64 step, since they are relative). The
    longest of several samples is always shorter than all of them together.
    """
    longest = max(end - first for first, end in pairwise(pack.segments))
    return seq_params(pack, pack.cu_seqlens_padded, longest, routing=routing)
