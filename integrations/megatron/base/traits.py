"""What planners must know of Megatron-Core. Imports neither it nor torch.

    precision  weight  gradient  master  Adam   divided over data-parallel ranks
    fp32       4       4         -       8      Adam, with the distributed optimizer
    bf16       2       4         4       8      master and Adam, likewise
    fp64       8       8         -       16     nothing

Gradients are there throughout, and are summed in float32 where weights are half precision. Read off megatron-core
0.16.1 as evenload sets it up, by the bytes alive after a step on one rank.
"""

from __future__ import annotations

from bisect import bisect_right
from itertools import accumulate

from ....core.errors import Rule
from ....core.recipe.recipe import Recipe
from ....core.recipe.sections import Megatron
from ....core.recipe.sizes import VALUE_BYTES
from ....core.recipe.stages import layers_of_each, stage_layers
from ....core.recipe.traits import LOCAL, OWN, SCRIPTS, TRANSFORMER_ENGINE, Loop, States, Trainer, TrainerTraits
from ....core.registry import LayerPlugin


def traits(recipe: Recipe) -> TrainerTraits:
    divides_tokens = recipe.megatron.sequence_parallel and recipe.parallel.tp > 1
    return traits_of(recipe.train.dtype, recipe.megatron, divides_tokens=divides_tokens)


def traits_of(dtype: str, section: Megatron, *, divides_tokens: bool) -> TrainerTraits:
    """What a precision (``train.dtype``) and the recipe's section make of Megatron-Core, and whether tensor-parallel
    ranks divide the tokens."""
    value = VALUE_BYTES[dtype]
    gradient = max(4, value)
    optimizer = 2 * gradient + (4 if dtype == "bf16" else 0)
    shards = section.distributed_optimizer and dtype != "fp64"
    return TrainerTraits(
        states=States(value + gradient + optimizer, optimizer if shards else 0),
        sharding="optimizer" if section.distributed_optimizer else "none",
        value_bytes=value,
        summed_bytes=gradient,
        overlaps_gradients=section.overlap_grad_reduce,
        waits_for_sends=True,
        dedups_per_node=True,
        divides_tokens=divides_tokens,
    )


def rules(recipe: Recipe) -> list[Rule]:
    """What is said of another trainer."""
    divided = [one for one in recipe.parallel.replicas or () if one.zero_stage is not None]
    what, do = "a replica says what DeepSpeed divides, and Megatron-Core runs", "leave zero_stage out of the replicas"
    return [(bool(divided), what, f"parallel.replicas, zero_stage of {len(divided)} of them", do)]


def run_rules(recipe: Recipe) -> list[Rule]:
    """What can be planned and not run: what Megatron-Core's MoE layers do not do, or not with the packs of a plan."""
    return [*_rules_of_sequence_parallelism(recipe), *(_rules_of_experts(recipe) if recipe.model.moe else [])]


def _rules_of_sequence_parallelism(recipe: Recipe) -> list[Rule]:
    asked, off = recipe.megatron.sequence_parallel, "set megatron.sequence_parallel=false"
    return [
        (
            asked and recipe.parallel.tp == 1,
            "sequence parallelism divides tokens among tensor-parallel ranks, and there is one",
            "megatron.sequence_parallel true, parallel.tp 1",
            f"{off}, or choose a larger parallel.tp",
        ),
        (
            asked and recipe.adapts,
            "adapters of tenants see the tokens of one rank, not all of them",
            "megatron.sequence_parallel true, tenants with adapters",
            off,
        ),
    ]


