"""`Host` on DeepSpeed: one planned step through `deepspeed.initialize`'s engine with ZeRO 0, 1, 2 or 3.

    loss of a micro-batch = sum of its token losses * share / T,   T = target tokens of the global batch

(of targets with weights, each loss times its weight, T what the weights of the global batch add up to) with share 1
where gradients are summed over ranks (ZeRO 0, 1, 2) and the number of ranks where the engine averages (ZeRO 3).
Gradients of a step are then those of the mean token loss of the batch, whatever the plan: whole sequences or slices, on
one rank or shared by several, forwards whose activations are kept or that are replayed before their backward, the same
groups in both directions or others. The loss of a token is counted where it is computed with gradients, once.

Measured against a plain run of the same weights, 2 gloo ranks, float32: see docs/deepspeed.md.
"""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ....core.errors import EvenloadError
from ....core.plan.action import Program
from ....core.plan.branches import DUMMIES
from ....core.plan.forwards import forwards_in_step, lower_forwards
from ....core.plan.program import Dummies, lower
from ....core.plan.step_plan import StepPlan
from ....core.recipe.recipe import Recipe
from ....runtime.adapters.peers import AdapterPeers
from ....runtime.adapters.places import linears_in
from ....runtime.attention.pack import Pack
from ....runtime.experts.routing import StepRouting
from ....runtime.generate.engine import Decoder, Quantizable
from ....runtime.generate.quantized import linears_of
from ....runtime.measure.busy import counts_waiting
from ....runtime.stage.offload import layers_of
from ....runtime.world.plane import Plane
from ....runtime.world.world import World
from ...host.generating import any_rank
from ...host.gradients import FrozenModel
from ...host.scoring import Collector, LossCollector, evaluating
from ...host.step import Step, refuse_foreign
from ...host.trained import PassResult, Trainable, freeze
from ...huggingface.models import refuse_unequal_replay, refuse_unsupported
from ...huggingface.routes import Recorder, num_experts_of
from .ds_config import SHARDED
from .engine import make_engine, one_reduction
from .engine_host import EngineHost, EngineWeights
from .expert_gate import GatedExperts
from .experts import DividedExperts
from .frozen import FrozenStage, blocks_of, frozen, linear_names
from .keeping import keeping_of
from .model import build_model, enable_recomputing, recompute_layers
from .stage import EngineStage, call_of

log = logging.getLogger("evenload")


