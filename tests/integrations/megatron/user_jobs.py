"""What the ranks of test_unmodified.py do: a user's own training loop, stock and under plans, and planted faults.

The loop is `tests/hosts/megatron_script.py`, which imports nothing of evenload.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import evenload
import torch
from evenload.core.chain import PlanChain
from evenload.core.errors import EvenloadError
from evenload.core.recipe import parse
from evenload.core.workload import StepPlan, sequences
from evenload.face import load_plugins
from evenload.integrations.megatron import unmodified, unmodified_order
from evenload.integrations.megatron.setup import leave_groups
from evenload.integrations.megatron.unmodified_step import UserStep
from evenload.runtime import prefix
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron_random_plans import random_plan

SCRIPT = Path(__file__).parents[2] / "hosts" / "megatron_script.py"


def recipe(**plugins: Any) -> Any:
    load_plugins()
    return parse({"plugins": plugins or {"packing": {"enabled": True, "max_tokens": 64}}})


@contextmanager
def user_loop(tp: int = 1, pp: int = 1, overlap: bool = False, **config: Any) -> Iterator[Loop]:
    """The script's model on a layout of its own; ``config`` changes fields of its TransformerConfig."""
    spec = importlib.util.spec_from_file_location("user_script", SCRIPT)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    # Names that a session rebinds are found in loaded modules only.
    with patch.dict(sys.modules, {"user_script": script}):
        parallel_state.initialize_model_parallel(tp, pp)
        make = script.TransformerConfig
        try:
            script.TransformerConfig = lambda **fields: make(**{**fields, "num_layers": 4, **config})
            torch.manual_seed(1234)
            model_parallel_cuda_manual_seed(1234)
            model, _ = script.build(torch.float64, "rope", overlap)
            yield Loop(script, model)
        finally:
            leave_groups()


class Loop:
    """One step of the script at a time, from the same weights and the same samples."""

    def __init__(self, script: Any, model: Any) -> None:
        self.script, self.model = script, model
        self.stage = parallel_state.get_pipeline_model_parallel_rank()
        self.last = parallel_state.is_pipeline_last_stage()

    def step(self, forward_step: Callable[..., Any] | None = None) -> dict[str, Any]:
        """Gradients, reports and what the forward step saw, in one step."""
        self.model.zero_grad_buffer()
        shapes: list[Any] = []
        reports = self.script.get_forward_backward_func()(
            forward_step_func=forward_step or partial(self.script.forward_step, shapes),
            data_iterator=self.script.batches(),
            model=[self.model],
            num_microbatches=self.script.NUM_MICRO_BATCHES,
            seq_length=self.script.SEQ_LENGTH,
            micro_batch_size=self.script.MICRO_BATCH,
            forward_only=False,
        )
        gradients = {name: p.main_grad.clone() for name, p in self.model.module.named_parameters()}
        return {"gradients": gradients, "reports": [r["lm loss"] for r in reports], "shapes": shapes}


def worst(found: dict[str, Any], wanted: dict[str, Any]) -> float:
    """Largest ||a - b|| / ||b|| over the gradients of this rank's part of the model."""
    pairs = [(found["gradients"][name], g) for name, g in wanted["gradients"].items()]
    return max(float((a - b).norm() / b.norm()) for a, b in pairs)


def told(found: dict[str, Any]) -> torch.Tensor:
    """(loss sum, tokens) over the reports of this data-parallel rank's last stage and those of its peers."""
    total = sum(found["reports"], torch.zeros(2, dtype=torch.float64))
    torch.distributed.all_reduce(total)
    return total


@contextmanager
def planning(make: Callable[[Any], StepPlan]) -> Iterator[list[StepPlan]]:
    """Plans come from ``make(chain, lengths)`` instead of the plugins; gives those that were made."""
    made: list[StepPlan] = []

    def plan(chain: PlanChain, batch: Any) -> StepPlan:
        made.append(make(chain, [s.length for s in batch]))
        return made[-1]

    with patch.object(PlanChain, "plan", plan):
        yield made


def drawn(seed: int, **how: Any) -> Callable[..., StepPlan]:
    """A random lawful plan for the layout of a chain."""

    def make(chain: PlanChain, lengths: list[int]) -> StepPlan:
        limits = chain.limits
        assert not limits.whole_sequences
        return random_plan(
            seed,
            lengths,
            num_ranks=limits.num_ranks,
            num_stages=limits.num_stages,
            layers_per_stage=limits.layers_per_stage,
            **how,
        )

    return make


