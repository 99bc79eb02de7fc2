"""What planners must know of DeepSpeed, and what it cannot run. Imports neither it nor torch.

    precision / ZeRO stage  weight  gradient  master  Adam   divided over data-parallel ranks
    fp32 / 0                4       4 late    -       8      nothing
    fp32 / 1, 2             4       4 late    4       8      master and Adam
    fp32 / 3                4       4         4       8      all
    bf16 / 0                2       2 late    4       8      nothing
    bf16 / 1, 2             2       2 late    4       8      master and Adam
    bf16 / 3                2       2         4       8      all

"Late" gradients are made in a step's first backward and freed with the update, the others are there throughout; they
are summed in the precision of the weights. Read off DeepSpeed 0.19 as evenload sets it up, by the bytes alive after a
step on one rank.
"""

from __future__ import annotations

from typing import Any

from ....core.errors import Rule
from ....core.input.format import to_json
from ....core.recipe.families import families_with
from ....core.recipe.recipe import Recipe
from ....core.recipe.sizes import VALUE_BYTES, shape_of
from ....core.recipe.traits import OWN, SCRIPTS, Loop, States, Trainer, TrainerTraits

LIVE_WEIGHTS = 1_000_000_000
"""DeepSpeed's stage3_max_live_parameters."""


def traits(recipe: Recipe) -> TrainerTraits:
    return traits_of(recipe.deepspeed.zero_stage, recipe.train.dtype)


def traits_of(stage: int, dtype: str) -> TrainerTraits:
    """What a ZeRO stage and a precision (``train.dtype``) make of DeepSpeed."""
    value = VALUE_BYTES[dtype]
    return TrainerTraits(
        states=_states(stage, value, dtype),
        sharding="parameters" if stage == 3 else "optimizer" if stage else "none",
        value_bytes=value,
        summed_bytes=value,
        all_in_step=stage == 3,
        fewest_stages_that_split=2,
    )


def _states(stage: int, value: int, dtype: str) -> States:
    adam = 2 * max(4, value)
    if stage == 3:
        everything = value + value + 4 + adam
        return States(everything, everything, gathered=value, most_gathered=LIVE_WEIGHTS)
    master = 4 if dtype == "bf16" or stage else 0
    return States(value + master + adam, master + adam if stage else 0, late=value)


def rules(recipe: Recipe) -> list[Rule]:
    """The rules of recipes that DeepSpeed cannot run."""
    p, stage, dtype = recipe.parallel, recipe.deepspeed.zero_stage, recipe.train.dtype
    piped = p.pp > 1
    return [
        (
            recipe.sharded_experts,
            "experts are cut over their group in trainer megatron alone",
            "plugins.moe.owners sharded",
            "set plugins.moe.owners=home, or use trainer: megatron",
        ),
        *_rules_of_experts(recipe),
        (
            recipe.checkpoint.background,
            "checkpoints of trainer deepspeed are written in the foreground: DeepSpeed's decoupled engine compiles its "
            "writer at the first start and commits files in the next step",
            "checkpoint.background true",
            "set checkpoint.background=false, or use trainer: megatron",
        ),
        (
            p.ep > 1 and stage == 0 and dtype == "bf16",
            "DeepSpeed's bfloat16 under ZeRO 0 does not know divided experts",
            f"train.dtype bf16, deepspeed.zero_stage 0, parallel.ep {p.ep}",
            "set deepspeed.zero_stage=1, or train.dtype=fp32",
        ),
        (
            p.ep > 1 and bool(recipe.train.freeze),
            "train.freeze does not go with experts that are divided, which have names of their own",
            f"train.freeze {', '.join(recipe.train.freeze)}; parallel.ep {p.ep}",
            "set parallel.ep=1, use trainer: megatron, or leave train.freeze out",
        ),
        (
            p.tp > 1,
            "trainer deepspeed runs without tensor parallelism here",
            f"parallel.tp {p.tp}",
            "set parallel.tp=1, or use trainer: megatron",
        ),
        (
            piped and stage > 1,
            "DeepSpeed's pipelines run under ZeRO 0 and 1",
            f"deepspeed.zero_stage {stage}, parallel.pp {p.pp}",
            "set deepspeed.zero_stage=1 (gradients and weights of a stage then stay whole), or parallel.pp=1",
        ),
        (
            piped and stage == 0 and dtype == "bf16",
            "DeepSpeed's pipelines cannot load what they save in bfloat16 under ZeRO 0",
            f"train.dtype bf16, deepspeed.zero_stage 0, parallel.pp {p.pp}",
            "set deepspeed.zero_stage=1, or train.dtype=fp32",
        ),
        (
            dtype == "fp64",
            "DeepSpeed's engine cannot train in float64",
            "train.dtype fp64",
            "use fp32, or trainer: megatron for float64 proofs",
        ),
    ]


