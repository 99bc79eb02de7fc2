"""Combinations that no trainer can run, found before any rank starts."""

from __future__ import annotations

from typing import Any

from .. import registry
from ..errors import EvenloadError, Rule, refuse_first
from ..registry import DataPlugin, LayerPlugin, StepPlugin
from .families import families_with
from .policies import rules_of_policies
from .sections import REPLACED, Model, Parallel, Train
from .shares import rules_of_mixture
from .sizes import shape_of
from .sparse import rules_of_sparse
from .traits import trainer_called


def refuse_impossible(recipe: Any) -> None:
    """Raise EvenloadError with the first rule that a `recipe.Recipe` breaks, plugin clashes first."""
    model: Model = recipe.model
    p: Parallel = recipe.parallel
    registry.refuse_clashes(plugin.name for plugin in recipe.enabled())
    sharing = recipe.deciding("shares")
    refuse_first(
        (
            p.cp > 1 and bool(sharing),
            f"parallel.cp and plugins.{sharing} both say how many ranks share a sequence",
            f"parallel.cp {p.cp}",
            "set parallel.cp=1 and give its ranks to parallel.dp, or disable the plugin",
        ),
        (
            model.head_dim is None and model.hidden_size % model.num_attention_heads != 0,
            "model.num_attention_heads does not divide model.hidden_size",
            f"{model.num_attention_heads} heads, hidden size {model.hidden_size}",
            "choose a number of heads that divides the hidden size, or set model.head_dim",
        ),
        (
            model.num_attention_heads % model.kv_heads != 0,
            "model.num_query_groups does not divide model.num_attention_heads",
            f"{model.kv_heads} groups, {model.num_attention_heads} heads",
            "choose a number of groups that divides the number of heads",
        ),
        (
            model.num_attention_heads % p.tp != 0 or model.kv_heads % p.tp != 0,
            "parallel.tp does not divide the attention heads",
            f"tp {p.tp}, {model.num_attention_heads} heads in {model.kv_heads} query groups",
            "choose a tp that divides both",
        ),
        (
            model.ffn_size % p.tp != 0,
            "parallel.tp does not divide model.ffn_hidden_size",
            f"tp {p.tp}, ffn_hidden_size {model.ffn_size}",
            "choose a tp that divides it",
        ),
        *_rules_of_layers(recipe),
        *_rules_of_v_shape(recipe),
        *_rules_of_extent(recipe.train),
        *_rules_of_experts(recipe),
        *_rules_of_copies(recipe),
        *_rules_of_freeze(recipe),
        *_rules_of_adapters(recipe),
        *_rules_of_replicas(recipe),
        *trainer_called(recipe.trainer).rules(recipe),
        *_rules_of_data(recipe),
        *_rules_of_best(recipe),
        *rules_of_sparse(recipe),
    )
    if p.replicas:
        _ = recipe.of_replicas
    elif not recipe.adapts:
        refuse_idle_ranks(recipe.train, p.dp or 1)
    validation, collect = recipe.data.validation, recipe.generate.collect
    for scored in (validation and validation.generate, collect and collect.prune):
        _ = scored and scored.bands  # refuses what is none


def _rules_of_layers(recipe: Any) -> list[Rule]:
    """What numbers of layers by stage need."""
    p = recipe.parallel
    if p.layers is None:
        layers = recipe.model.num_layers
        return [
            (
                layers % p.pp != 0,
                "parallel.pp does not divide model.num_layers",
                f"pp {p.pp}, {layers} layers",
                "choose a pp that divides the number of layers, or set parallel.layers=auto",
            )
        ]
    total = shape_of(recipe.model).num_layers
    layers = (1,) * p.pp if p.layers == "auto" else p.layers
    said = f"parallel.layers {p.layers if p.layers == 'auto' else list(p.layers)}"
    what = "parallel.layers does not say the layers of every stage"
    return [
        (
            p.pp == 1,
            "parallel.layers divides the layers among pipeline stages, and there are none",
            f"{said}, parallel.pp 1",
            "raise parallel.pp, or leave parallel.layers out",
        ),
        (
            recipe.v_shape,
            "parallel.layers does not go with two stages on each device",
            f"{said}, plugins.pipeline.v_shape true",
            "set plugins.pipeline.v_shape=false, or leave parallel.layers out",
        ),
        (len(layers) != p.pp, what, f"{said}, parallel.pp {p.pp}", f"give {p.pp} numbers, or auto"),
        (
            p.layers == "auto" and total < p.pp,
            "there are fewer layers than stages",
            f"{total} layers, parallel.pp {p.pp}",
            "lower parallel.pp",
        ),
        (
            p.layers != "auto" and sum(layers) != total,
            "parallel.layers does not add up to model.num_layers",
            f"{said} are {sum(layers)}, model.num_layers {total}",
            f"give numbers that add up to {total}, or auto",
        ),
    ]


