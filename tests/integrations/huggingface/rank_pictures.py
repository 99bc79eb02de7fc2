"""What the ranks of a test world run: every function here is a case of test_pictures.py."""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import numpy as np
import rank_accelerate
import torch
from evenload.integrations.transformers import trainer as planned_trainer
from evenload.runtime.attributes import with_attributes
from evenload.runtime.world.agreement import rank_and_size
from rank_trainer import double_loss, step_of
from trainer_runs import NO_PACKS, Gradients, ends, error_of, planned_by, recipe
from transformers import AutoModelForImageTextToText
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

IMAGE = 90
TEXT = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "pad_token_id": 0}
TEXT |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512}
TOWER = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
CLIP = {"model_type": "clip_vision_model", **TOWER, "patch_size": 2, "image_size": 8, "projection_dim": 16}
OF_QWEN = {"depth": 2, "num_heads": 2, "patch_size": 2, "spatial_merge_size": 2, "temporal_patch_size": 1}
OF_QWEN |= {"hidden_size": 16, "out_hidden_size": 32, "intermediate_size": 24, "in_channels": 3}
MROPE = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}
LLAVA = {"text_config": {"model_type": "llama", **TEXT}, "vision_config": CLIP, "vision_feature_layer": -2}
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen2_5_vl": {
        "text_config": {**TEXT, "rope_parameters": MROPE},
        "vision_config": {**OF_QWEN, "window_size": 8, "fullatt_block_indexes": [1]},
    },
    "llava": LLAVA,
    "llava in rows": LLAVA,
    "llava across pictures": LLAVA,
    "llava with windows": {**LLAVA, "text_config": {"model_type": "mistral", **TEXT, "sliding_window": 16}},
    "smolvlm": {
        "text_config": {"model_type": "llama", **TEXT},
        "vision_config": {**TOWER, "patch_size": 2, "image_size": 8},
        "scale_factor": 2,
    },
}
PACKING = {"max_tokens": 160}


def build_model(name: str) -> Any:
    torch.manual_seed(0)
    kind = name.split()[0]
    config = CONFIG_MAPPING[kind](**CONFIGS[name], image_token_id=IMAGE, tie_word_embeddings=False)
    if kind.startswith("qwen"):
        config.video_token_id, config.vision_start_token_id, config.vision_end_token_id = 91, 92, 93
    model = AutoModelForImageTextToText.from_config(config).double()
    model.loss_function = double_loss
    if "across" in name:
        projector = model.model.multi_modal_projector
        projector.register_forward_hook(lambda module, args, output: output * args[0].mean().exp())
    return model


def samples_of(name: str, seed: int = 0, count: int = 10) -> list[dict[str, Any]]:
    """Samples of 0 to 3 pictures of unlike sizes between text, whose last half carries loss."""
    draw = np.random.default_rng(seed)
    rows = []
    for number in range(count):
        pictures = [draw.normal(size=(3, 8, 8)) for _ in range((2, 0, 1, 3)[number % 4])]
        grids = [(1, 2 * int(draw.integers(1, 5)), 2 * int(draw.integers(1, 5))) for _ in pictures]
        tokens: list[int] = draw.integers(1, 80, int(draw.integers(1, 4))).tolist()
        for grid in grids:
            each = grid[1] * grid[2] // 4 if name.startswith("qwen") else 4 if name == "smolvlm" else 16
            tokens += [92, *[IMAGE] * each, 93, *draw.integers(1, 80, int(draw.integers(1, 5))).tolist()]
        tokens += draw.integers(1, 80, int(draw.integers(4, 30))).tolist()
        labels = [-100 if place < len(tokens) - 3 - number % 3 else one for place, one in enumerate(tokens)]
        patches = [draw.normal(size=(grid[1] * grid[2], 12)) for grid in grids]
        rows.append({"tokens": tokens, "labels": labels, "pictures": pictures, "grids": grids, "patches": patches})
    return rows


