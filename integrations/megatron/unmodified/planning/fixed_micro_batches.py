"""Micro-batches that stay as they are, since something of the model depends on which samples are in them.

A balance loss over a micro-batch, Sinkhorn's routing, the capacity of experts, the state of a Mamba layer: whoever
regroups samples changes them. So nothing is regrouped. Every rank runs the batches of its own iterator, in the loop's
own form, with Megatron's own routers, losses and reports; in a plan a whole micro-batch stands for one sequence. What
plugins can still do:

    moe         copies of experts, in every layer of every pass; Megatron's own schedule runs
    pipeline    an order of the micro-batches, with recomputation and passes for weight gradients

Where none of them has anything to do, the loop is left alone and says so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial, wraps
from typing import Any, NamedTuple

from megatron.core import parallel_state
from megatron.core.utils import get_model_config

from .....core.plan.step_plan import MicroBatch, Slice, StepPlan, as_lengths
from .....core.planning.chain import PlanChain
from .....core.recipe.recipe import Recipe
from .....core.registry import LayerPlugin, StepPlugin
from .....runtime.attention.prefix import PrefixStore
from .....runtime.experts.gate import ExpertGate
from .....runtime.world.agreement import all_or_none, everyone
from ....unmodified.planned_runs import report_idle
from ...base.families import unwrapped_chunk
from ...base.plane import current_layout, stage_links
from ...model.expert_gate import bind_gate
from ...model.linears import why_in_backward
from ...stage import FixedShape
from ..reading.context_parallel import refuse_together
from ..reading.taken import of_one, taken_from
from ..refusals.layers import refuse_experts
from ..refusals.supported import refuse_groups, why_stock
from ..running.experts import gate_of, with_experts_in_step
from ..running.order import LoopStep, run_order
from ..writers import MegatronSession
from .user_loop import chain_of

_IN_TURN = ("moe_router_load_balancing_type global_aux_loss", "moe_input_jitter_eps")
"""What depends on the order in which ranks run their micro-batches, too."""
_DO = "use the balance loss seq_aux_loss or the expert bias, or enable plugins.moe with expert parallelism"


@dataclass(eq=False, kw_only=True)
class FixedMicroBatchLoop(MegatronSession):
    """A loop whose micro-batches stay as they are; without planners where no plugin has anything to do."""

    why: str
    """What depends on the micro-batch."""
    plugins: str
    """The enabled ones."""

    @classmethod
    def of(
        cls, recipe: Recipe, chunks: list[Any], foreign_owner: str, why: str, call: Mapping[str, Any]
    ) -> FixedMicroBatchLoop:
        """What can be done in a loop. Raises EvenloadError. Collective.

        Args:
            chunks: the model's parts on this rank.
            why: what depends on the micro-batch.
            call: the arguments of Megatron's schedule.
        """
        refuse_together(get_model_config(chunks[0]), why)
        enabled, layout = recipe.enabled(), current_layout()
        loop = cls(why=why, plugins=", ".join(f"plugins.{plugin.name}" for plugin in enabled))
        copies = layout.ep > 1 and bool(recipe.enabled_of(LayerPlugin))
        alone = len(chunks) == layout.cp == 1 and layout.pp > 1 and not why.startswith(_IN_TURN)
        orders = alone and bool(recipe.deciding("orders"))
        if not copies and not orders:
            return loop
        gpt = unwrapped_chunk(chunks[0])

        def check() -> None:
            refuse_groups(call.get("pg_collection"), call.get("p2p_communicator"))
            if copies:
                refuse_experts(gpt, len(chunks))

        all_or_none(check)
        reasons = everyone((why_stock(chunks, foreign_owner), why_in_backward(gpt)))
        orders = orders and not any(stock for stock, _ in reasons)
        if copies or orders:
            loop.chain = _chain(recipe, gpt, _tokens(call), orders, splits=not any(late for _, late in reasons))
        return loop

    def prepared(self, stock: Callable[..., Any], chunks: list[Any], call: dict[str, Any]) -> Callable[[], Any]:
        """Runs a training call by its plan, and gives what the loss functions reported. Collective; raises
        EvenloadError where the call cannot be planned, on all ranks."""
        if self.planners is None:
            why = f"{self.why} depends on which samples are in a micro-batch, and {self.plugins} would regroup them"
            report_idle(self.name, why, _DO)
            return partial(stock, **call)
        number = self.chain.limits.num_ranks * call["num_microbatches"]
        return partial(self._run, self.plan(as_lengths([_tokens(call)] * number)), stock, chunks[0], call)

    def _run(self, plan: StepPlan, stock: Callable[..., Any], chunk: Any, call: dict[str, Any]) -> Any:
        """Run a training call by its plan; reports are given back in the order of the loop's micro-batches."""
        gate = gate_of(plan)
        if plan.in_host_schedule or not _is_even(plan, call["num_microbatches"]):
            result = _run_stock(stock, gate, chunk, call)
        else:
            batches = FixedBatches(plan, unwrapped_chunk(chunk), gate, call)
            links = self.group(stage_links)
            reports = run_order(plan, batches, chunk=chunk, links=links, plane=None, rest=call)
            result = batches.in_order_of_loop(reports)
        self.report(plan, micro_batch_size=1, loads=gate.loads)
        return result


