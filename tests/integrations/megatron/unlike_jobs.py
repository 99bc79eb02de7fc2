"""What ranks of unlike recipes read in Megatron's loops, and how many forwards with gradients had run; see
unmodified/test_unlike_recipes.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import evenload
import torch
from evenload.core.errors import RankError
from evenload.runtime.world import agreement
from megatron.core.models.gpt import GPTModel
from megatron_tests.form_jobs import packed_attention
from megatron_tests.user_jobs import loaded_script, recipe, user_loop
from torch.nn.modules.module import register_module_forward_pre_hook


def unlike_in_schedule(world: Any, *, plugins: list[dict[str, Any]], loop: dict[str, Any]) -> list[Any]:
    """In a loop that calls Megatron's schedule; a rank has the plugins of its place."""
    with user_loop(**loop) as user:
        return _message_of(user.step, plugins[world.rank])


def unlike_in_rows(world: Any, *, plugins: list[dict[str, Any]]) -> list[Any]:
    """In a loop that hands over TensorDicts."""
    with loaded_script("verl_script") as script, packed_attention():
        return _message_of(lambda: script.train("sft", True), plugins[world.rank])


def _message_of(step: Callable[[], Any], plugins: dict[str, Any]) -> list[Any]:
    """Of a step, as if the roll call, which compares recipes before it, had not been held."""
    trained: list[bool] = []
    count = register_module_forward_pre_hook(
        lambda module, _: trained.append(torch.is_grad_enabled()) if isinstance(module, GPTModel) else None
    )
    try:
        with evenload.enabled(recipe(**plugins)), patch.object(agreement, "before_first", None):
            step()
    except RankError as error:
        return [str(error), sum(trained)]
    finally:
        count.remove()
    return ["no error", sum(trained)]