def user_plans(
    world: Any, *, seeds: list[int], mutant: str = "", how: dict[str, Any] | None = None, **loop: Any
) -> list[dict[str, Any]]:
    """Errors of random plans in the user's loop against the same loop with nothing switched on."""
    results = []
    with user_loop(**loop) as user:
        stock = user.step()
        wanted = told(stock)
        for seed in seeds:
            try:
                with evenload.enabled(recipe()), planning(drawn(seed, **(how or {}))) as made, fault(mutant):
                    found = user.step()
            except EvenloadError as error:
                results.append({"seed": seed, "error": error.what})
                continue
            (plan,) = made
            results.append(
                {
                    "seed": seed,
                    "grad": worst(found, stock),
                    "loss": float(((told(found) - wanted).abs() / wanted).max()),
                    "reports": len(found["reports"]),
                    "steps": len(found["shapes"]),
                    "cut": len(plan.cut),
                    "recomputed": sum(map(sum, plan.recompute)),
                    "losses": max(len(plan.of_rank(r, "B")) for r in range(plan.limits.num_ranks)) if user.last else 0,
                }
            )
        again = user.step()
        results.append({"seed": -1, "grad": worst(again, stock), "loss": 0.0})
    return results


@contextmanager
def fault(name: str) -> Iterator[None]:
    """Plant a fault on the way of a user's batch."""
    with ExitStack() as stack:
        if name:
            stack.enter_context(_FAULTS[name]())
        yield


def _restarted_positions() -> Any:
    lay = unmodified.lay_out

    def restarted(micro_batch: Any, **rest: Any) -> Any:
        packed = lay(micro_batch, **rest)
        positions = packed.pack.positions_T.clone()
        for piece, first in zip(packed.pack.slices, packed.pack.segments, strict=False):
            positions[first : first + piece.length] -= piece.start
        return replace(packed, pack=replace(packed.pack, positions_T=positions))

    return patch.object(unmodified, "lay_out", restarted)


def _shifted_labels() -> Any:
    """As if the labels of a part were not shifted already: its last one is lost."""
    lay = unmodified.lay_out

    def shifted(micro_batch: Any, **rest: Any) -> Any:
        packed = lay(micro_batch, **rest)
        for piece, first in zip(packed.pack.slices, packed.pack.segments, strict=False):
            if piece.start:
                packed.fields["labels"][0, first] = packed.fields["tokens"][0, first]
        return packed

    return patch.object(unmodified, "lay_out", shifted)


def _dropped_accumulator() -> Any:
    settle = prefix.PrefixStore.settle

    def alone(self: Any, layer: int, piece: Any, dk: Any, dv: Any) -> Any:
        own = dk[piece.start :].clone(), dv[piece.start :].clone()
        settle(self, layer, piece, dk, dv)
        return own

    return patch.object(prefix.PrefixStore, "settle", alone)


def _plan_of_the_latest() -> Any:
    """Recomputed layers see the pack that ran last instead of their own."""
    run, attend, latest = UserStep.run, unmodified.packed_attention, []

    def noting(self: Any, packed: Any, *rest: Any) -> Any:
        latest[:] = [packed.pack]
        return run(self, packed, *rest)

    def misled(q: Any, k: Any, v: Any, pack: Any, *rest: Any) -> Any:
        return attend(q, k, v, latest[0] if latest[0].num_slots == pack.num_slots else pack, *rest)

    stack = ExitStack()
    stack.enter_context(patch.object(UserStep, "run", noting))
    stack.enter_context(patch.object(unmodified, "packed_attention", misled))
    return stack


def _uncounted_tokens() -> Any:
    init = unmodified_order._Forward.__init__

    def more(self: Any, *rest: Any) -> None:
        init(self, *rest)
        self.num_tokens += 1

    return patch.object(unmodified_order._Forward, "__init__", more)


_FAULTS = {
    "restarted positions": _restarted_positions,
    "shifted labels": _shifted_labels,
    "dropped accumulator": _dropped_accumulator,
    "plan of the latest": _plan_of_the_latest,
    "uncounted tokens": _uncounted_tokens,
}
