"""What ranks do with models that have experts; see jobs.py."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from evenload.core.laws import check
from evenload.core.plan.branches import branches_of
from evenload.core.plan.expert_policy import ExpertPolicy
from evenload.core.plan.step_plan import StepPlan, as_lengths
from evenload.core.planning.chain import PlanChain
from evenload.integrations.megatron import PlainModel
from evenload.integrations.megatron.base.setup import check_recipe
from evenload.integrations.megatron.model.experts import routers
from evenload.integrations.reference.exactness import relative_error
from evenload.training.proof.compare import compare_number
from evenload.training.proof.weighing import scale_of
from harness import proof
from harness.proof import LENGTHS, VOCABULARY, labels_in_turn, tokens
from harness.proof.experts import layer_planner_of, with_drawn_copies
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron_tests.jobs import hosted, recipe, save_new
from megatron_tests.telling import told

EXPERTS = {"num_experts": 4, "topk": 2, "ffn_hidden_size": 24}
LOSSES = {"z_loss": 0.02, "sequence_aux_loss": 0.05}


def small(**changes: Any) -> dict[str, Any]:
    """A model of two layers with experts, unless told otherwise."""
    moe = EXPERTS | changes.pop("moe", {})
    plugins = {f"plugins__{name}": section for name, section in changes.pop("plugins", {}).items()}
    return {"model__family": "mixtral", "model__num_layers": 2, "model__moe": moe, **plugins, **changes}


def planned(host: Any, lengths: Any = LENGTHS, seed: int | None = None) -> StepPlan:
    """What the recipe's plugins make of a batch; with a ``seed`` a random plan brought into rounds."""
    if seed is None:
        return check(PlanChain.of_recipe(host.recipe, host.layout).plan(as_lengths(lengths)))
    return proof.planned(host, seed, lengths)


def with_local_copies(plan: StepPlan, number: int) -> StepPlan:
    """The plan, every second one with the plugin's own quotas for nodes of two ranks, on which a copy of an expert pays
    for one token that so stays inside."""
    if number % 2 == 0:
        return plan
    policy = ExpertPolicy("clone", EXPERTS["num_experts"], node_ranks=2, keep=number % 4 == 1, copy_tokens=1)
    return plan.revised(experts=policy)


def without_copies(plan: StepPlan, _: int) -> StepPlan:
    return plan


def routed(
    world: Any,
    *,
    seeds: Any = (None, None),
    lengths: Any = LENGTHS,
    local: bool = False,
    once: bool = False,
    copies: bool = True,
    **changes: Any,
) -> list[dict[str, Any]]:
    """Of each plan: errors of loss, gradients, norm and biases against plain training, and what the plan does.
    ``local``: copies are those of `with_local_copies`, else drawn; without ``copies`` there are none. ``once``: to
    nodes of two ranks tokens go once."""
    rows = []
    with_copies = with_local_copies if local else with_drawn_copies if copies else without_copies
    with (
        hosted(world, **small(**changes)) as host,
        mock.patch("evenload.integrations.megatron.host.layer_planner", layer_planner_of),
    ):
        plain = PlainModel(host.recipe, host)
        for number, seed in enumerate(seeds):
            data, plan = tokens(lengths, number), with_copies(planned(host, lengths, seed), number)
            if once:
                plan = plan.revised(experts=plan.experts._replace(node_ranks=2, once_topk=2))
            labels = labels_in_turn(number, lengths)
            gradients: dict[str, Any] = {}
            plain.load(host.weights())
            result = host.train_step(plan, data, lr=1e-2, labels=labels, inspect=gradients.update)
            loss, expected = plain.gradients(data, plan.lengths, labels)
            rows.append(
                {
                    "loss": compare_number(result.loss, loss, scale_of(labels, plan.lengths)),
                    "grad": max(relative_error(g, expected[name]) for name, g in gradients.items()),
                    "norm": abs(result.grad_norm / plain.norm(expected) - 1),
                    "biases": plain.update_routing(host),
                    "miscounted": miscounted(host, plain),
                    "moved": float(sum(b.abs().sum() for b in host.expert_biases().values())),
                    "names": sorted(gradients),
                    "expected": sorted(expected),
                    "branches": sorted(branches_of(plan)),
                    "copies": sum(load.copies for load in result.expert_loads),
                }
            )
        plain.close()
    return rows


def miscounted(host: Any, plain: Any) -> list[int]:
    """Layers of this stage in which the counts for the biases are not those of plain training."""
    wrong = []
    expected = {layer.number + 1: layer.loads_E for layer in plain.routers._layers}
    for router in routers(host.model):
        if router.enable_expert_bias:
            counts = router.local_tokens_per_expert.double()
            torch.distributed.all_reduce(counts, group=parallel_state.get_tensor_and_data_parallel_group())
            wrong += [router.layer_number] * (not torch.equal(counts, expected[router.layer_number]))
    return wrong


