"""Weights of a Hugging Face folder on Megatron-Core's ranks: memory of a rank, and time beside `from_pretrained`.

    python benchmarks/finetuning/pretrained.py [--quick] [--json]

Makes a llama of 220 million weights, opens it on 4 gloo ranks (TP 2 x PP 2, float32, CPU) and says what a rank's memory
grows by while weights are read into a model that stands, at its peak: pages of files that the kernel can take back
count, too.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.multiprocessing as mp
from evenload.commands._shared.show import emit, grid, mib, seconds, stdout_aside

RANKS = 4
SIZES = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 12, "num_attention_heads": 16}
QUICK = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 8}


class Read(NamedTuple):
    """What reading took on a rank."""

    share_bytes: int
    """Of the weights that the rank holds."""
    more_bytes: int
    """By which its memory grew at the peak."""
    largest_bytes: int
    """Of its largest tensor."""
    seconds: float


def make(folder: Path, sizes: dict[str, int], vocabulary: int) -> float:
    """Write the folder; the seconds that Transformers takes to open it."""
    import transformers

    transformers.logging.set_verbosity_error()
    config = transformers.LlamaConfig(**sizes, num_key_value_heads=8, vocab_size=vocabulary)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    started = time.perf_counter()
    transformers.AutoModelForCausalLM.from_pretrained(folder)
    return time.perf_counter() - started


def _memory(key: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) * 1024


def on_rank(rank: int, folder: str, out: Any) -> None:
    """Open the folder on one of `RANKS`; what reading took goes to ``out``."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(RANKS), "LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1"}
    torch.set_num_threads(1)
    from evenload.patches import bridge_cpu

    bridge_cpu()
    from evenload.api import load_plugins
    from evenload.core.recipe.recipe import parse
    from evenload.integrations.megatron import host as hosts
    from evenload.runtime.world.world import init_world

    load_plugins()
    world, read = init_world(), hosts.read_pretrained

    def measured(model: Any, *rest: Any) -> None:
        for parameter in model.parameters():
            parameter.data.zero_()  # its pages are there
        Path("/proc/self/clear_refs").write_text("5")
        before, started = _memory("VmRSS"), time.perf_counter()
        read(model, *rest)
        sizes = [p.nbytes for p in model.parameters()]
        out[rank] = Read(sum(sizes), _memory("VmHWM") - before, max(sizes), time.perf_counter() - started)

    hosts.read_pretrained = measured
    host = hosts.MegatronHost(parse({"model": {"weights": folder}, "parallel": {"tp": 2, "pp": 2}}), world)
    torch.distributed.barrier()
    host.close()


def benchmark(sizes: dict[str, int], vocabulary: int) -> dict[str, Any]:
    """Bytes and seconds of every rank, and the seconds that Transformers takes."""
    with tempfile.TemporaryDirectory() as folder, mp.Manager() as manager:
        their_s, ranks = make(Path(folder), sizes, vocabulary), manager.dict()
        mp.spawn(on_rank, (folder, ranks), RANKS)
        return {"ranks": [ranks[rank]._asdict() for rank in range(RANKS)], "from_pretrained_s": their_s}


def table(result: dict[str, Any]) -> Any:
    head = ("rank", "share", "more at its peak", "largest tensor", "peak over share", "seconds")
    rows = []
    for rank, row in enumerate(result["ranks"]):
        over = 1 + row["more_bytes"] / row["share_bytes"]
        sizes = [mib(row[key]) for key in ("share_bytes", "more_bytes", "largest_bytes")]
        rows.append([str(rank), *sizes, f"{over:.2f}", seconds(row["seconds"])])
    note = f"from_pretrained of the whole model in one process: {seconds(result['from_pretrained_s'])}"
    return grid("reading a folder of weights on TP 2 x PP 2, float32, measured", head, rows, note)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="A model of 0.1 M weights: whether it runs.")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    with stdout_aside():
        result = benchmark(QUICK, 512) if asked.quick else benchmark(SIZES, 32000)
    emit(result, asked.json, table)


if __name__ == "__main__":
    main()
