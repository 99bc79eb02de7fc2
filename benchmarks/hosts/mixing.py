"""Packs against padded groups under the real Trainer, for models with windows, soft caps, sinks and linear layers.

    python benchmarks/hosts/mixing.py [--steps 4] [--repeats 3] [--json]

The same samples and the same plans' cap, one process, float32, models of four layers; padded groups are what runs where
packs are refused. Runs alternate; given is the least CPU time of a step of each, since cores are shared.
"""

from __future__ import annotations

import argparse
import json
import logging
import tempfile
import time
import warnings
from typing import Any

import numpy as np
import torch
from evenload.api import load_plugins
from evenload.core.errors import EvenloadError
from evenload.core.recipe import recipe as recipes
from evenload.integrations.transformers import trainer as planned_trainer
from evenload.patches.session import enabled
from evenload.runtime.attributes import with_attributes
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments

_SIZES = {"vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4}
_SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "pad_token_id": 0}
_DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
MODELS: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": 128},
    "gemma2": {"sliding_window": 128, "attention_dropout": 0.0},
    "gpt_oss": {"sliding_window": 128, "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_next": {**_DELTA, **_EXPERTS, "shared_expert_intermediate_size": 64},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
}
LENGTHS = np.random.default_rng(0).lognormal(4.6, 0.8, 128).clip(8, 1024).astype(int)
"""Tokens of the samples: median 99, a long tail."""
_ROWS = 8


class Clock(TrainerCallback):
    """CPU seconds of each step, and the slots that a model computes."""

    def __init__(self, model: Any) -> None:
        self.steps: list[float] = []
        self.slots = 0
        model.register_forward_pre_hook(self._count, with_kwargs=True)

    def _count(self, model: Any, args: Any, kwargs: Any) -> None:
        self.slots += kwargs["input_ids"].numel()

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._begun = time.process_time()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.steps.append(time.process_time() - self._begun)


def collate(rows: list[Any]) -> dict[str, torch.Tensor]:
    most = max(len(row["input_ids"]) for row in rows)
    pads = {"input_ids": 0, "labels": -100, "attention_mask": 0}
    return {k: torch.tensor([row[k] + [pad] * (most - len(row[k])) for row in rows]) for k, pad in pads.items()}


def run(name: str, packs: bool, steps: int) -> tuple[list[float], float]:
    """CPU seconds of the steps but the first, which measures, and slots of one step."""
    torch.manual_seed(0)
    config = CONFIG_MAPPING[name](**_SIZES, **MODELS[name])
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    draw = np.random.default_rng(1)
    drawn = [draw.integers(3, 512, length).tolist() for length in LENGTHS]
    data = [{"input_ids": one, "labels": one, "attention_mask": [1] * len(one)} for one in drawn]
    clock = Clock(model)
    refused = {} if packs else {"packs_fault": lambda _: EvenloadError("no packs", "--", "")}
    recipe = {"trainer": "transformers", "plugins": {"packing": {"enabled": True, "max_tokens": 2048}}}
    with tempfile.TemporaryDirectory() as folder, with_attributes(planned_trainer, **refused):
        own = {"per_device_train_batch_size": _ROWS, "max_steps": steps + 1, "seed": 1, "report_to": "none"}
        quiet = {"save_strategy": "no", "disable_tqdm": True, "logging_strategy": "no", "use_cpu": True}
        with enabled(recipes.parse(recipe)):
            arguments = TrainingArguments(folder, **own, **quiet)
            Trainer(model, arguments, train_dataset=data, data_collator=collate, callbacks=[clock]).train()
    return clock.steps[1:], clock.slots / (steps + 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    load_plugins()
    rows = {}
    for name in MODELS:
        least: dict[bool, float] = {}
        slots: dict[bool, float] = {}
        for _ in range(options.repeats):
            for packs in (False, True):
                seconds, slots[packs] = run(name, packs, options.steps)
                least[packs] = min(least.get(packs, np.inf), *seconds)
        row = {"rows_slots": slots[False], "packs_slots": slots[True], "rows_s": least[False], "packs_s": least[True]}
        rows[name] = row | {"ratio": least[False] / least[True]}
        if not options.json:
            print(f"{name:12} " + "  ".join(f"{key} {value:.3f}" for key, value in rows[name].items()), flush=True)
    if options.json:
        print(json.dumps(rows))


if __name__ == "__main__":
    main()
