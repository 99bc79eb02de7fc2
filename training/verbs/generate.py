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
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ...core.errors import EvenloadError, refuse_first, shown
from ...core.input.bounds import SEQUENCES
from ...core.recipe.recipe import Recipe
from ...core.recipe.sizes import shape_of
from ...data.prompt_file import read_prompts
from ...data.tokenizers import Tokenizer, open_tokenizer
from ..preflight import open_data, refuse_other_tokenizer, runnable, tokenizer_of, with_vocabulary
from ..progress import Progress, silent
from ..proof.prompting import MOST_NEW, Prompting
from .export import checkpoint_in

if TYPE_CHECKING:
    from ...runtime.generate.request import Completion, Generation, Request
    from ...runtime.watchdog.watchdog import Watchdog
    from ...runtime.world.world import World

_PLACES = {"slots", "cache_tokens"}
"""Keys of `generate` that change no token."""
_WINDOW = 8
"""Tokens that the end of a stop string may take beyond one a byte, such as special ones."""


class Asked(NamedTuple):
    """What a command asks for."""

    recipe: Recipe
    """With the vocabulary size filled in."""
    requests: list[Request]
    settings: Generation
    text_of: Callable[[Completion], str]
    run: str
    """What decides the tokens, hashed."""
    adapters: Sequence[Path] = ()
    """Folders of the tenants' adapters, by the numbers that requests have."""


def asked(
    recipe: Recipe, prompts: Path, out: Path, samples: int, checkpoint: Path | None = None, tenant: str = ""
) -> Asked:
    """The prompts of a file and how they are continued, by ``tenant``'s adapter where a line names none. Raises
    EvenloadError for what cannot be; starts nothing."""
    from ...runtime.generate.request import Generation, Request, Sampling, rules
    from ..tenants.serving import adapters_of, digests_of

    recipe = without_divided_tokens(runnable(recipe, None)[0])
    if recipe.model.vocab_size is None and recipe.model.config is None:
        recipe = with_vocabulary(recipe, open_data(recipe))
    refuse_other_tokenizer(recipe)
    section, name = recipe.generate, tokenizer_of(recipe.data, recipe.model.weights)
    tokenizer = open_tokenizer(name)
    ends = _end_tokens(section.end_tokens, tokenizer, name)
    rows = read_prompts(prompts, tokenizer, section.max_new_tokens)
    numbers = tuple(range(samples))
    of_rows = [row.tenant or tenant for row in rows]
    places = {name: place for place, name in enumerate(dict.fromkeys(filter(None, of_rows)))}
    adapters = adapters_of(recipe, places) if places else []
    requests = [
        Request(number, row.tokens, row.limit, numbers, places.get(name))
        for number, (row, name) in enumerate(zip(rows, of_rows, strict=True))
    ]
    do = "leave --checkpoint out: adapters are in plugins.lora.out"
    what = "checkpoints of tenants hold no model"
    refuse_first((bool(checkpoint) and recipe.adapts, what, str(checkpoint), do))
    refuse_first(*rules(requests, recipe.data.max_length, recipe.model.vocab_size))
    do = "ask for fewer --samples"
    refuse_first((len(rows) * samples > SEQUENCES, "these are too many samples", f"{len(rows) * samples}", do))
    folder = out.absolute().parent
    odd = (out.exists() and not out.is_file()) or not os.path.isdir(folder) or not os.access(folder, os.W_OK)
    do = "name a file in a folder that is there and can be written to"
    refuse_first((odd, "--out cannot be written", str(out), do))
    sampling = Sampling(section.temperature, section.top_k, section.top_p)
    stops = StopStrings(tokenizer, section.stop)
    settings = Generation(recipe.train.seed, sampling, ends, stops, section.slots, section.cache_tokens)
    decides = {
        "recipe": recipe.model_dump(mode="json", include={"trainer", "model"}),
        "train": [recipe.train.seed, recipe.train.dtype],
        "checkpoint": str(checkpoint_in(checkpoint).absolute()) if checkpoint else "",
        "generate": section.model_dump(mode="json", exclude=_PLACES),
        "prompts": [row.tokens for row in rows] + [row.limit for row in rows],
        "tokenizer": tokenizer.identity,
    }
    if adapters:
        decides |= {"tenants": [request.tenant for request in requests], "adapters": digests_of(adapters)}
    run = hashlib.blake2b(json.dumps(decides, sort_keys=True).encode(), digest_size=8).hexdigest()
    return Asked(recipe, requests, settings, stops.text_of, run, adapters)