class DeepSpeedHost(EngineHost):
    """Runs plans on DeepSpeed's engine, which ``train`` puts around the model.

    ``busy_s`` leaves gradient reduction out under ZeRO 0, 1 and 2. ZeRO 3 gathers parameters and reduces gradients
    inside every pass, and ranks that share a micro-batch exchange keys and values there, so then, by wall time or on a
    GPU, it holds the waiting for other ranks as well.
    """

    pipeline_stage = 0

    def __init__(self, recipe: Recipe, world: World, train: Callable[[DeepSpeedHost, Any], Trainable]) -> None:
        super().__init__(recipe, world)
        self.dp_cp_rank = world.rank
        model = build_model(recipe, keeping=keeping_of(recipe, world.rank, world.size))
        shares = bool(recipe.deciding("shares"))
        # Ranks do not share the keys of a window.
        refuse_unsupported(model.config, recipe.data.max_length, windows=not shares)
        if recipe.train.recompute:
            recompute_layers(model)
        self.trained = train(self, model)
        self.stage = int(self.engine.zero_optimization_stage())
        self.experts = DividedExperts(self.engine.module, world.device) if recipe.parallel.ep > 1 else None
        if self.experts is not None:
            self.engine.clip_fp32_gradients = self._clip
        if num_experts_of(self.engine.module):
            self.gated = GatedExperts(self.engine.module, self.experts.group if self.experts else None)
        self._all_in_step = self.stage == 3 and self.experts is None
        exchanges = self.stage == 3 or shares or self.experts is not None
        self.busy_waits = exchanges and world.size > 1 and counts_waiting(world.device)
        self._warned_of_dummies = False
        self._recorder: Recorder | None = None

    def own_parameters(self) -> Mapping[str, torch.nn.Parameter]:
        return dict(self.engine.module.named_parameters())

    def whole(self, tensors: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        return self.experts.whole(tensors) if self.experts else tensors

    def _name_in_model(self, name: str) -> str:
        return self.experts.name_in_model(name) if self.experts else name

    def of_all_stages(self, tensors: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        return tensors

    def close(self) -> None:
        super().close()
        if self.experts is not None:
            self.experts.close()

    def _clip(self) -> None:
        assert self.experts is not None
        self.experts.clip(self.own_parameters(), self.recipe.train.clip_grad)

    def program_of(self, plan: StepPlan, otherwise: Dummies) -> tuple[Program, tuple[str, ...]]:
        """What this rank runs, in step with all others where they must be, and `DUMMIES` where that adds any. Raises
        EvenloadError for a plan that the engine cannot run."""
        self._refuse_unfit(plan)
        refuse_unequal_replay(plan, self.engine.module)
        if not self._all_in_step:
            return lower(plan, 0, self.dp_cp_rank, otherwise), ()
        program = lower(plan, 0, self.dp_cp_rank, "in step")
        added = sum(action.op.micro_batch < 0 for action in program)
        if added and not self._warned_of_dummies:
            self._warned_of_dummies = True
            log.warning(
                "ZeRO 3: the plan's ranks run forwards and backwards in different orders; %d of the %d passes of rank "
                "%d are dummies that keep it in step",
                added,
                len(program),
                self.dp_cp_rank,
            )
        return program, (DUMMIES,) if added else ()

    @property
    def output_layer(self) -> torch.nn.Module | None:
        layer: torch.nn.Module = self.engine.module.get_output_embeddings()
        return layer

    def _forwards(self, step: Step, collector: Collector) -> None:
        plan, rank = step.plan, self.dp_cp_rank
        self._refuse_unfit(plan)
        program = forwards_in_step(plan)[rank] if self._all_in_step else lower_forwards(plan, 0, rank)
        if self.gated:
            self.gated.begin(plan, step.mark)
        with evaluating(self.engine.module):
            self.execute(step, (program, EngineStage(self, step, None, None, self.gated, collector=collector)))

    def adapter_peers(self) -> AdapterPeers:
        """The ranks that adapters are summed and gathered over."""
        return AdapterPeers(dist.group.WORLD if self.world.size > 1 else None)

    def frozen_passes(self, step: Step, collector: LossCollector) -> PassResult:
        """All passes of this rank through a model whose weights are frozen."""
        program, branches = self.program_of(step.plan, "none")
        return PassResult(self.execute(step, (program, FrozenStage(self, step, collector))), branches)

    @contextmanager
    def frozen_model(self) -> Iterator[FrozenModel]:
        module: Any = self.engine.module
        layers, sharded = layers_of(module), self.stage == SHARDED
        if sharded:
            enable_recomputing(module, layers)
        blocks = blocks_of(layers, linear_names(module))
        with frozen(module, module.get_input_embeddings(), layers if sharded else ()):
            yield FrozenModel(blocks, linears_in(blocks), self.adapter_peers(), torch.float32, self.frozen_passes)

    @contextmanager
    def decoding(self) -> Iterator[Decoder]:
        """Under ZeRO 3 all ranks run equally many forwards: each gathers the weights from all."""
        chooses = "logits_to_keep" in inspect.signature(self.engine.module.forward).parameters

        def logits(pack: Pack, slots_R: Tensor) -> Tensor:
            if self.gated:
                self.gated.gate.begin_unplanned()
            if chooses:
                chosen: Tensor = self.engine(**call_of(pack), logits_to_keep=slots_R).logits[0]
                return chosen
            whole: Tensor = self.engine(**call_of(pack)).logits[0]
            return whole[slots_R]

        with evaluating(self.engine.module):
            quantizable = Quantizable(linears_of(layers_of(self.engine.module)), logits)
            yield Decoder(self.device, logits, goes_on=any_rank if self._all_in_step else bool, quantizable=quantizable)

    def recording(self, plan: StepPlan) -> Recorder | None:
        """What records the routes of a step into `routes`, where somebody wants them."""
        if not self.records_routes:
            return None
        self._recorder = self._recorder or Recorder(self.engine.module)
        self._recorder.step = step = StepRouting(plan.lengths, record=True)
        assert step.routes is not None
        self.routes = step.routes
        return self._recorder

    def _refuse_unfit(self, plan: StepPlan) -> None:
        """Raise EvenloadError for a plan of another job, or one that does not keep those ranks in step that share
        experts, as its laws would have it."""
        refuse_foreign(plan, self.world.size, 1, splits_backward=False)
        limits, ranks = plan.limits, self.world.size if self.stage == 3 else self.layout.ep
        if self.experts is not None and limits.in_step != ranks:
            raise EvenloadError(
                "the plan does not keep the ranks in step that share experts",
                f"in_step {limits.in_step}, parallel.ep {self.layout.ep}",
                f"plan under limits of in_step {ranks}",
            )

    def _open_plane(self) -> Plane:
        return Plane.make([tuple(range(self.world.size))])


class DataParallelWeights(EngineWeights):
    """The weights of a model without pipeline stages. Making it puts the model into the host's engine."""

    _host: DeepSpeedHost

    def __init__(self, host: DeepSpeedHost, model: torch.nn.Module) -> None:
        super().__init__(host)
        own = dict(model.named_parameters())
        self.frozen = freeze(host.recipe.train.freeze, own, [list(own)])
        host.engine = make_engine(model, host.recipe, host.world.size)

    def _passes(self, step: Step, divisor: float) -> tuple[Tensor, PassResult]:
        host = self._host
        program, added = host.program_of(step.plan, "idle")
        if host.gated:
            host.gated.begin(step.plan, step.mark)
        share = host.world.size if host.stage == 3 else 1
        with ExitStack() as open_step:
            num_backwards = sum(action.kind == "backward" for action in program)
            reduction = open_step.enter_context(one_reduction(host.engine, num_backwards))
            recorder = host.recording(step.plan)
            sums = {"weight": share / divisor, "collector": step.collector}
            trainer = EngineStage(host, step, reduction, recorder, host.gated, **sums)
            executed = host.execute(step, (program, trainer))
            step.mark("gradient reduction")
            with step.clock.noting("G") if host.stage < 3 else nullcontext():
                open_step.close()
        return trainer.totals, PassResult(executed, added)

    def _norm_of_own(self) -> float:
        experts = self._host.experts
        if experts is None:
            return super()._norm_of_own()
        return math.sqrt(experts.square_of({n: p.grad for n, p in self._host.own_parameters().items()}))
