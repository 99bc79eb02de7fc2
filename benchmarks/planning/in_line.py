"""What planning takes of a step in loops of others, where it is in line: two ranks, real loops, ragged samples.

    torchrun --nproc-per-node 2 benchmarks/planning/in_line.py [--loop trainer|megatron] [--steps 8] [--json]
                                                                 [--out FILE]

trainer    Transformers' Trainer, 64 samples a step, lognormal, to 1,024 tokens; two layers of hidden size 256
megatron   tests/scripts/megatron_script.py, unedited: 64 samples a step, to 3,072 tokens

Packing and mesh are on. A step goes from one planning to the next; seconds of both are CPU seconds of rank 0 (waiting
for others is none, nor is what else the machine does). The first two steps are left out.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import evenload
import numpy as np
import torch
from evenload.api import load_plugins
from evenload.commands.tables.show import emit, grid
from evenload.core.recipe.recipe import parse
from evenload.integrations.unmodified.planned_loop import PlannedLoop

LONGEST, SAMPLES, SKIPPED = 1024, 64, 2
LONGEST_OF_SCRIPT = 3 * LONGEST
SCRIPT = Path(__file__).parents[2] / "tests/scripts/megatron_script.py"


def recipe_of(trainer: str, longest: int) -> Any:
    load_plugins()
    plugins = {name: {"enabled": True, "max_tokens": 2 * longest} for name in ("packing", "mesh")}
    return parse({"trainer": trainer, "plugins": plugins})


def run_trainer(steps: int) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    lengths = np.random.default_rng(0).lognormal(np.log(200), 1.0, SAMPLES * steps).clip(8, LONGEST).astype(int)
    samples: Any = [[1 + (7 * k + j) % 500 for j in range(length)] for k, length in enumerate(lengths.tolist())]

    def collated(rows: list[list[int]]) -> dict[str, torch.Tensor]:
        longest = max(map(len, rows))
        ids = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
        mask = (torch.arange(longest) < torch.tensor([len(row) for row in rows])[:, None]).long()
        return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}

    sizes = {"hidden_size": 256, "intermediate_size": 1024, "num_attention_heads": 4, "vocab_size": 512}
    model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=2, max_position_embeddings=LONGEST, **sizes))
    how: dict[str, Any] = {
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "ddp_backend": "gloo",
    }
    batches = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": SAMPLES // 16, "max_steps": steps}
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(folder, **how, **batches)
        Trainer(model, arguments, train_dataset=samples, data_collator=collated).train()


def run_megatron(steps: int) -> None:
    from evenload.patches import bridge_cpu

    bridge_cpu()
    spec = importlib.util.spec_from_file_location("megatron_script", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    script: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    script.SEQ_LENGTH, script.MICRO_BATCH, script.NUM_MICRO_BATCHES = LONGEST_OF_SCRIPT, 4, SAMPLES // 8
    script.STEPS = steps
    with tempfile.TemporaryDirectory() as folder:
        sys.argv = [str(SCRIPT), "--out", folder, "--dtypes", "fp32"]
        script.main()


LOOPS = {"trainer": ("transformers", run_trainer, LONGEST), "megatron": ("megatron", run_megatron, LONGEST_OF_SCRIPT)}


def benchmark(loop: str, steps: int) -> dict[str, Any]:
    """Run a loop with its plans timed."""
    begun_s, taken_s, wall_s = list[float](), list[float](), list[float]()
    plan = PlannedLoop.plan

    def timed(self: PlannedLoop, *batch: Any) -> Any:
        cpu_s, own_s, now_s = time.process_time(), time.thread_time(), time.perf_counter()
        begun_s.append(cpu_s)
        result = plan(self, *batch)
        taken_s.append(time.thread_time() - own_s)
        wall_s.append(now_s)
        return result

    PlannedLoop.plan = timed  # type: ignore[method-assign]
    trainer, run, longest = LOOPS[loop]
    with evenload.enable(recipe_of(trainer, longest)):
        run(steps)
    step_s = np.diff(begun_s)[SKIPPED:]
    assert len(step_s) >= 3, f"{len(begun_s)} plans"
    return {
        "loop": loop,
        "steps": len(step_s),
        "step_s": statistics.median(step_s),
        "step_wall_s": statistics.median(np.diff(wall_s)[SKIPPED:]),
        "plan_s": statistics.median(taken_s[SKIPPED:-1]),
        "share": sum(taken_s[SKIPPED:-1]) / sum(step_s),
        "most": max(np.array(taken_s[SKIPPED:-1]) / step_s),
    }


def table(result: dict[str, Any]) -> Any:
    seconds = (f"{result[name]:.3f}" for name in ("plan_s", "step_s", "step_wall_s"))
    row = (result["loop"], str(result["steps"]), *seconds, *(f"{result[name]:.2%}" for name in ("share", "most")))
    head = ("loop", "steps", "plan, CPU s", "step, CPU s", "step, wall s", "planning's share", "at most")
    return grid("Planning in line", head, [row], f"2 ranks, torch {torch.__version__}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--loop", choices=tuple(LOOPS), default="trainer")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--json", action="store_true", help="Print one JSON object instead of the table.")
    parser.add_argument("--out", type=Path, help="Write the JSON here too.")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    result = benchmark(asked.loop, asked.steps)
    if os.environ.get("RANK", "0") == "0":
        if asked.out:
            asked.out.write_text(json.dumps(result, indent=1) + "\n")
        emit(result, asked.json, table)


if __name__ == "__main__":
    main()