def _rules_of_v_shape(recipe: Any) -> list[Rule]:
    """What two stages a device need, and what they do not go with yet."""
    p, layers, parts = recipe.parallel, recipe.model.num_layers, 2 * recipe.parallel.pp
    if not recipe.v_shape:
        return []
    other = recipe.deciding("shares") or recipe.adapting
    what, do = "does not go with two stages on each device", "set plugins.pipeline.v_shape=false"
    return [
        (
            p.pp == 1,
            "a V of pipeline stages needs two devices or more",
            "plugins.pipeline.v_shape true, parallel.pp 1",
            "raise parallel.pp, or set plugins.pipeline.v_shape=false",
        ),
        (
            layers % parts != 0,
            "two stages on each device do not divide model.num_layers",
            f"plugins.pipeline.v_shape true, parallel.pp {p.pp}, {layers} layers",
            f"choose a number of layers that {parts} divides, another parallel.pp, or v_shape=false",
        ),
        (p.ep > 1, f"parallel.ep {what}", f"parallel.ep {p.ep}, plugins.pipeline.v_shape true", do),
        (p.cp > 1, f"parallel.cp {what}", f"parallel.cp {p.cp}, plugins.pipeline.v_shape true", do),
        (bool(other), f"plugins.{other} {what}", f"plugins.{other}.enabled true, plugins.pipeline.v_shape true", do),
    ]


def _rules_of_extent(train: Train) -> list[Rule]:
    rules: list[Rule] = []
    for name, others in REPLACED.items():
        said = [key for key in (name, *others) if key in train.model_fields_set and getattr(train, key) is not None]
        what = f"{' and '.join(f'train.{key}' for key in said)} say the same thing twice"
        detail = ", ".join(f"{key} {getattr(train, key)}" for key in said)
        rules.append((len(said) > 1, what, detail, f"keep one of them, e.g. with train.{name}=null"))
    return rules


def _rules_of_data(recipe: Any) -> list[Rule]:
    least, most = recipe.data.min_length, recipe.data.max_length
    what, do = "data.min_length is larger than data.max_length", "lower data.min_length"
    return [(least > most, what, f"{least} > {most}", do), *rules_of_mixture(recipe), *rules_of_policies(recipe)]


def _rules_of_best(recipe: Any) -> list[Rule]:
    wanted = recipe.checkpoint.best is not False
    what = "checkpoint.best keeps the checkpoint of the lowest validation loss"
    return [
        (wanted and recipe.data.validation is None, what, "data.validation null", "set data.validation.source"),
        (wanted and recipe.checkpoint.dir is None, what, "checkpoint.dir null", "set checkpoint.dir"),
    ]