_UNKNOWN = (
    *("score", "shared_ffn_hidden_size", "bias_rate", "dispatcher"),
    *("z_loss", "sequence_aux_loss", "batch_aux_loss", "capacity_factor"),
)
"""Fields of ``model.moe`` of which Transformers' experts do what their default says, and nothing else."""


def _rules_of_experts(recipe: Recipe) -> list[Rule]:
    """What the blocks of Transformers and DeepSpeed's AutoEP cannot do with ``model.moe``."""
    model, moe, ep = recipe.model, recipe.model.moe, recipe.parallel.ep
    if model.config is not None and ep > 1:
        experts = shape_of(model).experts
        number = experts.num_experts if experts else 0
        what = "parallel.ep does not divide the experts of model.config"
        return [(not number or number % ep != 0, what, f"{number} experts, ep {ep}", "choose an ep that divides them")]
    if moe is None:
        return []
    megatron = "use trainer: megatron, or "
    any_layer = families_with(lambda family: family.experts == "some")
    plain = {name: type(moe).model_fields[name].default for name in _UNKNOWN}
    return [
        *(
            (
                getattr(moe, name) != default,
                f"the experts of trainer deepspeed know no model.moe.{name}",
                f"model.moe.{name} {getattr(moe, name)}",
                f"{megatron}set it to {default}",
            )
            for name, default in plain.items()
        ),
        (
            model.kind.experts == "all" and moe.every > 1,
            f"every layer of Transformers' {model.family} has experts",
            f"model.moe.every {moe.every}",
            f"{megatron}set model.family={' or '.join(any_layer)}",
        ),
        (
            recipe.parallel.pp > 1,
            "pipelines of trainer deepspeed run dense models alone",
            f"parallel.pp {recipe.parallel.pp}, model.moe set",
            f"{megatron}set parallel.pp=1",
        ),
    ]


def config_line(recipe: Recipe) -> tuple[str, ...]:
    """The recipe's shards and precision as a ds_config says them."""
    config: dict[str, Any] = {"zero_optimization": {"stage": recipe.deepspeed.zero_stage}}
    config |= {"bf16": {"enabled": True}} if recipe.train.dtype == "bf16" else {}
    return (f"ds_config: {to_json(config)}",)


DEEPSPEED = Trainer(
    traits,
    rules,
    runs_any_model=True,
    packages=("deepspeed", "transformers"),
    beside=("tensorboard",),
    host="evenload.integrations.deepspeed",
    gradient_errors={"fp32": 2e-6},
    loops=(
        Loop("evenload train, DeepSpeed", OWN, stages=", ZeRO 0, 1"),
        Loop("deepspeed.initialize", SCRIPTS, cuts=False),
    ),
    first_imports=("deepspeed", "transformers", "accelerate"),
    planned_where="give deepspeed.initialize the data set as training_data=, or, where it trains by Hugging Face's "
    "Trainer, write trainer: transformers into the recipe",
    # Scripts of Transformers' Trainer run on DeepSpeed's engine too.
    patches=("evenload.patches.ranks", "evenload.patches.deepspeed", "evenload.patches.transformers"),
    patched_always=True,
    tries={"deepspeed.zero_stage": (0, 1, 2, 3)},
    says=config_line,
)