def _rules_of_experts(recipe: Recipe) -> list[Rule]:
    moe, p = recipe.model.moe, recipe.parallel
    assert moe is not None
    dense = _stages_without_experts(recipe)
    copying = [plugin.name for plugin in recipe.enabled_of(LayerPlugin)]
    return [
        *(export_rules(recipe) if recipe.train.export is not None else []),
        (
            p.tp > 1 and not recipe.megatron.sequence_parallel,
            "Megatron-Core wants sequence parallelism where experts and tensor parallelism meet",
            f"parallel.tp {p.tp}, {moe.num_experts} experts, megatron.sequence_parallel false",
            "set megatron.sequence_parallel=true, or parallel.tp=1 and parallel.ep to divide the experts",
        ),
        (
            p.tp > 1 and bool(copying),
            "experts that tensor parallelism cuts cannot be copied or cut again",
            f"parallel.tp {p.tp}, {', '.join(copying)}",
            "set parallel.tp=1, or disable it",
        ),
        (
            p.tp > 1 and bool(moe.capacity_factor),
            "an expert's capacity would be that of each tensor-parallel rank's part of the tokens",
            f"parallel.tp {p.tp}, model.moe.capacity_factor {moe.capacity_factor}",
            "set parallel.tp=1, or leave it out",
        ),
        (
            moe.dispatcher == "allgather" and (p.tp * p.pp > 1 or (p.ep > 1 and bool(recipe.enabled()))),
            "Megatron-Core's allgather dispatcher takes equally many tokens from all ranks in all micro-batches, and "
            "packs of plugins and of pipelines differ in length",
            f"model.moe.dispatcher allgather, ep {p.ep}, tp {p.tp}, pp {p.pp}, {len(recipe.enabled())} plugins",
            "set model.moe.dispatcher=alltoall",
        ),
        (
            moe.topk == 1 and moe.score == "softmax",
            "the softmax over one chosen expert is 1: its router would learn nothing, and Megatron-Core refuses it",
            "model.moe.topk 1, score softmax",
            "set model.moe.topk to 2 or more, or score=sigmoid",
        ),
        (
            p.ep > 1 and bool(dense) and recipe.train.dtype != "fp64",
            "Megatron-Core's optimizers cannot save a pipeline stage whose expert-parallel ranks have no experts",
            f"stages {dense} of {p.pp} have none, ep {p.ep}, train.dtype {recipe.train.dtype}",
            "choose parallel.pp and model.moe.every so that every stage has a layer with experts",
        ),
    ]


def export_rules(recipe: Recipe) -> list[Rule]:
    """What no family of Transformers computes, and so cannot be exported."""
    model, moe = recipe.model, recipe.model.moe
    if moe is None:
        return []
    what = f"Transformers' {model.family} is another model than this one: it cannot be exported"
    do = "train a model that Transformers has"
    return [
        (moe.shared_ffn_hidden_size > 0, what, f"model.moe.shared_ffn_hidden_size {moe.shared_ffn_hidden_size}", do),
        (moe.score != "softmax", what, f"model.moe.score {moe.score}", do),
        (model.kind.experts == "all" and moe.every > 1, what, f"model.moe.every {moe.every}", do),
    ]


def _stages_without_experts(recipe: Recipe) -> list[int]:
    ends = list(accumulate(layers_of_each(recipe.model, recipe.parallel)))
    with_experts = {bisect_right(ends, layer) for layer in recipe.model.moe_layers}
    return [stage for stage in range(recipe.parallel.pp) if stage not in with_experts]


def layers_of_stages(layers: tuple[int, ...]) -> str:
    """Megatron's layout of a pipeline with so many layers in each stage: E(mbedding), t(ransformer layer), L(oss)."""
    return f"E{'|'.join(f't*{own}' for own in layers)}L"


def flags(recipe: Recipe) -> tuple[str, ...]:
    """The recipe's layout as flags of Megatron-LM's scripts."""
    p, train = recipe.parallel, recipe.train
    degrees = {"tensor-model-parallel-size": p.tp, "pipeline-model-parallel-size": p.pp}
    degrees |= {"context-parallel-size": p.cp, "expert-model-parallel-size": p.ep}
    words = [f"--{name} {size}" for name, size in degrees.items() if size > 1]
    if layers := stage_layers(recipe.model, p):
        words.append(f"--pipeline-model-parallel-layout '{layers_of_stages(layers)}'")
    words += ["--use-distributed-optimizer"] if recipe.megatron.distributed_optimizer else []
    words += ["--overlap-grad-reduce"] if recipe.megatron.overlap_grad_reduce else []
    words += ["--sequence-parallel"] if recipe.megatron.sequence_parallel and p.tp > 1 else []
    recompute = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    words += [recompute] if train.recompute else []
    return ("Megatron-LM: " + " ".join(words + ["--bf16"] * (train.dtype == "bf16")),)


MEGATRON = Trainer(
    traits,
    rules=rules,
    run_rules=run_rules,
    packages=("megatron-core",),
    beside=("transformers", "tensorboard"),
    host="evenload.integrations.megatron",
    reshards=True,
    gradient_errors={"fp64": 1e-9, "fp32": 2e-5},
    loops=(
        Loop("evenload train, Megatron-Core", OWN, stages="", specs=(LOCAL,)),
        Loop("Megatron-LM, Megatron-Core loops", SCRIPTS, stages="", specs=(LOCAL, TRANSFORMER_ENGINE)),
    ),
    first_imports=("megatron.core",),
    planned_where="call the function that get_forward_backward_func() returns, with forward_only=False",
    patches=("evenload.patches.ranks", "evenload.patches.megatron"),
    mends=("evenload.patches.megatron_fixes",),
    tries={"megatron.overlap_grad_reduce": (False, True), "megatron.sequence_parallel": (False, True)},
    says=flags,
    sums_over_replicas=True,
    bridges_cpu=True,
)
