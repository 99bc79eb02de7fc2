"""Megatron-LM's flags to the configs that a training loop gets, and evenload's guards asked about them.

Importing this needs Megatron-Core; the argument parser comes from a checkout. What a GPU machine has and this one may
not is named by stand-ins that are never called: Transformer Engine's version and fused functions, a device.
"""

from __future__ import annotations

import os
import re
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from functional_tests import OF_GPT, FunctionalTest, Verdict, words, world_size

ROOT = Path(__file__).resolve().parents[2]
VARIABLES = ("CUDA_DEVICE_MAX_CONNECTIONS", "NCCL_ALGO", "NVTE_ALLOW_NONDETERMINISTIC_ALGO", "CUBLAS_WORKSPACE_CONFIG")
"""Which upstream's parser compares with flags."""
TE_VERSION = "2.9.0"
NAMED = {
    "megatron.core.models.common.embeddings.rope_utils": ("fused_apply_rotary_pos_emb",),
    "megatron.core.transformer.moe.moe_utils": (
        "fused_permute",
        "fused_permute_with_probs",
        "fused_unpermute",
        "fused_sort_chunks_by_index",
        "fused_sort_chunks_by_index_with_probs",
    ),
}
"""What configs ask for before they allow a fusion."""


class Guards:
    """evenload's guards over the flags of a checkout's recipes.

    Args:
        checkout: a folder of Megatron-LM, whose packages come first from now on.
        folder: where nothing is written, but the startup file of the hosts wants one.
    """

    def __init__(self, checkout: Path, folder: Path) -> None:
        os.environ["HOSTS_MEGATRON"] = str(folder)
        sys.path[:0] = [str(checkout), str(ROOT / "tests" / "hosts" / "startup")]
        import megatron_lm  # noqa: F401
        from evenload.api import load_plugins
        from evenload.patches import bridge_cpu

        load_plugins()
        bridge_cpu()
        _name_transformer_engine()
        import megatron.training.arguments as arguments

        self._arguments: Any = arguments
        self._capability = 9
        arguments.get_device_arch_version = lambda: self._capability

    def verdict(self, recipe: FunctionalTest) -> Verdict:
        """What happens to the recipe before its first step."""
        answer = self._asked(recipe)
        return Verdict(recipe.name, recipe.kind, *answer)

    def _asked(self, recipe: FunctionalTest) -> tuple[str, str, str]:
        if recipe.mode == "inference":
            return "alone", "inference: no training call", ""
        if recipe.mode == "rl":
            return "refused", "batches of other keys: samples of train_rl.py belong together", "train_rl.py"
        if recipe.kind not in OF_GPT:
            return "refused", "evenload packs the batches of Megatron-Core's GPTModel", recipe.kind
        try:
            arguments = self._parsed(recipe)
            config = self._arguments.core_transformer_config_from_args(arguments)
        except (Exception, SystemExit) as error:
            place = traceback.extract_tb(error.__traceback__)[-1]
            return "no parse", str(error) or f"{Path(place.filename).name}:{place.lineno}", place.line or ""
        return of_loop(config, arguments)

    def _parsed(self, recipe: FunctionalTest) -> Any:
        for name in VARIABLES:
            os.environ.pop(name, None)
            if name in recipe.variables:
                os.environ[name] = recipe.variables[name]
        os.environ["WORLD_SIZE"] = str(world_size(recipe.flags))
        self._capability = 10 if re.search(r"b_?200", recipe.name) else 9
        sys.argv = ["pretrain_gpt.py", *words(recipe.flags)]
        parsed = self._arguments.parse_args(ignore_unknown_args=True)
        self._arguments.validate_args(parsed)
        return parsed


def of_loop(config: Any, arguments: Any) -> tuple[str, str, str]:
    """The answer of the guards to a loop with these configs."""
    from evenload.core.errors import EvenloadError, refuse_first
    from evenload.integrations.megatron.unmodified.refusals.layers import rules_of_layer, why_together, why_whole
    from evenload.integrations.megatron.unmodified.refusals.supported import refuse_loop, why_stock

    loop = chunk(config, arguments)
    if why := why_together(config):
        return together(loop, config, why)
    try:
        refuse_loop(loop, {})
        refuse_first(*rules_of_layer(layer(config), arguments.transformer_impl == "local"))
    except EvenloadError as error:
        return "refused", error.what, error.found
    trouble = why_stock([loop] * (config.virtual_pipeline_model_parallel_size or 1), "")
    if trouble:
        return "whole", trouble[0], trouble[1]
    attention = layer(config)
    if why := why_whole(SimpleNamespace(config=config, modules=lambda: [attention]), shares=False):
        return "whole", why, ""
    return "cut", "", ""


def together(loop: Any, config: Any, why: str) -> tuple[str, str, str]:
    """The answer to a loop whose micro-batches stay as they are: what a plugin can do (`FixedMicroBatchLoop`)."""
    from evenload.core.errors import EvenloadError
    from evenload.integrations.megatron.unmodified.planning.fixed_micro_batches import _IN_TURN
    from evenload.integrations.megatron.unmodified.refusals.layers import refuse_experts
    from evenload.integrations.megatron.unmodified.refusals.supported import why_stock

    one_chunk = (config.virtual_pipeline_model_parallel_size or 1) == config.context_parallel_size == 1
    in_order = one_chunk and config.pipeline_model_parallel_size > 1 and not why.startswith(_IN_TURN)
    if in_order and why_stock([loop], "") is None:
        return "together", f"{why}; plugins.pipeline can plan", ""
    try:
        refuse_experts(SimpleNamespace(config=config, decoder=SimpleNamespace(layers=[])))
    except EvenloadError as error:
        return "idle", why, error.found
    if config.expert_model_parallel_size > 1 and not config.moe_grouped_gemm:
        return "together", f"{why}; plugins.moe can plan", ""
    return "idle", why, "no plugin has anything to do"


def chunk(config: Any, arguments: Any) -> Any:
    """A model's wrapper as the guards look at it: its kind, its configs, and no weights."""
    from megatron.core.distributed import DistributedDataParallel

    overlap = bool(arguments.overlap_grad_reduce)
    if overlap:
        config.no_sync_func = SimpleNamespace  # megatron.training gives the model's own
    ddp_config = SimpleNamespace(overlap_grad_reduce=overlap)
    if arguments.use_megatron_fsdp or arguments.use_torch_fsdp2:
        return SimpleNamespace(config=config, ddp_config=ddp_config)
    wrapper = DistributedDataParallel.__new__(DistributedDataParallel)
    vars(wrapper).update(config=config, ddp_config=ddp_config)
    return wrapper


def layer(config: Any) -> Any:
    """Self-attention as the layer specs of GPT make it."""
    from megatron.core.transformer.enums import AttnMaskType

    # That of Megatron's own, where dropout is a setting of the module, has the same value.
    core = SimpleNamespace(scale_mask_softmax=SimpleNamespace(window_size=config.window_size))
    return SimpleNamespace(
        config=config, attention_type="self", attn_mask_type=AttnMaskType.causal, core_attention=core
    )


def _name_transformer_engine() -> None:
    from importlib import import_module

    import megatron.core.utils as utils
    from packaging.version import Version

    if utils.get_te_version() is None:
        utils._te_version = Version(TE_VERSION)
    for module, names in NAMED.items():
        loaded: ModuleType = import_module(module)
        for name in names:
            if getattr(loaded, name, None) is None:
                setattr(loaded, name, _never)


def _never(*_: Any, **__: Any) -> Callable[..., Any]:
    raise RuntimeError("this survey runs no model")
