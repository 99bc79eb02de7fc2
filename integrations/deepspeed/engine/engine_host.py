"""What hosts on any engine of DeepSpeed have in common: their model's weights, and what they say of themselves."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
import transformers
from torch import Tensor

from ....core.errors import EvenloadError, refuse_first
from ....core.machine.layout import Layout
from ....core.plan.branches import COPIED, SUM_AFTER_PASSES
from ....core.recipe.recipe import Recipe
from ....runtime.attention.kernels import choose_kernel
from ....runtime.attention.labels import checked_divisor, count_targets
from ....runtime.world.world import World
from ...host.host import Host
from ...host.step import Step
from ...host.trained import PassResult, StepResult, Weights
from ...huggingface.folders.conversion import as_in_folder, exported_groups
from ...reference.textbook import AdamState, norm_of
from . import checkpoint
from .engine import adam_states, discard_gradients, full_gradients, full_weights
from .expert_gate import GatedExperts
from .model import empty_model
from .traits import rules


class EngineHost(Host):
    """A host but for its engine, of a recipe with ``model.vocab_size`` resolved, or ``model.config``. Making one is
    collective. Raises EvenloadError for a recipe that DeepSpeed cannot honour here.
    """

    engine: Any
    stage: int
    """Of ZeRO."""
    gated: GatedExperts | None = None
    """The model's experts, if it has any."""

    def __init__(self, recipe: Recipe, world: World) -> None:
        cp, what = recipe.parallel.cp, "trainer deepspeed has no context parallelism of a fixed degree"
        do = "set parallel.cp=1 (plugins.mesh shares sequences), or use megatron"
        refuse_first(*rules(recipe), (cp > 1, what, f"parallel.cp {cp}", do))  # which can be planned, all the same
        self.layout: Layout = recipe.layout(world.size)
        self.world = world
        self.recipe = recipe
        self.device = world.device

    def weights(self) -> Mapping[str, Tensor]:
        return self.of_all_stages(self.whole(full_weights(self.engine, self.own_parameters())))

    def exported(self) -> Iterator[tuple[str, Tensor | None]]:
        empty = empty_model(self.recipe)
        shapes = {name: tensor.to("meta") for name, tensor in empty.state_dict().items()}
        for names in exported_groups(empty):
            parts = {name: shapes[name] for name in names}
            whole = self.gathered(parts)
            for name, tensor in as_in_folder(empty, whole if self.world.rank == 0 else parts):
                yield name, tensor if self.world.rank == 0 else None

    def describe(self) -> dict[str, Any]:
        config = self.engine.module.config
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        dtype = torch.bfloat16 if self.recipe.train.dtype == "bf16" else torch.float32
        return {
            "trainer": "deepspeed",
            "deepspeed": deepspeed.__version__,
            "transformers": transformers.__version__,
            "torch": torch.__version__,
            "zero_stage": self.stage,
            "pp": self.layout.pp,
            **({"layers": list(self.layout.layers)} if self.layout.layers else {}),
            "dp": self.layout.dp,
            "dtype": self.recipe.train.dtype,
            "recompute": self.recipe.train.recompute,
            "model": config.model_type,
            "parameters": sum(getattr(p, "ds_numel", p.numel()) for p in self.engine.module.parameters()),
            "attention": choose_kernel(self.world.device, dtype, head_dim).name,
            "device": str(self.world.device),
            **self.trained.describe(),
        }

    def close(self) -> None:
        super().close()
        if self.gated:
            self.gated.unbind()
        self.engine.destroy()

    @abstractmethod
    def own_parameters(self) -> Mapping[str, torch.nn.Parameter]:
        """The parameters of this rank's part of the model, under their global names."""

    def whole(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Tensors of this rank's parameters by the names of the model that the recipe asks for. Collective where ranks
        hold parts of one."""
        return tensors

    def gathered(self, wanted: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """These parameters and buffers of the model that the recipe asks for, whole, on the CPU of rank 0. Collective.

        ``wanted``: by name, on the meta device.
        """
        own = {name: p for name, p in self.own_parameters().items() if self._name_in_model(name) in wanted}
        tensors = dict(self.whole(full_weights(self.engine, own))) if own else {}
        buffers = {name: buffer.cpu() for name, buffer in self.engine.module.named_buffers() if name in wanted}
        return {**buffers, **tensors}

    def _name_in_model(self, name: str) -> str:
        """The name in the recipe's model of the parameter that holds this rank's ``name``."""
        return name


class EngineWeights(Weights):
    """The weights of a host's model; how a rank runs its passes is a subclass's to say."""

    def __init__(self, host: EngineHost) -> None:
        self._host = host

    def run(self, step: Step) -> StepResult:
        plan, labels, gated = step.plan, step.labels, self._host.gated
        num_targets = count_targets(plan.lengths, labels)
        if num_targets == 0:
            raise EvenloadError(
                "the batch has no target token",
                f"{len(plan.lengths)} sequences",
                "use longer samples, or mask fewer tokens",
            )
        divisor = checked_divisor(plan.lengths, labels)
        totals, (executed, branches) = self._passes(step, divisor)
        dist.all_reduce(totals)
        loss_sum, ran = totals.tolist()
        busy = step.clock.read()
        loads = tuple(gated.gate.loads) if gated else ()
        branches = (SUM_AFTER_PASSES, *branches, *((COPIED,) if any(load.copies for load in loads) else ()))
        ran = num_targets if labels is None else round(ran)
        return StepResult(loss_sum / divisor, ran, busy.total_s, busy.forward_s, executed, branches, loads)

    @abstractmethod
    def _passes(self, step: Step, divisor: float) -> tuple[Tensor, PassResult]:
        """All passes of this rank; every token loss is divided by ``divisor``, that of the global batch. Sum and number
        of its token losses, float64 [2] on the device, and what ran."""

    def gradients(self) -> dict[str, Tensor]:
        return dict(self._host.whole(full_gradients(self._trained_parameters())))

    def norm(self, gradients: Mapping[str, Tensor | None]) -> float:
        return norm_of(gradients)

    def update(self, lr: Any) -> float:
        engine = self._host.engine
        for group in engine.basic_optimizer.param_groups:
            group["lr"] = lr
        # Plain fp32 training is clipped by the engine itself, which then keeps no norm.
        norm = self._norm_of_own() if self._host.stage == 0 else None
        self._step()
        return float(engine.get_global_grad_norm()) if norm is None else norm

    def _norm_of_own(self) -> float:
        """The norm of the whole model's gradient, from what the parameters of this rank hold. Collective."""
        return self.norm({n: p.grad for n, p in self._host.own_parameters().items()})

    def _step(self) -> None:
        self._host.engine.step()

    def _trained_parameters(self) -> Mapping[str, torch.nn.Parameter]:
        return {name: one for name, one in self._host.own_parameters().items() if one.requires_grad}

    def discard(self) -> None:
        discard_gradients(self._host.engine)

    def optimizer_states(self) -> dict[str, AdamState]:
        states = adam_states(self._host.engine, self._trained_parameters())
        fields = [self._host.whole({name: state[i] for name, state in states.items()}) for i in range(3)]
        return {name: AdamState(*(field[name] for field in fields)) for name in fields[0]}

    def describe(self) -> dict[str, Any]:
        return {}

    def save(self, directory: Path) -> None:
        checkpoint.save(self._host.engine, directory, self._host.recipe.train.freeze)

    def load(self, directory: Path) -> None:
        recipe = self._host.recipe
        checkpoint.load(self._host.engine, directory, freeze=recipe.train.freeze, trust=recipe.checkpoint.trust)
