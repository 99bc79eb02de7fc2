"""What travels with a row: cut out of a batch row by row, put together in another order, and what it costs."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from evenload.core.costs.costs import Costs, PassCost
from evenload.core.errors import EvenloadError
from evenload.core.machine.shape import Shape
from evenload.core.plan.step_plan import MicroBatch, Slice
from evenload.integrations.transformers.multimodal.parts import joined, split_parts
from evenload.integrations.transformers.multimodal.work import Tower, seconds_beside, values_of
from evenload.runtime.attention.pack import build_pack
from torch import nn

IMAGE, SOUND = 7, 8
CONFIG = SimpleNamespace(image_token_id=IMAGE, audio_token_id=SOUND, pad_token_id=0, eos_token_id=1)


def batch_of(rows: list[list[int]], **more: torch.Tensor) -> dict[str, torch.Tensor]:
    most = max(map(len, rows))
    tokens = torch.tensor([row + [0] * (most - len(row)) for row in rows])
    return {"input_ids": tokens, "labels": tokens, "attention_mask": (tokens != 0).long(), **more}


def regrouped(batch: dict[str, torch.Tensor], order: list[int], *, rows: bool, left: bool = False) -> dict:
    """The parts of these rows in another batch or pack."""
    read = split_parts(batch, CONFIG)
    lengths = batch["attention_mask"].sum(1).tolist()
    pieces = tuple(Slice(i, 0, lengths[i]) for i in order)
    pack = build_pack(MicroBatch(pieces, (0,), max(lengths) if rows else 0), lambda i: batch["input_ids"][i].numpy())
    return joined([read.of_rows[i] for i in order], pack, read.form, rows=rows, left=left)


PICTURES = [[3, 7, 7, 4], [3, 5], [7, 7, 7, 7, 3, 7, 7]]
"""Rows with 1, 0 and 2 pictures, of 2, 4 and 2 tokens."""
GRID = torch.tensor([[1, 2, 4], [1, 4, 4], [1, 2, 4]])
PATCHES = torch.arange(8 + 16 + 8).float()[:, None].repeat(1, 3)


@pytest.mark.parametrize("rows", [False, True])
def test_patches_go_by_the_grid_of_their_row(rows):
    batch = batch_of(PICTURES, image_grid_thw=GRID, pixel_values=PATCHES)
    found = regrouped(batch, [2, 1, 0], rows=rows)
    assert found["image_grid_thw"].tolist() == GRID[[1, 2, 0]].tolist()
    assert found["pixel_values"][:, 0].tolist() == [*range(8, 32), *range(8)]


def test_numbers_of_tokens_go_with_their_token():
    types = (batch_of(PICTURES)["input_ids"] == IMAGE).int()
    batch = batch_of(PICTURES, mm_token_type_ids=types, image_grid_thw=GRID, pixel_values=PATCHES)
    assert regrouped(batch, [2, 0], rows=False)["mm_token_type_ids"].tolist() == [[1, 1, 1, 1, 0, 1, 1, 0, 1, 1, 0]]
    of_rows = regrouped(batch, [0, 1], rows=True, left=True)["mm_token_type_ids"]
    assert of_rows.tolist() == [[0, 0, 0, 0, 1, 1, 0], [0] * 7]


def test_pictures_and_sounds_are_told_apart_by_their_tokens():
    rows = [[7, 7, 3, 8], [3, 4], [7, 7, 7, 7, 8, 8, 2], [3, 8]]
    pictures, sounds = torch.arange(3.0)[:, None, None, None].expand(3, 3, 2, 2), torch.arange(3.0)[:, None, None]
    mask = torch.ones(3, 5).long() * torch.arange(3)[:, None]
    batch = batch_of(rows, pixel_values=pictures, input_features=sounds.expand(3, 2, 5), feature_attention_mask=mask)
    found = regrouped(batch, [2, 0, 1], rows=False)
    assert found["pixel_values"][:, 0, 0, 0].tolist() == [1, 2, 0], "two pictures of equal tokens without text between"
    assert found["input_features"][:, 0, 0].tolist() == [1, 0]
    assert found["feature_attention_mask"][:, 0].tolist() == [1, 0]


@pytest.mark.parametrize("rows", [False, True])
def test_pictures_of_a_row_leave_their_padding(rows):
    own = torch.zeros(3, 2, 1, 2, 2)
    own[0, 0], own[2, 0], own[2, 1] = 1, 2, 3
    batch = batch_of([[3, 7, 7, 4], [3, 5], [7, 7, 3, 7, 7]], pixel_values=own, pixel_attention_mask=own[:, :, 0] > 0)
    found = regrouped(batch, [2, 1, 0], rows=rows)
    values = found["pixel_values"][..., 0, 0, 0].tolist()
    assert values == ([[2, 3], [0, 0], [1, 0]] if rows else [[2, 3, 1]])
    assert found["pixel_attention_mask"].shape == found["pixel_values"].shape[:2] + (2, 2)


def test_a_pack_without_pictures_has_no_entry_of_them():
    batch = batch_of(PICTURES, image_grid_thw=GRID, pixel_values=PATCHES)
    assert regrouped(batch, [1], rows=False) == {}


@pytest.mark.parametrize(
    ("rows", "entries"), [([[3, 7, 7], [7, 4, 7]], 5), ([[3, 4], [5, 6]], 1), ([[7, 7, 7], [7, 3, 3]], 3)]
)
def test_pictures_that_do_not_fit_their_tokens_are_refused(rows, entries):
    with pytest.raises(EvenloadError, match="pictures of a batch and the tokens that stand for them disagree"):
        split_parts(batch_of(rows, pixel_values=torch.ones(entries, 3, 2, 2)), CONFIG)


def test_a_cut_picture_is_refused():
    with pytest.raises(EvenloadError, match="image_grid_thw does not fit rows with 1, 0, 6"):
        split_parts(batch_of([[3, 7], *PICTURES[1:]], image_grid_thw=GRID, pixel_values=PATCHES), CONFIG)


def test_a_model_without_such_tokens_leaves_the_batch_as_it_is():
    batch = batch_of(PICTURES, image_grid_thw=GRID, pixel_values=PATCHES)
    assert split_parts(batch, SimpleNamespace(pad_token_id=0, eos_token_id=1)).form == ()


def test_work_of_a_tower_is_linear_and_quadratic_in_a_picture():
    """64 tokens' seconds by hand: a tower of half the text's weights, and its layers' width as the text's."""
    read = split_parts(batch_of(PICTURES, image_grid_thw=GRID, pixel_values=PATCHES), CONFIG)
    values = [values_of(parts, read.form) for parts in read.of_rows]
    shape = Shape(2, 8, 16, 8, 8, 32, gated=True)
    tower = Tower(patch_values=3, weights=shape.weights // 2, layer_widths=16, trained=False)
    costs = Costs(source="", forward=PassCost(token_s=2.0, pair_s=1.0), backward=PassCost(token_s=4.0, pair_s=2.5))
    seconds = seconds_beside(values, {False: tower}, shape, costs)
    assert seconds == [(8 * 1.0 + 64, 0), (0, 0), (24 * 1.0 + 256 + 64, 0)]
    (_, trained) = seconds_beside(values, {False: tower._replace(trained=True)}, shape, costs)[0]
    assert trained == 8 * 2.0 + 2.5 * 64


def test_frames_of_a_video_attend_by_themselves():
    grid = torch.tensor([[2, 2, 4]])
    read = split_parts(batch_of([[7] * 4], video_grid_thw=grid, pixel_values_videos=torch.ones(16, 3)), CONFIG)
    (values,) = values_of(read.of_rows[0], read.form)
    assert (values.total, values.squares) == (48, 2 * 24**2)


def test_the_tower_is_found_beside_the_language_model():
    from evenload.integrations.transformers.multimodal.work import towers_of

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.decoder, self.merger = nn.Linear(4, 4), nn.Linear(5, 2, bias=False)
            self.tower = nn.Sequential(
                nn.Conv2d(3, 6, 4, 4, bias=False), nn.ModuleList([nn.Linear(6, 6, bias=False)] * 3)
            )

        def get_decoder(self) -> nn.Module:
            return self.decoder

        def get_output_embeddings(self) -> None:
            return None

    assert towers_of(Model()) == {False: Tower(48, 6 * 48 + 36 + 10, 18, True)}
