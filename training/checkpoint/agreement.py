"""Whether an exported folder says what the trainer says: the next token after some prompts, by both."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...core.errors import RankError
from ...core.plan.step_plan import as_lengths
from ...core.planning.forward_only import forward_only
from ...data.sources import Source
from ...runtime.world.agreement import from_first
from ..job import Job, logger

Agreement = dict[str, Any]
"""``prompts``, ``equal`` of them, and ``largest_difference`` of a logit in float32."""


def next_token_agreement(job: Job, folder: Path, prompts: int) -> Agreement:
    """Compare the next token of some prompts of the validation data, or of the data, with Transformers'. Collective.

    Rank 0 opens the whole folder, in float32. A prompt is what stands before a sample's first target; of a sample that
    is all targets, its first half. Raises RankError where Transformers cannot open the folder.
    """
    samples = list(_prompts(job.held_out or job.source, prompts))
    plan = forward_only(job.chain).plan(as_lengths(np.array([len(tokens) for tokens in samples])))
    with job.watchdog.working("comparing next tokens"):
        ours = job.host.logits(plan, lambda index: samples[index])
        result: Agreement = from_first(lambda: _compared(folder, samples, ours))
    logger.info(
        "next tokens of %d of %d prompts are those of Transformers (logits within %.1e)",
        result["equal"],
        result["prompts"],
        result["largest_difference"],
    )
    return result


def _prompts(source: Source, count: int) -> Iterator[NDArray[np.int64]]:
    """Token ids of some prompts, of two tokens at least."""
    for number in range(len(source.lengths)):
        tokens = source.tokens(number)
        labels = source.labels(number) if source.targets is not None else None
        targets = np.flatnonzero(labels >= 0) if labels is not None else np.zeros(0, dtype=np.int64)
        size = int(targets[0]) if len(targets) else len(tokens) // 2
        if size > 1:
            yield tokens[:size]
            count -= 1
        if not count:
            return


@torch.no_grad()
def _compared(folder: Path, samples: list[NDArray[np.int64]], ours: Any) -> Agreement:
    import transformers

    transformers.utils.logging.disable_progress_bar()

    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    except Exception as error:  # each model and each file fails in its own manner
        raise RankError("Transformers cannot open the exported folder", f"{error}", "report the folder") from error
    equal, largest = 0, 0.0
    for number, tokens in enumerate(samples):
        theirs: Tensor = model(torch.from_numpy(tokens)[None]).logits[0, -1]
        last = ours[number][-1].float()
        equal += int(theirs.argmax() == last.argmax())
        largest = max(largest, float((theirs - last).abs().max()))
    return {"prompts": len(samples), "equal": equal, "largest_difference": largest}
