"""Samples of prompts by the recipe's model, on the ranks that it needs, into a file that the same command goes on with.

Which tokens come is decided by the model, the prompts, `train.seed` and what `generate` says of drawing and ending: not
by ranks, slots or caches, so that a run may go on on other ranks.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ...core.cascade import warn_of_rescore
from ...core.errors import refuse_first
from ...core.input import reading
from ...core.input.bounds import SEQUENCES
from ...core.recipe.adapter import TenantTrain
from ...core.recipe.recipe import Recipe
from ...runtime.files import faults, stamp
from ...training.adapting import adapter_training
from ...training.checkpoint import manifest
from ...training.preflight import open_data, refuse_other_tokenizer, runnable, tokenizer_of, with_vocabulary
from ...training.progress import Progress, silent
from ...training.proof.prompting import without_divided_tokens
from ...training.sampling.prompted import prompted
from ...training.verbs.export import checkpoint_in
from .keeping import PruneScores, beside_all, collecting, samples_begun
from .sample_file import SampleFile, earlier_samples, refuse_unreadable

if TYPE_CHECKING:
    from ...integrations.host.host import Host
    from ...runtime.generate.request import Completion, Generation, Request
    from ...runtime.watchdog.watchdog import Watchdog
    from ...runtime.world.world import World

_PLACES = {"slots", "cache_tokens", "move_every", "drafts", "keys"}
"""Keys of `generate` that change no token, and one that the mark names."""
_UNMOVED = dict.fromkeys(_PLACES, True) | {"collect": {"prune": {"rescore"}}}


class GenerateRequest(NamedTuple):
    """What a command asks for."""

    recipe: Recipe
    """With the vocabulary size filled in."""
    requests: list[Request]
    settings: Generation
    text_of: Callable[[Completion], str]
    decides: dict[str, Any]
    """What decides the tokens besides the weights."""
    adapters: Sequence[Path] = ()
    """Folders of the tenants' adapters, by the numbers that requests have."""
    unhashed: Sequence[Path] = ()
    """Files whose content decides the tokens and is in no manifest; those of ``model.weights`` aside."""


def resolve_request(
    recipe: Recipe, prompts: Path, out: Path, samples: int, checkpoint: Path | None = None, tenant: str = ""
) -> GenerateRequest:
    """The prompts of a file and how they are continued, by ``tenant``'s adapter where a line names none. Raises
    EvenloadError for what cannot be; starts nothing."""
    recipe = without_divided_tokens(runnable(recipe, None)[0])
    if recipe.model.vocab_size is None and recipe.model.config is None:
        recipe = with_vocabulary(recipe, open_data(recipe))
    refuse_other_tokenizer(recipe)
    section, name = recipe.generate, tokenizer_of(recipe.data, recipe.model.weights)
    begun = samples_begun(section.collect, samples)
    what, detail = "samples of which some are kept stay on one rank", f"generate.move_every {section.move_every}"
    refuse_first((section.collect is not None and bool(section.move_every), what, detail, "set generate.move_every=0"))
    prepared = prompted(recipe, name, prompts, begun)
    rows = prepared.rows
    of_rows = [row.tenant or tenant for row in rows]
    places = {name: place for place, name in enumerate(dict.fromkeys(filter(None, of_rows)))}
    adapters = [adapter_training(recipe, ", ".join(places)).adapter_of(recipe, name) for name in places]
    pairs = zip(prepared.requests, of_rows, strict=True)
    requests = [request._replace(tenant=places.get(name)) for request, name in pairs]
    do = "leave --checkpoint out: adapters are in plugins.lora.out"
    what = "checkpoints of tenants hold no model"
    refuse_first((bool(checkpoint) and recipe.adapts, what, str(checkpoint), do))
    do = "ask for fewer --samples"
    refuse_first((len(rows) * begun > SEQUENCES, "these are too many samples", f"{len(rows) * begun}", do))
    if section.drafts and section.drafts.earlier:
        refuse_unreadable(section.drafts.earlier)
    folder = out.absolute().parent
    odd = (
        (os.path.exists(out) and not os.path.isfile(out)) or not os.path.isdir(folder) or not os.access(folder, os.W_OK)
    )
    do = "name a file in a folder that is there and can be written to"
    refuse_first((odd, "--out cannot be written", str(out), do))
    loaded = checkpoint_in(checkpoint) if checkpoint else None
    kept = manifest.read(loaded).files if loaded else {}
    broken = faults(loaded, kept, hashes=False) if loaded else []
    do = "restore it from a copy, or take an older one"
    refuse_first((bool(broken), f"the checkpoint {loaded} is damaged", "; ".join(broken[:3]), do))
    unhashed = _files_of(adapters) + ([recipe.model.config] if recipe.model.config else [])
    unhashed += [loaded / name for name, file in kept.items() if loaded and not file.hash]
    decides: dict[str, Any] = {
        "trainer": recipe.trainer,
        "model": recipe.model.model_dump(mode="json", exclude={"weights", "config"}),
        "train": [recipe.train.seed, recipe.train.dtype],
        "checkpoint": kept,
        "generate": section.model_dump(mode="json", exclude=_UNMOVED if section.collect else {*_PLACES, "collect"}),
        "prompts": [row.tokens for row in rows] + [row.limit for row in rows],
        "scored": [dict(row.row) for row in rows] if section.collect and section.collect.prune else [],
        "tokenizer": prepared.tokenizer.identity,
        "tenants": [request.tenant for request in requests],
    }
    settings = prepared.settings if section.collect is None else collecting(prepared, section.collect)
    return GenerateRequest(recipe, requests, settings, prepared.stops.text_of, decides, adapters, unhashed)


