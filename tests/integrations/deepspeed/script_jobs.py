"""What ranks run for the tests of unmodified loops: a user's loop, with data that only some ranks have."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import deepspeed
import numpy as np
import torch
import torch.distributed as dist
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed_tests.jobs import recipe, told
from evenload.core.errors import EvenloadError
from evenload.integrations.deepspeed.engine.engine import prepare_deepspeed
from evenload.integrations.deepspeed.engine.model import build_model
from evenload.integrations.unmodified.planned_runs import release_loops
from evenload.patches import deepspeed as patch
from evenload.patches import transformers
from evenload.patches.ledger import Ledger
from evenload.runtime.world.world import init_world
from transformers import (
    AutoModelForCausalLM,
    DataCollatorWithFlattening,
    Llama4TextConfig,
    LlamaConfig,
    MistralConfig,
    Qwen3MoeConfig,
)

SMALL = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
SMALL |= {"num_attention_heads": 4, "num_key_value_heads": 2}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
Rows = list[torch.Tensor]
SAMPLES = [np.random.default_rng(i).integers(0, 97, n) for i, n in enumerate((40, 9, 13, 22, 5))]


def rows_of(*lengths: int) -> Rows:
    return [torch.arange(1, n + 1) + 13 * place for place, n in enumerate(lengths)]


def collate(rows: Rows, *, side: str = "right", fill: int = -100, width: int = 0) -> dict[str, torch.Tensor]:
    width = max(width, *map(len, rows))

    def padded(row: torch.Tensor, value: int) -> torch.Tensor:
        padding = row.new_full((width - len(row),), value)
        return torch.cat([padding, row] if side == "left" else [row, padding])

    labels = [row.clone() for row in rows]
    if side == "left":
        for label in labels:
            label[0] = -100
    return {
        "input_ids": torch.stack([padded(row, 0) for row in rows]),
        "attention_mask": torch.stack([padded(torch.ones_like(row), 0) for row in rows]),
        "labels": torch.stack([padded(label, fill) for label in labels]),
    }


def flatten(rows: Rows) -> Any:
    return DataCollatorWithFlattening(return_flash_attn_kwargs=True)([{"input_ids": row} for row in rows])


def start(data: Any, collate_fn: Callable[..., Any], config: Any = None, *, size: int = 2, gas: int = 1) -> Any:
    """(engine, loader) of ``deepspeed.initialize`` in a script with an evenload section; size: rows a micro-batch."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config or LlamaConfig(**SMALL), attn_implementation="sdpa")
    ds_config = {"train_micro_batch_size_per_gpu": size, "gradient_accumulation_steps": gas, "gradient_clipping": 0.0}
    ds_config |= {"zero_allow_untested_optimizer": True, "evenload": {"packing": {"enabled": True, "max_tokens": 64}}}
    engine, _, loader, _ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.5),
        config=ds_config,
        training_data=data,
        collate_fn=collate_fn,
    )
    return engine, loader


@contextmanager
def switched_on() -> Iterator[None]:
    """Inside, DeepSpeed reads the evenload section of a script."""
    prepare_deepspeed()
    init_world()
    with Ledger() as ledger:
        ledger.apply([*transformers.rows()[:1], *patch.rows()])  # the first one names the attention
        yield
    release_loops()


class Drifting(list[torch.Tensor]):
    def __getitem__(self, index: Any) -> Any:
        self.readings = getattr(self, "readings", 0) + 1
        return super().__getitem__(index) + self.readings


def refusals() -> dict[str, str]:
    """Messages of what cannot be regrouped, on this rank; the rows at fault are some other rank's alone."""
    os.environ["PYTHON_EVENLOAD_REQUIRE"] = "1"
    chunked = Llama4TextConfig(**SMALL, attention_chunk_size=16, layer_types=["chunked_attention"] * 2)
    dynamic = LlamaConfig(**SMALL, max_position_embeddings=16, rope_parameters=DYNAMIC)
    routed = Qwen3MoeConfig(**SMALL, output_router_logits=True)
    cases: dict[str, Callable[[], Any]] = {
        "labels on padding": lambda: start(rows_of(8, 8, 8, 5), lambda rows: collate(rows, fill=0)),
        "chunks": lambda: start(rows_of(8, 8, 8, 20), collate, chunked),
        "rotary": lambda: start(rows_of(8, 8, 8, 17), collate, dynamic),
        "rotary of padding": lambda: start(rows_of(8, 8, 8, 9), lambda rows: collate(rows, width=17), dynamic),
        "router loss": lambda: start(rows_of(8, 8, 8, 8), collate, routed),
        "no target": lambda: start(rows_of(1, 1, 1, 1), collate),
        "another sample": lambda: start(Drifting(rows_of(40, 3, 3, 3)), collate),
    }
    messages: dict[str, str] = {}
    with switched_on():
        for name, case in cases.items():
            try:
                _, loader = case()
                next(iter(loader))
            except EvenloadError as error:
                messages[name] = str(error)
    return messages


