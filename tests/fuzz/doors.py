"""What cases of `brought` reach beyond the command line: what a job does with files while it runs, without a trainer.

The model of a job of tenants is two linear layers; everything that reads a tenant's files is the product's own.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from evenload.core.errors import EvenloadError
from evenload.core.planning.chain import PlanChain
from evenload.core.recipe.recipe import parse
from evenload.integrations.huggingface.folders import reading, tiny  # noqa: F401  # what data and folders bring in
from evenload.plugins.lora import members as tenants
from evenload.plugins.lora.arrivals.folder import Folder
from evenload.plugins.lora.arrivals.job import TenantSamples
from evenload.plugins.lora.records.output import Output
from evenload.plugins.lora.state.drawing import labels_in
from evenload.runtime.adapters.adapters import Adapters
from evenload.runtime.adapters.peers import AdapterPeers
from evenload.runtime.adapters.places import AdaptedBlock, Place, Site
from evenload.training.replicas import Replicas
from evenload.training.run.writers import Entry, writer
from torch import nn
from transformers import AutoTokenizer, PreTrainedTokenizerFast  # noqa: F401

NAMES = "model.layers.0.self_attn.q_proj", "model.layers.0.mlp.down_proj"
GOOD = "good"
"""The tenant beside those of a case, which must join whatever they are."""
MARK = "f00d"
"""Of the run whose samples `sampled` goes on with."""
_LOOKS = 3
_BATCHES = 2


class Watchdog:
    """Watches over nothing."""

    @contextmanager
    def working(self, *_: object) -> Iterator[None]:
        yield

    def at(self, *_: object, **__: object) -> None:
        """Nobody asks."""


def admit() -> dict[str, str]:
    """Let the tenants of the folder ``tenants`` come, take part and read two batches; how each stands.

    Raises AssertionError where the good one does not take part.
    """
    packing = {"enabled": True, "max_tokens": 256}
    plugins = {"packing": packing, "lora": {"enabled": True, "tenants": "tenants", "out": "out"}}
    recipe = parse({"model": {"vocab_size": 300}, "plugins": plugins})
    layers = [nn.Linear(4, 6), nn.Linear(6, 4)]
    places = [Place(name, n.out_features, n.in_features, (0, n.out_features), (0, n.in_features))
              for name, n in zip(NAMES, layers, strict=True)]  # fmt: skip
    sites = tuple(Site(module, (place,)) for module, place in zip(layers, places, strict=True))
    block = AdaptedBlock(nn.Sequential(*layers), lambda *_: None, sites)  # type: ignore[arg-type, return-value]
    adapters = Adapters([block], NAMES, AdapterPeers(), torch.float32, torch.device("cpu"))
    chain = PlanChain.of_recipe(recipe, recipe.layout())
    job: Any = SimpleNamespace(
        recipe=recipe,
        chain=chain,
        replicas=Replicas([chain]),
        is_rank0=True,
        host=SimpleNamespace(adapters=adapters, dp_cp_rank=0),
        samples=TenantSamples(),
        watchdog=Watchdog(),
        folder=Path("tenants"),
        out=Path("out"),
        gather=lambda *values: np.array([values]),
    )
    folder = Folder(job.folder)
    members = tenants.TenantTable(job, Output(job), folder, None)
    for _ in range(_LOOKS):
        members.apply(folder.look())
        members.admit()
    stand = {name: str(error) for name, error in members.invalid_files.items()}
    for one in members.active:
        stand[one.name] = _read(one)
    for one in list(members.active):
        members.end(one, "stopped", "the case is over")
    assert stand.get(GOOD) == "reads", stand
    return stand


def sampled() -> int:
    """Go on with the samples in ``o.jsonl`` as rank 0 of a generation does, one sample more; how many there are."""
    from evenload.api import load_recipe
    from evenload.plugins.rollout.generate import mark_of, resolve_request
    from evenload.plugins.rollout.sample_file import SampleFile
    from evenload.runtime.generate.request import Completion
    from evenload.runtime.world.folder_lock import file_lock

    out, recipe = (
        Path("o.jsonl"),
        load_recipe("r.yaml", ["data.source=d.jsonl", "generate={end_tokens: [10], max_new_tokens: 4}"]),
    )
    mark_of(resolve_request(recipe, Path("p.jsonl"), out, 1, Path("kept")))
    with file_lock(out):
        file = SampleFile(out, MARK, str)
        there, more = file.read(), Completion(0, 7, (5, 6), (-0.5, -0.25), "end")
        with file.adding(0) as add:
            add(more)
        file.finish([*there, more])
    return len(there)


def scored() -> int:
    """Write losses into ``out`` as rank 0 of a score does; bytes of them."""
    from evenload.api import load_recipe
    from evenload.plugins.data.reference import LossFiles
    from evenload.plugins.data.score import asked, refuse_others
    from evenload.runtime.world.folder_lock import folder_lock
    from evenload.training.preflight import open_data

    out, recipe = Path("out"), load_recipe("r.yaml", ["data.source=d.jsonl"])
    recipe, _ = asked(recipe, out, Path("kept"))
    with folder_lock(out):
        refuse_others(out)
        files = LossFiles(out, open_data(recipe))
        files.write(0, np.ones(4))
        return files.finish()


def admit_once(folder: Path) -> None:
    """Import what cases import, by doing it once."""
    place = Path(tempfile.mkdtemp(dir=folder))
    (place / "tenants").mkdir()
    (place / "good.jsonl").write_text('{"tokens": [5, 6, 7]}\n' * 9)
    (place / "tenants" / "good.yaml").write_text("data: {source: good.jsonl}\n")
    with contextlib.chdir(place):
        admit()


def _read(tenant: Any) -> str:
    try:
        for _ in range(_BATCHES):
            for sample in tenant.drawing().samples.tolist():
                tenant.source.tokens(sample)
                labels_in(tenant.source, sample)
        _ = tenant.rate
    except EvenloadError as error:
        return str(error)
    return "reads"


def logged(first: int) -> int:
    """Go on with ``log.jsonl`` behind ``first`` steps; the bytes that it then has."""
    recipe = parse({"log": {"jsonl": "log.jsonl"}, "checkpoint": {"dir": "kept"}})
    with writer(recipe, is_rank0=True, first=first) as write:
        write(Entry(first, {}, {"step": first}))
    path = Path("log.jsonl")
    return path.stat().st_size if path.is_file() else 0
