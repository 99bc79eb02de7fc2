"""What `evenload audit` watches in a script, as rows; `plugins.audit.audit` judges what is seen.

They go on instead of all others, and for an audit alone.
"""

from __future__ import annotations

from ...core.recipe.recipe import Recipe
from ...integrations.host.versions import requirement
from ...patches.row import Patch, from_module

BORDER = "PYTHON_EVENLOAD_BORDER"
"""Set to the token that ends a sample."""


def rows(recipe: Recipe | None = None) -> tuple[Patch, ...]:
    """The rows; ``recipe`` says what passes cost, and without one they only describe themselves."""
    return (
        Patch(
            name="audit.models",
            target="transformers.modeling_utils:PreTrainedModel.__init__",
            supports=requirement("transformers"),
            why="Every Hugging Face model comes into being there, whatever trains or wraps it later: it gets hooks "
            "that look at its training forwards and their gradients and change neither.",
            wrapper=from_module("evenload.plugins.audit.audit:start_model", recipe),
            expects=("config",),
        ),
        Patch(
            name="audit.batches",
            target="torch.utils.data.dataloader:DataLoader.__init__",
            supports=requirement("torch"),
            why="A collator knows the samples that a batch holds, which the batch need not say. It runs in the "
            "script's process, where it is seen, and gives what it gives.",
            wrapper=from_module("evenload.plugins.audit.watched:start_loader"),
            expects=("collate_fn", "num_workers"),
        ),
    )
