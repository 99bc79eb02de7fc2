"""evenload beside what evens batches by changing them: ODB, Transformers' two samplers, TRL's packing and padding-free.

    python benchmarks/hosts/peers.py [--models llama qwen3] [--lengths published uniform] [--repeats 1] [--json]

TRL's SFTTrainer trains one epoch on two CPU ranks, 8 samples a rank and step, in float32: on a Llama of 2 layers and a
Qwen 3 of 3 layers, hidden size 128, or (`--models gemma3 gemma2`) a Gemma of 2 layers, whose windows of 256 tokens and
soft caps run no packs: there evenload regroups padded rows. ``published`` is the setting in which the authors of
``batch_rebalance`` published theirs: 1,600 lengths lognormal(5, 1) in [16, 1024]; ``uniform`` is 16 to 1,024; of
``two_kinds`` 85 % have 32 to 128 tokens and 15 % 768 to 1,024 (400 samples each).

    padded       SFTTrainer's default
    by length    train_sampling_strategy="group_by_length"
    rebalance    train_sampling_strategy="batch_rebalance", which evens padded cost over ranks
    padding-free padding_free=True: a rank's batch as one row
    bfd          packing=True, packing_strategy="bfd": rows of 1,024 tokens, about as many tokens a step
    odb          ``enable_odb`` of online-dynamic-batching in `.venv-odb`, with a token budget of about as many tokens a
                 step: `python -m venv .venv-odb`, with the packages of `.venv` in sight, and
                 `pip install --no-deps online-dynamic-batching==0.1.2`
    evenload     the padded run, planned

Variants take turns in one process a rank; ODB replaces methods for good, so it has a process of its own, beside a
padded run there. Each is over the padded run of its process. A second is one of CPU time on the busier rank of each
step (ranks meet once in it), so that other work on the machine counts nothing; `wall` is by the clock. The first step
is left out. A token is one of a sample. What a variant changes of the objective is counted where batches come to the
Trainer: ``same`` steps have the samples of the padded run's step; ``seen`` counts samples, of those that there are;
``samples`` is the least and most a step; ``weight`` the least and most that a rank's loss is multiplied by besides
Trainer's own divisor, which is the number of all targets of the step.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import nullcontext
from itertools import chain, product
from pathlib import Path
from typing import Any

import numpy as np
from evenload.benchmarks.frame import ROOT, Row, columns, main, options
from evenload.commands.tables.show import stdout_aside

sys.path.append(str(ROOT / "tests" / "hosts"))

RANKS, BATCH, LONGEST, VOCABULARY, START = 2, 8, 1024, 512, 1
STEADY = {"max_length": LONGEST, "average_tokens_across_devices": True, "learning_rate": 1e-4, "seed": 1}
STEADY |= {"lr_scheduler_type": "constant", "num_train_epochs": 1, "use_cpu": True, "bf16": False, "logging_steps": 1}
STEADY |= {"gradient_checkpointing": False, "save_strategy": "no", "report_to": "none", "disable_tqdm": True}
VARIANTS: dict[str, dict[str, Any]] = {
    "padded": {},
    "by length": {"train_sampling_strategy": "group_by_length"},
    "rebalance": {"train_sampling_strategy": "batch_rebalance"},
    "padding-free": {"padding_free": True, "max_length": None},
    "bfd": {"packing": True, "packing_strategy": "bfd"},
    "evenload": {},
}
OWN_PROCESS = ("padded", "odb")
RECIPE = "trainer: transformers\nplugins:\n  packing: {enabled: true, max_tokens: 4096}\n"


LENGTHS: dict[str, tuple[int, Any]] = {
    "published": (1600, lambda count, drawn: drawn.lognormal(5, 1, count)),
    "uniform": (400, lambda count, drawn: drawn.integers(16, LONGEST + 1, count)),
    "two_kinds": (400, lambda count, drawn: two_kinds(count, drawn)),
}


def two_kinds(count: int, drawn: np.random.Generator) -> Any:
    short, long = drawn.integers(32, 129, count), drawn.integers(768, LONGEST + 1, count)
    return np.where(drawn.random(count) < 0.85, short, long)


def rows_of(name: str, most: int) -> list[list[int]]:
    """Samples that say by their first tokens which they are."""
    count, draw = LENGTHS[name]
    drawn = np.random.default_rng(0)
    lengths = np.clip(draw(min(count, most), drawn).astype(int), 16, LONGEST)
    rows = [drawn.integers(5, VOCABULARY, length) for length in lengths]
    for number, row in enumerate(rows):
        row[:3] = START, 5 + number // 500, 5 + number % 500
    return [row.tolist() for row in rows]


def model_of(name: str) -> Any:
    import torch
    from transformers import AutoModelForCausalLM, Gemma2Config, Gemma3TextConfig, LlamaConfig, Qwen3Config

    sizes = {"hidden_size": 128, "intermediate_size": 512, "num_attention_heads": 4, "vocab_size": VOCABULARY}
    sizes |= {"max_position_embeddings": LONGEST, "num_key_value_heads": 2, "pad_token_id": 0}
    torch.manual_seed(0)
    kinds = {"llama": LlamaConfig(num_hidden_layers=2, **sizes)}
    kinds["qwen3"] = Qwen3Config(num_hidden_layers=3, head_dim=32, **sizes)
    both = ["sliding_attention", "full_attention"]
    windows = {"num_hidden_layers": 2, "head_dim": 32, "sliding_window": 256, "layer_types": both}
    kinds["gemma3"] = Gemma3TextConfig(**sizes, **windows)
    kinds["gemma2"] = Gemma2Config(**sizes, **windows)
    return AutoModelForCausalLM.from_config(kinds[name])


def train(model_name: str, rows: list[list[int]], variant: str, tokenizer: Any, steps: int) -> Row:
    """What this rank measures of one epoch, or of so many steps."""
    import evenload
    import torch
    from datasets import Dataset
    from torch.utils.data import DataLoader, DistributedSampler
    from transformers import TrainerCallback
    from trl import SFTConfig, SFTTrainer

    of_torch = DataLoader.__len__
    seen: list[list[int]] = []
    weights: list[float] = []
    tokens, computed, clock = [], [], []

    class Watching(SFTTrainer):
        """Notes which samples come to it."""

        def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
            ids, mask = inputs["input_ids"], inputs.get("attention_mask")
            starts = (ids == START).nonzero().tolist()
            seen.append([500 * (int(ids[b, t + 1]) - 5) + int(ids[b, t + 2]) - 5 for b, t in starts])
            tokens.append(int(ids.numel() if mask is None else mask.sum()))
            loss = super().training_step(model, inputs, num_items_in_batch)
            infos = getattr(self.state, "odb_step_infos", None)
            weights.append(float(infos[-1].loss_scale) if infos else 1.0)
            return loss

    class Clock(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            clock.append((time.process_time(), time.perf_counter()))
            computed.append(places[0])

    size = sum(map(len, rows)) / len(rows) * BATCH
    per_device = {"bfd": max(1, round(size / LONGEST)), "odb": 1}.get(variant, BATCH)
    trainer = Watching(
        model=model_of(model_name),
        args=SFTConfig(
            tempfile.mkdtemp(),
            per_device_train_batch_size=per_device,
            max_steps=steps,
            **STEADY | VARIANTS.get(variant, {}),
        ),
        train_dataset=Dataset.from_dict({"input_ids": rows}),
        processing_class=tokenizer,
        callbacks=[Clock()],
    )
    places = [0]

    def count(module: Any, args: Any) -> None:
        if torch.is_grad_enabled():
            places[0] += args[0].numel()

    trainer.model.get_input_embeddings().register_forward_pre_hook(count)
    if variant == "odb":
        from odb.integrations.hf import enable_odb

        counts = ("total_batch_size", "odb_total_tokens")  # which it adds to samples, and reads off batches
        # Of Accelerate's own loader on several ranks ODB says that it has no batch size.
        loader = DataLoader(
            trainer.train_dataset,
            batch_size=1,
            sampler=DistributedSampler(trainer.train_dataset, seed=1),
            collate_fn=lambda samples: trainer.data_collator(samples) | {key: samples[0][key] for key in counts},
            num_workers=2,
            prefetch_factor=64,
        )
        enable_odb(
            trainer, train_dataloader=loader, token_budget=int(size), max_optimizer_steps=steps if steps > 0 else None
        )
    recipe = Path(tempfile.mkdtemp()) / "recipe.yaml"
    recipe.write_text(RECIPE)
    with evenload.enabled(recipe) if variant == "evenload" else nullcontext():
        trainer.train()
    DataLoader.__len__ = of_torch  # ODB's is of no other loader
    return {
        **{"seen": seen, "tokens": tokens, "weights": weights, "computed": np.diff(computed).tolist()},
        "cpu_s": np.diff([cpu for cpu, _ in clock]).tolist(),
        "wall_s": clock[-1][1] - clock[0][1],
        "losses": [row["loss"] for row in trainer.state.log_history if "loss" in row],
    }


def child(asked: argparse.Namespace) -> None:
    """A rank: variants in turn."""
    import assets
    import torch
    import torch.distributed as dist
    import transformers

    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    tokenizer = assets.make_tokenizer(assets.library()[:100_000], VOCABULARY, LONGEST)
    rows = rows_of(asked.lengths[0], asked.most)
    results: list[tuple[str, list[Row]]] = []
    for number in range(asked.repeats + 1):
        # The first round only warms up. Workers of ODB's loader that it leaves behind end what comes after them.
        for variant in asked.variants if number else [one for one in asked.variants if one != "odb"]:
            own = train(asked.models[0], rows, variant, tokenizer, asked.steps if number else 1)
            of_ranks: list[Any] = [None] * RANKS
            dist.all_gather_object(of_ranks, own)
            if number:
                results.append((variant, of_ranks))
    if dist.get_rank() == 0:
        asked.out.write_text(json.dumps(results))


def runs_of(asked: argparse.Namespace, model: str, lengths: str, variants: list[str], python: Path) -> Any:
    """What the ranks of one process each measured, variant by variant."""
    with tempfile.TemporaryDirectory(prefix="peers-") as folder:
        out = Path(folder) / "result.json"
        launch = [python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS), __file__]
        own = ["--child", "--models", model, "--lengths", lengths, "--repeats", asked.repeats, "--most", asked.most]
        own += ["--steps", asked.steps, "--out", out, "--variants", *variants]
        plain = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "HF_HOME": folder}
        plain |= {"TOKENIZERS_PARALLELISM": "false", "TMPDIR": folder}
        words, both = list(map(str, [*launch, *own])), {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        process = subprocess.run(words, env=os.environ | plain, text=True, check=False, **both)
        return json.loads(out.read_text()) if out.exists() else process.stdout.strip().splitlines()[-12:]


def step_s(of_ranks: list[Row]) -> float:
    """CPU seconds of an epoch but its first step: of the busier rank, step by step."""
    return sum(map(max, *(one["cpu_s"] for one in of_ranks)))


def figures(of_ranks: list[Row], padded: list[Row], total: int) -> Row:
    """A run beside the padded one of its process."""
    steps = [sorted(chain(*of_step)) for of_step in zip(*(one["seen"] for one in of_ranks), strict=False)]
    wanted = [sorted(chain(*of_step)) for of_step in zip(*(one["seen"] for one in padded), strict=False)]
    tokens = [sum(of_step) for of_step in zip(*(one["tokens"] for one in of_ranks), strict=False)]
    samples = [number for step in steps for number in step]
    weights = [weight for one in of_ranks for weight in one["weights"]]
    return {
        "tokens_per_s": sum(tokens[1:]) / step_s(of_ranks),
        "wall_tokens_per_s": sum(tokens[1:]) / max(one["wall_s"] for one in of_ranks),
        "computed": sum(sum(one["computed"]) for one in of_ranks) / sum(tokens[1:]),
        "steps": len(steps),
        "same": sum(a == b for a, b in zip(steps, wanted, strict=False)),
        "seen": len(set(samples)) / total,
        "again": len(samples) - len(set(samples)),
        "samples": [min(map(len, steps)), max(map(len, steps))],
        "weight": [min(weights), max(weights)],
        "apart": max(abs(a / b - 1) for a, b in zip(of_ranks[0]["losses"], padded[0]["losses"], strict=False)),
    }


def rows_for(asked: argparse.Namespace, model: str, lengths: str) -> list[Row]:
    """The variants on one model and one set of lengths."""
    total = len(rows_of(lengths, asked.most))
    result: dict[str, list[Row]] = {}
    here = [one for one in asked.variants if one != "odb"]
    worlds = [(here, Path(sys.executable))]
    if "odb" in asked.variants and (ROOT / ".venv-odb").exists():
        worlds.append((list(OWN_PROCESS), ROOT / ".venv-odb" / "bin" / "python"))
    for variants, python in worlds:
        runs = runs_of(asked, model, lengths, variants, python)
        if runs and isinstance(runs[0], str):
            result[variants[-1]] = [{"failed": "\n".join(runs)}]
            continue
        padded = next(of_ranks for variant, of_ranks in runs if variant == "padded")
        for variant, of_ranks in runs:
            if variant == "padded":
                padded = of_ranks
            one = figures(of_ranks, padded, total)
            one["over_padded"] = one["tokens_per_s"] / figures(padded, padded, total)["tokens_per_s"]
            one["wall_over"] = one["wall_tokens_per_s"] / figures(padded, padded, total)["wall_tokens_per_s"]
            if variant != "padded" or variants == here:
                result.setdefault(variant, []).append(one)
    key = {"model": model, "lengths": lengths}
    return [key | {"variant": variant} | combined(runs) for variant, runs in result.items()]


def combined(runs: list[Row]) -> Row:
    """Runs of a variant as one row."""
    if "failed" in runs[0]:
        return runs[0]
    names = ("tokens_per_s", "over_padded", "wall_over")
    return runs[0] | {name: statistics.median(run[name] for run in runs) for name in names}


def table(result: Row) -> Any:
    def unless_failed(template: str) -> Any:
        return lambda row: "-" if "failed" in row else template.format(**row)

    def seen(row: Row) -> str:
        return "-" if "failed" in row else f"{row['seen']:.0%}" + f" +{row['again']}" * bool(row["again"])

    cells = {
        "model": "{model}",
        "lengths": "{lengths}",
        "variant": "{variant}",
        "tokens/CPU s": unless_failed("{tokens_per_s:,.0f}"),
        "over padded": unless_failed("{over_padded:.2f}x"),
        "wall": unless_failed("{wall_over:.2f}x"),
        "computed a token": unless_failed("{computed:.2f}"),
        "same": unless_failed("{same} of {steps}"),
        "seen": seen,
        "samples": unless_failed("{samples[0]}..{samples[1]}"),
        "weight": unless_failed("{weight[0]:.2f}..{weight[1]:.2f}"),
        "loss": lambda row: row["failed"][-200:] if "failed" in row else f"{row['apart']:.0e}",
    }
    below = "loss: largest relative difference from the padded run's, step by step: of other samples where not the same"
    return columns("Beside what changes batches, 2 CPU ranks", result["rows"], cells, below)


def benchmark(asked: argparse.Namespace) -> Row:
    rows: list[Row] = []
    with stdout_aside():
        for model, lengths in product(asked.models, asked.lengths):
            rows += rows_for(asked, model, lengths)
            seen = [(row["variant"], row.get("over_padded", row.get("failed"))) for row in rows[-7:]]
            print(model, lengths, seen, file=sys.stderr)
    return {"rows": rows}


if __name__ == "__main__":
    sizes = {"repeats": 1, "most": 10**9, "steps": -1, "child": False}
    own = options(__doc__, models=["llama", "qwen3"], lengths=list(LENGTHS), variants=[*VARIANTS, "odb"], **sizes)
    if "--child" in sys.argv:
        child(own.parse_args())
    else:
        main(own, benchmark, table)