def without_divided_tokens(recipe: Recipe) -> Recipe:
    """A recipe with these weights: packs of a token a sample are too small for tensor-parallel ranks to divide. Experts
    demand it of Megatron-Core; a host refuses to generate from them by name."""
    divided = recipe.megatron.sequence_parallel and shape_of(recipe.model).experts is None
    return recipe.changed({"megatron.sequence_parallel": False}) if divided else recipe


def prompting(recipe: Recipe, prompts: Path | None) -> Prompting:
    """What `verify_generation` continues, and how. Raises EvenloadError for what cannot be; starts nothing."""
    from ...runtime.generate.request import Generation, Sampling

    section, name = recipe.generate, tokenizer_of(recipe.data, recipe.model.weights)
    tokenizer, limit = open_tokenizer(name), min(recipe.generate.max_new_tokens, MOST_NEW)
    sampling = Sampling(section.temperature, section.top_k, section.top_p)
    known = section.end_tokens if section.end_tokens is not None else [tokenizer.end_token]
    ends, stops = frozenset(token for token in known if token is not None), StopStrings(tokenizer, section.stop)
    settings = Generation(recipe.train.seed, sampling, ends, stops, section.slots, section.cache_tokens)
    return Prompting(settings, limit, read_prompts(prompts, tokenizer, limit) if prompts else None)


class StopStrings:
    """Whether a sample has come to a string that ends it, and its text before that."""

    def __init__(self, tokenizer: Tokenizer, strings: Sequence[str]) -> None:
        self._decode = tokenizer.decode
        self._strings = strings
        self._most = max((len(string.encode()) for string in strings), default=0) + _WINDOW

    def __call__(self, tokens: Sequence[int]) -> bool:
        text = self._decode(tokens[-self._most :]) if self._strings else ""
        return any(string in text for string in self._strings)

    def text_of(self, sample: Completion) -> str:
        """The text of a sample, without the token or the string that ended it."""
        text = self._decode(sample.tokens[:-1] if sample.ended == "end" else sample.tokens)
        places = [text.find(string) for string in self._strings if sample.ended == "stop" and string in text]
        return text[: min(places, default=len(text))]


def _end_tokens(own: Sequence[int] | None, tokenizer: Tokenizer, name: str) -> frozenset[int]:
    if own is not None:
        return frozenset(own)
    if tokenizer.end_token is None:
        what, detail = "nothing says which token ends a sample", f"the tokenizer {shown(name)} names no end of sequence"
        do = "set generate.end_tokens to the ids that do, or to [] where samples end by generate.stop or their limit"
        raise EvenloadError(what, detail, do)
    return frozenset([tokenizer.end_token])


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
    from ..checkpoint.checkpoints import require_whole
    from ..job import host_until_end, in_world
    from ..run.sample_file import SampleFile
    from ..tenants.serving import join

    def work(world: World, watchdog: Watchdog) -> dict[str, Any]:
        begin_s = time.perf_counter()
        with watchdog.working("reading the prompts"):
            wanted = asked(recipe, prompts, out, samples, checkpoint, tenant)
            file = SampleFile(out, wanted.run, wanted.text_of)
            there = from_first(file.read)
        known, total = {sample[:2] for sample in there}, len(wanted.requests) * samples
        left = [r._replace(samples=tuple(s for s in r.samples if (r.number, s) not in known)) for r in wanted.requests]
        new: tuple[Completion, ...] = ()
        if any(request.samples for request in left):
            with host_until_end(wanted.recipe, world, watchdog) as host, file.adding(world.rank) as add:
                if checkpoint is not None:
                    with watchdog.working("loading the checkpoint"):
                        require_whole(checkpoint_in(checkpoint))
                        host.load(checkpoint_in(checkpoint) / "trainer")

                with watchdog.working("loading the adapters"):
                    join(host, wanted.adapters)

                def counted(done: int) -> None:
                    rate = done / (time.perf_counter() - generate_s)
                    progress("generate", len(there) + done, total, f"{rate:.3g} samples/s")

                generate_s = time.perf_counter()
                new = host.generate(left, wanted.settings, ended=add, counted=counted, mark=watchdog.at)
        with watchdog.working("writing the samples"):
            from_first(lambda: file.finish([*there, *new]))
        return _result(out, wanted, there, new, time.perf_counter() - begin_s)

    return in_world(recipe, work)


def _result(
    out: Path, wanted: Asked, there: Sequence[Completion], new: Sequence[Completion], seconds: float
) -> dict[str, Any]:
    return {
        "out": str(out),
        "prompts": len(wanted.requests),
        "samples": len(there) + len(new),
        "samples_before": len(there),
        "tokens": sum(len(sample.tokens) for sample in new),
        "ended": dict(Counter(sample.ended for sample in (*there, *new))),
        "seconds": seconds,
        "run": wanted.run,
    }