def batches(kind: str) -> list[list[tuple[list[int], list[int]]]]:
    """What this rank's loader gives over an epoch: for each batch its segments as (tokens, labels), by positions."""
    forms = {"right": collate, "left": lambda rows: collate(rows, side="left"), "flattened": flatten}
    with switched_on():
        _, loader = start(rows_of(30, 3, 1, 17, 9, 4, 22, 6), forms[kind], size=2, gas=2)
        result = []
        for batch, planned in ((batch, loader._handed_out[-1]) for batch in loader):
            tokens, labels = (batch[key][0].tolist() for key in ("input_ids", "labels"))
            result.append([(tokens[a:b], labels[a:b]) for a, b in pairwise(planned.pack.segments)])
    return result


def losses_of_dummies(kind: str) -> dict[str, Any]:
    """A step in which a rank has one sample for two micro-batches: losses, and the weights' error to a plain step."""
    data = rows_of(60, 4, 5, 3)
    routed = {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}
    windowed = MistralConfig(**SMALL, sliding_window=16)
    config = {"experts": Qwen3MoeConfig(**SMALL, **routed), "window": windowed, "": LlamaConfig(**SMALL)}[kind]
    with switched_on():
        engine, loader = start(data, collate, config, size=1, gas=2)
        plain = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
        plain.load_state_dict(engine.module.state_dict())
        losses, real = [], []
        for batch in loader:
            real.append(loader._handed_out[-1].weight > 0)
            loss = engine(**batch).loss
            engine.backward(loss)
            engine.step()
            losses.append(float(loss.detach()))
        moved = {name: p.detach() for name, p in engine.module.named_parameters()}
    targets = sum(len(row) - 1 for row in data)
    for row in data:
        (plain(**collate([row])).loss * (len(row) - 1) / targets).backward()
    error = max(float((moved[name] - (p - 0.5 * p.grad)).abs().max()) for name, p in plain.named_parameters())
    return {"rank": dist.get_rank(), "losses": losses, "real": real, "error": error}


def misuse() -> dict[str, Any]:
    """A script's engine in one process, used as a script should not; messages of the errors, and what is left after."""
    os.environ["PYTHON_EVENLOAD_REQUIRE"] = "1"
    said: dict[str, Any] = {}

    def collate(rows: list[Any]) -> dict[str, torch.Tensor]:
        (row,) = rows
        return {"input_ids": row[None], "labels": row[None]}

    def make(section: Any, collate_fn: Any = collate, **more: Any) -> Any:
        config = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 2, **more, "evenload": section}
        model = build_model(recipe(1), attn_implementation="sdpa")
        data = [torch.from_numpy(tokens) for tokens in SAMPLES]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        engine, _, loader, _ = deepspeed.initialize(
            model=model, optimizer=optimizer, config=config, training_data=data, collate_fn=collate_fn
        )
        return engine, loader

    section = {"packing": {"enabled": True, "max_tokens": 64}}
    with switched_on():
        said["unknown key"] = told(lambda: make({"packin": {}}))
        said["unmanaged"] = told(lambda: make(section, managed_gradient_accumulation=False))
        engine, loader = make(section, collate_fn=lambda rows: {"x": rows[0][None]})
        said["other keys"] = told(lambda: next(iter(loader)))
        engine, loader = make({"packing": {"enabled": True, "max_tokens": 30}})
        said["too long"] = told(lambda: list(loader))

        engine, loader = make(section)
        said["micro-batches"] = [len(loader), len(list(loader))]
        engine, loader = make({**section, "mesh": {"enabled": True}})
        said["with mesh"] = len(list(loader))
        engine, loader = make(section)
        batches = iter(loader)
        first = next(batches)
        said["other tokens"] = told(lambda: engine(input_ids=first["input_ids"] + 1, labels=first["labels"]))
        loss = engine(first["input_ids"], labels=first["labels"]).loss
        said["two forwards"] = told(lambda: engine(**next(batches)))
        said["step without backward"] = told(lambda: engine.step())
        returned = engine.backward(loss)
        said["returned"] = [float(loss.detach()), float(returned)]
        engine.step()
        said["attention"] = [engine.module.config._attn_implementation]
    said["attention"].append(engine.module.config._attn_implementation)
    said["disabled inside an epoch"] = told(lambda: next(batches) and next(batches))
    said["stock again"] = type(iter(loader)).__name__
    said["methods"] = [type(vars(DeepSpeedEngine)[n]).__name__ for n in ("deepspeed_io", "forward", "backward", "step")]
    return said
