"""Ragged pictures under Transformers' Trainer on two CPU ranks: the script as it is, and planned by evenload.

    python benchmarks/hosts/pictures.py [--repeats 3] [--layout ddp] [--steps 6] [--quick] [--json] [--out FILE]

A Qwen2.5-VL of random weights (text: 4 layers of 192; tower: 3 layers of 80) is fine-tuned on samples with 0 to 4
pictures, lognormal from 16 to 1,024 patches each, between lognormal texts; two samples in a micro-batch, four
micro-batches a step and rank.

    stock     the script
    evenload  the same by ``evenload run``: samples change micro-batches and ranks with their pictures
    unweighed evenload, with pictures counted as no work: what weighing them gains

Variants alternate. Seconds are CPU seconds of a rank's process from one update to the next, since cores are shared with
other work: a step takes what its busiest rank does, summed over all steps but the first, which measures and draws.
Losses are held against the stock run's, step by step.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, ClassVar

IMAGE, WORDS, VALUES = 1000, 1000, 3 * 2 * 14 * 14
TEXT = {"hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 6}
TOWER = {"depth": 3, "hidden_size": 80, "intermediate_size": 192, "num_heads": 4, "out_hidden_size": 192}
RECIPE = "trainer: transformers\nplugins:\n  packing: {enabled: true, max_tokens: 4096}\n"
VARIANTS = ("stock", "evenload", "unweighed")


def sample(number: int, quick: bool) -> dict[str, Any]:
    """Tokens, and the grids of its pictures."""
    import numpy as np

    draw = np.random.default_rng(number)
    largest = 8 if quick else 32
    sides = np.exp(draw.normal(2.3, 0.5, (int(draw.choice([0, 0, 1, 1, 2, 4])), 2)))
    grids = [(1, *(2 * int(np.clip(side // 2, 2, largest // 2)) for side in of_one)) for of_one in sides]
    tokens = draw.integers(1, 900, 8).tolist()
    for _, height, width in grids:
        tokens += [1001, *[IMAGE] * (height * width // 4), 1002]
    tokens += draw.integers(1, 900, int(np.clip(np.exp(draw.normal(4.0, 0.8)), 8, 400))).tolist()
    return {"tokens": tokens, "grids": grids, "number": number}


def collate(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """As a processor's collator: rows padded, all patches behind each other."""
    import torch

    most = max(len(row["tokens"]) for row in rows)
    tokens = torch.tensor([row["tokens"] + [0] * (most - len(row["tokens"])) for row in rows])
    batch = {"input_ids": tokens, "attention_mask": (tokens != 0).long()}
    batch |= {
        "mm_token_type_ids": (tokens == IMAGE).int(),
        "labels": tokens.where((tokens > 0) & (tokens < 1000), -100),
    }
    grids = [grid for row in rows for grid in row["grids"]]
    if grids:
        batch["image_grid_thw"] = torch.tensor(grids)
        draw = torch.Generator().manual_seed(rows[0]["number"])
        batch["pixel_values"] = torch.randn(int(batch["image_grid_thw"].prod(1).sum()), VALUES, generator=draw)
    return batch


def train(asked: argparse.Namespace) -> None:
    """One rank of a run; leaves its CPU seconds and its losses."""
    import torch
    from transformers import (
        Qwen2_5_VLConfig,
        Qwen2_5_VLForConditionalGeneration,
        Trainer,
        TrainerCallback,
        TrainingArguments,
    )

    class Clock(TrainerCallback):
        times: ClassVar[list[float]] = []

        def on_step_end(self, *_: Any, **__: Any) -> None:
            self.times.append(time.process_time())

    torch.set_num_threads(1)
    torch.manual_seed(0)
    text = {**TEXT, "num_key_value_heads": 6, "vocab_size": 1003, "max_position_embeddings": 8192}
    rope = {"rope_type": "default", "mrope_section": [4, 6, 6], "rope_theta": 1e6}
    tower = {**TOWER, "patch_size": 14, "window_size": 112, "fullatt_block_indexes": [2]}
    tokens = {
        "image_token_id": IMAGE,
        "vision_start_token_id": 1001,
        "vision_end_token_id": 1002,
        "video_token_id": 999,
    }
    config = Qwen2_5_VLConfig(text_config={**text, "rope_parameters": rope}, vision_config=tower, **tokens)
    if asked.unweighed:
        from evenload.integrations.transformers import planning

        planning.seconds_beside = lambda samples, *_: [(0.0, 0.0) for _ in samples]
    settings = json.loads(asked.train)
    shared = {"use_cpu": True, "seed": 1, "report_to": "none", "save_strategy": "no", "disable_tqdm": True}
    shared |= {"logging_steps": 1, "max_steps": asked.steps, "remove_unused_columns": False, "learning_rate": 1e-3}
    arguments = TrainingArguments(
        "out", per_device_train_batch_size=2, gradient_accumulation_steps=4, **shared, **settings
    )
    rows = [sample(number, asked.quick) for number in range(16 * asked.steps)]
    model = Qwen2_5_VLForConditionalGeneration(config)
    trainer = Trainer(model, arguments, train_dataset=rows, data_collator=collate, callbacks=[Clock()])
    trainer.train()
    log = [row for row in trainer.state.log_history if "loss" in row]
    result = {"times": Clock.times, "loss": [row["loss"] for row in log], "norm": [row.get("grad_norm") for row in log]}
    Path(f"{os.environ['RANK']}.json").write_text(json.dumps(result))
    torch.distributed.destroy_process_group()  # else its threads now and then abort the process as it ends


