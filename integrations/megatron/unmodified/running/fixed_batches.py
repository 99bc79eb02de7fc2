"""A loop's own micro-batches, whole and in its own form, in the order of a plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from megatron.core import parallel_state

from .....core.plan.step_plan import MicroBatch, Slice, StepPlan
from .....runtime.attention.prefix import PrefixStore
from .....runtime.experts.gate import ExpertGate
from ...model.expert_gate import bind_gate
from ...stage import FixedShape
from .chunks import one_iterator
from .order import LoopStep


class FixedPack(NamedTuple):
    """What the executor asks of a pack that nobody lays out."""

    slices: tuple[Slice, ...]
    segments: tuple[int, ...] = ()


class FixedBatch(NamedTuple):
    """A micro-batch of the loop, loaded."""

    number: int
    """Among those of this rank."""
    batch: Any
    """None on a rank without an iterator."""
    pack: FixedPack
    num_counted: float = 0.0


class FixedBatches(LoopStep):
    """A training call whose micro-batches stay as they are. Takes them from the loop's iterator.

    ``call``: the arguments of Megatron's schedule.
    """

    def __init__(self, plan: StepPlan, gpt: Any, gate: ExpertGate, call: Mapping[str, Any]) -> None:
        iterator, number = one_iterator(call["data_iterator"]), call["num_microbatches"]
        self._batches = [None if iterator is None else next(iterator) for _ in range(number)]
        self._function: Callable[..., Any] = call["forward_step_func"]
        self._gpt = gpt
        self.gate: ExpertGate = gate
        self.shape = FixedShape(number, call["seq_length"], call["micro_batch_size"])
        own = [plan.micro_batches[index] for index in plan.of_rank(parallel_state.get_data_parallel_rank())]
        self._number_of = {micro_batch: number for number, micro_batch in enumerate(own)}
        self._losses: list[int] = []
        """Numbers of the micro-batches that had a loss, in the order of their losses."""

    def load(self, micro_batch: MicroBatch, _: PrefixStore | None) -> FixedBatch:
        number = self._number_of[micro_batch]
        return FixedBatch(number, self._batches[number], FixedPack(micro_batch.slices))

    @contextmanager
    def listening(self) -> Iterator[None]:
        undo = bind_gate(self._gpt, self.gate)
        try:
            yield
        finally:
            undo()

    def run(self, loaded: FixedBatch, chunk: Any) -> tuple[Any, Any]:
        output, loss_func = self._function(None if loaded.batch is None else iter([loaded.batch]), chunk)
        if parallel_state.is_pipeline_last_stage():
            self._losses.append(loaded.number)
        return output, loss_func

    def in_order_of_loop(self, reports: Sequence[Any]) -> list[Any]:
        """The reports of the losses, in the order of the loop's micro-batches."""
        return [report for _, report in sorted(zip(self._losses, reports, strict=True), key=lambda pair: pair[0])]
