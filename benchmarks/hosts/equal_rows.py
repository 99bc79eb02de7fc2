"""What evenload costs where it has nothing to gain: rows of one length, under Transformers' Trainer and Accelerate.

    python benchmarks/hosts/equal_rows.py [--rows 256x128 64x64] [--steps 60] [--loop trainer accelerate] [--json]

CPU seconds of a step of a small Llama of two layers, 8 rows of so many tokens x hidden size: the Trainer's in two
batches, the loop's in one, read, reported and run in one process as `evenload run` has it. Steps alternate in one run,
with evenload and without: what else the machine does meets both. "least" and "median" are of such steps; the first ten
are left out. On a rank of a larger job comes what `runtime/world/agreement.py` says of its two exchanges.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import evenload
import torch
from accelerate import Accelerator
from evenload.benchmarks.chains import plugins, recipe_of
from evenload.benchmarks.frame import Row, columns, main, options
from evenload.integrations.transformers import accelerate_loop, trainer
from evenload.integrations.unmodified.run_folder import VARIABLE
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

WARMUP = 10
ROWS = 8


class Steps:
    """CPU seconds of steps, with evenload (True) and without in turn."""

    def __init__(self, switch: Callable[[bool], None]) -> None:
        self.taken: dict[bool, list[float]] = {True: [], False: []}
        self._switch, self._number, self._since_s = switch, 0, 0.0

    def end(self) -> None:
        """A step has ended, and the next one begins."""
        now_s = time.process_time()
        if self._number > WARMUP:
            self.taken[self._number % 2 == 0].append(now_s - self._since_s)
        self._number += 1
        # The first steps, in which packs are measured, are planned.
        self._switch(self._number < WARMUP or self._number % 2 == 0)
        self._since_s = time.process_time()


def rows_of(length: int) -> list[list[int]]:
    return [[1 + (7 * k + j) % 500 for j in range(length)] for k in range(64)]


def collated(rows: list[list[int]]) -> dict[str, torch.Tensor]:
    ids = torch.tensor(rows)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}


def model_of(hidden: int) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": hidden, "intermediate_size": 4 * hidden, "num_attention_heads": 4, "vocab_size": 512}
    return LlamaForCausalLM(LlamaConfig(num_hidden_layers=2, max_position_embeddings=2048, **sizes))


def of_trainer(length: int, hidden: int, steps: int) -> dict[bool, list[float]]:
    with tempfile.TemporaryDirectory() as folder:
        how: dict[str, Any] = {"save_strategy": "no", "report_to": "none", "disable_tqdm": True, "use_cpu": True}
        batches = {"per_device_train_batch_size": ROWS // 2, "gradient_accumulation_steps": 2, "max_steps": steps}
        own: Any = None

        def switch(on: bool) -> None:
            trainer._planned[own].stays = not on

        taken = Steps(switch)

        class AtEnd(TrainerCallback):
            def on_step_end(self, *_: Any, **__: Any) -> None:
                taken.end()

        rows: Any = rows_of(length)
        own = Trainer(
            model_of(hidden),
            TrainingArguments(folder, **how, **batches),
            train_dataset=rows,
            data_collator=collated,
            callbacks=[AtEnd()],
        )
        own.train()
    return taken.taken


def of_accelerate(length: int, hidden: int, steps: int) -> dict[bool, list[float]]:
    accelerator, rows = Accelerator(cpu=True), rows_of(length)
    network = model_of(hidden)
    model, optimizer = accelerator.prepare(network, torch.optim.AdamW(network.parameters()))
    hooks = model._forward_pre_hooks
    own = dict(hooks)

    def switch(on: bool) -> None:
        for key, hook in own.items():
            hooks.pop(key, None)
            if on:
                hooks[key] = hook

    taken = Steps(switch)
    model.train()
    for step in range(steps):
        batch = collated([rows[(ROWS * step + k) % len(rows)] for k in range(ROWS)])
        accelerator.backward(model(**batch).loss)
        optimizer.step()
        optimizer.zero_grad()
        taken.end()
    accelerate_loop.release()
    return taken.taken


LOOPS = {"trainer": of_trainer, "accelerate": of_accelerate}


@contextmanager
def switched_on() -> Any:
    """evenload in this process, which has a folder as under `evenload run`."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ[VARIABLE] = folder
        recipe = recipe_of({"trainer": "transformers", "plugins": plugins(65536, "packing")})
        with evenload.enabled(recipe):
            yield


def row_of(loop: str, length: int, hidden: int, steps: int) -> Row:
    with switched_on():
        taken = LOOPS[loop](length, hidden, steps)
    row: Row = {"loop": loop, "length": length, "hidden": hidden, "steps": len(taken[True])}
    for name, of in (("least", min), ("median", statistics.median)):
        plain_s, with_s = of(taken[False]), of(taken[True])
        row |= {f"{name}_plain_s": plain_s, f"{name}_s": with_s, f"{name}_more": with_s / plain_s - 1}
    return row


def benchmark(asked: Any) -> list[Row]:
    torch.set_num_threads(1)
    sizes = [tuple(map(int, size.split("x"))) for size in asked.rows]
    return [row_of(loop, *size, asked.steps) for loop in asked.loop for size in sizes]


def table(rows: list[Row]) -> Any:
    def ms(name: str) -> Any:
        return lambda row: f"{1e3 * row[f'{name}_plain_s']:.1f} to {1e3 * row[f'{name}_s']:.1f}"

    cells = {
        "rows of one length": f"{{loop}}, {ROWS} x {{length}}, hidden {{hidden}}",
        "steps each": "{steps}",
        "least, CPU ms": ms("least"),
        "median, CPU ms": ms("median"),
        "least": "{least_more:+.1%}",
        "median": "{median_more:+.1%}",
    }
    title = "What a step costs with evenload beside one without"
    return columns(title, rows, cells, f"torch {torch.__version__}, 1 rank")


if __name__ == "__main__":
    main(options(__doc__, rows=["256x128", "64x64"], steps=60, loop=list(LOOPS)), benchmark, table)