def _rules_of_experts(recipe: Any) -> list[Rule]:
    model, p, moe = recipe.model, recipe.parallel, recipe.model.moe
    has_config = model.config is not None
    with_experts = families_with(lambda family: family.experts != "none")
    wants = model.family in with_experts
    rules: list[Rule] = [
        (
            wants and moe is None and not has_config,
            f"model.family {model.family} has experts, and model.moe is null",
            "model.moe null",
            "set model.moe, e.g. {num_experts: 8, topk: 2}, or choose a dense family",
        ),
        (
            p.ep > 1 and moe is None and not has_config,
            "parallel.ep divides experts, and this model has none",
            f"parallel.ep {p.ep}",
            "set model.moe, or parallel.ep=1",
        ),
    ]
    if moe is None:
        return rules
    regroups = next((plugin.name for plugin in recipe.enabled_of(StepPlugin)), "")
    depends = {"model.moe.batch_aux_loss": moe.batch_aux_loss, "model.moe.capacity_factor": moe.capacity_factor}
    depending = next((name for name, value in depends.items() if value), "")
    return [
        *rules,
        (
            not wants or has_config,
            f"model.moe belongs to the families {' and '.join(with_experts)}",
            f"model.family {model.family}" + (f", model.config {model.config}" if has_config else ""),
            "choose one of these families (without model.config), or leave model.moe out",
        ),
        (
            moe.num_experts % p.ep != 0,
            "parallel.ep does not divide the experts",
            f"{moe.num_experts} experts, ep {p.ep}",
            "choose an ep that divides model.moe.num_experts",
        ),
        (
            moe.topk > moe.num_experts,
            "a token cannot go to more experts than there are",
            f"topk {moe.topk}, {moe.num_experts} experts",
            "lower model.moe.topk",
        ),
        (
            moe.bias_rate > 0 and moe.score != "sigmoid",
            "the bias of experts is for sigmoid scores",
            f"model.moe.bias_rate {moe.bias_rate}, score {moe.score}",
            "set model.moe.score=sigmoid, or bias_rate=0",
        ),
        (
            bool(depending) and bool(regroups),
            f"{depending} depends on which samples are in a micro-batch, and plugins.{regroups} regroups them",
            f"{depending} {depends.get(depending, 0)}",
            "set it to 0 (model.moe.sequence_aux_loss and bias_rate balance experts and depend on no plan), or disable "
            "the plugin",
        ),
    ]


def _rules_of_freeze(recipe: Any) -> list[Rule]:
    """Where parameters are pieces of others, patterns of their names cannot find them."""
    what = "train.freeze does not go with experts that are cut over their group"
    detail = f"train.freeze {', '.join(recipe.train.freeze)}; an owner of experts that is sharded"
    do = "set plugins.moe.owners=home, or leave train.freeze out"
    return [(bool(recipe.train.freeze) and recipe.sharded_experts, what, detail, do)]


def _rules_of_adapters(recipe: Any) -> list[Rule]:
    """What a frozen base and adapters on it do not go with."""
    name, model, p = recipe.adapting, recipe.model, recipe.parallel
    if not name:
        return []
    has_experts = shape_of(model).experts is not None
    of_model = f"model.config {model.config}" if model.config else f"model.family {model.family}"
    beside = f"plugins.{name}.enabled true"
    return [
        (
            has_experts,
            f"plugins.{name} adapts the linear layers of dense models: experts have no adapters",
            of_model,
            f"choose a dense model, or disable plugins.{name}",
        ),
        (
            p.ep > 1,
            f"plugins.{name} does not go with divided experts",
            f"parallel.ep {p.ep}",
            f"set parallel.ep=1, or disable plugins.{name}",
        ),
        (
            bool(recipe.train.freeze),
            f"plugins.{name} freezes the whole model already",
            f"train.freeze {', '.join(recipe.train.freeze)}",
            "leave train.freeze out; a tenant's adapter.target_modules says what is adapted",
        ),
        (
            p.cp > 1,
            f"plugins.{name} does not go with static context parallelism",
            f"parallel.cp {p.cp}, {beside}",
            "set parallel.cp=1 and give its ranks to parallel.dp; plugins.mesh shares long sequences",
        ),
        (
            recipe.data.group is not None,
            f"samples of tenants are in no groups, and plugins.{name} trains tenants",
            f"data.group {recipe.data.group}",
            f"leave data.group out, or disable plugins.{name}",
        ),
    ]


