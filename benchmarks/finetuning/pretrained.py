"""Weights of a Hugging Face folder on a trainer's ranks: memory of a rank, and time against `from_pretrained`.

    python benchmarks/finetuning/pretrained.py [--layout tp2pp2|zero0|zero3|pp2] [--kv-heads 8] [--quick] [--json]

Makes a llama of 207 million weights (220 with 16 heads for keys and values), opens it on gloo ranks (float32, CPU) and
says what a rank's memory grows by over the weights that it keeps, at the peak of reading: pages of files that the
kernel can take back count. Megatron-Core (``tp2pp2``, 4 ranks) reads into a model that stands; DeepSpeed (the others, 2
ranks) makes one as it reads.
"""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.multiprocessing as mp
from evenload.benchmarks.frame import columns, main, options
from evenload.commands.tables.show import stdout_aside
from evenload.core.input.format import seconds


class Layout(NamedTuple):
    """Who reads, on how many ranks."""

    trainer: str
    num_ranks: int
    sections: dict[str, dict[str, int]]
    """Of the recipe."""
    name: str


LAYOUTS = {
    "tp2pp2": Layout("megatron", 4, {"parallel": {"tp": 2, "pp": 2}}, "Megatron-Core, TP 2 x PP 2"),
    "zero0": Layout("deepspeed", 2, {"deepspeed": {"zero_stage": 0}}, "DeepSpeed, ZeRO 0"),
    "zero3": Layout("deepspeed", 2, {"deepspeed": {"zero_stage": 3}}, "DeepSpeed, ZeRO 3"),
    "pp2": Layout("deepspeed", 2, {"deepspeed": {"zero_stage": 0}, "parallel": {"pp": 2}}, "DeepSpeed, PP 2"),
}
SIZES = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 12, "num_attention_heads": 16}
QUICK = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 8}


class Read(NamedTuple):
    """What reading took on a rank."""

    share_bytes: int
    """Of the weights that the rank holds."""
    more_bytes: int
    """By which its memory grew beyond that share at the peak."""
    largest_bytes: int
    """Of its largest tensor, as the model has it."""
    seconds: float


def make(folder: Path, sizes: dict[str, int], vocabulary: int) -> float:
    """Write the folder; the seconds that Transformers takes to open it."""
    import transformers

    transformers.logging.set_verbosity_error()
    config = transformers.LlamaConfig(**sizes, vocab_size=vocabulary)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    started = time.perf_counter()
    transformers.AutoModelForCausalLM.from_pretrained(folder)
    return time.perf_counter() - started


def _memory(key: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) * 1024


class Reading:
    """Measures one reading of weights; a context, entered where the rank's memory is what it was before."""

    def __enter__(self) -> Reading:
        Path("/proc/self/clear_refs").write_text("5")
        self._before, self._started = _memory("VmRSS"), time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self.grew_bytes, self.seconds = _memory("VmHWM") - self._before, time.perf_counter() - self._started


def of_megatron(out: Any, rank: int) -> None:
    """From now on a host says what reading into its model takes."""
    from evenload.integrations.megatron import host as hosts

    read = hosts.read_pretrained

    def measured(model: Any, *rest: Any) -> None:
        for parameter in model.parameters():
            parameter.data.zero_()  # its pages are there
        with Reading() as reading:
            read(model, *rest)
        sizes = [p.nbytes for p in model.parameters()]
        out[rank] = Read(sum(sizes), reading.grew_bytes, max(sizes), reading.seconds)

    hosts.read_pretrained = measured


def of_deepspeed(out: Any, rank: int) -> None:
    """From now on a host says what making and reading its model takes."""
    from evenload.integrations.deepspeed.engine import model as models

    read = models.read_model

    def measured(*asked: Any) -> Any:
        with Reading() as reading:
            model = read(*asked)
        weights = [p for p in model.parameters() if not p.is_meta]
        share = sum(getattr(p, "ds_tensor", p).nbytes for p in weights)
        largest = max(getattr(p, "ds_numel", p.numel()) * p.element_size() for p in weights)
        out[rank] = Read(share, reading.grew_bytes - share, largest, reading.seconds)
        return model

    models.read_model = measured


def on_rank(rank: int, layout: Layout, folder: str, out: Any) -> None:
    """Open the folder on one of the ranks; what reading took goes to ``out``."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(layout.num_ranks), "LOCAL_RANK": str(rank)}
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    torch.distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=layout.num_ranks)
    from evenload.patches import bridge_cpu

    bridge_cpu()
    from evenload.api import load_plugins
    from evenload.core.recipe.recipe import parse
    from evenload.runtime.world.world import init_world
    from evenload.training.job import open_host

    load_plugins()
    world = init_world()
    (of_megatron if layout.trainer == "megatron" else of_deepspeed)(out, rank)
    host = open_host(parse({"trainer": layout.trainer, "model": {"weights": folder}, **layout.sections}), world)
    torch.distributed.barrier()
    host.close()


def benchmark(sizes: dict[str, int], vocabulary: int, layout: str = "tp2pp2") -> dict[str, Any]:
    """Bytes and seconds of every rank, and the seconds that Transformers takes."""
    asked = LAYOUTS[layout]
    with tempfile.TemporaryDirectory() as folder, mp.Manager() as manager:
        their_s, ranks = make(Path(folder), sizes, vocabulary), manager.dict()
        mp.spawn(on_rank, (asked, folder, ranks), asked.num_ranks)
        rows = [ranks[rank]._asdict() for rank in range(asked.num_ranks)]
        return {"layout": asked.name, "ranks": rows, "from_pretrained_s": their_s}


def table(result: dict[str, Any]) -> Any:
    rows = [
        {"rank": rank, **row, "all_bytes": row["share_bytes"] + row["more_bytes"]}
        for rank, row in enumerate(result["ranks"])
    ]
    cells = {
        "rank": "{rank}",
        "share": "{share_bytes:mib}",
        "more at its peak": "{more_bytes:mib}",
        "in all": "{all_bytes:mib}",
        "largest tensor": "{largest_bytes:mib}",
        "peak over share": lambda row: f"{row['all_bytes'] / row['share_bytes']:.2f}",
        "seconds": "{seconds:seconds}",
    }
    note = f"from_pretrained of the whole model in one process: {seconds(result['from_pretrained_s'])}"
    return columns(f"reading a folder of weights, {result['layout']}, float32, measured", rows, cells, note)


def measured(asked: Any) -> dict[str, Any]:
    sizes, vocabulary = (QUICK, 512) if asked.quick else (SIZES, 32000)
    with stdout_aside():
        return benchmark({**sizes, "num_key_value_heads": asked.kv_heads}, vocabulary, asked.layout)


if __name__ == "__main__":
    main(options(__doc__, layout=tuple(LAYOUTS), kv_heads=8, quick=False), measured, table)