def _files_of(folders: Iterable[Path]) -> list[Path]:
    """The files that make adapters what they are: tensors, and the config that scales them."""
    from ...integrations.huggingface.folders.adapter_config import ADAPTER_CONFIG
    from ...integrations.huggingface.folders.adapters import ADAPTER_MODEL

    names = ADAPTER_CONFIG, ADAPTER_MODEL
    return [folder / name for folder in folders for name in names if reading.is_file(folder / name)]


def mark_of(wanted: GenerateRequest) -> str:
    """What decides the tokens, hashed: settings, and files by their content. Collective.

    Ranks read each file once, as those of a checkpoint: pieces of it would miss the one tensor that was trained.
    """
    from ...integrations.huggingface.folders.reading import WeightFolder  # and torch, which the launcher needs not
    from ...runtime.world.agreement import everyone, rank_and_size

    weights, (rank, size) = wanted.recipe.model.weights, rank_and_size()
    files = [*map(str, [*wanted.unhashed, *(WeightFolder.open(weights).files if weights else ())])]
    own = stamp(Path(), files[rank::size])
    parts = everyone([own[name].hash for name in files[rank::size]])
    hashes = [parts[place % size][place // size] for place in range(len(files))]
    text, keys = json.dumps([wanted.decides, hashes], sort_keys=True), wanted.recipe.generate.keys
    mark = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
    return f"approximate-{keys}-keys-{mark}" if keys else mark


def generate(
    recipe: Recipe,
    prompts: Path,
    out: Path,
    samples: int,
    checkpoint: Path | None = None,
    progress: Progress = silent,
    tenant: str = "",
) -> dict[str, Any] | None:
    """Generate on this rank; rank 0 gives how many samples there are, how they ended, and how long it took."""
    from ...runtime.world.agreement import from_first
    from ...runtime.world.folder_lock import file_lock
    from ...training.checkpoint.checkpoints import require_whole
    from ...training.job import host_until_end, in_world
    from .dealer import by_length

    def work(world: World, watchdog: Watchdog) -> dict[str, Any]:
        begin_s = time.perf_counter()
        with watchdog.working("reading the prompts"):
            loaded = from_first(lambda: checkpoint and checkpoint_in(checkpoint))  # training may save while this runs
            wanted = resolve_request(recipe, prompts, out, samples, loaded, tenant)
        with watchdog.working("reading the weights"):
            run = mark_of(wanted)
            file = SampleFile(out, run, wanted.text_of)
            there = from_first(file.read)
            there, left = _left(wanted, there)
            earlier = from_first(lambda: _earlier(wanted.recipe))
            settings = replace(wanted.settings, earlier=[*earlier, *there])
        if (rule := wanted.recipe.generate.collect) and rule.prune:
            warn_of_rescore(rule.prune, "generate.collect.prune")
        approximate = f", approximate: {recipe.generate.keys} keys" if recipe.generate.keys else ""
        total = len(there) + sum(len(request.samples) for request in left)
        new: tuple[Completion, ...] = ()
        dealer = by_length(wanted.recipe, there)
        if any(request.samples for request in left):
            with host_until_end(wanted.recipe, world, watchdog) as host, file.adding(world.rank) as add:
                if loaded is not None:
                    with watchdog.working("loading the checkpoint"):
                        require_whole(loaded)
                        host.load(loaded / "trainer")

                with watchdog.working("loading the adapters"):
                    join(host, wanted.adapters)

                def counted(done: int) -> None:
                    rate = done / (time.perf_counter() - generate_s)
                    progress("generate", len(there) + done, total, f"{rate:.3g} samples/s{approximate}")

                generate_s = time.perf_counter()
                new = host.generate(left, settings, ended=add, counted=counted, mark=watchdog.at, dealer=dealer)
        with watchdog.working("writing the samples"):
            from_first(lambda: file.finish([*there, *(sample for sample in new if sample.kept)]))
        dealt, scores = dealer.report(left, new, wanted.settings.slots), wanted.settings.scores
        scorers = scores.figures() if isinstance(scores, PruneScores) else None
        seconds = time.perf_counter() - begin_s
        result = _result(out, wanted, there, new, seconds)
        return {**result, "dealing": dealt, "drafts": dealer.drafts, "scorers": scorers, "run": run}

    def alone(world: World, watchdog: Watchdog) -> dict[str, Any]:
        with file_lock(out):
            return work(world, watchdog)

    return in_world(recipe, alone)


def join(host: Host, folders: Sequence[Path]) -> None:
    """Let adapters join a host by their places. Collective. Raises EvenloadError for one that is of another base."""
    from ...integrations.huggingface.folders.adapters import read_adapter
    from ...runtime.adapters.places import AdapterState

    for number, folder in enumerate(folders):
        adapter, weights = read_adapter(folder)
        host.adapters.join(number, adapter, TenantTrain(), AdapterState(weights, {}, {}, 0))


def _earlier(recipe: Recipe) -> list[Completion]:
    rule = recipe.generate.drafts
    return earlier_samples(rule.earlier, recipe.model.vocab_size) if rule and rule.earlier else []


def _left(wanted: GenerateRequest, there: Sequence[Completion]) -> tuple[list[Completion], list[Request]]:
    """Samples that stay, and those that are not there yet; of prompts that are not decided all are drawn again."""
    known = {sample[:2] for sample in there}
    rule = wanted.recipe.generate.collect
    if rule is None:
        left = [r._replace(samples=tuple(s for s in r.samples if (r.number, s) not in known)) for r in wanted.requests]
        return list(there), left
    counts = Counter(prompt for prompt, _ in known)
    decided = {prompt for prompt, count in counts.items() if count == rule.keep}
    left = [r._replace(samples=()) if r.number in decided else r for r in wanted.requests]
    return [sample for sample in there if sample.prompt in decided], left


def _result(
    out: Path, wanted: GenerateRequest, there: Sequence[Completion], new: Sequence[Completion], seconds: float
) -> dict[str, Any]:
    kept = [*there, *(sample for sample in new if sample.kept)]
    collects = bool(new) and wanted.recipe.generate.collect is not None
    return {
        "out": str(out),
        "prompts": len(wanted.requests),
        "samples": len(kept),
        "samples_before": len(there),
        "tokens": sum(len(sample.tokens) for sample in new),
        "ended": dict(Counter(sample.ended for sample in kept)),
        "collected": beside_all(new, wanted.requests) if collects else None,
        "seconds": seconds,
        **({"approximate": f"{keys} keys"} if (keys := wanted.recipe.generate.keys) else {}),
    }
