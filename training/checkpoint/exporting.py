"""The trained model as a Hugging Face folder, written by rank 0 while all ranks gather it tensor by tensor; and whether
the folder says what the trainer says: the next token after some prompts, by both."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...core.errors import EvenloadError, RankError
from ...core.input.format import mib
from ...core.plan.step_plan import as_lengths
from ...core.planning.forward_only import forward_only
from ...core.recipe.recipe import Recipe
from ...data.sources import Source
from ...integrations.host.host import Host
from ...integrations.huggingface.folders.model_config import model_config
from ...integrations.huggingface.folders.reading import WeightFolder
from ...integrations.huggingface.folders.writing import FolderWriter
from ...runtime import files
from ...runtime.world.agreement import first_error, from_first, rank_and_size
from ...runtime.world.folder_lock import file_lock
from ..job import Job, logger
from ..progress import Progress, silent

Exported = dict[str, Any]
"""``folder``, ``tensors``, ``bytes`` (of files), ``files`` (name to bytes) and ``seconds`` of an export."""
Agreement = dict[str, Any]
"""``prompts``, ``equal`` of them, and ``largest_difference`` of a logit in float32."""


def write_export(job: Job, out: Path, progress: Progress = silent) -> Exported:
    """Write the model of a job, see `write_folder`; with ``agreement``, where the recipe asks whether Transformers
    says the same."""
    with job.watchdog.working("exporting the model"), file_lock(out.expanduser()):
        exported = write_folder(job.host, job.recipe, out, progress)
    if prompts := job.recipe.train.export_prompts:
        exported["agreement"] = next_token_agreement(job, out, prompts)
    return exported


def write_folder(host: Host, recipe: Recipe, out: Path, progress: Progress = silent) -> Exported:
    """Write a host's model as a Hugging Face folder. Collective.

    Memory beyond the host's own: a tensor on each rank, a file on rank 0. The folder has its name when every rank has
    given all of its tensors, so the same command can follow one that was killed. Raises RankError, on every rank, if
    the folder could not be written: nothing of it is left then.
    """
    started, error = time.perf_counter(), ""
    tensors, agreed = host.exported(), list[list[tuple[int, str]]]()

    def agree() -> None:
        """Once on every rank, wherever that fails."""
        agreed.append(first_error(error or None))

    if rank_and_size()[0] == 0:
        try:
            _write(tensors, _with_epsilon(recipe, host), out, agree, progress)
        except EvenloadError as caught:
            error = f"{caught.what} ({caught.found})"
    for _ in tensors:
        """Peers wait in the exchange of each, also where rank 0 could not write."""
    if not agreed:
        agree()
    error = agreed[0][0][1] if agreed[0] else from_first(lambda: error)
    if error:
        do = f"repair or free the disk of {out}, and export again from a checkpoint"
        raise RankError("the model was not exported", error, do)
    result: Exported = from_first(lambda: _report(out, time.perf_counter() - started))
    logger.info("exported to %s: %d files, %s", out, len(result["files"]), mib(result["bytes"]))
    return result


def _write(
    tensors: Iterator[tuple[str, Tensor | None]],
    recipe: Recipe,
    out: Path,
    confirm: Callable[[], object],
    progress: Progress,
) -> None:
    with FolderWriter(out, _config(recipe), _carried_from(recipe), confirm=confirm) as writer:
        for number, (name, tensor) in enumerate(tensors, 1):
            assert tensor is not None
            writer.add(name, tensor)
            progress("exporting", number, None, name)


def _with_epsilon(recipe: Recipe, host: Host) -> Recipe:
    """The recipe with what the norms of the host's model have, which are not the same under all trainers."""
    if recipe.model.norm_epsilon is not None or host.norm_epsilon is None:
        return recipe
    return recipe.changed({"model.norm_epsilon": host.norm_epsilon})


def _report(out: Path, seconds: float) -> Exported:
    sizes = {name: (out / name).stat().st_size for name in files.below(out)}
    tensors = len(WeightFolder.open(out).names)
    return {"folder": str(out), "tensors": tensors, "bytes": sum(sizes.values()), "files": sizes, "seconds": seconds}


def _config(recipe: Recipe) -> dict[str, Any]:
    """The config.json of the folder that came in, as it is there; else what Transformers makes of the recipe."""
    if recipe.model.weights is not None:
        return WeightFolder.open(recipe.model.weights).config
    return dict(model_config(recipe).to_dict())


def _carried_from(recipe: Recipe) -> Path | None:
    if recipe.model.weights is not None:
        return recipe.model.weights
    tokenizer = Path(recipe.data.tokenizer)
    return tokenizer if tokenizer.is_dir() else None


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
