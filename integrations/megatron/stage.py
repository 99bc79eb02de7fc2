"""A pipeline stage of Megatron-Core for the executor: its own forward and backward step around the passes of a plan.

Plans without an order run in Megatron's own schedule (`batch.run_stock`), unless ranks share micro-batches or
activations are offloaded: then the executor runs Megatron's order over links that never wait for a send, which is what
the laws have checked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel.schedules import deallocate_output_tensor, forward_step
from megatron.core.tensor_parallel import checkpoint, gather_from_sequence_parallel_region
from megatron.core.utils import get_model_config
from torch import Tensor

from ...core.plan.action import Action, Program
from ...core.plan.step_plan import MicroBatch, Slice
from ...runtime.attention.pack import Pack
from ...runtime.attention.prefix import PrefixStore
from ...runtime.attributes import with_attributes
from ...runtime.experts.gate import ExpertGate
from ...runtime.stage.deferred import WgradStore
from ...runtime.stage.executor import Graph, Loaded, StageTrainer
from ...runtime.stage.offload import layers_of
from ...runtime.stage.tape import Tape
from .base.compat import backward_step
from .base.families import HybridModel
from .model.linears import deferring_wgrads


class FixedShape(NamedTuple):
    """The micro-batches of a loop that stay as they are: how many a rank has, and the shape of each."""

    number: int
    tokens: int
    samples: int


class MegatronStage(StageTrainer):
    """The passes of the stage's ``gpt``, called as ``model``: in Megatron's DDP, or as `VShaped` has it.

    Args:
        load: a micro-batch in the form that ``step`` takes.
        step: Megatron's ``forward_step_func``: of what was loaded and the model (output, loss function).
        gate: of the layers with experts, if there are any.
        shape: where the micro-batches of a loop stay as they are.
    """

    def __init__(
        self,
        model: Any,
        gpt: Any,
        *,
        load: Callable[[MicroBatch, PrefixStore | None], Loaded],
        step: Callable[..., tuple[Any, Any]],
        gate: ExpertGate | None = None,
        shape: FixedShape | None = None,
    ) -> None:
        super().__init__(layers_of(gpt), next(gpt.parameters()).device)
        self._model = model
        self._gpt = gpt
        self._config = get_model_config(model)
        self._load = load
        self._step = step
        self._last = bool(gpt.post_process)
        self._gate = gate
        self._shape = shape
        self.shares: int = self._config.tensor_model_parallel_size if self._config.sequence_parallel else 1
        """Tensor-parallel ranks over which the tokens of the stage's input are divided."""
        if self.shares > 1:
            self.tape = _SharedTape()

    @contextmanager
    def prepared(self, program: Program, wgrads: WgradStore) -> Iterator[None]:
        """Holds around the executor's `run`: layers can leave weight gradients, and recomputed ones have a backward."""
        recomputed = self._gpt.config.recompute_granularity or any(action.recomputed for action in program)
        with ExitStack() as stack:
            if any(action.defers_wgrad for action in program):
                stack.enter_context(deferring_wgrads(self._gpt, wgrads))
            if recomputed:
                stack.enter_context(reaching_recomputed(self._gpt))
            yield

    def entering(self, where: str) -> None:
        if self._gate:
            self._gate.enter(where)

    def load(self, micro_batch: MicroBatch, prefix: PrefixStore | None) -> Loaded:
        return self._load(micro_batch, prefix)

    def forward(self, loaded: Any, received: Tensor | None, action: Action) -> Tensor:
        # A forward that only fills the prefix returns hidden states: it needs no logits and no loss.
        head = action.kind != "forward_kv" and self._gpt.post_process
        with recomputing(self._gpt, action.recomputed), with_attributes(self._gpt, post_process=head):
            number = self._shape.number if self._shape else 1
            arguments: tuple[Any, ...] = self._step, loaded, self._model, number, received, [], self._config, 1
            output: Tensor = forward_step(*arguments, is_last_stage=self._last and head)[0]
        return output

    def backward(self, graph: Graph, gradient: Tensor | None) -> Tensor | None:
        return backward_step(graph.received, graph.output, gradient, self._model)

    def empty_like_input(self, pack: Pack) -> Tensor:
        """[T, 1, C], or [tokens, samples, C] of a micro-batch that stays as it is."""
        config = self._config
        tokens, samples = self._shape[1:] if self._shape else (pack.num_padded_tokens, 1)
        shape = tokens // self.shares, samples, config.hidden_size
        return torch.empty(*shape, dtype=config.pipeline_dtype, device=self.device)

    def free_output(self, output: Tensor) -> None:
        deallocate_output_tensor(output, self._config.deallocate_pipeline_outputs)


class _SharedTape(Tape):
    """A tape of stages whose inputs lie in shares on the tensor-parallel ranks (sequence parallelism), which keeps them
    whole. A replay may group its tokens in another way, and every rank then needs tokens from the shares of others."""

    def write(self, slices: Sequence[Slice], segments: Sequence[int], input_TC: Tensor) -> None:
        super().write(slices, segments, gather_from_sequence_parallel_region(input_TC, False))

    def gather(self, slices: Sequence[Slice], segments: Sequence[int], like_TC: Tensor, *, free: bool = True) -> Tensor:
        whole = like_TC.new_empty(segments[-1], *like_TC.shape[1:])
        share = parallel_state.get_tensor_model_parallel_rank() * len(like_TC)
        return like_TC.copy_(super().gather(slices, segments, whole, free=free)[share : share + len(like_TC)])


def recomputing(gpt: Any, layers: int | None) -> AbstractContextManager[Any]:
    """Forwards inside recompute the first ``layers`` of their stage in backward; None leaves it to the model's config.

    Megatron reads these fields in the forward only, and its closures keep what they were given. The decoder of a hybrid
    model reads them from 0.19 on alone, so its layers are recomputed one by one here.
    """
    config = gpt.config
    if layers is None:
        return nullcontext()
    if isinstance(gpt, HybridModel):
        undo = ExitStack()
        undo.enter_context(with_attributes(config, recompute_granularity=None))
        for layer in gpt.decoder.layers[:layers]:
            undo.enter_context(with_attributes(layer, forward=_recomputed(layer.forward)))
        return undo
    granularity, method, number = ("full", "block", layers) if layers else (None, None, None)
    names = {"recompute_granularity": granularity, "recompute_method": method, "recompute_num_layers": number}
    return with_attributes(config, **names)


def _recomputed(forward: Callable[..., Any]) -> Callable[..., Any]:
    """A layer's forward that keeps its input alone."""

    def recomputed(*, hidden_states: Tensor, **rest: Any) -> Any:
        return checkpoint(lambda states: forward(hidden_states=states, **rest), False, hidden_states)

    return recomputed


@contextmanager
def reaching_recomputed(gpt: Any) -> Iterator[None]:
    """What the embedding gives needs a gradient, also where its weights are frozen.

    Megatron's checkpoints have a backward only where their input needs a gradient: without this, a recomputed layer
    after a frozen embedding would leave no gradients, silently.
    """

    def need_gradient(_: Any, __: Any, output: Tensor) -> Tensor:
        return output if output.requires_grad or not torch.is_grad_enabled() else output.detach().requires_grad_()

    hook = gpt.embedding.register_forward_hook(need_gradient) if gpt.pre_process else None
    try:
        yield
    finally:
        if hook is not None:
            hook.remove()