def _run_stock(stock: Callable[..., Any], gate: ExpertGate, chunk: Any, call: dict[str, Any]) -> Any:
    """Megatron's own schedule over the loop's own batches, its experts behind the gate."""
    function = call["forward_step_func"]

    @wraps(function)
    def forward_step(*args: Any, **named: Any) -> Any:
        gate.enter("a micro-batch")
        return function(*args, **named)

    with bind_gate(unwrapped_chunk(chunk), gate):
        return stock(**{**call, "forward_step_func": forward_step})


def _chain(recipe: Recipe, gpt: Any, tokens: int, orders: bool, *, splits: bool) -> PlanChain:
    """The chain of plugins that have something to do; a micro-batch is a sequence, and every cap holds one."""
    planned, in_step = with_experts_in_step(current_layout(), gpt.config)
    placing = recipe.enabled_of(StepPlugin)
    ordering = [p.name for p in placing if orders and "orders" in p.decides]
    changes: dict[str, Any] = {f"plugins.{p.name}.enabled": False for p in placing if p.name not in ordering}
    changes |= {f"plugins.{name}.max_tokens": tokens for name in ordering}
    chain = chain_of(recipe.changed(changes), gpt, planned, warn=False)
    limits = replace(chain.limits, in_step=in_step, splits_backward=chain.limits.splits_backward and splits)
    return replace(chain, limits=limits, micro_batch_size=1)


def _is_even(plan: StepPlan, number: int) -> bool:
    """Whether each rank runs as many micro-batches as it has."""
    return all(len(plan.of_rank(rank)) == number for rank in range(plan.limits.num_ranks)) and not plan.replayed


def _tokens(call: Mapping[str, Any]) -> int:
    return int(call["seq_length"]) * int(call["micro_batch_size"])


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
        number = call["num_microbatches"]
        self._batches = of_one(taken_from(call["data_iterator"], number)) or [None] * number
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

    def listening(self) -> AbstractContextManager[Any]:
        return bind_gate(self._gpt, self.gate)

    def run(self, loaded: FixedBatch, chunk: Any) -> tuple[Any, Any]:
        output, loss_func = self._function(None if loaded.batch is None else iter([loaded.batch]), chunk)
        if parallel_state.is_pipeline_last_stage():
            self._losses.append(loaded.number)
        return output, loss_func

    def in_order_of_loop(self, reports: Sequence[Any]) -> list[Any]:
        """The reports of the losses, in the order of the loop's micro-batches."""
        return [report for _, report in sorted(zip(self._losses, reports, strict=True), key=lambda pair: pair[0])]