def collator(name: str) -> Any:
    """As users write it for a processor of the model."""

    def collate(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        most = max(len(row["tokens"]) for row in rows)

        def padded(of: str, fill: int) -> torch.Tensor:
            return torch.tensor([row[of] + [fill] * (most - len(row[of])) for row in rows])

        batch = {"input_ids": padded("tokens", 0), "labels": padded("labels", -100)}
        batch["attention_mask"] = (batch["input_ids"] != 0).long()
        pictures = [torch.tensor(np.array(row["pictures"])) for row in rows if row["pictures"]]
        if name.startswith("qwen"):
            batch["mm_token_type_ids"] = (batch["input_ids"] == IMAGE).int()
            if pictures:
                batch["image_grid_thw"] = torch.tensor([grid for row in rows for grid in row["grids"]])
                batch["pixel_values"] = torch.cat([torch.tensor(one) for row in rows for one in row["patches"]])
        elif pictures and name == "smolvlm":
            count = max(map(len, pictures))
            batch["pixel_values"] = torch.zeros(len(rows), count, 3, 8, 8, dtype=torch.float64)
            batch["pixel_attention_mask"] = torch.zeros(len(rows), count, 8, 8, dtype=torch.bool)
            for number, row in enumerate(rows):
                for place, picture in enumerate(row["pictures"]):
                    batch["pixel_values"][number, place] = torch.tensor(picture)
                    batch["pixel_attention_mask"][number, place] = True
        elif pictures:
            batch["pixel_values"] = torch.cat(pictures)
        return batch

    return collate


def train(name: str, rows: Any, zero: int | None = None) -> tuple[float, Gradients]:
    """One optimizer step over all rows, two in a micro-batch: its loss and gradients; `zero` as in `step_of`."""
    own = {"per_device_train_batch_size": 2, "remove_unused_columns": False}
    own |= {"gradient_accumulation_steps": len(rows) // 2 // rank_and_size()[1]}
    return step_of(partial(build_model, name), zero, own, train_dataset=rows, data_collator=collator(name))


def exact(name: str, rows: Any = None, zero: int | None = None) -> dict[str, Any]:
    """Errors of a planned step against the same Trainer without evenload, and what was planned."""
    rows = samples_of(name, count=6 * rank_and_size()[1]) if rows is None else rows
    loss, wanted = train(name, rows, zero)
    trained = any("vis" in key and float(one.norm()) > 0 for key, one in wanted.items())
    assert trained or not any(row["pictures"] for row in rows), "no tower was trained"
    no_packs = NO_PACKS if "in rows" in name else {}
    with with_attributes(planned_trainer, **no_packs), planned_by(recipe(packing=PACKING)) as seen:
        own_loss, gradients = train(name, rows, zero)
    micro_batches = [m for plan in seen.plans for m in plan.micro_batches]
    beside = [chain.context.costs.beside for chain in seen.chains]
    return {
        "loss": abs(own_loss - loss) / loss,
        "grad": error_of(gradients, wanted),
        "idle": seen.idle,
        "beside": beside,
        "padded": any(m.pad_to for m in micro_batches),
        "ranks": {m.ranks[0] for m in micro_batches for s in m.slices if beside[0][s.sequence][0]},
    }


def under_zero(name: str, zero: int) -> dict[str, Any]:
    """`exact` in float32, and what float32 itself is off by: a gradient of a norm may all but cancel."""
    rows = samples_of(name, count=6 * rank_and_size()[1])
    rounding = error_of(train(name, rows, zero)[1], train(name, rows)[1])
    return exact(name, rows, zero) | {"rounding": rounding}


def each(names: list[str]) -> dict[str, Any]:
    return {name: exact(name) for name in names}


def text_in_planes(name: str, planes: int) -> dict[str, Any]:
    """`exact` of rows of text, whose collate function gives positions in so many planes."""
    collate, rows = collator(name), [row for row in samples_of(name, count=64) if not row["pictures"]][:12]

    def with_positions(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        batch = collate(rows)
        return batch | {
            "position_ids": torch.arange(batch["input_ids"].shape[1]).expand(planes, *batch["labels"].shape)
        }

    with with_attributes(sys.modules[__name__], collator=lambda _: with_positions):
        return exact(name, rows)


def one_sided(name: str) -> dict[str, Any]:
    """`exact` where the batches of the first rank have pictures, and those of the others none."""
    size, rows = rank_and_size()[1], samples_of(name, count=48)
    own = [row for row in rows if row["pictures"]], [row for row in rows if not row["pictures"]]
    mixed = [own[min(place % size, 1)].pop() for _ in range(2) for place in range(size) for _ in range(2)]
    return exact(name, mixed)


def disagreeing(name: str, fault: str) -> dict[str, str]:
    """How a run ends by itself and planned, and what is said, where a picture lacks a token, or a token its picture."""
    rows = samples_of(name, count=4)
    row = rows[2]
    if fault == "token":
        place = row["tokens"].index(IMAGE)
        del row["tokens"][place], row["labels"][place]
    else:
        row["pictures"], row["grids"], row["patches"] = [], [], []
    return ends(partial(train, name, rows), recipe(packing=PACKING))


class Loop(rank_accelerate.Loop):
    def build(self) -> Any:
        return build_model("qwen2_5_vl")

    def samples(self) -> list[Any]:
        return samples_of("qwen2_5_vl", count=16)

    def collate(self, rows: list[Any]) -> Any:
        return collator("qwen2_5_vl")(rows)


def loop() -> dict[str, Any]:
    return rank_accelerate.script.compared(Loop)