def measured(variant: str, asked: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """A run of a variant: the busiest rank's seconds of its steps, and their mean."""
    import launching

    folder.mkdir()
    (folder / "recipe.yaml").write_text(RECIPE)
    layout = {"deepspeed": str(launching.ds_config(folder, int(asked.layout[-1])))} if asked.layout != "ddp" else {}
    words = ["--train", json.dumps(layout), "--steps", asked.steps, *["--quick"] * asked.quick]
    words += ["--unweighed"] if variant == "unweighed" else []
    recipe = None if variant == "stock" else folder / "recipe.yaml"
    run = launching.launch(Path(__file__).resolve(), words, folder, recipe, limit_s=900.0)
    if run.code:
        sys.exit(f"{variant} failed:\n{run.output[-3000:]}")
    ranks = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(launching.RANKS)]
    steps = [[b - a for a, b in zip(one["times"], one["times"][1:], strict=False)] for one in ranks]
    busiest, mean = sum(map(max, *steps)), sum(map(sum, steps)) / len(steps)
    return {"busiest_s": busiest, "mean_s": mean, "loss": ranks[0]["loss"], "norm": ranks[0]["norm"]}


def summary(variant: str, rows: list[dict[str, Any]], stock: list[dict[str, Any]]) -> dict[str, Any]:
    """The runs of a variant as one row, each held against the stock run beside it."""
    ratios = sorted(other["busiest_s"] / row["busiest_s"] for row, other in zip(rows, stock, strict=True))

    def apart(name: str) -> float | None:
        pairs = [(a, b) for a, b in zip(rows[0][name], stock[0][name], strict=True) if a and b]
        return max((abs(float(a) / float(b) - 1) for a, b in pairs), default=None)

    return {
        "variant": variant,
        "busiest_s": statistics.median(row["busiest_s"] for row in rows),
        "imbalance": statistics.median(row["busiest_s"] / row["mean_s"] for row in rows),
        "over_stock": statistics.median(ratios),
        "ratios": ratios,
        "loss_apart": apart("loss"),
        "norm_apart": apart("norm"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--layout", default="ddp", choices=("ddp", "zero2", "zero3"))
    parser.add_argument("--quick", action="store_true", help="small pictures: whether it runs")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--train", help=argparse.SUPPRESS)
    parser.add_argument("--unweighed", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.train:
        train(asked)
        return
    sys.path.append(str(Path(__file__).resolve().parents[2] / "tests" / "hosts"))
    from evenload.commands.tables.show import emit, grid, stdout_aside

    runs: dict[str, list[dict[str, Any]]] = {variant: [] for variant in VARIANTS}
    with stdout_aside(), tempfile.TemporaryDirectory(prefix="pictures-") as folder:
        for repeat in range(asked.repeats):
            for variant, rows in runs.items():
                rows.append(measured(variant, asked, Path(folder) / f"{variant}{repeat}"))
                print(variant, repeat, f"{rows[-1]['busiest_s']:.2f} s", file=sys.stderr)
    rows = [summary(variant, own, runs["stock"]) for variant, own in runs.items()]
    result = {"layout": asked.layout, "steps": asked.steps, "rows": rows}
    if asked.out:
        asked.out.write_text(json.dumps(result, indent=1))

    def table(result: dict[str, Any]) -> Any:
        head = ("variant", "busiest rank, CPU s", "over the mean", "over stock", "lowest .. highest", "loss", "norm")
        cells = [
            [
                row["variant"],
                f"{row['busiest_s']:.2f}",
                f"{row['imbalance']:.2f}",
                f"{row['over_stock']:.2f}x",
                f"{row['ratios'][0]:.2f} .. {row['ratios'][-1]:.2f}",
                *("-" if row[name] is None else f"{row[name]:.0e}" for name in ("loss_apart", "norm_apart")),
            ]
            for row in result["rows"]
        ]
        return grid(f"Pictures, {result['layout']}, {result['steps']} steps", head, cells, "loss, norm: from stock")

    emit(result, asked.json, table)


if __name__ == "__main__":
    main()