def _rules_of_replicas(recipe: Any) -> list[Rule]:
    """What replicas of unlike shapes do not go with."""
    p: Parallel = recipe.parallel
    if p.replicas is None:
        return []
    said = {key: getattr(p, key) for key in type(p).model_fields if key != "replicas"}
    more = [f"parallel.{key} {value}" for key, value in said.items() if value != getattr(Parallel(), key)]
    return [
        (not p.replicas, "parallel.replicas names no replica", "an empty list", "name at least one, such as {tp: 2}"),
        (
            bool(more),
            "parallel.replicas gives the degrees of each replica, and parallel gives others",
            ", ".join(more),
            "leave them out, or write them into the replicas",
        ),
        (
            not recipe.adapts and not trainer_called(recipe.trainer).sums_over_replicas,
            "replicas of a whole model exchange its gradients, which this trainer keeps to itself",
            f"trainer {recipe.trainer}, parallel.replicas of {len(p.replicas)}",
            "choose a trainer that sums them, train adapters of tenants, or give parallel.tp, pp and dp instead",
        ),
        (
            bool(recipe.model.moe and recipe.model.moe.bias_rate),
            "the bias of experts follows the loads of all replicas, of which each knows its own",
            f"model.moe.bias_rate {recipe.model.moe.bias_rate if recipe.model.moe else 0}, {len(p.replicas)} replicas",
            "set model.moe.bias_rate=0, or give parallel.tp, pp and dp instead",
        ),
    ]


def refuse_in_loops(recipe: Any) -> None:
    """Raise EvenloadError where a training loop that is not ours is to train adapters of tenants, a model or experts
    that only ours lays out, or batches that only ours draws."""
    name = recipe.adapting
    drawing = next((plugin.name for plugin in recipe.enabled_of(DataPlugin)), "")
    refuse_first(
        (
            bool(name),
            f"plugins.{name} has no place in a training loop of your own, which has one model, one data set and one "
            "optimizer",
            f"plugins.{name}.enabled true",
            f"train tenants with `evenload train`, or set plugins.{name}.enabled=false",
        ),
        (
            bool(drawing),
            f"plugins.{drawing} says what is drawn, and a training loop of your own draws by itself",
            f"plugins.{drawing}.enabled true",
            f"train the recipe with `evenload train`, or set plugins.{drawing}.enabled=false",
        ),
        (
            recipe.v_shape,
            "two stages on each device are laid out by `evenload train` alone, and in no training loop of your own",
            "plugins.pipeline.v_shape true",
            "set plugins.pipeline.v_shape=false, or train the recipe with `evenload train`",
        ),
        (
            recipe.sharded_experts,
            "experts of a training loop of your own stay whole, where its model has them",
            "plugins.moe.owners sharded",
            "set plugins.moe.owners=home, or train with `evenload train`",
        ),
    )


def _rules_of_copies(recipe: Any) -> list[Rule]:
    moe, ep = recipe.model.moe, recipe.parallel.ep
    copies = next((plugin.name for plugin in recipe.enabled_of(LayerPlugin)), "")
    return [
        (
            bool(copies) and moe is not None and moe.dispatcher == "allgather" and ep > 1,
            f"plugins.{copies} gives ranks copies of experts, which the allgather dispatcher cannot reach",
            f"model.moe.dispatcher allgather, ep {ep}",
            "set model.moe.dispatcher=alltoall, or disable the plugin",
        ),
        (
            ep == 1 and recipe.sharded_experts,
            "experts are cut over the ranks of a group, and here each rank is a group of its own",
            f"plugins.{copies}.owners sharded, parallel.ep 1",
            f"set parallel.ep to two or more, or plugins.{copies}.owners=home",
        ),
    ]


def refuse_idle_ranks(train: Train, dp: int) -> None:
    """Raise EvenloadError for global batches of fewer samples than data-parallel ranks, given or of the world."""
    samples = train.global_batch_size
    if samples < dp and train.global_batch_tokens is None:
        raise EvenloadError(
            "train.global_batch_size is smaller than the number of data-parallel ranks",
            f"{samples} samples, {dp} ranks",
            "raise it, or lower parallel.dp or --nproc",
        )