def expert_steps(
    world: Any, *, steps: int = 3, first: int = 0, read: str = "", write: str = "", **changes: Any
) -> dict[str, Any]:
    """Losses, norms and biases of some steps; ``read`` and ``write`` name checkpoints."""
    with hosted(world, **small(**changes)) as host:
        if read:
            host.load(Path(read))
        start = {name: weight.double().norm().item() for name, weight in host.weights().items()}
        plan = planned(host)
        results = [host.train_step(plan, tokens(seed=step), lr=1e-2) for step in range(first, first + steps)]
        if write:
            save_new(world, host, Path(write))
        return {
            "start": start,
            "losses": [r.loss for r in results],
            "norms": [r.grad_norm for r in results],
            "biases": {layer: bias.tolist() for layer, bias in host.expert_biases().items()},
        }


def left_alive(world: Any) -> int:
    """Layers with experts that are still there when a host that has trained was closed."""
    with hosted(world, **small(parallel__dp=2, parallel__ep=2)) as host:
        host.train_step(planned(host), tokens(), lr=1e-3)
    gc.collect()
    return sum(isinstance(one, MoELayer) for one in gc.get_objects())


def stock_reads(world: Any, *, folder: str, **changes: Any) -> dict[str, bool]:
    """Whether Megatron's own model and loader, which know nothing of a plan, get the very weights and biases."""
    from evenload.integrations.megatron.model.attention import stock_layer_spec
    from megatron.core.models.gpt.gpt_model import GPTModel

    with hosted(world, **small(**changes)) as host:
        host.load(Path(folder))
        config = host.model.config
        sizes = {"vocab_size": VOCABULARY, "max_sequence_length": 128, "share_embeddings_and_output_weights": False}
        model = GPTModel(config, stock_layer_spec(config), position_embedding_type="rope", **sizes).double()
        state = {"model": model.sharded_state_dict()}
        loaded = dist_checkpointing.load(state, folder)
        model.load_state_dict(loaded["model"])
        own = dict(host.model.named_parameters())
        same = {name: torch.equal(p, own[name]) for name, p in model.named_parameters()}
        for one, other in zip(routers(model), routers(host.model), strict=True):
            same[f"bias {one.layer_number}"] = torch.equal(one.expert_bias.float(), other.expert_bias.float())
        return same


def refused_recipes(world: Any, *, cases: list[dict[str, Any]]) -> list[str]:
    """What is said of each of some recipes."""
    return [told(lambda case=case: check_recipe(recipe(**small(**case)))) for case in cases]


def sharded_beside_home(world: Any, *, folder: str, **changes: Any) -> dict[str, Any]:
    """Two steps with updates where experts are whole and where they are cut, and what differs by a bit behind a
    checkpoint that goes from the second host to the first, and behind one that comes back."""
    common = small(**changes)
    with (
        hosted(world, **common) as home,
        hosted(world, **common | {"plugins__moe": {"enabled": True, "owners": "sharded"}}) as sharded,
        mock.patch("evenload.integrations.megatron.host.layer_planner", layer_planner_of),
    ):
        rows: dict[str, Any] = {"started": unequal(home, sharded), "losses": [], "norms": []}

        def step(number: int) -> None:
            plan = with_drawn_copies(planned(home), number)
            results = [host.train_step(plan, tokens(seed=number), lr=1e-2) for host in (home, sharded)]
            rows["losses"].append([result.loss for result in results])
            rows["norms"].append([result.grad_norm for result in results])

        for number in range(2):
            step(number)
        rows["far"] = farthest(home, sharded)
        for source, target in ((sharded, home), (home, sharded)):
            target.train_step(planned(home), tokens(seed=9), lr=1e-2)
            rows[f"before {target is home}"] = unequal(source, target)
            there = Path(folder) / str(target is home)
            save_new(world, source, there)
            target.load(there)
            rows[f"behind {target is home}"] = unequal(source, target)
        step(3)
        return rows | {"then": farthest(home, sharded)}


def unequal(one: Any, other: Any) -> list[str]:
    """Names of weights and states of optimizers that differ by a bit between two hosts."""
    weights, states = one.weights(), one.trained.optimizer_states()
    others, their_states = other.weights(), other.trained.optimizer_states()
    wrong = [name for name, weight in weights.items() if not torch.equal(weight, others[name])]
    for name, state in states.items():
        if not all(map(torch.equal, state, their_states[name])):
            wrong.append(f"state of {name}")
    return wrong + sorted(weights.keys() ^ others.keys()) + sorted(states.keys() ^ their_states.keys())


def farthest(one: Any, other: Any) -> float:
    """The largest relative difference of weights and moments between two hosts."""
    states, others = one.trained.optimizer_states(), other.trained.optimizer_states()
    return max(
        relative_error(ours, theirs)
        for name, state in states.items()
        for ours, theirs in zip(state, others[name], strict=True)
    )
